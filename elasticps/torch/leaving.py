"""Gradients that have left their device and are not here yet, in the order in which they did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol


class Coming(Protocol):
    """Something on its way here."""

    def done(self) -> bool:
        """Whether `result` would wait for nothing."""

    def result(self) -> Any: ...


class Leaving:
    """The gradients of one step on their way here. Whoever asks waits for them only if they say so."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Any, Coming]] = deque()

    def __contains__(self, target: object) -> bool:
        return any(each is target for each, _ in self._coming)

    def add(self, target: object, coming: Coming) -> None:
        """A gradient of this target has left its device."""
        self._coming.append((target, coming))

    def here(self, wait: bool) -> Iterator[tuple[Any, Any]]:
        """Targets and gradients: of those that are here, up to the first that is not; with `wait` of all, each as soon
        as it is here."""
        while self._coming:
            target, coming = self._coming[0]
            if not (wait or coming.done()):
                return
            value = coming.result()
            self._coming.popleft()
            yield target, value

    def clear(self) -> None:
        """Nobody wants them any more, so that it does not matter what their copies still bring."""
        self._coming.clear()
