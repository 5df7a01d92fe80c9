"""An impossible message of another server ends its link, is refused by every replica, and ends no process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from unittest.mock import Mock, patch

import numpy as np
import pytest

from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core import view_exchange
from elasticps.server.core.barrier_state import RangeRounds
from elasticps.server.core.operations import (
    ChunkContent,
    Contribution,
    CreatedTable,
    CreatedTables,
    RowBlocks,
    TableRows,
    positions_of,
)
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.roles import replica_links
from elasticps.server.server import Server
from elasticps.wire.frames import Block, Header, Kind, json_body
from replication.effects import Send
from replication.messages import Ack, Forward, Operation, OperationKind, SnapshotChunk
from tests.server.conftest import DIM, RANGES, SPEC, TABLE, WORKER, Group, Run, until
from tests.server.test_malformed_requests import LATER, NOW, create, pair, say_what_cannot_be

EVERY = np.arange(RANGES, dtype=np.int64)
NO_VALUES = np.empty(0, np.float32)


@pytest.fixture(autouse=True)
def ended() -> Iterator[Mock]:
    """Stays uncalled: no process ends."""
    with patch.object(os, "_exit") as ended:
        yield ended
    ended.assert_not_called()


def block(table: int = TABLE, dim: int = DIM, keys: tuple[int, ...] = (), values: int = 0) -> Block:
    found = np.array(keys, np.int64)
    return Block(table, found, np.ones((len(keys), dim), np.float32), np.zeros(values, np.float32))


def forwarded(kind: OperationKind, payload: object, server: Server) -> Forward:
    operation = Operation(kind, WORKER if kind == OperationKind.PUSH else -1, 1 << 16, payload, 64)
    return Forward(NOW, EVERY, server.replica.seq + 1, operation)


def pushed(one: Block, kind: OperationKind = OperationKind.PUSH) -> Callable[[Server], Forward]:
    return lambda server: forwarded(kind, RowBlocks([one], EVERY, positions_of(EVERY, RANGES)), server)


def shared(one: Block) -> Callable[[Server], Forward]:
    content = Contribution("default", 1, [one], EVERY, positions_of(EVERY, RANGES))
    return lambda server: forwarded(OperationKind.PUSH, content, server)


async def tail_and_joiner(group: Group) -> tuple[Server, Server]:
    """A linked tail and joiner of all ranges; the tail does not fill the joiner by itself."""
    await pair(group)
    a, b = group.servers["a"], group.servers["b"]
    group.adopt(group.make_view(lambda r: ["a"]))
    await group.connect("a")
    a.peer.handlers[Kind.RESYNC] = lambda *_: None
    group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
    await until(lambda: None not in (b.links.link(a.member), a.links.link(b.member)))
    return a, b


OTHER_SPEC = TableSpec("t", DIM + 1, Accumulate()).to_json()
UNKNOWN_OPTIMIZER = SPEC.to_json().replace('"kind":"accumulate"', '"kind":"custom","name":"nobody"')


@pytest.mark.parametrize(
    "message",
    [
        pushed(block(table=99)),
        pushed(block(dim=DIM + 1)),
        pushed(block(values=2)),
        pushed(block(keys=(1, 2, 3, 4, 5, 6, 7, 8, 9))),
        pushed(block(table=99), OperationKind.INIT),
        pushed(block(dim=DIM + 1, keys=(1,)), OperationKind.INIT),
        shared(block(table=99)),
        lambda server: forwarded(OperationKind.CREATE, CreatedTables((CreatedTable(TABLE, OTHER_SPEC),)), server),
    ],
    ids=["unknown table", "another dim", "step values", "no order", "unknown table, init", "another dim, init",
         "unknown table in a round", "another spec"],
)  # fmt: skip
def test_an_operation_that_does_not_fit_the_tables_ends_the_link_only(
    run: Run, message: Callable[[Server], Forward]
) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        worker = await group.connect("a")
        head, tail = group.servers["a"], group.servers["b"]
        await say_what_cannot_be(head, tail, message(tail))
        assert group.view is not None
        header, _ = await asyncio.wait_for(worker.push(group.view, "a", 1, [1, 2, 3], 1.0), 10)
        assert header.kind == Kind.OK

    run(test)


def chunk(*tables: TableRows, shares: tuple[Block, ...] = ()) -> SnapshotChunk:
    rounds = RangeRounds({}, {}, [("default", 1, WORKER, list(shares))] if shares else [])
    nothing = np.empty(0, np.int64)
    return SnapshotChunk(2, 3, 2, 0, 1 << 62, True, 5, nothing, nothing, ChunkContent(list(tables), rounds, {}))


def rows(table: int, spec: str, keys: tuple[int, ...], stride: int) -> TableRows:
    return TableRows(
        table, spec, np.array(keys, np.int64), np.zeros((len(keys), stride), np.uint8), np.zeros(len(keys), np.uint16)
    )


@pytest.mark.parametrize(
    "message",
    [
        chunk(rows(TABLE, OTHER_SPEC, (), 16)),
        chunk(rows(50, UNKNOWN_OPTIMIZER, (), 16)),
        chunk(rows(TABLE, SPEC.to_json(), (), 8)),
        chunk(rows(TABLE, SPEC.to_json(), (1, 2, 3, 4, 5, 6, 7), 16)),
        chunk(rows(TABLE, SPEC.to_json(), (), 16), shares=(block(dim=DIM + 1),)),
        chunk(rows(TABLE, SPEC.to_json(), (), 16), shares=(block(keys=(1, 2, 3, 4, 5, 6, 7)),)),
    ],
    ids=["another spec", "unknown optimizer", "stride", "keys of other ranges", "dim of a share", "keys of a share"],
)
def test_a_snapshot_piece_that_does_not_fit_the_tables_ends_the_link_only(run: Run, message: SnapshotChunk) -> None:
    async def test(group: Group) -> None:
        a, b = await tail_and_joiner(group)
        await say_what_cannot_be(a, b, message._replace(epoch=a.serving.epoch))

    run(test)


def test_an_operation_of_a_range_that_is_not_here_ends_the_link_only(run: Run) -> None:
    async def test(group: Group) -> None:
        a, b = await tail_and_joiner(group)
        await say_what_cannot_be(a, b, pushed(block())(b)._replace(epoch=a.serving.epoch))

    run(test)


def test_a_peer_that_keeps_sending_errors_gets_no_links_until_the_next_view(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        head, tail = group.servers["a"], group.servers["b"]
        for _ in range(replica_links.MOST_REJECTIONS):
            await until(lambda: None not in (head.links.link(tail.member), tail.links.link(head.member)))
            link, wrong = tail.links.link(head.member), head.links.link(tail.member)
            assert wrong is not None
            wrong.send_all(head.links._codec.encode(pushed(block(table=99))(tail)))
            await until(lambda link=link: tail.links.link(head.member) is not link)  # type: ignore[misc]
        await until(lambda: tail.links.suspects().get(head.member, 0.0) > 0.3)  # what the leader goes by
        group.adopt(group.make_view(lambda r: ["a"]))
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        await until(lambda: tail.links.link(head.member) is not None)

    run(test)


def test_no_message_is_handled_after_an_impossible_one(run: Run) -> None:
    """Above all not by compiled code, to which such a link is nobody, as is the predecessor of a head."""

    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["b"] if r == 0 else ["a", "b"])
        group.adopt(view)
        await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
        worker = await group.connect("b")
        await group.connect("a")
        header, _ = await asyncio.wait_for(worker.push(view, "b", 1, list(range(40)), 1.0), 10)
        assert header.kind == Kind.OK
        a, b = group.servers["a"], group.servers["b"]
        before = b.replica.seq.copy()
        alone = np.zeros(1, np.int64)
        operation = Operation(
            OperationKind.PUSH, WORKER, 9 << 16, RowBlocks([], alone, positions_of(alone, RANGES)), 64
        )
        next_one = Forward(NOW, alone, b.replica.seq[alone] + 1, operation)
        await say_what_cannot_be(a, b, pushed(block(table=99))(b), next_one)
        assert b.replica.seq.tolist() == before.tolist()

    run(test)


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 100 << 10), ("HOLD_TIMEOUT_S", -1.0)])
def test_messages_for_a_future_view_wait_bounded_in_size_and_time(run: Run, limit: str, value: float) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        head, tail = group.servers["a"], group.servers["b"]
        link, early = head.links.link(tail.member), tail.links.link(head.member)
        assert link is not None
        assert early is not None
        for _ in range(200):
            early.send_all(tail.links._codec.encode(Ack(LATER, EVERY, head.replica.seq)))
        await until(lambda: head.replica.holds(tail.member) or head.links.link(tail.member) is not link)
        with patch.object(replica_links, limit, value):
            head.tick()
            early.send_all(tail.links._codec.encode(Ack(LATER, EVERY, head.replica.seq)))
            await until(lambda: head.links.link(tail.member) not in (None, link))
        assert not head.replica.holds(tail.member)

    run(test)


def test_a_peer_that_requests_more_than_it_reads_loses_its_link(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        head, tail = group.servers["a"], group.servers["b"]
        link = head.links.link(tail.member)
        assert link is not None
        with patch.object(replica_links, "MOST_BYTES", -1):
            head.links.send(Send(tail.member, Ack(NOW, EVERY, head.replica.seq)))
        await until(lambda: head.links.link(tail.member) not in (None, link))

    run(test)


def test_a_table_that_a_head_learned_from_a_peer_reaches_its_successor(run: Run) -> None:
    """The log of its own ranges has not said so."""

    async def test(group: Group) -> None:
        for name in ("a", "b", "c"):
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"] if r % 2 else ["b", "c"])
        group.adopt(view)
        await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
        first, second = await group.connect("a", create=False), await group.connect("b", create=False)
        header, _ = await asyncio.wait_for(create(first, TABLE, NOW, SPEC), 10)
        assert header.kind == Kind.OK
        header, _ = await asyncio.wait_for(second.push(view, "b", 1, list(range(20)), 1.0), 10)
        assert header.kind == Kind.OK
        assert group.servers["c"].store.rows == group.servers["b"].store.rows > 0

    run(test)


def test_a_table_with_two_specs_becomes_the_registered_one_everywhere(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["a", "b"] if r % 2 else ["b", "a"]))
        await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
        for server in group.servers.values():
            server.know_tables({TABLE: RegisteredTable("default", SPEC)})
        right, wrong = await group.connect("a", create=False), await group.connect("b", create=False)
        answers = create(right, TABLE, NOW, SPEC), create(wrong, TABLE, NOW, TableSpec("t", DIM + 1, Accumulate()))
        (header, _), (_, refusal) = await asyncio.wait_for(asyncio.gather(*answers), 10)
        assert header.kind == Kind.OK
        assert json_body(refusal)["code"] == "spec"
        assert [s.store.tables[TABLE].spec for s in group.servers.values()] == [SPEC, SPEC]

    run(test)


def test_a_table_that_is_not_registered_is_waited_for_on_its_own_connection(run: Run) -> None:
    async def test(group: Group) -> None:
        (second,) = group.enrol(1)
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        server.know_tables({})
        early = await group.connect("a", create=False)
        other = await group.connect("a", create=False, worker=second)
        answer = create(early, TABLE, NOW, SPEC)
        await until(lambda: server.registered.due_keys and server.updates.tables.is_set())
        header, _ = await asyncio.wait_for(other.ask(Header(Kind.GET_CLOCKS, epoch=NOW, worker=WORKER)), 10)
        assert header.kind == Kind.CLOCKS
        server.know_tables({TABLE: RegisteredTable("default", SPEC)})
        header, _ = await asyncio.wait_for(answer, 10)
        assert header.kind == Kind.OK
        server.registered.due_keys.clear()
        never = create(early, 50, NOW)
        await until(lambda: server.registered.due_keys)
        with patch.object(view_exchange, "HOLD_TIMEOUT_S", -1.0):
            server.tick()
        _, refusal = await asyncio.wait_for(never, 10)
        assert json_body(refusal)["code"] == "unknown-table"

    run(test)
