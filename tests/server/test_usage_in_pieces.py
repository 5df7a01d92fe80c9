"""What another server's pieces say of a table's usage is checked before it is taken over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticps.kernels.hashing import HASH_END
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import MAX_TIME, Capacity, MinCountSketch
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import RangeRounds
from elasticps.server.core.operations import ChunkContent, RestoredKeys, TableRows, WaitingKeys
from elasticps.server.core.validation import wrong
from elasticps.store import Store
from elasticps.store.admission import BLOCKS, NO_BLOCKS
from elasticps.store.eviction import MOST_SWEEPS, Measure, Predicate, Reason, Sweep
from replication.messages import Forward, Operation, OperationKind, SnapshotChunk

P, R, TABLE, CUT = 4, 3, 9, 5
BLOCK_BYTES = 16
SPEC = TableSpec(
    "t", 2, Accumulate(), admission=MinCountSketch(2, nbytes=P * BLOCKS * BLOCK_BYTES), eviction=(Capacity(10),)
)
BEGIN, HASHES = R * (HASH_END // P), HASH_END // P // BLOCKS  # of a block
NONE = np.empty(0, np.int64)
GONE = Predicate(Measure.LAST_USE, Reason.IDLE, 7)


def key() -> int:
    """One that lies in range R."""
    keys = np.arange(100, dtype=np.int64)
    return int(keys[Store(P).create(SPEC, TABLE).ranges_of(keys) == R][0])


def piece(waiting: WaitingKeys, time: int = 100) -> SnapshotChunk:
    stride = Store(P).create(SPEC, TABLE).stride
    no_rows = np.empty((0, stride), np.uint8), np.empty(0, np.uint16)
    rows = TableRows(TABLE, SPEC.to_json(), NONE, *no_rows, waiting=waiting)
    content = ChunkContent([rows], RangeRounds({}, {}, []), {}, CUT, 1, time)
    return SnapshotChunk(2, R, 2, 0, HASH_END, True, 5, NONE, NONE, content)


def waiting(word: int = 100 << 16 | 1, **more: Any) -> WaitingKeys:
    return WaitingKeys(np.array([key()]), np.array([word]), BEGIN, NO_BLOCKS)._replace(**more)


def blocks(first: int, count: int, width: int = BLOCK_BYTES) -> WaitingKeys:
    return waiting(low=BEGIN + first * HASHES, blocks=np.ones((count, width), np.uint8))


def sweeps(*some: Sweep) -> WaitingKeys:
    return waiting(sweeps=some)


@pytest.mark.parametrize(
    "given",
    [waiting(), blocks(0, BLOCKS), blocks(60, 4), sweeps(Sweep(CUT, GONE)), sweeps(*[Sweep(1, GONE)] * MOST_SWEEPS)],
)
def test_a_piece_that_fits_is_taken(given: WaitingKeys) -> None:
    assert wrong(Store(P), "b", piece(given)) == ""


@pytest.mark.parametrize(
    "given",
    [
        waiting(0),
        waiting(100 << 16 | 0xFFFF),
        blocks(0, BLOCKS + 1),
        blocks(61, 4),
        blocks(-1, 4),
        blocks(0, 4, BLOCK_BYTES + 4),
        waiting(low=BEGIN + 1, blocks=np.ones((1, BLOCK_BYTES), np.uint8)),
        sweeps(Sweep(CUT + 1, GONE)),
        sweeps(Sweep(-1, GONE)),
        sweeps(Sweep(CUT, GONE, 9, 8)),
        sweeps(Sweep(CUT, GONE, -1, 8)),
        sweeps(Sweep(CUT, GONE, 0, HASH_END + 1)),
        sweeps(Sweep(CUT, GONE._replace(measure=Measure.CANDIDATE))),
        sweeps(Sweep(CUT, GONE._replace(measure=Measure.SCORE))),
        sweeps(Sweep(CUT, GONE._replace(now=MAX_TIME + 1))),
        sweeps(*[Sweep(1, GONE)] * (MOST_SWEEPS + 1)),
    ],
)
def test_a_piece_that_cannot_be_is_refused(given: WaitingKeys) -> None:
    assert f"a piece of range {R} has " in wrong(Store(P), "b", piece(given))


@pytest.mark.parametrize("time", [-1, MAX_TIME + 1])
def test_a_piece_of_a_time_that_cannot_be_is_refused(time: int) -> None:
    assert "cannot be" in wrong(Store(P), "b", piece(waiting(), time))


def test_restored_keys_with_counts_that_cannot_be_are_refused() -> None:
    store = Store(P)
    store.create(SPEC, TABLE)
    for word, fits in ((100 << 16 | 60_000, True), (100 << 16 | 0xFFFF, False)):
        payload = RestoredKeys(TABLE, np.array([key()]), np.array([word]), NO_BLOCKS)
        operation = Operation(OperationKind.RESTORE, -1, 0, payload, 0)
        assert (wrong(store, "b", Forward(2, np.array([R]), np.array([1]), operation)) == "") is fits
