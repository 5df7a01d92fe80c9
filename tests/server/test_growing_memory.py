"""Sketches and keys that wait for rows keep within a server's memory limit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.errors import SpecError
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import MinCount, MinCountSketch
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import ChangedPolicies, CutMark
from elasticps.server.core.requests import RequestError
from elasticps.server.core.validation import check_policies
from elasticps.server.fast import layout as at
from elasticps.server.server import Server
from elasticps.store import Store
from elasticps.store.admission import BLOCKS
from elasticps.store.index import GROWN_BYTES
from elasticps.system import fatal
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_body, json_frame
from elasticps.wire.headers import PoliciesHeader
from tests.server.conftest import DIM, RANGES, Group, Run, Worker
from tests.server.test_memory_limits import chain, look

NUMBER = 8
MOST_BYTES = RANGES * BLOCKS << 20  # of a sketch
SKETCHED = TableSpec("s", DIM, Accumulate(), admission=MinCountSketch(2, nbytes=1 << 16))
EVERY = np.arange(RANGES)


def sketched(nbytes: int) -> TableSpec:
    return SKETCHED.with_policies(MinCountSketch(2, nbytes=nbytes), ())


async def ask(group: Group, worker: Worker, kind: Kind, spec: TableSpec) -> str:
    """The code with which a CREATE or SET_POLICIES is answered, "" if it is done."""
    assert group.view is not None
    body = json_frame(kind, {"id": NUMBER, "spec": spec.to_json()})[HEADER_BYTES:]
    header = Header(kind, epoch=group.view.epoch)
    if kind == Kind.SET_POLICIES:
        header = PoliciesHeader(kind, NUMBER).header(0)._replace(epoch=group.view.epoch)
    answer, text = await asyncio.wait_for(worker.ask(header, body), 10)
    return "" if answer.kind != Kind.ERROR else str(json_body(text)["code"])


@pytest.mark.parametrize("kind", [Kind.CREATE, Kind.SET_POLICIES])
def test_a_sketch_for_which_there_is_no_room_is_refused_before_it_is_logged(run: Run, kind: Kind) -> None:
    async def test(group: Group) -> None:
        gauges = await chain(group, "a")
        server, worker = group.servers["a"], await group.connect("a")
        if kind == Kind.SET_POLICIES:
            assert await ask(group, worker, Kind.CREATE, SKETCHED) == ""
        look(group)
        seq = server.replica.seq.copy()
        assert await ask(group, worker, kind, sketched(MOST_BYTES + (MOST_BYTES >> 10))) == "spec"
        assert await ask(group, worker, kind, sketched(1 << 40)) == "spec"
        gauges["a"].used = server.headroom.mark - (32 << 20)
        look(group)
        assert await ask(group, worker, kind, sketched(64 << 20)) == "memory"
        assert (server.replica.seq == seq).all()
        assert (NUMBER in server.store.tables) == (kind == Kind.SET_POLICIES)
        assert await ask(group, worker, kind, sketched(16 << 20)) == ""
        assert server.store.nbytes >= 16 << 20

    run(test)


def test_other_servers_are_refused_such_sketches_too() -> None:
    store = Store(RANGES)
    store.create(SKETCHED, NUMBER)
    with pytest.raises(SpecError, match=f"at most {MOST_BYTES:,}"):
        store.create(sketched(1 << 40), NUMBER + 1)
    with pytest.raises(SpecError, match=f"at most {MOST_BYTES:,}"):
        check_policies(store, "a", ChangedPolicies(NUMBER, sketched(1 << 40).to_json()))


def test_a_cleared_range_has_a_fresh_sketch() -> None:
    store = Store(2)
    table = store.create(SKETCHED, NUMBER)
    assert table.lifecycle is not None
    table.lifecycle.begin(np.arange(2), SKETCHED)
    waiting, keys = table.lifecycle.waiting, np.arange(500, dtype=np.int64)
    table.apply(keys, np.ones((500, DIM), np.float32), np.empty(0, np.float32), 1, 1)
    assert waiting.sketches[0].any()
    before = waiting.sketches[0]
    table.drop_range(0)
    assert waiting.sketches[0] is not before
    table.apply(keys, np.ones((500, DIM), np.float32), np.empty(0, np.float32), 1, 2)
    assert waiting.sketches[0].any()
    assert before.shape == waiting.sketches[0].shape


def test_restored_keys_that_wait_need_room(run: Run) -> None:
    async def test(group: Group) -> None:
        gauges = await chain(group, "a")
        server = group.servers["a"]
        table = server.store.create(TableSpec("w", DIM, Accumulate(), admission=MinCount(2)), NUMBER)
        gauges["a"].used = server.headroom.mark - 100 * GROWN_BYTES
        look(group)
        server.memory.take_waiting(table, 60)
        with pytest.raises(RequestError, match="new rows of table 'w'"):
            server.memory.take_waiting(table, 60)
        server.memory.take_waiting(table, 40)

    run(test)


def test_a_checkpoint_fails_when_copies_of_waiting_keys_have_no_room(run: Run) -> None:
    async def test(group: Group) -> None:
        gauges = await chain(group, "a")
        server = group.servers["a"]
        table = server.store.create(TableSpec("w", DIM, Accumulate(), admission=MinCount(2)), NUMBER)
        keys = np.arange(1000, dtype=np.int64)
        table.apply(keys, np.ones((1000, DIM), np.float32), np.empty(0, np.float32), 1, 1)
        server.checkpoints._aside_bytes = 1 << 10
        look(group)
        pass_cut(server, 1)
        assert server.checkpoints._scan is not None
        assert server.checkpoints._scan.copied == 16 * 1000
        gauges["a"].used = server.headroom.mark
        look(group)
        pass_cut(server, 2)
        writing = server.checkpoints.writing(2)
        assert writing is not None
        assert "keys that wait" in writing.failed

    run(test)


def pass_cut(server: Server, number: int) -> None:
    mark = CutMark(number, 0, server.me.name, server.me.incarnation, "memory://")
    server.checkpoints._passed(EVERY, EVERY, mark, None)


@pytest.mark.parametrize("reason", [at.ROWS_MISSING, at.CANDIDATES_MISSING])
def test_rows_of_a_table_that_is_not_here_end_the_process(
    run: Run, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """Compiled code is amid making them, and would go on with the next frame's."""
    errors: list[BaseException] = []
    monkeypatch.setattr(fatal, "end", lambda me, error: errors.append(error))

    async def test(group: Group) -> None:
        server = await group.start("a")
        server.fast._blocks[0, at.B_TABLE] = 99
        server.fast.h[at.H_INFO] = 0
        server.fast._take_memory(reason)
        assert [repr(error) for error in errors] == ["KeyError(99)"]

    run(test)
