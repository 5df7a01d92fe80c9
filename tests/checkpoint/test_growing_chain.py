"""Checkpoints of a table that grows and forgets: random pushes, sweeps and cuts, and what chains of increments have."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elasticps.checkpoint import catalog, maintenance
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.manifest import FileEntry, Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.kernels.hashing import HASH_END
from elasticps.model import policies, spec
from elasticps.server.core import scan
from elasticps.server.core.operations import CutMark
from elasticps.server.core.scan import Finished, Scan
from elasticps.store import Store, retained
from elasticps.store.cuts import PassedCuts
from elasticps.store.eviction import Measure, Predicate, Reason, threshold
from elasticps.store.retained import Allowance
from tests.checkpoint.growing import NAME, NOW, TABLE, Content, content_of, put, read
from tests.store.test_twin import floats

RANGES, DIM = 4, 3
ALL = np.arange(RANGES)
KEYS = st.lists(st.integers(0, 80), min_size=1, max_size=40, unique=True)
SEEDS = st.integers(0, 2**32 - 1)
ADMISSIONS = [None, policies.MinCount(3), policies.MinCountSketch(2, 1 << 12, halve_after="1h")]
HALVINGS = [None, 600.0, 7 * 86_400.0]
ROWS = [Measure.LAST_USE, Measure.COUNT, Measure.SCORE, Measure.NORM]


class ChainMachine(RuleBasedStateMachine):
    """A store and its checkpoints. What a checkpoint has is compared with what the store had as the cut passed."""

    @initialize(
        admission=st.sampled_from(ADMISSIONS), half_life=st.sampled_from(HALVINGS), dtype=st.sampled_from(spec.DTYPES)
    )
    def create(self, admission: policies.Admission | None, half_life: float | None, dtype: str) -> None:
        optimizer = spec.Accumulate()
        self.described = spec.TableSpec(
            "t", DIM, optimizer, spec.Zeros(), dtype, admission=admission, eviction=(self._capacity(half_life),)
        )
        self.store = Store(RANGES)
        self.table = self.store.create(self.described, TABLE)
        self.storage = Storage(f"memory://{uuid.uuid4()}")
        self.store.advance(ALL, NOW)
        self.clock = self.cut = 0
        self.published: list[int] = []
        self.scan: Scan | None = None
        self.steps: Iterator[Finished | None] = iter(())
        self.files: list[FileEntry] = []
        self.expected: Content | None = None

    @staticmethod
    def _capacity(half_life: float | None) -> policies.Capacity:
        return policies.Capacity(1 << 20, keep="score", half_life=half_life)

    @rule(keys=KEYS, seed=SEEDS, times=st.integers(1, 3))
    def push(self, keys: list[int], seed: int, times: int) -> None:
        for _ in range(times):
            self.clock += 1
            grads = floats(seed, len(keys), DIM + 1).round()
            grads[:, -1] = np.abs(grads[:, -1]) * (grads[:, -1] < 0)  # every other score is 0
            self.table.apply(np.array(keys, np.int64), grads, np.empty(0, np.float32), 70_000, self.clock << 16)

    @rule(seconds=st.sampled_from([1, 300, 4_000, 86_400]), some=st.booleans())
    def advance(self, seconds: int, some: bool) -> None:
        self.store.advance(ALL[:2] if some else ALL, int(self.store.times.max()) + seconds)

    @rule(what=st.sampled_from(ROWS), share=st.floats(0.05, 0.9), part=st.sampled_from([0, 0, 1, 2]))
    def sweep(self, what: Measure, share: float, part: int) -> None:
        """Evicts a share of the rows of each range, or of half of its hashes."""
        assert self.table.lifecycle is not None
        width = HASH_END // RANGES
        for r in range(RANGES):
            half_life = policies.half_life_of(self.table.lifecycle.spec_of(r).eviction)
            low, high = (
                (0, HASH_END) if not part else (r * width + (part - 1) * width // 2, r * width + part * width // 2)
            )
            now, decay = int(self.store.times[r]), 1.0 / half_life if half_life else 0.0
            by = Predicate(
                what, Reason.CAPACITY, 0, 0, *((now, decay) if what in (Measure.COUNT, Measure.SCORE) else ())
            )
            keys, _, ranks = self.table.lifecycle.measure(self.table, r, low, high, by)
            going = round(share * len(keys))
            if going:
                below, tie = threshold(keys, ranks, going)
                gone = self.table.evict(r, low, high, by._replace(below=below, tie=tie))
                assert gone == going
                self._bound()

    @rule(share=st.floats(0.1, 1.0), by_age=st.booleans())
    def forget_candidates(self, share: float, by_age: bool) -> None:
        assert self.table.lifecycle is not None
        what = Measure.CANDIDATE_AGE if by_age else Measure.CANDIDATE
        for r in range(RANGES):
            by = Predicate(what, Reason.FORGOTTEN, 0)
            keys, _, ranks = self.table.lifecycle.measure(self.table, r, 0, HASH_END, by)
            if going := round(share * len(keys)):
                below, tie = threshold(keys, ranks, going)
                self.table.evict(r, 0, HASH_END, by._replace(below=below, tie=tie))

    @rule(keys=KEYS)
    def delete(self, keys: list[int]) -> None:
        self.table.delete(np.array(keys, np.int64))
        self._bound()

    def _bound(self) -> None:
        for r in range(RANGES):
            self.table.deletions.bound(r, self.table.count_range(r))

    @rule(keys=KEYS, seed=SEEDS)
    def load(self, keys: list[int], seed: int) -> None:
        self.table.put(np.array(keys, np.int64), floats(seed, len(keys), DIM))
        self._bound()

    @rule(r=st.integers(0, RANGES - 1))
    def clear(self, r: int) -> None:
        self.store.clear(TABLE, r)

    @rule(admission=st.sampled_from(ADMISSIONS), half_life=st.sampled_from(HALVINGS), some=st.booleans())
    def change_policies(self, admission: policies.Admission | None, half_life: float | None, some: bool) -> None:
        changed = self.described.with_policies(admission, (self._capacity(half_life),))
        self.store.change_policies(TABLE, ALL[:2] if some else ALL, changed)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @rule(full=st.integers(0, 5))
    def begin(self, full: int) -> None:
        """A cut passes. A checkpoint that is still being written is given up: its cut has passed all the same."""
        if self.scan is not None:
            self.scan.stop()
        self.cut += 1
        since = 0 if not full or not self.published else self.published[-1]
        self.store.pass_cut(ALL, self.cut)
        mark = CutMark(self.cut, since, "s", 1, self.storage.url)
        self.scan = Scan(self.store, mark, Allowance(1 << 30, lambda: None, lambda: None))
        self.scan.add(ALL[:1])
        self.scan.add(ALL[1:])
        self.expected, self.steps, self.files = content_of(self.store), self.scan.run(), []

    @precondition(lambda self: self.scan)
    @rule(steps=st.integers(1, 4))
    def write_some(self, steps: int) -> None:
        assert self.scan is not None
        for _ in range(steps):
            try:
                finished = next(self.steps)
            except StopIteration:
                self._publish()
                return
            if finished is not None:
                self.files.append(put(self.storage, self.cut, finished, self.described))
                self.scan.written(finished.file)

    @precondition(lambda self: self.scan)
    @rule()
    def write(self) -> None:
        while self.scan is not None:
            self.write_some(100)

    def _publish(self) -> None:
        assert self.scan is not None
        manifest = Manifest(
            "c@1", self.cut, self.scan.mark.since, RANGES, 1.0, {NAME: (TABLE, self.described)}, tuple(self.files)
        )
        assert catalog.publish(self.storage, manifest)
        self.published.append(self.cut)
        self.scan.stop()
        self.scan = None
        chain = catalog.chain(self.storage)
        assert [maintenance.verify(self.storage, each) for each in chain] == [[]] * len(chain)
        assert read(Contents(self.storage, chain)) == self.expected

    @precondition(lambda self: self.published and not self.scan)
    @rule()
    def merge(self) -> None:
        maintenance.merge(self.storage, catalog.chain(self.storage))
        assert read(Contents(self.storage, catalog.chain(self.storage))) == self.expected


TestChains = ChainMachine.TestCase
TestChains.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_chains_of_small_files_whose_stamps_begin_anew(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The same with limits so small that they are met all the time."""
    monkeypatch.setattr(retained, "_PART_ROWS", 4)
    monkeypatch.setattr(scan, "FILE_BYTES", 4096)
    monkeypatch.setattr(PassedCuts, "most", 3)
    monkeypatch.setattr(TestChains, "settings", settings(TestChains.settings, max_examples=30))
    TestChains("runTest").runTest()
