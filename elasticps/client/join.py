"""How a worker takes part: where it starts, where it goes on after a pause, what its predecessor has left behind.

A worker starts at the lowest clock of some active workers, so that it neither waits for others nor lets them wait.
Under bounded delay they may have gone on before the head of the group range let them wait for it, and what they were
shown then may be shown later, too (rows that are kept): it starts no lower than what is released as it joined, so that
its steps need not be in that. One that is started again under its name also starts above every clock that its
predecessor may have used; by then every server that has a copy of anything has fenced that one, for a server lets a
worker in only when its roster has the new incarnation instead.

The coordination store keeps, by name, who took part last and where it started (`PastRun`): a predecessor that died
before its first push has left nothing at the servers. It is written before the worker says anywhere that it takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

from elasticps.client.barrier import Barrier
from elasticps.client.core.join import PastRun, Resume, Starting, first_past, past_again
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.registry import Registry
from elasticps.errors import Closed, ClusterUnreachable, ServerError, Timeout

log = logging.getLogger(__name__)


class Joining:
    """A worker's part in its application. `active`: it has joined and has not paused since."""

    def __init__(self, dispatcher: Dispatcher, registry: Registry, barrier: Barrier | None, timeout_s: float) -> None:
        self.active = False
        self._dispatcher = dispatcher
        self._registry = registry
        self._session = dispatcher.session
        self._barrier = barrier
        self._timeout_s = timeout_s
        worker = dispatcher.worker
        self._starting = Starting(worker.id, worker.app, timeout_s, rounds=barrier is not None)
        self._lock = dispatcher.runtime.lock()
        self._resume: Resume | None = None
        self._past = PastRun(0, 0, 0, 0, 0)

    def enter(self) -> Resume:
        """Takes part from now on; no effect if the worker does already. What is returned is of the first time."""
        with self._lock:
            if not self.active:
                with nullcontext() if self._barrier is None else self._dispatcher.entering(self._timeout_s):
                    if self._resume is None:
                        self._resume = self._first()
                    else:
                        self._again()
                    self.active = True
            assert self._resume is not None
            return self._resume

    def has_to_wait(self) -> bool:
        """Whether it cannot take part yet, as servers are absent that it would have to ask."""
        dispatcher = self._dispatcher
        with self._lock:
            if self._resume is None and self._registry.past(self._timeout_s) is not None:
                deadline_s = dispatcher.runtime.monotonic() + self._timeout_s
                dispatcher.meet(lambda: dispatcher.routes.holding, deadline_s)
        return bool(dispatcher.absent())

    def pause(self) -> None:
        """Holds nobody back from now on; no effect as long as another thread has something outstanding."""
        with self._lock:
            if not self.active or not self._rests():
                return
            try:
                if self._barrier is not None:
                    self._barrier.leave(self._timeout_s)
                self._tell(self._dispatcher.participation.pause)
            except BaseException:
                self.active = True
                raise

    def _rests(self) -> bool:
        """Whether nothing is outstanding, and no round open: then no step begins before `enter`."""
        with self._dispatcher.lock:
            in_round = self._barrier is not None and self._barrier.is_open
            self.active = bool(self._session.outstanding) or in_round
            return not self.active

    # --- the first time ---------------------------------------------------------------------------------------------

    def _first(self) -> Resume:
        me = self._dispatcher.worker.id
        while True:
            past = self._registry.past(self._timeout_s)
            if past is not None and past.id > me:
                raise self._started_again()
            found = self._dispatcher.carry_out(self._starting.first(past))
            if self._keep(first_past(me, found, past)):
                break
        lowest = self._join(found.clock)
        if lowest > found.clock:
            found = found.later(lowest)
            if not self._keep(first_past(me, found, self._past)):
                raise self._started_again()
            self._join(found.clock)
        return found

    def _join(self, clock: int) -> int:
        """Takes part above `clock`. Returns the clock to take part above if it is higher: all that others were shown
        before they knew of this worker is no newer than that. Rounds need none, in which nobody is ahead."""
        self._take_part(clock)
        if self._barrier is not None:
            return 0
        dispatcher, wait_ms = self._dispatcher, int(self._timeout_s * 1000)
        answers = dispatcher.ask_all(dispatcher.delay.question(0, wait_ms), self._timeout_s, "joining")
        with dispatcher.lock:
            return max(dispatcher.delay.released(answer.header) for answer in answers)

    def _keep(self, past: PastRun) -> bool:
        revision = self._registry.keep(past, self._timeout_s)
        if revision is None:
            return False
        self._past = past._replace(revision=revision)
        return True

    def _started_again(self) -> Closed:
        return Closed(f"worker {self._dispatcher.worker.name!r} was started again; this is the older incarnation")

    # --- after a pause ----------------------------------------------------------------------------------------------

    def _again(self) -> None:
        own, past = self._session.clock, self._past
        start = self._raised(past, own, own, self._dispatcher.carry_out(self._starting.lowest()))
        raised = self._raised(past, own, start, self._join(start))
        if raised > start:
            self._join(raised)

    def _raised(self, past: PastRun, own: int, start: int, lowest: int) -> int:
        """Where it goes on instead of at `start`, if others are all at `lowest` or further; own, past: as it paused."""
        if lowest <= start:
            return start
        try:
            if not self._keep(past_again(past._replace(revision=self._past.revision), own, lowest)):
                raise self._started_again()
        except (Timeout, ClusterUnreachable) as error:
            if self._barrier is not None:
                raise
            log.warning("this worker goes on at clock %d instead of %d: %s", start, lowest, error)
            return start
        return lowest

    # --- after a round that was closed without this worker ------------------------------------------------------------

    def later(self, push_again: Callable[[], None]) -> bool:
        """Goes on after the last round; whether with the newest step, which was in none: `push_again()` begins it anew.
        A worker that was away may have been in that round, and have missed the answer that said so."""
        with self._lock:
            newest, name = self._session.clock, self._dispatcher.worker.name
            start, last = self._dispatcher.carry_out(self._starting.again())
            if start < newest:
                raise ServerError(f"worker {name!r} is in round {newest}, its application only after round {start}")
            lost = last < newest
            if not self._keep(past_again(self._past, newest - 1 if lost else newest, start)):
                raise self._started_again()
            if lost:
                log.warning("round %d was closed without worker %s, which goes on after round %d", newest, name, start)
            self._take_part(start, push_again if lost else lambda: None)
            return lost

    # --- what servers hear ------------------------------------------------------------------------------------------

    def _take_part(self, base: int, begin: Callable[[], None] = lambda: None) -> None:
        """Tells every server that is connected, and each later one first of all, the clock that this worker starts
        above; `begin()` may push the step after it in the same breath."""

        def start() -> None:
            self._session.start_at(base)
            self._dispatcher.participation.join(base)
            begin()

        self._tell(start)

    def _tell(self, change: Callable[[], None]) -> None:
        """Changes whether this worker takes part, and waits until the servers know that it is always connected to."""
        with self._dispatcher.lock:
            change()
        self._dispatcher.carry_out(self._starting.ask(self._dispatcher.participation.header))
