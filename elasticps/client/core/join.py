"""Where a worker starts, and where it goes on after a pause: what it has to ask for that. Pure; `joining` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elasticps.client.core.barrier import entering
from elasticps.client.core.fan_out import Request, Script, of_ranges, steps_of
from elasticps.client.core.session import resume
from elasticps.client.core.standing import standing_ranges
from elasticps.wire.frames import Header
from elasticps.wire.joining import MOST_HOMES, JoinedAnswer, JoinHeader, lowest_clock


class PastRun(NamedTuple):
    """Who took part last under a worker's name: the worker's id, the clock that it went on above last, and how far the
    name had come by then: the last clock that need not be trained again, and the number of committed steps.
    `revision`: of the key in the store."""

    id: int
    base: int
    trained: int
    steps: int
    revision: int


@dataclass(frozen=True)
class Resume:
    """Where a worker starts.

    - clock: it starts above this one
    - trained: the last clock whose samples need not be trained again: everything up to it is committed, once
    - begun: the last clock of which any server has seen anything. The samples of steps `trained` + 1 … `begun` are to
      be trained again: what came of them is in each range by itself, once or not
    - steps: how many steps of all incarnations of this name are committed: where each step trains the next batch of a
      fixed order, the next batch is number `steps`, counted from 0
    - predecessor: whether there was one; without, `trained` and `begun` are `clock`
    """

    clock: int
    trained: int
    begun: int
    steps: int
    predecessor: bool

    def later(self, clock: int) -> Resume:
        """The same of one that starts above `clock`, which is higher."""
        return replace(self, clock=clock) if self.predecessor else Resume(clock, clock, clock, 0, False)


class Starting:
    """The questions of one worker. rounds: whether it trains in synchronous rounds."""

    def __init__(self, worker: int, app: str, timeout_s: float, *, rounds: bool) -> None:
        self._worker = worker
        self._app = app
        self._rounds = rounds
        self._timeout_s = timeout_s

    def first(self, past: PastRun | None) -> Script[Resume]:
        """Where it starts, after whoever had its name before."""
        if past is None:
            start = yield from self.lowest()
            return Resume(start, start, start, 0, False)
        found = yield from steps_of(past.id, self._timeout_s, fencing=True)
        begun, trained = resume(found.applied, found.committed, found.home, found.records, past.base)
        if not self._rounds:
            start = max(begun, (yield from self.lowest()))
        else:  # what counts is the round, not that its share has arrived
            start, last = yield from entering(self._app, self._worker, past.id, self._timeout_s)
            trained = max(past.base, last)
        steps = past.steps + trained - past.base
        return Resume(start, trained if trained > past.base else past.trained, begun, steps, True)

    def again(self) -> Script[tuple[int, int]]:
        """The last round, in which it is counted from now on, and the last one that it was in."""
        return (yield from entering(self._app, self._worker, self._worker, self._timeout_s))

    def lowest(self) -> Script[int]:
        """Where one starts that has nothing to come back to: at the last round, in which it is counted from now on; or
        at the lowest clock of some active workers, 0 if there is none. Without rounds nobody waits for it but under
        bounded delay, and then it starts no lower than is released: so some will do, and asking all would be a
        connection to each server."""
        if self._rounds:
            start, _ = yield from entering(self._app, self._worker, 0, self._timeout_s)
            return start
        found = yield from self.ask(JoinHeader(homes=MOST_HOMES).header())
        homes = {home for answer in found for home in answer.homes}
        if homes:
            found += yield from self.ask(JoinHeader().header(), sorted(homes))
        return lowest_clock(found)

    def ask(self, header: Header, others: Sequence[int] = ()) -> Script[list[JoinedAnswer]]:
        """Sends a JOIN to the servers that it is always connected to, and to the heads of other ranges."""
        of = 0

        def standing_and_others(ranges: int) -> Sequence[int]:
            nonlocal of
            of = ranges
            return [*standing_ranges(self._worker, self._app, ranges), *others]

        answers = yield Request(of_ranges(standing_and_others, header), self._timeout_s, "joining")
        return [JoinedAnswer.of(*answer, of) for answer in answers]


def first_past(worker: int, found: Resume, past: PastRun | None) -> PastRun:
    """What to keep of a worker that starts as `found` says, in the place of `past`."""
    return PastRun(worker, found.clock, found.trained, found.steps, 0 if past is None else past.revision)


def past_again(past: PastRun, own: int, start: int) -> PastRun:
    """The same for one that goes on at `start` after a pause; all its steps up to `own` are committed."""
    return past._replace(base=start, trained=own, steps=past.steps + own - past.base)
