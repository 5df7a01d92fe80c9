"""Admission and eviction policies of sparse tables, as values: which keys get a row, and which rows are forgotten.

Policies travel as JSON within a table's spec and in POLICY operations. What they mean for a row is computed by
`elasticps.store.admission` and `elasticps.store.eviction`; why every replica comes to the same result is told in
`docs/internals/growing-tables.md`.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

from elasticps.errors import SpecError
from elasticps.model.optimizers import FLOAT32_LIMIT, Checked, integer, number

MAX_COUNT = 60_000  # of MinCount: a candidate's count has 16 bits
MAX_SECONDS = 1 << 31
MAX_TIME = (1 << 32) - 1  # cluster time in seconds, which rows keep in 32 bits
MAX_POLICIES = 8
LAST_USED, MOST_USED, SCORE = "last_used", "most_used", "score"
NO_USAGE, COUNTS, SCORES = "", "count", "score"
USAGE_FLOATS = {NO_USAGE: 0, COUNTS: 2, SCORES: 3}
"""Words of 4 bytes that a row has for its usage: last use and count; last use, count and score."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")


def seconds(value: object, what: str, low: float = 1.0) -> float:
    """A duration in seconds: a number, a timedelta, or a text like "90s", "15m", "12h", "7d", "2w".

    Raises SpecError for anything else, and outside `low`..2^31 seconds.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        if found is None:
            raise SpecError(f'{what} must be seconds or a text like "90s", "15m", "12h", "7d" or "2w", got {value!r}')
        value = float(found[1]) * _UNITS[found[2]]
    return number(value, what, low, MAX_SECONDS)


class Policy(Checked, ABC):
    """One policy, as a frozen dataclass."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


class Admission(Policy):
    """Decides which of the keys that are pushed, and have no row yet, get one."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Admits a key with its `count`-th push; pushes before that are counted and change nothing else.

    forget_after: a key that has waited so long since its last push is forgotten, with its count; seconds or "7d", None
    for never. most: keys of the whole table that are counted at a time, None for no bound: above it those that were
    pushed least often, and longest ago, are forgotten.
    """

    kind: ClassVar[str] = "min_count"
    count: int
    forget_after: float | str | timedelta | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        self._set(count=integer(self.count, "MinCount.count", 1, MAX_COUNT))
        if self.forget_after is not None:
            self._set(forget_after=seconds(self.forget_after, "MinCount.forget_after"))
        if self.most is not None:
            self._set(most=integer(self.most, "MinCount.most", 1, 1 << 40))


@dataclass(frozen=True)
class MinCountSketch(Admission):
    """Admits a key with about its `count`-th push, counted in a count-min sketch.

    For streams in which most keys come once: `nbytes` bytes for each copy of the table, however many keys there are. A
    key may be admitted too early (never too late) where its counters are shared. halve_after: all counters are halved
    so often, in seconds or "7d"; None for never.
    Source: Cormode and Muthukrishnan 2005, with the conservative update of Estan and Varghese 2002.
    """

    kind: ClassVar[str] = "min_count_sketch"
    count: int
    nbytes: int = 64 << 20
    halve_after: float | str | timedelta | None = None

    def __post_init__(self) -> None:
        self._set(
            count=integer(self.count, "MinCountSketch.count", 1, 255),
            nbytes=integer(self.nbytes, "MinCountSketch.nbytes", 1 << 10, 1 << 40),
        )
        if self.halve_after is not None:
            self._set(halve_after=seconds(self.halve_after, "MinCountSketch.halve_after"))


@dataclass(frozen=True)
class Probability(Admission):
    """Admits a key with probability `p` at each of its pushes, by a hash of key, worker and clock: a push that is
    retried is decided as before."""

    kind: ClassVar[str] = "probability"
    p: float

    def __post_init__(self) -> None:
        self._set(p=number(self.p, "Probability.p"))
        if not 0 < self.p <= 1:
            raise SpecError(f"Probability.p must be above 0 and at most 1, got {self.p!r}")


class Eviction(Policy):
    """Decides which rows a table forgets."""


@dataclass(frozen=True)
class IdleFor(Eviction):
    """Evicts rows that were not pushed to for `idle`, in seconds or as "30d"."""

    kind: ClassVar[str] = "idle_for"
    idle: float | str | timedelta

    def __post_init__(self) -> None:
        self._set(idle=seconds(self.idle, "IdleFor.idle"))


@dataclass(frozen=True)
class Capacity(Eviction):
    """Holds a table to `rows` rows, give or take 2 %.

    keep: "last_used" evicts rows whose last push is longest ago, "most_used" those with the least pushes, "score" those
    with the least score of the caller's (`push({table: (keys, grads, scores)})`). half_life: counts and scores fall by
    half in this time, in seconds or as "7d"; None: they never fall.
    """

    kind: ClassVar[str] = "capacity"
    rows: int
    keep: str = LAST_USED
    half_life: float | str | timedelta | None = None

    def __post_init__(self) -> None:
        self._set(rows=integer(self.rows, "Capacity.rows", 1, 1 << 48))
        if self.keep not in (LAST_USED, MOST_USED, SCORE):
            raise SpecError(f'Capacity.keep must be "last_used", "most_used" or "score", got {self.keep!r}')
        if self.half_life is not None:
            if self.keep == LAST_USED:
                raise SpecError('Capacity.half_life is for keep="most_used" and keep="score": the last use has none')
            self._set(half_life=seconds(self.half_life, "Capacity.half_life"))


@dataclass(frozen=True)
class SmallNorm(Eviction):
    """Evicts rows whose weights have an Euclidean norm below `below`."""

    kind: ClassVar[str] = "small_norm"
    below: float

    def __post_init__(self) -> None:
        self._set(below=number(self.below, "SmallNorm.below", below=math.sqrt(FLOAT32_LIMIT)))


ADMISSIONS: dict[str, type[Policy]] = {cls.kind: cls for cls in (MinCount, MinCountSketch, Probability)}
EVICTIONS: dict[str, type[Policy]] = {cls.kind: cls for cls in (IdleFor, Capacity, SmallNorm)}


def check_admission(value: object, where: str) -> Admission | None:
    """`value`, checked to be an admission policy or None. Raises SpecError."""
    if value is None or isinstance(value, Admission):
        return value
    raise SpecError(f"{where}admission must be one of MinCount, MinCountSketch and Probability, got {value!r}")


def check_evictions(value: object, where: str) -> tuple[Eviction, ...]:
    """`value` as a tuple of eviction policies: one of them, a sequence, or None for none. Raises SpecError."""
    if isinstance(value, Eviction):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, str):
        if value is not None:
            raise SpecError(f"{where}eviction must be IdleFor, Capacity or SmallNorm, or a list of them, got {value!r}")
        value = ()
    found = tuple(value)
    for each in found:
        if not isinstance(each, Eviction):
            raise SpecError(f"{where}eviction must be IdleFor, Capacity or SmallNorm, or a list of them, got {each!r}")
    if len(found) > MAX_POLICIES:
        raise SpecError(f"{where}a table has at most {MAX_POLICIES} eviction policies, got {len(found)}")
    if len({policy.half_life for policy in found if isinstance(policy, Capacity) and policy.keep != LAST_USED}) > 1:
        raise SpecError(f"{where}counts have one half-life: several Capacity policies name different ones")
    return found


def usage_of(admission: Admission | None, evictions: Sequence[Eviction]) -> str:
    """What rows must keep of their usage for these policies: one of NO_USAGE, COUNTS, SCORES."""
    if any(isinstance(policy, Capacity) and policy.keep == SCORE for policy in evictions):
        return SCORES
    return COUNTS if evictions or admission is not None else NO_USAGE


def half_life_of(evictions: Sequence[Eviction]) -> float | None:
    """Seconds in which counts and scores fall by half; None: never."""
    for policy in evictions:
        if isinstance(policy, Capacity) and policy.half_life is not None:
            return float(policy.half_life)  # type: ignore[arg-type]
    return None


@lru_cache(maxsize=256)
def word_of(admission: Admission | None, evictions: tuple[Eviction, ...]) -> int:
    """A number of 56 bits, above 0, that equal policies have in common, and others do not."""
    policies = json.dumps([None if each is None else each.to_dict() for each in (admission, *evictions)]).encode()
    return int.from_bytes(blake2b(policies, digest_size=7).digest(), "little") or 1
