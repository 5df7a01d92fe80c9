"""A worker's side of synchronous rounds (BSP); `scripts` has what is asked of whom.

A step is closed when it is committed everywhere, all workers of the round have said the same of theirs, and every head
has averaged what it was given. That happens before anything that could see the result: the next push, a pull, a flush.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticps.client import scripts
from elasticps.client.network import Network


class SyncRounds:
    """Rounds of one worker. `pushed(clock)` after each step; `settle` closes it."""

    def __init__(self, network: Network, app: str, worker: int) -> None:
        self.app = app
        self._network = network
        self._worker = worker
        self._open = 0  # the step whose round is not closed yet, 0 for none
        self._lock = network.runtime.lock()

    def closed(self, clock: int) -> int:
        """The last round up to `clock` that is closed."""
        return min(clock, self._open - 1) if self._open else clock

    def leave(self, timeout_s: float) -> None:
        """Is in no further round, until it enters again."""
        self._network.carry_out(scripts.leaving(self.app, self._worker, timeout_s))

    def pushed(self, clock: int) -> None:
        """A step was pushed; its round is open."""
        self._open = clock

    def settle(self, wait_committed: Callable[[], None], timeout_s: float) -> None:
        """Closes the open round, if there is one. Raises `Timeout`, which says for whom it waited."""
        with self._lock:
            if not self._open:
                return
            wait_committed()
            self._network.carry_out(scripts.settling(self.app, self._worker, self._open, timeout_s))
            self._open = 0
