"""Proves from vector clocks that a cut through all ranges is consistent. Pure.

Each range notes at the CUT how far every worker's steps had come there. A step ticks some ranges, so that differs from
range to range. A worker that holds at step c reports a digest of its progress in all ranges, all of it committed. The
cut is the state after exactly its steps 1 … c if and only if the ranges noted that progress: then what they noted adds
up to the same digest. What that proves, and what it cannot:

- By clocks against the worker's own report: the steps of each worker in the roster after the cut. A worker that came
  meanwhile has reported nothing, and has to be as far in all ranges.
- By clocks: the rounds of each application that has a worker.
- Less, of ranges that ever came back from a checkpoint, where a worker may have fewer steps than it knows of: that none
  has a step later than the one reported, or a part of a step.
- Not by clocks: initial values, loads, deletions and drops, which are no steps. For these a cut relies on the hold and
  its timing (see `checkpoint.cuts`).
- Not at all: workers that have left the roster. If the records of their steps say that the newest step of one is whole,
  and all before it, its clock is that. Else the steps above the last whole one are listed by range (`left_out`), and so
  is a deletion that was given up halfway, which is counted under the worker's id + 2³¹.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.admin.interface import CutTaken, WorkerHeld
from replication.progress import ERASER, PART_BITS, PART_MASK, Progress, progress_digest
from replication.step_records import StepRecord, home_range, last_whole_step

_STEPS_SHOWN = 5  # in a message


@dataclass(frozen=True)
class Verdict:
    """The verdict on a cut. why: what is wrong, "" if the cut is consistent.

    clocks        worker id, also of deletions -> the step up to which all of its are in the cut, and none later
    left_out      the same -> range -> progress, of workers that are gone, in the midst of a step perhaps. Steps up to
                  there are in that range, and at least all that are whole count as that
    records       (worker, record) of the steps of workers in `left_out`
    rounds        application -> the last round that is closed, in all ranges
    rounds_torn   the same by range, of applications without workers, the last of whom went while a round was closed;
                  in a cut that is not consistent for that alone, of the one that has some
    """

    why: str = ""
    clocks: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    records: Sequence[tuple[int, StepRecord]] = ()
    rounds: Mapping[str, int] = field(default_factory=dict)
    rounds_torn: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def prove_cut(
    taken: Sequence[CutTaken], present: Mapping[int, str], held: Mapping[int, WorkerHeld],
    records: Sequence[tuple[int, StepRecord]] = (), recovered: NDArray[np.bool_] | None = None,
) -> Verdict:  # fmt: skip
    """The verdict on a cut through all ranges, from what each noted. present: the application of each worker in the
    roster after the cut; held: what workers reported; records: (worker, record) of workers that have left; recovered:
    ranges that ever came back from a checkpoint, bool [P], None for none."""
    ranges = sum(len(one.ranges) for one in taken)
    noted = _noted(taken, np.zeros(ranges, np.bool_) if recovered is None else recovered)
    waiting = {worker for one in taken for _, _, worker in one.waiting_shares}
    clocks: dict[int, int] = {}
    left_out: dict[int, dict[int, int]] = {}
    records_of: dict[int, list[StepRecord]] = {}
    for worker, record in records:
        records_of.setdefault(worker, []).append(record)
    for worker in sorted(noted.keys() | waiting | present.keys()):
        found = noted.get(worker, _Noted(0, 0, 0, True))
        if worker in present:
            if why := _objection(worker, found, held.get(worker), taken, waits=worker in waiting):
                return Verdict(why)
            clocks[worker] = held[worker].clock if worker in held else found.most >> PART_BITS
            continue
        whole = found.least >> PART_BITS
        if worker not in waiting and found.least == found.most and found.closed:
            clocks[worker] = whole
            continue
        progress = _progress(taken, worker, ranges)
        if worker < ERASER:
            home = home_range(worker, ranges)
            whole = last_whole_step(0, home, progress, records_of.get(worker, ()))
        if worker not in waiting and found.most <= whole << PART_BITS:
            clocks[worker] = whole
        else:
            left_out[worker] = dict(enumerate(np.maximum(progress, whole << PART_BITS).tolist()))
    rounds: dict[str, int] = {}
    torn: dict[str, dict[int, int]] = {}
    for app in sorted({app for one in taken for app in one.closed}):
        closed = {one.closed.get(app, 0) for one in taken}
        by_range = {r: one.closed.get(app, 0) for one in taken for r in one.ranges}
        if len(closed) == 1:
            rounds[app] = closed.pop()
        elif app in present.values():
            why = f"the rounds of {app!r} that are closed differ: {sorted(closed)}"
            return Verdict(why, rounds_torn={app: by_range})
        else:
            torn[app] = by_range
    return Verdict("", clocks, left_out, [one for one in records if one[0] in left_out], rounds, torn)


class _Noted(NamedTuple):
    """What ranges noted of a worker. digest: of ranges that never came back from a checkpoint; closed: none has a part
    of a step."""

    digest: int
    least: int
    most: int
    closed: bool


def _noted(taken: Sequence[CutTaken], recovered: NDArray[np.bool_]) -> dict[int, _Noted]:
    """What all ranges noted, by worker."""
    workers = np.array(sorted({worker for one in taken for worker in one.clocks}), np.int64)
    digests, count = np.zeros(len(workers), np.uint64), np.zeros(len(workers), np.int64)
    least, most = np.full(len(workers), np.iinfo(np.int64).max), np.zeros(len(workers), np.int64)
    closed = np.ones(len(workers), np.bool_)
    for one in taken:
        progress = np.fromiter(one.clocks.values(), np.int64, len(one.clocks))
        at = np.searchsorted(workers, np.fromiter(one.clocks.keys(), np.int64, len(one.clocks)))
        count[at] += len(one.ranges)
        least[at], most[at] = np.minimum(least[at], progress), np.maximum(most[at], progress)
        closed[at] &= progress & PART_MASK == 0
        ranges = np.array(one.ranges)
        digests[at] += progress_digest(workers[at], progress, ranges[~recovered[ranges]])
    least[count < len(recovered)] = 0
    columns = (each.tolist() for each in (digests, least, most, closed))
    return dict(zip(workers.tolist(), map(_Noted._make, zip(*columns, strict=True)), strict=True))


def _objection(
    worker: int, noted: _Noted, held: WorkerHeld | None, taken: Sequence[CutTaken], *, waits: bool
) -> str:  # fmt: skip
    """Why the cut does not have exactly the steps of a worker that is there; "" if it does."""
    if waits:
        return f"what ranges have of worker {worker} waits for its round"
    if held is not None and noted.most >> PART_BITS > held.clock:
        return f"worker {worker} holds at step {held.clock}, and ranges have {noted.most >> PART_BITS}"
    same = noted.least == noted.most if held is None else noted.digest == held.digest
    if same and noted.closed:
        return ""
    found = _as_steps({one.clocks.get(worker, 0) for one in taken})
    if held is None:
        return f"what ranges have of worker {worker} differs: {found}"
    return f"what ranges have of worker {worker} is not what it reported as it held at step {held.clock}: {found}"


def _progress(taken: Sequence[CutTaken], worker: int, ranges: int) -> Progress:
    """A worker's progress by range, int64 [P]."""
    progress = np.zeros(ranges, np.int64)
    for one in taken:
        progress[list(one.ranges)] = one.clocks.get(worker, 0)
    return progress


def uncovered(ranges: int, taken: Sequence[CutTaken]) -> str:
    """Why a cut does not cover each of so many ranges once; "" if it does."""
    count = [0] * ranges
    for one in taken:
        for r in one.ranges:
            count[r] += 1
    missing, twice = [r for r in range(ranges) if not count[r]], [r for r in range(ranges) if count[r] > 1]
    if missing:
        return f"{len(missing)} ranges have no server that writes them, such as {missing[0]}"
    return f"{len(twice)} ranges were cut twice, such as {twice[0]}" if twice else ""


def _as_steps(found: set[int]) -> str:
    steps = [f"{progress >> PART_BITS}" + " and a part" * bool(progress & ((1 << PART_BITS) - 1)) for progress in
            sorted(found)[:_STEPS_SHOWN]]  # fmt: skip
    return "steps " + ", ".join(steps)
