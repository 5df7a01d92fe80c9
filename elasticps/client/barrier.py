"""A worker's side of synchronous rounds (BSP); `protocol.barrier` has what is asked of whom.

A step is closed when it is committed everywhere, all workers of the round have said the same of theirs, and every head
has averaged what it was given. That happens before anything that could see the result: the next push, a pull, a flush.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticps.client.dispatcher import Dispatcher
from elasticps.client.protocol import barrier


class Barrier:
    """Rounds of one worker; `settle` closes that of its newest step."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.app = dispatcher.worker.app
        self._dispatcher = dispatcher
        self._session = dispatcher.session
        self._worker = dispatcher.worker.id
        self._closed = 0  # the last step whose round is closed
        self._lock = dispatcher.runtime.lock()

    def closed(self, clock: int) -> int:
        """The last round up to `clock` that is closed."""
        return min(clock, self._open - 1) if self._open else clock

    @property
    def _open(self) -> int:
        """The step whose round is not closed yet, 0 for none."""
        session = self._session
        pushed = session.clock - session.open
        return pushed if pushed > max(self._closed, session.base) else 0

    def leave(self, timeout_s: float) -> None:
        """Is in no further round, until it enters again."""
        self._dispatcher.carry_out(barrier.leaving(self.app, self._worker, timeout_s))

    def settle(self, wait_committed: Callable[[], None], timeout_s: float) -> None:
        """Closes the open round, if there is one. Raises `Timeout`, which says for whom it waited."""
        with self._lock:
            clock = self._open
            if clock:
                wait_committed()
                self._dispatcher.carry_out(barrier.settling(self.app, self._worker, clock, timeout_s))
                self._closed = clock
