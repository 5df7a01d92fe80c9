"""A worker's side of synchronous rounds (BSP); `protocol.barrier` has what is asked of whom.

A step is closed when it is committed everywhere, all workers of the round have said the same of theirs, and every head
has averaged what it was given. That happens before anything that could see the result: the next push, a pull, a flush.

A worker that was away for longer than its lease is in no round meanwhile. What it had pushed for the one that was
closed without it counts nowhere: it enters again, and the step is its share of a later round.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticps.client.core import barrier
from elasticps.client.dispatcher import Dispatcher
from elasticps.errors import LeftOut, Timeout

LONG_S = 1e6  # a lock takes no endless time


class Barrier:
    """Rounds of one worker; `settle` closes that of its newest step."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.app = dispatcher.worker.app
        self._dispatcher = dispatcher
        self._session = dispatcher.session
        self._worker = dispatcher.worker.id
        self._closed = 0  # the last step whose round is closed
        self._first = 0  # the clock under which the open step was pushed first, 0 if it has not been pushed again
        self._lock = dispatcher.runtime.lock()

    def closed(self, clock: int) -> int:
        """The last round up to `clock` that is closed."""
        still_open = self._first or self._open
        return min(clock, still_open - 1) if still_open else clock

    @property
    def is_open(self) -> bool:
        """Whether the newest step's round is not closed."""
        return bool(self._open)

    @property
    def _open(self) -> int:
        """The step whose round is not closed yet, 0 for none."""
        session = self._session
        pushed = session.clock - session.open
        return pushed if pushed > max(self._closed, session.base) else 0

    def leave(self, timeout_s: float) -> None:
        """Is in no further round, until it enters again."""
        self._dispatcher.carry_out(barrier.leaving(self.app, self._worker, timeout_s))

    def settle(self, wait_committed: Callable[[], None], push_again: Callable[[], bool], timeout_s: float) -> None:
        """Closes the open round, if there is one. Raises `Timeout`, which says for whom it waited. `push_again()` has
        the step begun anew in a later round, unless it was in this one after all; it says whether."""
        if not self._lock.acquire(timeout=min(timeout_s, LONG_S)):
            raise Timeout(f"a round that another thread closes took longer than {timeout_s:.1f} s")
        try:
            while clock := self._open:
                wait_committed()
                try:
                    self._dispatcher.carry_out(barrier.settling(self.app, self._worker, clock, timeout_s))
                except LeftOut:
                    self._first = self._first or clock
                    if push_again():
                        continue
                self._closed, self._first = clock, 0
                self._dispatcher.holding.tell()
                with self._dispatcher.lock:
                    self._dispatcher.delay.tell()
        finally:
            self._lock.release()
