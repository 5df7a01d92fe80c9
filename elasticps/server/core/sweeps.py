"""Plans sweeps: which ranges, or which part of one, are looked at next, and by what predicate rows go. Pure.

A head plans for the ranges that it heads. What it chooses becomes an EVICT in the range's log, so that nothing here has
to be the same on other servers: a new head begins its own rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from coordinator.core.capacities import SLACK, divide
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import (
    LAST_USED,
    MOST_USED,
    Admission,
    Capacity,
    Eviction,
    IdleFor,
    MinCount,
    SmallNorm,
    half_life_of,
    word_of,
)
from elasticps.store import eviction
from elasticps.store.eviction import TIE_END, Measure, Predicate, Reason
from elasticps.wire.frames import MAX_RANGES, FrameError, whole, wholes

SLICE_ROWS = 2_560  # rows that are looked at in one go: some 0.5 ms
MOST_RANGES = 4_096  # that are looked at in one go: an operation lists them
MOST_SLICES = 64  # of a range: to find the rows of an interval takes a look at every entry of its index
MOST_IN_A_ROUND = 256  # sweeps that one round takes
ROUND_BYTES = 1 << 16  # that they have as JSON, beyond the first of them
OVERFULL = 0.02  # so much above its capacity a table has outrun the usual pace of sweeps
NORM_EVERY_S = 60.0  # between two looks at all norms of a range
IDLE_SHARE = 32  # of an idle time lies between two looks at a range
_LEAST_S, _MOST_S = 1.0, 600.0


MAX_TABLE = (1 << 32) - 1
_MAX = 1 << 62


class SweptInterval(NamedTuple):
    """An EVICT: in each of its ranges, the rows of a table whose hashes are in low..high-1, and that the predicate
    chooses, are forgotten. ranges: of a sweep that is part of a BARRIER_CLOSE, in which ranges. policies: the word of
    those that it follows from: in a range that is under others by now it changes nothing; 0: of whatever policies."""

    table: int
    low: int
    high: int
    predicate: Predicate
    ranges: tuple[int, ...] = ()
    policies: int = 0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> SweptInterval:
        """From JSON. FrameError for what it cannot be."""
        table, low, high = whole(document.get("id"), MAX_TABLE, 1), document.get("low"), document.get("high")
        ranges, predicate = wholes(document.get("ranges", []), MAX_RANGES - 1), predicate_of(document.get("predicate"))
        policies = whole(document.get("policies", 0), _MAX)
        return cls(table, whole(low, HASH_END), whole(high, HASH_END), predicate, ranges, policies)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes as part of a BARRIER_CLOSE."""
        return len(json.dumps(self.document(), separators=(",", ":"))) + 1

    def document(self) -> dict[str, Any]:
        """As JSON."""
        found = {"id": self.table, "low": self.low, "high": self.high, "predicate": list(self.predicate)}
        found |= {"ranges": list(self.ranges)} if self.ranges else {}
        return found | ({"policies": self.policies} if self.policies else {})


def predicate_of(values: object) -> Predicate:
    """A predicate from a list of numbers, as `list(predicate)` gives them. FrameError for what it cannot be."""
    try:
        measure, reason, below, tie, now, decay = cast(list[Any], values)
        if not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"{decay!r} half-lives a second")
        bounds = whole(below, _MAX), whole(tie, TIE_END), whole(now, _MAX)
        return Predicate(Measure(measure), Reason(reason), *bounds, float(decay))
    except (TypeError, ValueError) as error:
        raise FrameError(f"a predicate of an EVICT cannot be read: {error}") from None


class Slice(NamedTuple):
    """What is looked at in one go: several ranges of a table as a whole, or hashes low..high-1 of a single one.
    policies: the word of those that the ranges were under as this was planned; 0: of any."""

    table: int
    ranges: tuple[int, ...]
    low: int
    high: int
    policies: int = 0


Policies = tuple[Admission | None, tuple[Eviction, ...]]


class SweptTable(Protocol):
    """A table, as planning needs it."""

    @property
    def version(self) -> int:
        """Another number when policies have changed."""

    def by_policies(self, ranges: NDArray[np.int64]) -> Mapping[Policies, list[int]]:
        """Ranges [n], by the policies that they are under."""

    def counts(self, of_candidates: bool) -> NDArray[np.int64]:
        """Rows, or candidates, of each range now, int64 [ranges]."""

    def allowed(self, of_candidates: bool, capacity: int) -> int | None:
        """How many rows, or candidates, the ranges headed here may keep; None while the whole table is not above its
        capacity."""


def predicates(
    admission: Admission | None, evictions: Iterable[Eviction], now: int
) -> list[tuple[Predicate, float, int]]:
    """What each policy compares: (predicate, seconds between two looks, rows to which a table is held).

    The predicate's bound is final where the rows are 0 (no bound on rows); else it is to be chosen, see `bounded`. A
    policy that evicts nothing now has the bound 0.
    """
    evictions = tuple(evictions)
    half_life = half_life_of(evictions)
    decay = 1.0 / half_life if half_life else 0.0
    found: list[tuple[Predicate, float, int]] = []
    for policy in evictions:
        if isinstance(policy, IdleFor):
            idle = float(policy.idle)  # type: ignore[arg-type]
            by = Predicate(Measure.LAST_USE, Reason.IDLE, max(0, math.ceil(now - idle)))
            found.append((by, _pause(idle), 0))
        elif isinstance(policy, SmallNorm):
            bound = int((np.float32(policy.below) * np.float32(policy.below)).view(np.uint32))
            found.append((Predicate(Measure.NORM, Reason.SMALL_NORM, bound), NORM_EVERY_S, 0))
        elif isinstance(policy, Capacity):
            if policy.keep == LAST_USED:
                by = Predicate(Measure.LAST_USE, Reason.CAPACITY, 0)
            else:
                measure = Measure.COUNT if policy.keep == MOST_USED else Measure.SCORE
                by = Predicate(measure, Reason.CAPACITY, 0, 0, now, decay)
            found.append((by, 0.0, policy.rows))
    if isinstance(admission, MinCount):
        if admission.forget_after is not None:
            age = float(admission.forget_after)  # type: ignore[arg-type]
            by = Predicate(Measure.CANDIDATE_AGE, Reason.FORGOTTEN, max(0, math.ceil(now - age)))
            found.append((by, _pause(age), 0))
        if admission.most is not None:
            found.append((Predicate(Measure.CANDIDATE, Reason.FORGOTTEN, 0), 0.0, admission.most))
    return found


def _pause(age: float) -> float:
    return min(max(age / IDLE_SHARE, _LEAST_S), _MOST_S)


def bounded(by: Predicate, keys: NDArray[np.int64], ranks: NDArray[np.int64], share: float) -> Predicate:
    """The predicate with the bound by which such a share of rows goes, chosen from some of them: int64 [n] each."""
    going = min(len(ranks), round(share * len(ranks)))
    if going < 1:
        return by
    below, tie = eviction.threshold(keys, ranks, going)
    return by._replace(below=below, tie=tie)


@dataclass
class _Round:
    """When the next look of a policy at the ranges headed here may begin."""

    due_s: float = -math.inf


class _Groups(NamedTuple):
    """The ranges of a table by policies. version: of the policies; headed: all ranges."""

    version: int
    headed: NDArray[np.int64]
    ranges: Mapping[Policies, list[int]]


class SweepPlan:
    """Chooses what is looked at next. width: hashes of a range."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rounds: dict[tuple[int, Predicate], _Round] = {}
        self._groups: dict[int, _Groups] = {}  # by table

    def slices(
        self, tables: Mapping[int, SweptTable], headed: NDArray[np.int64], now: int, clock_s: float, hurry: bool
    ) -> Iterator[tuple[Slice, Predicate, float]]:
        """The slices that are due, with a predicate each, and the share of rows that has to go where its bound is to be
        chosen, 0 where it is final. headed: the same array as long as the ranges are the same. hurry: memory is short,
        so all policies are due. Rows may come and go between two slices."""
        for number, table in sorted(tables.items()):
            for policies, ranges in self._by_policies(number, table, headed).items():
                for by, pause_s, rows in sorted(predicates(*policies, now), key=lambda found: found[2] > 0):
                    if rows:  # last: what goes by its age makes room
                        yield from _under(policies, self._cut(number, table, headed, ranges, by, rows))
                    elif self._due(number, by, pause_s, clock_s, hurry) and table.counts(by.of_candidates).any():
                        for some in _grouped(table, ranges, by.of_candidates):
                            yield from _under(policies, self._parts(number, table, some, by))

    def cuts(
        self, tables: Mapping[int, SweptTable], headed: NDArray[np.int64], now: int
    ) -> Iterator[tuple[Slice, Predicate, float]]:
        """As `slices`, by capacities alone."""
        for number, table in sorted(tables.items()):
            for policies, ranges in self._by_policies(number, table, headed).items():
                for by, _, rows in predicates(*policies, now):
                    if rows:
                        yield from _under(policies, self._cut(number, table, headed, ranges, by, rows))

    def _by_policies(self, number: int, table: SweptTable, headed: NDArray[np.int64]) -> Mapping[Policies, list[int]]:
        known = self._groups.get(number)
        if known is None or known.version != table.version or known.headed is not headed:
            known = self._groups[number] = _Groups(table.version, headed, table.by_policies(headed))
        return known.ranges

    def _due(self, table: int, by: Predicate, pause_s: float, clock_s: float, hurry: bool) -> bool:
        """Whether a policy without a bound on rows looks at all ranges now; begins its pause."""
        state = self._rounds.setdefault((table, by._replace(below=0, now=0)), _Round())
        if by.below == 0 or (clock_s < state.due_s and not hurry):
            return False
        state.due_s = clock_s + pause_s
        return True

    def _cut(
        self,
        number: int,
        table: SweptTable,
        headed: NDArray[np.int64],
        ranges: Sequence[int],
        by: Predicate,
        rows: int,
    ) -> Iterator[tuple[Slice, Predicate, float]]:
        """Cuts ranges to what they may keep; nothing while all that are headed here are less than SLACK above it. What
        each group keeps is fixed as this begins."""
        allowed = table.allowed(by.of_candidates, rows)
        if allowed is None or _count(table, headed, by) <= allowed + int(SLACK * allowed):
            return
        others = [*set(headed.tolist()).difference(ranges)]  # under other policies, for the moment
        groups = [*_grouped(table, ranges, by.of_candidates)]
        counts, sizes = zip(*((_count(table, some, by), len(some)) for some in (*groups, others)), strict=True)
        for some, keep in zip(groups, divide(allowed, counts, sizes), strict=False):
            if (count := _count(table, some, by)) > keep:
                yield from self._parts(number, table, some, by, (count - keep) / count)

    def _parts(
        self, number: int, table: SweptTable, some: Sequence[int], by: Predicate, share: float = 0.0
    ) -> Iterator[tuple[Slice, Predicate, float]]:
        count = _count(table, some, by)
        if len(some) > 1 or count <= SLICE_ROWS:
            if count:
                yield Slice(number, tuple(some), 0, HASH_END), by, share
            return
        parts, begin = min(-(-count // SLICE_ROWS), MOST_SLICES), some[0] * self._width
        for part in range(parts):
            low, high = (begin + self._width * edge // parts for edge in (part, part + 1))
            yield Slice(number, tuple(some), low, high), by, share

    def overfull(self, tables: Mapping[int, SweptTable], headed: NDArray[np.int64]) -> list[int]:
        """Tables that have so many rows, or waiting keys, above their capacity that sweeps have to be faster."""
        return [
            number
            for number, table in tables.items()
            if any(
                (1 - SLACK) * _count(table, headed, by) > (1 + OVERFULL) * allowed
                for policies in self._by_policies(number, table, headed)
                for by, _, rows in predicates(*policies, 0)
                if rows and (allowed := table.allowed(by.of_candidates, rows)) is not None
            )
        ]

    def forget(self, live: Iterable[int]) -> None:
        """Forgets tables that are not here any more."""
        there = set(live)
        self._rounds = {at: state for at, state in self._rounds.items() if at[0] in there}
        self._groups = {number: groups for number, groups in self._groups.items() if number in there}


def _under(
    policies: Policies, found: Iterable[tuple[Slice, Predicate, float]]
) -> Iterator[tuple[Slice, Predicate, float]]:
    """Slices of ranges under these policies."""
    word = word_of(*policies)
    for at, by, share in found:
        yield at._replace(policies=word), by, share


def _count(table: SweptTable, ranges: Sequence[int] | NDArray[np.int64], by: Predicate) -> int:
    return int(table.counts(by.of_candidates)[np.asarray(ranges, np.int64)].sum())


def _grouped(table: SweptTable, ranges: Iterable[int], of_candidates: bool) -> Iterator[list[int]]:
    """Ranges in groups of at most SLICE_ROWS rows and MOST_RANGES, or single ones that have more."""
    group: list[int] = []
    rows, counts = 0, table.counts(of_candidates)
    for r in ranges:
        if group and (rows + int(counts[r]) > SLICE_ROWS or len(group) == MOST_RANGES):
            yield group
            group, rows, counts = [], 0, table.counts(of_candidates)  # rows come and go meanwhile
        group.append(r)
        rows += int(counts[r])
    if group:
        yield group
