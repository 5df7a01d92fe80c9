"""The life of one table's rows: which keys get a row, what rows keep of their use, which rows are forgotten.

Policies are state of a range, as rows are: they change at a place of its log. So is time. What this does depends on
nothing else, so replicas that apply the same log hold the same rows, candidates and counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError
from elasticps.model.policies import Admission, Capacity, Eviction, MinCount, MinCountSketch, half_life_of, word_of
from elasticps.model.spec import TableSpec
from elasticps.store import admission, usage
from elasticps.store import native as field
from elasticps.store.admission import WAITS
from elasticps.store.eviction import Measure, Predicate, Reason
from elasticps.store.memory import Allocator
from elasticps.store.native import (
    H_ADMITS,
    H_SPARE,
    H_STRIDE,
    H_TIMES,
    H_USAGE_AT,
    H_USAGE_FLOATS,
)
from elasticps.store.range_map import RangeMap
from elasticps.store.registry import load_lifecycle
from elasticps.store.updates import FOUND, USED
from elasticps.store.waiting import Waiting

_NO_FLOATS = np.empty(0, np.float32)
Keys = NDArray[np.int64]
Rows = NDArray[np.int64]
Ranges = NDArray[np.int64]
Floats = NDArray[np.float32]


Policies = tuple[Admission | None, tuple[Eviction, ...]]


def policies_of(spec: TableSpec) -> Policies:
    """The policies of a table."""
    return spec.admission, tuple(spec.eviction)


class MeasuredRows(NamedTuple):
    """What a predicate is about in an interval of a range's hashes: keys, words and ranks, int64 [n] each."""

    keys: Keys
    words: Rows
    ranks: Rows


class MeasuredSweep(NamedTuple):
    """What was measured for a sweep that is logged at once. applied: operations that were applied until then: beyond
    the next one it holds no more."""

    applied: int
    low: int
    high: int
    predicate: Predicate
    found: Mapping[int, MeasuredRows]  # by range

    def recall(self, applied: int, r: int, low: int, high: int, by: Predicate) -> MeasuredRows | None:
        """What was measured in range r for this sweep, unless anything was applied since."""
        same = (self.applied, self.low, self.high, self.predicate) == (applied, low, high, by)
        return self.found.get(r) if same else None


def _numbers_of(spec: TableSpec) -> tuple[int, int, int, int]:
    """Policies as kernels know them: the words from `native.P_DECAY` to P_WORD."""
    half_life, (number, threshold) = half_life_of(spec.eviction), admission.numbers_of(spec.admission)
    decay, bound = np.array([1.0 / half_life if half_life else 0.0, threshold]).view(np.int64).tolist()
    return decay, number, bound, word_of(*policies_of(spec))


NOTHING_MEASURED = MeasuredSweep(-1, 0, 0, Predicate(Measure.LAST_USE, Reason.IDLE, 0), {})


class StoredRows(Protocol):
    """The table, as its lifecycle needs it."""

    def find(self, keys: Keys) -> tuple[Rows, int]:
        """Addresses of the rows of keys [n], 0 where there is none, and how many there are none of."""

    def change(self, keys: Keys, rows: Rows) -> None:
        """Prepares rows that `find` has just found for a change, and makes those that are missing (0)."""

    def update(self, keys: Keys, grads: Floats, step_values: Floats, rows: Rows, mode: int) -> None:
        """Runs the optimizer on rows that are there, with a mode of `updates.run`."""

    def list_words(self, r: int, low: int, high: int) -> tuple[Keys, Rows]:
        """Keys of range r whose hashes are in low..high-1, and the words of their rows."""

    def forget(self, keys: Keys) -> None:
        """Forgets rows that are there."""

    def note_gone(self, keys: Keys) -> None:
        """Notes keys whose rows are forgotten, for increments."""


class Lifecycle:
    """Admission, usage and eviction of a table whose rows keep their usage.

    times: cluster time of each range in seconds, int64 [ranges], shared by all tables of a store. A range has policies
    of its own in `_policies` once it is under others than the table, has a sketch, or has had rows or candidates.
    """

    def __init__(
        self, spec: TableSpec, header: NDArray[np.int64], usage_at: int, times: NDArray[np.int64], memory: Allocator,
    ) -> None:  # fmt: skip
        load_lifecycle()
        self.spec = spec  # as the table was made here
        self.times = times
        self._header = header
        blank = [*_numbers_of(spec), *(0 for _ in range(field.P_ADMITTED, field.POLICY))]
        self._policies = RangeMap(len(times), blank, header, field.H_POLICIES)
        self.waiting = Waiting(header, self._policies, memory)
        self.waiting.segments.begun = self.count
        self.measured = NOTHING_MEASURED  # for the sweep that is being logged
        self._changed: dict[int, TableSpec] = {}  # specs of ranges whose policies are others than the table's
        self._decided = np.zeros(-(-len(times) // 8), np.uint8)  # bits, the lowest first: see `decided`
        self._bounds: frozenset[tuple[bool, int]] | None = None  # as `bounds` gives them; None: look
        self.version = 1  # how often policies were set
        header[H_USAGE_AT], header[H_USAGE_FLOATS] = usage_at, spec.usage_floats
        header[H_TIMES] = times.ctypes.data
        self._spare = np.zeros(int(header[H_STRIDE]) // 8, np.int64)  # a row of no key
        header[H_SPARE] = self._spare.ctypes.data
        header[H_ADMITS] = blank[field.P_ADMISSION - 1] > 0

    @property
    def decided(self) -> NDArray[np.int64]:
        """The ranges whose log has said what policies they are under."""
        return np.flatnonzero(np.unpackbits(self._decided, bitorder="little"))

    def is_decided(self, r: int) -> bool:
        """Whether the log of range r has said what policies it is under."""
        return bool(self._decided[r >> 3] >> (r & 7) & 1)

    def count(self, r: int) -> None:
        """Range r gets a row, or a candidate: kernels count there from now on."""
        self._policies.set(r, field.P_COUNTED, 1)

    @property
    def admitted(self) -> NDArray[np.int64]:
        """Keys that an admission policy gave a row, int64 [ranges]."""
        return self._policies.everywhere(field.P_ADMITTED)

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of the descriptors of ranges."""
        return self._policies.nbytes + self._decided.nbytes + self.waiting.segments.descriptors.nbytes

    def spec_of(self, r: int) -> TableSpec:
        """The table's spec with the policies that range r is under."""
        return self._changed.get(r, self.spec)

    def by_policies(self, ranges: Ranges) -> dict[Policies, list[int]]:
        """Ranges [n], by the policies that they are under."""
        if not self._changed:
            return {policies_of(self.spec): ranges.tolist()}
        known: dict[int, list[int]] = {}  # by the spec's own id: ranges share one, and it takes long to compare
        specs = {r: self.spec_of(r) for r in ranges.tolist()}
        for r, spec in specs.items():
            known.setdefault(id(spec), []).append(r)
        found: dict[Policies, list[int]] = {}
        for some in known.values():
            found.setdefault(policies_of(specs[some[0]]), []).extend(some)
        return {policies: sorted(some) for policies, some in found.items()}

    def under(self, r: int, word: int) -> bool:
        """Whether range r is under the policies with that word, see `word_of`; 0: whatever it is under."""
        return word in (0, self._word(r))

    def _word(self, r: int) -> int:
        """That of range r, 0 while none is decided."""
        return self._policies.get(r, field.P_WORD) if self.is_decided(r) else 0

    def set_policies(self, ranges: Ranges, chosen: Admission | None, evictions: Sequence[Eviction]) -> None:
        """Puts ranges [n] under these policies. SpecError if the rows do not keep what they need."""
        self._set(ranges, self.spec.with_policies(chosen, evictions))
        np.bitwise_or.at(self._decided, ranges >> 3, (1 << (ranges & 7)).astype(np.uint8))

    def begin(self, ranges: Ranges, spec: TableSpec) -> None:
        """The table was created in ranges [n], with these policies. They count unless there are some: a worker that
        opens the table later may not know of those that were set since."""
        new = np.array([r for r in ranges.tolist() if not self.is_decided(r)], np.int64)
        if len(new):
            self.set_policies(new, spec.admission, spec.eviction)

    @property
    def evicts(self) -> bool:
        """Whether some range is under a policy that evicts rows."""
        return any(self.spec_of(r).eviction for r in self.decided.tolist())

    @property
    def bounds(self) -> frozenset[tuple[bool, int]]:
        """How many rows, and keys that wait for one (True), policies of ranges here allow the whole table."""
        if self._bounds is None:
            policies = {(s.admission, s.eviction) for s in map(self.spec_of, self.decided.tolist())}
            rows = {(False, p.rows) for _, evictions in policies for p in evictions if isinstance(p, Capacity)}
            most = {(True, p.most) for p, _ in policies if isinstance(p, MinCount) and p.most is not None}
            self._bounds = frozenset(rows | most)
        return self._bounds

    def _set(self, ranges: Ranges, spec: TableSpec) -> None:
        self._bounds = None
        if (spec.admission, spec.eviction) == (self.spec.admission, self.spec.eviction):
            for r in ranges.tolist() if self._changed else ():
                self._changed.pop(r, None)
        else:
            self._changed.update(dict.fromkeys(ranges.tolist(), spec))
        self.version += 1
        for word, value in enumerate(_numbers_of(spec), field.P_DECAY):
            apart = self._policies.read(ranges, word) != value  # mostly none: then they need no policies of their own
            self._policies.write(ranges[apart], word, value)
        for r in ranges.tolist() if isinstance(spec.admission, MinCountSketch) or self.waiting.sketches else ():
            self.waiting.use_sketch(r, spec.admission)
        admits = self._policies.words[:, field.P_ADMISSION].any()
        self._header[H_ADMITS] = bool(admits) or self.waiting.candidates > 0

    # --- pushes -------------------------------------------------------------------------------------------------------

    def apply(self, table: StoredRows, keys: Keys, grads: Floats, step_values: Floats, worker: int, clock: int) -> int:
        """One optimizer step of a worker on the rows of keys [n] with grads [n, dim], or [n, dim + 1] with scores.

        Keys that get no row yet are counted, and left out. Returns the rows updated. InputError for other shapes.
        """
        n, width, floats = len(keys), self.spec.push_width, self.spec.optimizer.step_floats
        if grads.shape != (n, width) or len(step_values) != floats:
            raise InputError(
                f"table {self.spec.name!r}: {n} keys need gradients of {(n, width)} and {floats} step values, got "
                f"{grads.shape} and {len(step_values)}"
            )
        scores = _NO_FLOATS
        if width > self.spec.dim:
            scores, grads = grads[:, -1].copy(), np.ascontiguousarray(grads[:, :-1])
        rows, missing = table.find(keys)
        counts = _NO_FLOATS
        if missing and self._header[H_ADMITS]:
            counts = self.waiting.admit(keys, rows, worker, clock)
            there = rows != WAITS
            if not there.all():
                keys, grads, rows, counts = keys[there], grads[there], rows[there], counts[there]
                scores = scores[there] if len(scores) else scores
        new = rows == 0
        table.change(keys, rows)
        if len(counts):
            usage.begin(self._header, keys[new], rows[new], counts[new])
        table.update(keys, grads, step_values, rows, FOUND if width > self.spec.dim else USED)
        if width > self.spec.dim:
            usage.use(self._header, keys, rows, scores)
        return len(keys)

    def load(self, r: int, keys: Keys, words: Keys, low: int, blocks: NDArray[np.uint8]) -> None:
        """Stores keys of range r that wait for a row, and blocks of its sketch from hash `low` on."""
        self.waiting.put(keys, words)
        if blocks.size:
            self.waiting.write_blocks(r, low, blocks)
        if len(keys):
            self._header[H_ADMITS] = True

    def loaded(self, keys: Keys, rows: Rows) -> None:
        """Notes that rows of keys [n] were loaded: used now, never pushed to; they wait no more."""
        usage.begin(self._header, keys, rows, _NO_FLOATS)
        self.waiting.remove(keys)

    # --- eviction -----------------------------------------------------------------------------------------------------

    def measure(self, table: StoredRows, r: int, low: int, high: int, by: Predicate) -> MeasuredRows:
        """What a predicate is about, in range r and at hashes low..high-1."""
        if by.of_candidates:
            keys, words = self.waiting.list_interval(r, low, high)
            rank = admission.rank if by.measure == Measure.CANDIDATE else admission.last_push
            return MeasuredRows(keys, words, rank(words))
        keys, words = table.list_words(r, low, high)
        ranks = np.empty(len(keys), np.int64)
        usage.measure(self._header, words, int(by.measure), by.now, by.decay, ranks)
        return MeasuredRows(keys, words, ranks)

    def evict(
        self, table: StoredRows, r: int, low: int, high: int, by: Predicate, stamp: int, applied: int
    ) -> int:  # fmt: skip
        """Forgets the rows, or candidates, of range r at hashes low..high-1 that a predicate chooses; returns how many.

        stamp: the least of rows that an increment may find changed: they may have an older version in a file. Keys of
        those whose older version the predicate might not choose are noted. applied: operations applied so far, by
        which `measured` still holds.
        """
        found = self.measured.recall(applied, r, low, high, by)
        keys, words, ranks = found or self.measure(table, r, low, high, by)
        chosen = by.chosen(keys, ranks)
        gone = keys[chosen]
        if by.of_candidates:
            self.waiting.remove(gone)
        elif len(gone):
            unsure = by.unsure(ranks[chosen]) & (words[chosen] >> field.STAMP_BIT >= stamp)
            table.note_gone(gone[unsure])
            table.forget(gone)
        word = field.P_EVICTED + by.reason
        self._policies.set(r, word, self._policies.get(r, word) + len(gone))
        return len(gone)

    @property
    def sketch_bytes(self) -> int:
        """Bytes of sketches."""
        return sum(one.nbytes for one in self.waiting.sketches.values())

    def counts(self, ranges: NDArray[np.int64]) -> dict[str, Any]:
        """What there is and what has happened here in ranges [n]: keys that wait for a row, keys that a policy gave
        one, and what was forgotten, by reason."""
        return {
            "candidates": sum(self.waiting.count_range(r) for r in ranges.tolist()),
            "admitted": int(self._policies.read(ranges, field.P_ADMITTED).sum()),
            "evicted": {
                reason.name.lower(): int(self._policies.read(ranges, field.P_EVICTED + reason).sum())
                for reason in Reason
            },
        }

    def total(self) -> dict[str, Any]:
        """The counts of all ranges together: any range with rows or candidates has policies of its own."""
        return self.counts(self._policies.there)

    def words(self, r: int) -> list[int]:
        """Numbers on which replicas of range r must agree: of its policies, and of keys that wait for a row. None while
        the table is not created there: a replica may know it by other ranges, and others not."""
        if not self.is_decided(r):
            return []
        return [self._word(r), *self.waiting.words(r)]

    def erase(self, ranges: Ranges) -> None:
        """Forgets ranges [n] that are not here any more."""
        self._bounds = None
        self.version += 1
        np.bitwise_and.at(self._decided, ranges >> 3, (~(1 << (ranges & 7))).astype(np.uint8))
        for r in ranges.tolist():
            self._changed.pop(r, None)
            self.waiting.use_sketch(r, None)
            self._policies.drop(r)

    def advance(self, ranges: Ranges, before: Ranges) -> None:
        """Cluster time of ranges [n] has gone on from `before`, seconds [n]: halves sketches where that is due."""
        for r, earlier in zip(ranges.tolist(), before.tolist(), strict=True) if self.waiting.sketches else ():
            every = getattr(self.spec_of(r).admission, "halve_after", None)
            if every and earlier:
                for _ in range(min(int(self.times[r] // every) - int(earlier // every), 8)):
                    self.waiting.halve(r)
