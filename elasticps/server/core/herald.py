"""Tells the newest view, once per connection and epoch, in one frame for all; and why a request is not done. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.core.view import View
from elasticps.server.core.asker import Asker
from elasticps.server.core.request_error import RequestError
from elasticps.wire.frames import Kind, json_frame
from elasticps.wire.views import view_frame

TOLD_IN_A_TURN = 64  # then frames of others have theirs
MAX_WAITING_BYTES = 4 << 20  # who leaves so much unread is told when it asks, or is refused as stale


class Herald:
    """Has the frame of the newest view. `soon(f)` calls f in the loop's next turn. refused: how many requests were."""

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._view: View | None = None
        self._frame = b""
        self._left: list[Asker] = []  # to be told in turns to come
        self.refused = 0

    def adopt(self, view: View) -> None:
        """This is the view to tell from now on."""
        self._view, self._frame = view, b""

    def tell(self, asker: Asker) -> None:
        """Tells it now, if it does not know yet."""
        view = self._view
        if view is not None and asker.told_epoch < view.epoch:
            self._frame = self._frame or view_frame(view)
            asker.told_epoch = view.epoch
            asker.send(self._frame)

    def refuse(self, asker: Asker, request: int, error: RequestError) -> None:
        """Tells why a request was not done; and the view first, if it is one that the asker does not know."""
        self.refused += 1
        if error.document["code"] == "stale-view":
            self.tell(asker)
        epoch = 0 if self._view is None else self._view.epoch
        asker.send(json_frame(Kind.ERROR, error.document, request=request, epoch=epoch))

    def tell_all(self, askers: Iterable[Asker]) -> None:
        """Tells them one after another. Those of an earlier call that were not told yet are told the newer view too."""
        idle = not self._left
        self._left = list({id(asker): asker for asker in (*self._left, *askers)}.values())
        if idle:
            self._turn()

    def _turn(self) -> None:
        now, self._left = self._left[:TOLD_IN_A_TURN], self._left[TOLD_IN_A_TURN:]
        for asker in now:
            if asker.waiting_bytes < MAX_WAITING_BYTES:
                self.tell(asker)
        if self._left:
            self._soon(self._turn)
