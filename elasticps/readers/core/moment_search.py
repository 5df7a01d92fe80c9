"""Finds one moment of all ranges: a state of each server in which every worker's same steps are everywhere. Pure.

Servers tell their states one after the other, each with the progress of every worker in each of its ranges. A moment is
one state of each server such that for every worker w there is a step c with exactly its steps up to c in all ranges. No
worker pauses for it, so there need not be one at any given time; but workers rest between steps, and then there is.

The search goes forward only. For each worker c is the newest step in any of the states chosen. A server whose state
lacks a step up to c in a range that this step ticks, or has a part of a step, cannot be in a moment with these states
or later ones: its next state is chosen (Garg and Waldecker, "Detection of weak unstable predicates", 1994). So the
first moment is found, in time proportional to the states.

Which ranges a step ticks is said by its record at the worker's home range; a step without a record ticks all. Every
step ticks home: so a server whose home ranges lack a step that others have is moved on first, and then all records up
to c are known. Records of older steps are dropped when they are committed, which the newest one says: `committed` has
to be from before the first of these states, so that all states have those steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.progress import PART_BITS, PART_MASK
from replication.step_records import StepRecord, home_range

Ints = NDArray[np.int64]


class TailState(NamedTuple):
    """A state that a server has told of. number: of the window that ends with it; runs: what has changed of workers'
    progress, as in `Progresses`; records: those that are new."""

    number: int
    runs: Ints
    records: Sequence[tuple[int, StepRecord]]


class MomentSearch:
    """owner: int64 [P], the server of each range, by any number. progress: by worker, int64 [P], in the first state of
    each server; records, committed: as `RangeClocks` has them. chosen: by server, the window of its state, 0 for the
    first."""

    def __init__(
        self, owner: Ints, progress: Mapping[int, Ints], records: Mapping[int, Mapping[int, Ints]],
        committed: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.chosen = dict.fromkeys(np.unique(owner).tolist(), 0)
        self._owner = owner
        self._progress = {worker: row.copy() for worker, row in progress.items()}
        self._records = {worker: dict(of) for worker, of in records.items()}
        self._committed = dict(committed)
        self._states: dict[int, deque[TailState]] = {server: deque() for server in self.chosen}

    def add(self, server: int, state: TailState) -> None:
        """A server tells of its next state."""
        self._states[server].append(state)
        for worker, record in state.records:
            self._records.setdefault(worker, {})[record.clock] = record.ranges

    def find(self) -> bool:
        """Whether the states chosen are a moment now. If not, some server has to tell of another state."""
        while late := self._late():
            ready = [server for server in late if self._states[server]]
            for server in ready:
                self._advance(server)
            if not ready:
                return False
        return True

    def _advance(self, server: int) -> None:
        state = self._states[server].popleft()
        self.chosen[server] = state.number
        for worker, first, last, progress in state.runs.tolist():
            row = self._progress.setdefault(worker, np.zeros(len(self._owner), np.int64))
            mine = self._owner[first : last + 1] == server
            row[first : last + 1][mine] = progress

    def _late(self) -> set[int]:
        """Servers whose state chosen cannot be in a moment with the others', or later ones of these."""
        late: set[int] = set()
        for worker, row in self._progress.items():
            late |= {*self._owner[self._lacks(worker, row)].tolist()}
        return late

    def _lacks(self, worker: int, row: Ints) -> NDArray[np.bool_]:
        """In which ranges a worker's step is missing, or there in part."""
        steps = row >> PART_BITS
        newest, home = int(steps.max()), home_range(worker, len(row))
        lacks: NDArray[np.bool_] = row & PART_MASK != 0
        if steps[home] < newest:
            lacks[home] = True
            return lacks
        return lacks | (steps < self._expected(worker, newest))

    def _expected(self, worker: int, newest: int) -> Ints:
        """The newest step up to `newest` that ticks each range, 0 where that is committed for long."""
        records, committed = self._records.get(worker, {}), self._committed.get(worker, 0)
        dense = newest
        while dense in records and dense > committed:
            dense -= 1
        expected = np.full(len(self._owner), dense if dense > committed else 0, np.int64)
        for step in range(dense + 1, newest + 1):
            expected[records[step]] = step
        return expected

    def apart(self) -> str:
        """How far ranges are apart in the states chosen, for people."""
        worst = {w: row >> PART_BITS for w, row in self._progress.items() if self._lacks(w, row).any()}
        shown = [f"worker {w} is at step {int(row.min())} to {int(row.max())}" for w, row in sorted(worst.items())[:3]]
        more = f", and so are {len(worst) - 3} more workers" if len(worst) > 3 else ""
        return f"{', '.join(shown) or 'a worker came or left'}{more}"
