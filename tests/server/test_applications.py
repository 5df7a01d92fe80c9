"""Tables belong to applications: workers of another one can neither read nor change them."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import patch

import numpy as np
import pytest

from coordinator.core.keys import TABLES, table_key
from coordinator.core.store import Listing
from coordinator.core.view import Roster, View, WorkerInfo
from coordinator.memory import MemoryStore
from elasticps.model.spec import SGD, Accumulate, TableSpec
from elasticps.server.core import view_exchange
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.fast import layout as at
from elasticps.server.process import lifecycle
from elasticps.wire.frames import ALL_RANGES, LAST, Header, Kind, json_body
from replication.messages import OperationKind
from tests.coordinator.support import FaultyStore
from tests.server.conftest import DIM, SPEC, TABLE, WORKER, Answer, Group, Run, Worker, until
from tests.server.test_malformed_requests import body_of, create

STRANGER = 6
KEYS = np.arange(20)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_worker_of_another_application_reaches_no_table(run: Run, compiled: bool) -> None:
    async def test(group: Group) -> None:
        workers = WorkerInfo(WORKER, "w", 1, "default"), WorkerInfo(STRANGER, "x", 1, "other")
        group.roster = Roster(1, workers, "c")
        server = await group.start("a")
        server.fast.h[at.H_ENABLED] = compiled
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        server.know_tables({TABLE: RegisteredTable("default", SPEC)})
        ours = await group.connect("a")
        theirs = await group.connect("a", create=False, worker=STRANGER, worker_name="x", app="other")
        assert (await asyncio.wait_for(ours.push(view, "a", 1, list(KEYS), 1.0), 10))[0].kind == Kind.OK

        listing = Header(Kind.LIST_KEYS, epoch=view.epoch, table=TABLE, items=100, worker=0)
        clearing = Header(Kind.ERASE, epoch=view.epoch, clock=1, table=TABLE, part=int(OperationKind.CLEAR))
        drop = Header(Kind.ERASE, epoch=view.epoch, table=TABLE, part=int(OperationKind.DROP))
        pulling = Header(Kind.PULL, epoch=view.epoch, table=TABLE, items=len(KEYS), worker=STRANGER)
        for answer in (
            theirs.ask(pulling, KEYS.tobytes()),
            theirs.push(view, "a", 1, list(KEYS), 5.0),
            theirs.init(view, "a", (KEYS + 100).tolist(), 5.0),
            theirs.ask(listing),
            theirs.ask(clearing),
            theirs.ask(drop),
            create(theirs, TABLE, view.epoch, SPEC),
        ):
            header, body = await asyncio.wait_for(answer, 10)
            assert header.kind == Kind.ERROR
            assert json_body(body)["code"] == "foreign"
            assert "does not belong to application 'other'" in json_body(body)["message"]

        own = Header(Kind.PULL, epoch=view.epoch, table=TABLE, items=len(KEYS), worker=WORKER)
        header, body = await asyncio.wait_for(ours.ask(own, KEYS.tobytes()), 10)
        assert (np.frombuffer(body, np.float32)[: len(KEYS) * DIM] == 1).all()
        assert server.store.rows == len(KEYS)
        there, progress = server.replica.clocks.column(0)
        assert dict(zip(there.tolist(), progress.tolist(), strict=True))[STRANGER] >> 16 == 1  # it ticked, as empty

    run(test)


def dropping(worker: Worker, view: View, table: int) -> Answer:
    return worker.ask(
        Header(Kind.ERASE, LAST | ALL_RANGES, epoch=view.epoch, part=int(OperationKind.DROP), table=table)
    )


def test_a_table_of_another_application_cannot_be_dropped_before_it_exists(run: Run) -> None:
    """Its id would be remembered as one that never comes again: the owner could not make it any more."""

    async def test(group: Group) -> None:
        workers = WorkerInfo(WORKER, "w", 1, "default"), WorkerInfo(STRANGER, "x", 1, "other")
        group.roster = Roster(1, workers, "c")
        for name in ("a", "b"):
            await group.start(name)
            group.servers[name].know_tables(
                {TABLE: RegisteredTable("default", SPEC), TABLE + 1: RegisteredTable("default", None)}
            )
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        theirs = await group.connect("a", create=False, worker=STRANGER, worker_name="x", app="other")
        for table in (TABLE, TABLE + 1):
            header, body = await asyncio.wait_for(dropping(theirs, view, table), 10)
            assert (header.kind, json_body(body)["code"]) == (Kind.ERROR, "foreign")
        ours = await group.connect("a", create=False)
        header, _ = await asyncio.wait_for(create(ours, TABLE, view.epoch, SPEC), 10)
        assert header.kind == Kind.OK
        for _ in range(2):  # its owner may, and again, as who has heard no answer does
            header, _ = await asyncio.wait_for(dropping(ours, view, TABLE), 10)
            assert header.kind == Kind.OK
        assert {name: list(server.store.dropped) for name, server in group.servers.items()} == {
            "a": [TABLE],
            "b": [TABLE],
        }

    run(test)


def test_an_unknown_table_is_not_remembered_as_dropped(run: Run) -> None:
    """Whoever guesses ids would use them up. One that drops a table may all the same be told that it is, though
    somebody was faster, and the registry has forgotten the name."""

    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        head = group.servers["a"]
        for server in group.servers.values():
            server.know_tables({TABLE: RegisteredTable("default", SPEC)})
        worker = await group.connect("a")
        gone = dropping(worker, view, 50)
        await until(lambda: head.registered.read_due and head.updates.view_or_roster.is_set())
        with patch.object(view_exchange, "HOLD_TIMEOUT_S", -1.0):
            head.tick()
            assert (await asyncio.wait_for(gone, 10))[0].kind == Kind.OK
        head.know_tables({})
        later = dropping(worker, view, 51)
        await until(lambda: head.registered.read_due)
        head.know_tables({51: RegisteredTable("other", None)})  # it was too new to be known
        header, body = await asyncio.wait_for(later, 10)
        assert (header.kind, json_body(body)["code"]) == (Kind.ERROR, "foreign")
        assert not any(server.store.dropped for server in group.servers.values())
        # The registry has forgotten it since, which says no less whose it was.
        assert (await asyncio.wait_for(dropping(worker, view, TABLE), 10))[0].kind == Kind.OK
        assert all(list(server.store.dropped) == [TABLE] for server in group.servers.values())

    run(test)


def test_a_table_whose_owner_is_unknown_cannot_be_dropped(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"] if r % 2 else ["b", "a"])
        group.adopt(view)
        await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
        head = group.servers["b"]
        head.know_tables({})
        group.servers["a"].know_tables({TABLE: RegisteredTable("default", SPEC)})
        await group.connect("a")
        await until(lambda: TABLE in head.store.live)
        head.store.live[TABLE].app = ""  # as an earlier version's server, or a checkpoint, leaves it
        head.store.unowned.add(TABLE)
        other = await group.connect("b", create=False)
        answer = dropping(other, view, TABLE)
        await until(lambda: head.registered.read_due and head.updates.view_or_roster.is_set())
        with patch.object(view_exchange, "HOLD_TIMEOUT_S", -1.0):
            head.tick()
            header, body = await asyncio.wait_for(answer, 10)
        assert (header.kind, json_body(body)["code"]) == (Kind.ERROR, "unknown-table")
        assert not head.store.dropped

    run(test)


def test_a_server_reads_the_owner_of_a_table_it_learned_from_a_peer(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        tail = group.servers["b"]

        def reread_due() -> bool:
            return bool(tail.registered.read_due)

        tail.know_tables({})
        group.servers["a"].know_tables({TABLE: RegisteredTable("default", SPEC)})
        await group.connect("a")
        await until(lambda: TABLE in tail.store.live)
        assert tail.store.live[TABLE].app == "default"  # the other server says whose it is
        tail.tick()
        assert not reread_due()
        tail.store.live[TABLE].app = ""  # as an earlier version's server, or a checkpoint, leaves it
        tail.store.unowned.add(TABLE)
        tail.tick()
        assert reread_due()
        assert tail.updates.view_or_roster.is_set()
        tail.know_tables({TABLE: RegisteredTable("default", SPEC)})
        assert {server.store.live[TABLE].app for server in group.servers.values()} == {"default"}
        tail.tick()
        assert not reread_due()

    run(test)


def test_a_server_reads_single_new_tables_and_not_the_whole_registry(run: Run) -> None:
    """It read all of them, and slept: 28 ms for a table at first, 45 with 600 tables."""

    class Counting(FaultyStore):
        lists = 0

        async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
            self.lists += 1
            return await super().list(prefix)

    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        head, store = group.servers["a"], Counting(MemoryStore())
        head.know_tables({})
        specs = {number: TableSpec(f"t{number}", 2, Accumulate()) for number in range(50, 60)}
        for number, spec in specs.items():
            entry = json.dumps({"id": number, "spec": spec.to_json()}).encode()
            await store.put(table_key("default", spec.name), entry)
        reads = asyncio.create_task(lifecycle._learn(store, head))
        try:
            ours = await group.connect("a", create=False)
            header, _ = await asyncio.wait_for(create(ours, 50, view.epoch, specs[50]), 10)
            assert header.kind == Kind.OK
            several = [{"id": number, "spec": specs[number].to_json()} for number in range(50, 60)]
            body = body_of(Kind.CREATE, {"tables": several})
            header, _ = await asyncio.wait_for(ours.ask(Header(Kind.CREATE, epoch=view.epoch), body), 10)
            assert header.kind == Kind.OK
        finally:
            reads.cancel()
        assert store.lists == 0
        for server in group.servers.values():
            assert {number: server.store.live[number].app for number in specs} == dict.fromkeys(specs, "default")

    run(test)


@pytest.mark.parametrize(
    "entry",
    [
        b"[]",
        b"7",
        b"[" * 100_000,
        b'{"id": 1e999, "spec": "{}"}',
        json.dumps({"id": 9, "spec": TableSpec("bad", 2, SGD(3.25)).to_json().replace("3.25", "1" * 400)}).encode(),
        json.dumps({"id": 9, "spec": SPEC.to_json().replace('"t"', '"t\\ud800"')}).encode(),
    ],
    ids=["list", "number", "nested", "infinite id", "huge rate", "half a surrogate pair"],
)
def test_a_damaged_table_entry_ends_no_server(entry: bytes) -> None:
    """A server reads the registry as it starts, and when somebody speaks of a table that it does not know: all servers
    would end, again and again."""

    async def known() -> dict[int, RegisteredTable]:
        store = MemoryStore("c")
        await store.put(f"{TABLES}default/bad", entry)
        await store.put(f"{TABLES}default/t", json.dumps({"id": TABLE, "spec": SPEC.to_json()}).encode())
        return await lifecycle._tables(store)

    assert asyncio.run(known())[TABLE] == RegisteredTable("default", SPEC)


def test_a_table_is_registered_under_its_own_name_or_not_at_all() -> None:
    """Else what is refused of a table, or read of it in a checkpoint, would be told by the name of another."""

    async def read() -> dict[int, RegisteredTable]:
        store = MemoryStore()
        plug_in = SPEC.to_json().replace('"t"', '"p"').replace("accumulate", "unheard-of")
        for number, (name, spec) in enumerate([("t", SPEC.to_json()), ("u", SPEC.to_json()), ("p", plug_in)], 1):
            await store.put(table_key("ads", name), json.dumps({"id": number, "spec": spec}).encode())
        return await lifecycle._tables(store)

    assert asyncio.run(read()) == {1: RegisteredTable("ads", SPEC), 3: RegisteredTable("ads", None)}


def test_a_server_knows_the_owner_of_a_table_being_dropped() -> None:
    """Else it would have its owner wait who drops it."""

    async def known() -> dict[int, RegisteredTable]:
        store = MemoryStore("c")
        entry = {"id": TABLE, "spec": SPEC.to_json(), "dropping": True}
        await store.put(table_key("default", "t"), json.dumps(entry).encode())
        return await lifecycle._tables(store)

    assert asyncio.run(known()) == {TABLE: RegisteredTable("default", SPEC)}


def test_a_table_keeps_its_owner_whatever_others_register() -> None:
    async def read() -> dict[int, RegisteredTable]:
        store = MemoryStore()
        for app in ("default", "ads"):
            await store.put(table_key(app, SPEC.name), json.dumps({"id": 3, "spec": SPEC.to_json()}).encode())
        return await lifecycle._tables(store)

    assert asyncio.run(read()) == {3: RegisteredTable("default", SPEC)}


def test_a_server_keeps_the_owner_of_a_table_whatever_etcd_holds_later(run: Run) -> None:
    """Who may write in etcd would take tables of others, with all their rows."""

    async def test(group: Group) -> None:
        workers = WorkerInfo(WORKER, "w", 1, "default"), WorkerInfo(STRANGER, "x", 1, "other")
        group.roster = Roster(1, workers, "c")
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        head, tail = group.servers["a"], group.servers["b"]
        tail.know_tables({})
        head.know_tables({TABLE: RegisteredTable("default", SPEC)})
        ours = await group.connect("a")
        assert (await asyncio.wait_for(ours.push(view, "a", 1, list(KEYS), 1.0), 10))[0].kind == Kind.OK
        theirs = await group.connect("a", create=False, worker=STRANGER, worker_name="x", app="other")
        for server in (head, tail):
            for entry in ({TABLE: RegisteredTable("other", SPEC)}, {}, {TABLE: RegisteredTable("other", SPEC)}):
                server.know_tables(entry)
                assert server.store.live[TABLE].app == "default"
        pulling = Header(Kind.PULL, epoch=view.epoch, table=TABLE, items=len(KEYS), worker=STRANGER)
        for answer in (theirs.ask(pulling, KEYS.tobytes()), dropping(theirs, view, TABLE)):
            header, body = await asyncio.wait_for(answer, 10)
            assert (header.kind, json_body(body)["code"]) == (Kind.ERROR, "foreign")
        own = Header(Kind.PULL, epoch=view.epoch, table=TABLE, items=len(KEYS), worker=WORKER)
        header, body = await asyncio.wait_for(ours.ask(own, KEYS.tobytes()), 10)
        assert (np.frombuffer(body, np.float32)[: len(KEYS) * DIM] == 1).all()

    run(test)


def test_a_server_retries_reading_an_owner_until_the_store_answers(run: Run) -> None:
    """Until then workers of every application reach the table."""

    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        tail, store = group.servers["b"], FaultyStore(MemoryStore())
        tail.know_tables({})
        await store.put(table_key("default", "t"), json.dumps({"id": TABLE, "spec": SPEC.to_json()}).encode())
        group.servers["a"].know_tables({TABLE: RegisteredTable("default", SPEC)})
        store.out = True
        reads = asyncio.create_task(lifecycle._refresh(store, tail))
        try:
            await group.connect("a")
            await until(lambda: TABLE in tail.store.live)
            tail.store.live[TABLE].app = ""  # as an earlier version's server leaves it
            tail.store.unowned.add(TABLE)
            tail.tick()
            await until(lambda: store.refused and not tail.updates.view_or_roster.is_set())
            store.out = False

            def answered() -> bool:
                tail.tick()
                return tail.store.live[TABLE].app == "default"

            await until(answered)
        finally:
            reads.cancel()

    run(test)
