"""Rows at a cut under random changes and scans, beside a dict."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.model import spec
from elasticps.store import Store, Table, cuts, retained, slabs
from elasticps.store.cuts import Deletions, PassedCuts
from elasticps.store.native import MAX_STAMP
from elasticps.store.retained import Allowance, Listed
from elasticps.store.stamps import rows_at, stamps_in
from tests.store.test_twin import RANGES, floats

DIM = 3
keys = st.lists(st.integers(0, 120), max_size=40, unique=True)
seeds = st.integers(0, 2**32 - 1)
ALL = np.arange(RANGES)


class Row(NamedTuple):
    weights: tuple[float, ...]
    stamp: int


class Scan(NamedTuple):
    """The rows at a cut, the part that a checkpoint has to hold, and the rows found so far."""

    since: int
    cut: int
    every: dict[int, Row]
    rows: dict[int, Row]
    found: dict[int, Row]
    parts: list[tuple[int, int]]


class CutMachine(RuleBasedStateMachine):
    """One store; the twin has each key's row with its stamp, and each deletion."""

    @initialize(dtype=st.sampled_from(spec.DTYPES), most=st.sampled_from([3, MAX_STAMP]))
    def create(self, dtype: str, most: int) -> None:
        self.described = spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), dtype)
        self.store = Store(RANGES)
        self.table = self.store.create(self.described, 3)
        self.rows: dict[int, Row] = {}
        self.deleted: list[tuple[int, int]] = []
        self.cut = 0
        self.cuts = [0]
        self.scan: Scan | None = None
        self.full = self.burst = 0
        PassedCuts.most = most

    def teardown(self) -> None:
        PassedCuts.most = MAX_STAMP

    def _changed(self, changed: list[int]) -> None:
        out = np.empty((len(changed), DIM), np.float32)
        self.table.gather(np.array(changed, np.int64), out)
        for key, weights in zip(changed, out.tolist(), strict=True):
            self.rows[key] = Row(tuple(weights), self.cut)

    @rule(keys=keys, seed=seeds)
    def apply(self, keys: list[int], seed: int) -> None:
        twice = np.array(keys + keys[:3], np.int64)
        self.table.apply(twice, floats(seed, len(twice), DIM).round(), np.empty(0, np.float32))
        self._changed(keys)

    @rule(keys=keys, seed=seeds)
    def put(self, keys: list[int], seed: int) -> None:
        self.table.put(np.array(keys, np.int64), floats(seed, len(keys), DIM))
        self._changed(keys)

    @rule(keys=keys, seed=seeds)
    def put_if_absent(self, keys: list[int], seed: int) -> None:
        self.table.put_if_absent(np.array(keys, np.int64), floats(seed, len(keys), DIM))
        self._changed([key for key in keys if key not in self.rows])

    @rule(keys=keys)
    def delete(self, keys: list[int]) -> None:
        self.table.delete(np.array(keys + keys, np.int64))
        for r in ALL.tolist():
            self.table.deletions.bound(r, self.table.count_range(r))
        self._gone([key for key in keys if key in self.rows])

    def _gone(self, gone: list[int]) -> None:
        for key in gone:
            del self.rows[key]
        self.deleted += [(key, self.cut) for key in gone]

    @rule(r=st.integers(0, RANGES - 1))
    def clear(self, r: int) -> None:
        gone = self.table.range_keys(r).tolist()
        self.store.clear(3, r)
        self._gone(gone)

    @rule(step=st.integers(1, 3))
    def pass_cut(self, step: int) -> None:
        self.table.keep(None)
        self.scan = None
        self.cut += step
        self.cuts.append(self.cut)
        self.store.pass_cut(ALL, self.cut)

    @precondition(lambda self: self.cut)
    @rule(full=st.booleans(), step=st.integers(1, 3), pick=st.integers(0, 10))
    def begin(self, full: bool, step: int, pick: int) -> None:
        self.pass_cut(step)
        since = 0 if full else self.cuts[pick % (len(self.cuts) - 1)]
        budget = 40_000
        self.table.keep(Allowance(budget, self._is_full, self._is_burst))
        assert self.table.retained is not None
        self.table.retained.begin(ALL, since)
        rows = {key: row for key, row in self.rows.items() if row.stamp >= since}
        parts = [(r, p) for r in range(RANGES) for p in range(self.table.retained.parts)]
        self.scan = Scan(since, self.cut, dict(self.rows), rows, {}, parts)
        self.listed: dict[int, Listed] = {}

    def _is_full(self) -> None:
        self.full += 1

    def _is_burst(self) -> None:
        raise AssertionError("so many rows there are not")

    @precondition(lambda self: self.scan and self.scan.parts)
    @rule(most=st.integers(1, 5))
    def go_on(self, most: int) -> None:
        scan, writing = self.scan, self.table.retained
        assert scan is not None
        assert writing is not None
        for _ in range(min(most, len(scan.parts))):
            r, part = scan.parts.pop(0)
            if r not in self.listed:
                self.listed[r] = writing.list_range(r, scan.since)
            found, words = writing.take(self.listed[r], part, part + 1, scan.cut)
            stamps = stamps_in(words).astype(np.int32) + np.int32(writing.base(r))
            self._read(found, rows_at(words, self.table.stride), stamps, scan.found)
        if not scan.parts:
            got, expected = self._known(scan.found), self._known(scan.rows)
            assert expected.items() <= got.items() <= self._known(scan.every).items()
            # Where stamps began anew, what was changed before is in it, too.
            assert self.store.cuts.base.any() or got == expected
            self.table.keep(None)
            self.scan = None

    def _known(self, rows: dict[int, Row]) -> dict[int, Row]:
        base = int(self.store.cuts.base.max())
        return {key: row._replace(stamp=max(row.stamp, base)) for key, row in rows.items()}

    def _read(
        self, found: NDArray[np.int64], rows: NDArray[np.uint8], stamps: NDArray[np.int32], into: dict[int, Row]
    ) -> None:
        copy = Table(self.described, 3, RANGES)
        for r in range(RANGES):
            of = copy.ranges_of(found) == r
            copy.load_range(r, found[of], rows[of])
        out = np.empty((len(found), DIM), np.float32)
        copy.gather(found, out)
        for key, weights, stamp in zip(found.tolist(), out.tolist(), stamps.tolist(), strict=True):
            assert key not in into, "a row comes once"
            into[key] = Row(tuple(weights), stamp)

    @rule(pick=st.integers(0, 10))
    def deletions_are_known(self, pick: int) -> None:
        since = self.cuts[pick % len(self.cuts)]
        noted = self.table.deletions
        for r in range(RANGES):
            if since and since >= noted.floor(r):
                expected = {key for key, cut in self.deleted if since <= cut < self.cut}
                of = {key for key in expected if int(self.table.ranges_of(np.array([key]))[0]) == r}
                assert of == set(noted.between(r, since, self.cut).tolist())

    @rule(r=st.integers(0, RANGES - 1), parts=st.integers(1, 3))
    def move_range(self, r: int, parts: int) -> None:
        """A joiner gets the range in pieces and is the same then."""
        width = HASH_END // RANGES
        other = Store(RANGES)
        there = other.create(self.described, 3)
        for part in range(parts):
            low, high = r * width + width * part // parts, r * width + width * (part + 1) // parts
            found, rows, stamps = self.table.dump_stamped(r, low, high)
            other.load_cut(r, int(self.store.cuts.newest[r]), int(self.store.cuts.base[r]))
            there.load_range(r, found, rows, stamps)
        there.deletions.add(r, self.table.deletions.of(r))
        there.deletions.forget(r, self.table.deletions.floor(r))
        assert there.digest_range(r) == self.table.digest_range(r)
        assert other.words(r) == self.store.words(r)
        other.erase(ALL)
        assert other.words(r) == [0, 0, 0]

    @rule(rows=st.integers(1, 300))
    def reclaim(self, rows: int) -> None:
        self.table.reclaim(rows)

    @invariant()
    def stamps_are_as_they_should(self) -> None:
        if not hasattr(self, "table"):
            return
        found: dict[int, Row] = {}
        for r in range(RANGES):
            listed, rows, stamps = self.table.dump_stamped(r, 0, HASH_END)
            self._read(listed, rows, stamps.astype(np.int32) + np.int32(self.store.cuts.base[r]), found)
        assert found == self._known(self.rows)


TestCuts = CutMachine.TestCase
TestCuts.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_rows_at_a_cut_are_right_with_small_blocks_and_few_notes(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The same with limits so small that they are met all the time."""
    monkeypatch.setattr(slabs, "_RECLAIM_BYTES", 1)
    monkeypatch.setattr(retained, "_PART_ROWS", 4)
    monkeypatch.setattr(retained, "_FIRST_RECORDS", 1)
    monkeypatch.setattr(retained, "_BLOCK", 200)
    monkeypatch.setattr(cuts, "LEAST", 5)
    TestCuts("runTest").runTest()


def test_incompletely_known_deletions_are_not_kept() -> None:
    """Or a replica that had it before its range was cleared would differ from one that was filled later."""
    notes, filled = Deletions(2), Deletions(2)
    notes.note(1, np.array([3, 4]), 1)
    for each in (notes, filled):
        each.forget(1, 2)
    notes.note(1, np.array([5]), 1)
    assert notes.words(1) == filled.words(1) == (2, 0)
    for each in (notes, filled):
        each.note(1, np.array([6]), 2)
    assert notes.words(1) == filled.words(1)
    assert notes.between(1, 0, 9).tolist() == [6]
