"""A sketch that appears while ranges are being filled counts the same at the joiner as at their tail."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import HASH_END, table_salt
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import MinCountSketch
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import ChangedPolicies, CreatedTable, CreatedTables
from elasticps.server.roles import snapshots
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.store.admission import BLOCKS
from elasticps.wire.frames import Kind, block_head, grads_padding
from elasticps.wire.headers import PushHeader
from replication.messages import OperationKind
from replication.progress import before_part
from tests.server.conftest import DIM, RANGES, TABLE, Group, Run, Worker, until

SKETCHED = TableSpec("sketched", DIM, Accumulate(), admission=MinCountSketch(3, nbytes=RANGES * BLOCKS * 256))
NUMBER = TABLE + 1
WIDTH = HASH_END // RANGES
KEYS = np.arange(20_000, dtype=np.int64)
EVERY = np.arange(RANGES)


async def push(group: Group, worker: Worker, clock: int) -> None:
    """Pushes KEYS of the table with a sketch to the server that heads all ranges."""
    assert group.view is not None
    keys = KEYS[plan_push(KEYS, table_salt(NUMBER), Routes(group.view)).order]
    body = block_head(NUMBER, len(keys), DIM, np.empty(0, np.float32)) + keys.tobytes() + bytes(4 * DIM * len(keys))
    body += bytes(grads_padding(len(keys), DIM))
    header = PushHeader(0, group.view.epoch, clock, before_part(clock, 0), 1).header(0)
    answer, _ = await asyncio.wait_for(worker.ask(header, body), 30)
    assert answer.kind == Kind.OK


@pytest.mark.parametrize("change", [OperationKind.CREATE, OperationKind.POLICY], ids=["create", "policy"])
def test_a_sketch_may_appear_between_two_pieces(
    run: Run, monkeypatch: pytest.MonkeyPatch, change: OperationKind
) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1 << 10)
    held = True

    def may_go(self: SnapshotSender, r: int) -> bool:  # while they are held, first pieces only
        return not held or self._snapshots[r].low == r * WIDTH

    monkeypatch.setattr(SnapshotSender, "_may_go", may_go)

    async def test(group: Group) -> None:
        nonlocal held
        a, b = await group.start("a"), await group.start("b")
        group.adopt(group.make_view(lambda r: ["a"]))
        worker = await group.connect("a")
        a.store.tables[TABLE].put(KEYS, np.ones((len(KEYS), DIM), np.float32))
        table = a.store.create(SKETCHED, NUMBER)
        assert table.lifecycle is not None
        if change == OperationKind.POLICY:
            table.lifecycle.set_policies(EVERY, None, ())
        else:
            a.store.tables.pop(NUMBER)
            a.store.live.pop(NUMBER)
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        await until(lambda: begun(a.snapshots))
        payload: object = ChangedPolicies(NUMBER, SKETCHED.to_json())
        if change == OperationKind.CREATE:
            payload = CreatedTables((CreatedTable(NUMBER, SKETCHED.to_json()),))
        a.executor.log(a.serving.epoch, change, EVERY, payload, 256)
        await push(group, worker, 1)
        await push(group, worker, 2)
        held = False
        await until(lambda: b.replica.filled.all())
        await push(group, worker, 3)
        await until(lambda: (a.replica.seq == b.replica.seq).all())
        there = a.store.tables[NUMBER]
        assert there.rows
        for r in range(RANGES):
            assert a.executor.words(r) == b.executor.words(r)
            assert there.digest_range(r) == b.store.tables[NUMBER].digest_range(r)

    run(test)


def begun(sender: SnapshotSender) -> bool:
    """Whether every range has sent a piece, and some ended within a block of a sketch."""
    lows = {r: snapshot.low for r, snapshot in sender._snapshots.items()}
    return all(lows.get(r, 0) > r * WIDTH for r in range(RANGES)) and any(
        low % (WIDTH // BLOCKS) for low in lows.values()
    )
