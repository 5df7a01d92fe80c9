"""Random operations on a table and on its dumb twin leave the same bits."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.model import spec
from elasticps.store import Table, slabs
from tests.store.twin import TwinTable

RANGES = 4
OPTIMIZERS = [
    spec.SGD(0.1),
    spec.SGD(0.1, momentum=0.9, weight_decay=0.01),
    spec.SGD(0.1, momentum=0.9, nesterov=True),
    spec.Adagrad(0.1, initial_accumulator=0.1, weight_decay=0.01),
    spec.RowAdagrad(0.1),
    spec.Adam(0.01, weight_decay=0.1),
    spec.AdamW(0.01),
    spec.FTRL(0.1, l1=0.05, l2=0.01),
    spec.Assign(),
    spec.Accumulate(),
]
INITS = [spec.Zeros(), spec.Constant(0.5), spec.Uniform(-1, 1, seed=4), spec.Normal(std=0.5, seed=5)]
EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B9, 1 << 32]
keys = st.lists(st.integers(-60, 60) | st.sampled_from(EXTREMES), max_size=40, unique=True)
seeds = st.integers(0, 2**32 - 1)


def floats(seed: int, n: int, dim: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


class TableMachine(RuleBasedStateMachine):
    @initialize(
        optimizer=st.sampled_from(OPTIMIZERS),
        init=st.sampled_from(INITS),
        dim=st.sampled_from([1, 3, 8, 17]),
        dtype=st.sampled_from(spec.DTYPES),
        table_id=st.integers(0, 5),
    )
    def create(self, optimizer: spec.ServerOptimizer, init: spec.Init, dim: int, dtype: str, table_id: int) -> None:
        described = spec.TableSpec("t", dim, optimizer, init, dtype)
        self.dim, self.clock = dim, 0
        self.table, self.twin = Table(described, table_id, RANGES), TwinTable(described, table_id, RANGES)
        self.other = Table(described, table_id, RANGES)

    @rule(keys=keys, seed=seeds)
    def apply(self, keys: list[int], seed: int) -> None:
        self.clock += 1
        grads = floats(seed, len(keys), self.dim)
        values = self.table.spec.optimizer.step_values(self.clock)
        self.table.apply(np.array(keys, np.int64), grads, values)
        self.twin.apply(keys, grads, values)

    @rule(start=st.integers(-(2**40), 2**40), n=st.integers(1, 400), seed=seeds)
    def apply_many(self, start: int, n: int, seed: int) -> None:
        self.apply(list(range(start, start + n)), seed)

    @rule(keys=keys, seed=seeds)
    def put_if_absent(self, keys: list[int], seed: int) -> None:
        twice, values = keys + keys, floats(seed, 2 * len(keys), self.dim)
        assert self.table.put_if_absent(np.array(twice, np.int64), values) == self.twin.put_if_absent(twice, values)

    @rule(keys=keys)
    def gather(self, keys: list[int]) -> None:
        out = np.empty((len(keys), self.dim), np.float32)
        before = self.table.rows
        self.table.gather(np.array(keys, np.int64), out)
        np.testing.assert_array_equal(out, self.twin.gather(keys))
        assert self.table.rows == before

    @rule(keys=keys)
    def read_slots(self, keys: list[int]) -> None:
        out = np.empty((len(keys), self.table.slot_floats), np.float32)
        self.table.read_slots(np.array(keys, np.int64), out)
        np.testing.assert_array_equal(out, self.twin.slots(keys))

    @rule(keys=keys)
    def delete(self, keys: list[int]) -> None:
        twice = keys + keys
        assert self.table.delete(np.array(twice, np.int64)) == self.twin.delete(twice)

    @rule(start=st.integers(0, 400), step=st.integers(1, 3))
    def delete_many(self, start: int, step: int) -> None:
        self.delete(sorted(self.twin.content)[start::step])

    @rule(r=st.integers(0, RANGES - 1), part=st.integers(0, 3))
    def drop_interval(self, r: int, part: int) -> None:
        width = HASH_END // RANGES
        low, high = r * width + width * part // 4, r * width + width * (part + 1) // 4
        gone = self.table.dump_interval(r, low, high)[0].tolist()
        self.table.drop_interval(r, low, high)
        assert self.twin.delete(gone) == len(gone)
        assert not len(self.table.dump_interval(r, low, high)[0])

    @rule(r=st.integers(0, RANGES - 1))
    def drop_range(self, r: int) -> None:
        self.table.drop_range(r)
        self.twin.drop_range(r)
        assert self.table.digest_range(r) == 0

    @precondition(lambda self: self.table.rows)
    @rule(r=st.integers(0, RANGES - 1))
    def move_range_there_and_back(self, r: int) -> None:
        keys, rows = self.table.dump_range(r)
        digest = self.table.digest_range(r)
        self.other.load_range(r, keys[::-1].copy(), rows[::-1])
        assert self.other.digest_range(r) == digest
        self.table.drop_range(r)
        self.table.load_range(r, *self.other.dump_range(r))
        assert self.table.digest_range(r) == digest
        self.other.drop_range(r)
        assert self.other.nbytes == 0

    @rule(rows=st.integers(1, 300))
    def reclaim(self, rows: int) -> None:
        before = [self.table.digest_range(r) for r in range(RANGES)]
        with patch.object(slabs, "_RECLAIM_BYTES", 1):
            self.table.reclaim(rows)
        assert [self.table.digest_range(r) for r in range(RANGES)] == before
        assert 0 <= self.table.reusable_bytes <= self.table.nbytes

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.twin.content.clear()
        assert self.table.nbytes == 0

    @invariant()
    def same_rows(self) -> None:
        content = self.twin.content
        assert self.table.rows == len(content) == sum(self.table.count_range(r) for r in range(RANGES))
        for r in range(RANGES):
            assert sorted(self.table.range_keys(r).tolist()) == sorted(self.twin.range_keys(r))

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        keys = list(self.twin.content)
        out = np.empty((len(keys), self.dim), np.float32)
        self.table.gather(np.array(keys, np.int64), out)
        np.testing.assert_array_equal(out, self.twin.gather(keys))
        slots_at = -(-self.dim * (4 if self.table.spec.dtype == "float32" else 2) // 4) * 4
        for r in range(RANGES):
            for key, row in zip(*self.table.dump_range(r), strict=True):
                slots = self.twin.content[int(key)][1]
                end = slots_at + slots.nbytes
                np.testing.assert_array_equal(row[slots_at:end].view(np.float32), slots)
                assert not row[end:].any(), "padding is zero, so that equal rows have equal digests"


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
