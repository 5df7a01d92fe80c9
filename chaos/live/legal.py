"""Which values a reader may show of what the load has pushed. Pure.

A row of the load is the sum of the first steps of each life, so a value is legal if there is a number of steps for each
life, from what was committed when the reader's state was read up to what was begun when it was shown, whose sum it is.
Where all of a range is of one moment, the rows of the lives say these numbers, and sums are compared with just them.
Any other row is looked for among all of these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chaos.live.load import DIM, SHAPE, Job, Part, part

Ints: TypeAlias = NDArray[np.int64]
Span = tuple[int, int]  # steps of a life: the fewest, the most
REMEMBERED = 1 << 14  # steps of a life
MOST_SUMS = 1 << 22  # that are compared with one value
_WEIGHTS = np.random.default_rng(7).integers(-(1 << 40), 1 << 40, max(DIM, SHAPE[0] * SHAPE[1])) | 1

PartOf: TypeAlias = Callable[[Job, int], Part]


class Steps:
    """The steps of lives, made once each."""

    def __init__(self, make: PartOf = part) -> None:
        self._make = make
        self._made: dict[Job, dict[int, Part]] = {}

    def of(self, life: Job, step: int) -> Part:
        """What a step adds."""
        made = self._made.setdefault(life, {})
        if step not in made:
            while len(made) >= REMEMBERED:
                del made[next(iter(made))]
            made[step] = self._make(life, step)
        return made[step]


class StepSums:
    """The shared rows and the tensor after the first steps of each life, by range.

    counts: by life, int64 [ranges]; rows: float64 [keys, DIM]; dense: float64 of SHAPE."""

    def __init__(self, steps: Steps, row_ranges: NDArray[np.int32], dense_range: int, ranges: int) -> None:
        self.counts: dict[Job, Ints] = {}
        self.rows = np.zeros((len(row_ranges), DIM))
        self.dense = np.zeros(SHAPE)
        self.steps = steps
        self.row_ranges = row_ranges
        self.dense_range = dense_range
        self._ranges = ranges

    def advance(self, life: Job, counts: Ints) -> None:
        """Goes on to so many steps of a life in each range; never back."""
        before = self.counts.get(life)
        if before is None:
            before = np.zeros(self._ranges, np.int64)
        assert (counts >= before).all()
        self.counts[life] = counts.copy()
        for step in range(int(before.min()) + 1, int(counts.max()) + 1):
            due = (before < step) & (step <= counts)
            if due.any():
                added = self.steps.of(life, step)
                there = due[self.row_ranges[added.keys]]
                self.rows[added.keys[there]] += added.rows[there]
                if due[self.dense_range]:
                    self.dense += added.dense


def row_is_legal(sums: StepSums, key: int, value: NDArray[np.float32], spans: Mapping[Job, Span]) -> bool | None:
    """Whether a shared row may have this value, for some number of steps of each life in its span, in which is the
    number that `sums` has of it; None if there are too many sums to say."""

    def added(step: Part) -> NDArray[np.float64]:
        return np.asarray(step.rows[step.keys == key].sum(axis=0, dtype=np.float64))

    return _is_legal(sums, int(sums.row_ranges[key]), value.astype(np.float64) - sums.rows[key], spans, added)


def dense_is_legal(sums: StepSums, value: NDArray[np.float32], spans: Mapping[Job, Span]) -> bool | None:
    """The same of the tensor."""
    difference = (value.astype(np.float64) - sums.dense).ravel()
    return _is_legal(sums, sums.dense_range, difference, spans, lambda step: step.dense.ravel().astype(np.float64))


def _is_legal(
    sums: StepSums, r: int, difference: NDArray[np.float64], spans: Mapping[Job, Span],
    added: Callable[[Part], NDArray[np.float64]],
) -> bool | None:  # fmt: skip
    """Whether other numbers of steps make such a difference in a range."""
    chains = []
    for life, (low, high) in spans.items():
        now = int(sums.counts[life][r])
        values = [np.zeros(len(difference))]
        values += [added(sums.steps.of(life, step)) for step in range(low + 1, high + 1)]
        chain = np.cumsum(values, axis=0)
        chains.append((chain - chain[min(max(now - low, 0), high - low)]).astype(np.int64))
    whole = difference.astype(np.int64)
    return bool((whole == difference).all()) and is_sum(whole, chains)


def is_sum(value: Ints, chains: Sequence[Ints]) -> bool | None:
    """Whether a value, int64 [D], is the sum of one of each chain, int64 [n, D]. Compared are random sums of their
    numbers: values that differ are taken for equal once in 2^40. None: there are more than MOST_SUMS to be compared."""
    weights = _WEIGHTS[: len(value)]
    options = sorted((np.unique(chain @ weights) for chain in chains), key=len)
    target = int(value @ weights)
    if not options:
        return target == 0
    found = np.zeros(1, np.int64)
    for some in options[:-1]:
        if len(found) * len(some) > MOST_SUMS:
            return None
        found = np.unique(np.add.outer(found, some))
    return bool(np.isin(target - options[-1], found).any())
