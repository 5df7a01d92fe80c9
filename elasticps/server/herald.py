"""Tells workers the newest view: once per connection and epoch, in one frame for all, some of them in each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from coordinator.view import View
from elasticps.wire.views import view_frame

TOLD_IN_A_TURN = 64  # then frames of others have theirs
MAX_WAITING_BYTES = 4 << 20  # who leaves so much unread is told when it asks, or is refused as stale


class Listener(Protocol):
    """A connection, as far as views are concerned. told_epoch: of the newest view sent on it."""

    told_epoch: int

    def send(self, frame: bytes) -> None:
        """Queues a frame."""

    @property
    def waiting_bytes(self) -> int:
        """What has been sent and has not left yet."""


class Herald:
    """Has the frame of the newest view. `soon(f)` calls f in the loop's next turn."""

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._view: View | None = None
        self._frame = b""
        self._left: list[Listener] = []

    def adopt(self, view: View) -> None:
        """This is the view to tell from now on."""
        self._view, self._frame = view, b""

    def tell(self, listener: Listener) -> None:
        """Tells it now, if it does not know yet."""
        view = self._view
        if view is not None and listener.told_epoch < view.epoch:
            self._frame = self._frame or view_frame(view)
            listener.told_epoch = view.epoch
            listener.send(self._frame)

    def tell_all(self, listeners: Iterable[Listener]) -> None:
        """Tells them one after another. Those of an earlier call that were not told yet are told the newer view too."""
        idle = not self._left
        self._left = list({id(listener): listener for listener in (*self._left, *listeners)}.values())
        if idle:
            self._turn()

    def _turn(self) -> None:
        now, self._left = self._left[:TOLD_IN_A_TURN], self._left[TOLD_IN_A_TURN:]
        for listener in now:
            if listener.waiting_bytes < MAX_WAITING_BYTES:
                self.tell(listener)
        if self._left:
            self._soon(self._turn)
