"""When the demo's evaluator is asked: once for each epoch that every worker has finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Evaluations:
    """The evaluations asked for and not yet answered. The evaluator answers in the order in which it is asked; what it
    had not answered when it went is asked again when it is back, and what comes up meanwhile only then."""

    def __init__(self, workers: Iterable[str]) -> None:
        self._finished = dict.fromkeys(workers, 0)  # epochs
        self._last = 0  # the last epoch that all have finished
        self._open: deque[tuple[int, float]] = deque()  # epoch, and when its last worker finished it
        self._away = False

    def finished(self, worker: str, epoch: int, t: float) -> int:
        """A worker has finished an epoch: how often to ask now. One that goes on from a checkpoint finishes some again,
        which asks for nothing."""
        self._finished[worker] = max(self._finished[worker], epoch)
        new = range(self._last + 1, min(self._finished.values()) + 1)
        self._open.extend((epoch, t) for epoch in new)
        self._last += len(new)
        return 0 if self._away else len(new)

    def answered(self) -> tuple[int, float]:
        """The evaluator has answered: the epoch it was asked about, and when that epoch was finished."""
        return self._open.popleft()

    def goes(self) -> None:
        """The evaluator is killed: nothing is asked until it is back."""
        self._away = True

    def back(self) -> int:
        """The evaluator is back: how often to ask now."""
        self._away = False
        return len(self._open)
