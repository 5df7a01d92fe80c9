"""Proves from vector clocks that a cut through all ranges is consistent. Pure.

Each range notes at the CUT how far every worker's steps had come there. The cut is the state after exactly the steps
1 … c of a worker if and only if every range has the same closed step c of it. What that proves, and what it cannot:

- By clocks: the steps of each worker in the roster after the cut, and the rounds of each application that has one.
- By clocks against the worker's own report: that no range has a step later than the one at which the worker says that
  it holds. A worker that has reported and never pushed has its reported clock in the checkpoint.
- Not by clocks: initial values, loads, deletions and drops, which are no steps. For these a cut relies on the hold and
  its timing (see `checkpoint.cuts`).
- Not at all: workers that have left the roster. A step that one of them left unfinished is listed by range
  (`left_out`), and so is a deletion that was given up halfway, which is counted under the worker's id + 2³¹.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elasticps.admin.interface import CutTaken
from replication.progress import MAX_CLOCK, PART_BITS

_STEPS_SHOWN = 5  # in a message


@dataclass(frozen=True)
class Verdict:
    """The verdict on a cut. why: what is wrong, "" if the cut is consistent.

    clocks        worker id, also of deletions -> the step up to which all of its are in the cut, and none later
    left_out      the same -> range -> progress, of workers that are gone, in the midst of a step perhaps
    rounds        application -> the last round that is closed, in all ranges
    rounds_torn   the same by range, of applications without workers, the last of whom went while a round was closed;
                  in a cut that is not consistent for that alone, of the one that has some
    """

    why: str = ""
    clocks: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    rounds: Mapping[str, int] = field(default_factory=dict)
    rounds_torn: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def prove_cut(taken: Sequence[CutTaken], present: Mapping[int, str], written: Mapping[int, int]) -> Verdict:
    """The verdict on a cut through all ranges, from what each noted. present: the application of each worker in the
    roster after the cut; written: the clock up to which each worker has reported all its steps committed."""
    clocks: dict[int, int] = {}
    left_out: dict[int, dict[int, int]] = {}
    waiting = {worker for one in taken for _, _, worker in one.waiting_shares}
    for worker in sorted({worker for one in taken for worker in one.clocks} | waiting):
        found = {one.clocks.get(worker, 0) for one in taken}
        least = min(found)
        whole = len(found) == 1 and least & ((1 << PART_BITS) - 1) == 0 and worker not in waiting
        if not whole and worker in present:
            state = "waits for its round" if worker in waiting else f"differs: {_as_steps(found)}"
            return Verdict(f"what ranges have of worker {worker} {state}")
        if not whole:
            left_out[worker] = {r: one.clocks.get(worker, 0) for one in taken for r in one.ranges}
        # Ranges may have fewer steps than a worker reports: it went on at a higher clock, and has pushed nothing since.
        elif written.get(worker, MAX_CLOCK) < least >> PART_BITS:
            return Verdict(f"worker {worker} holds at step {written[worker]}, and ranges have {least >> PART_BITS}")
        else:
            clocks[worker] = least >> PART_BITS
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
    for worker in present:
        clocks.setdefault(worker, written.get(worker, 0))
    return Verdict("", clocks, left_out, rounds, torn)


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
