"""Views between a server and its peers: sends the newest one, and holds frames that name one still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.core.differences import ViewHistory
from coordinator.core.view import View
from elasticps.server.core.error_replies import ErrorReplies
from elasticps.server.core.requests import Asker, Body, RequestError
from elasticps.server.core.serving import Serving
from elasticps.wire.frames import Header, Kind, difference_frame, view_frame
from elasticps.wire.headers import GetViewHeader

NOTIFIED_PER_TURN = 64  # then frames of others have theirs
UNASKED_BYTES = 8 << 10  # of a view, to one worker from all servers together
LEAST_BYTES = 256  # no shorter is what a worker needs of a view
MAX_WAITING_BYTES = 4 << 20  # who leaves so much unread is told when it asks, or is refused as stale


class ViewNotifier:
    """Sends the newest view, once per connection and epoch, and refusals. Who has one of the views before gets the
    difference. `soon(f)` calls f in the loop's next turn; errors: makes and counts the server's ERROR frames.

    Unasked, workers of a large cluster get only the epoch, and ask one server for that view: those that head ranges of
    a server that died all speak to each worker. Where all of them together send little, they send the view at once.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._view: View | None = None
        self._history = ViewHistory()
        self._frames: dict[int, bytes] = {}  # by the epoch of the view that the receiver has
        self._notice = b""
        self._left: list[Asker] = []  # to be told in turns to come
        self.errors = ErrorReplies()

    def adopt(self, view: View) -> None:
        """Takes the view to send from now on."""
        self._view = view
        self._history.add(view)
        self._frames.clear()
        self._notice = Header(Kind.NEWER_VIEW, epoch=view.epoch).pack()

    def tell(self, asker: Asker) -> None:
        """Sends the view now, unless the peer has it."""
        view = self._view
        if view is not None and asker.notified_epoch < view.epoch:
            frame = self._frame_since(asker.notified_epoch, view)
            asker.notified_epoch = view.epoch
            asker.send(frame)

    def _frame_since(self, epoch: int, view: View) -> bytes:
        if (known := self._frames.get(epoch)) is not None:
            return known
        difference = self._history.since(epoch)
        if difference is not None:
            frame = self._frames[epoch] = difference_frame(view.epoch, difference)
            return frame
        whole = self._frames[0] = self._frames.get(0) or view_frame(view)
        return whole

    def _is_short_for(self, asker: Asker) -> bool:
        """Whether what a peer gets of the newest view is so short that it may get that from every server unasked."""
        view = self._view
        if view is None or (most := UNASKED_BYTES // len(view.servers)) < LEAST_BYTES:
            return False
        return len(self._frame_since(asker.notified_epoch, view)) <= most

    def refuse(self, asker: Asker, kind: int, request: int, error: RequestError) -> None:
        """Answers why a request of this kind was not done; first sends the view, if that is the reason."""
        if error.document["code"] == "stale-view":
            self.tell(asker)
        epoch = 0 if self._view is None else self._view.epoch
        asker.send(self.errors.for_request(kind, request, error.document, epoch))

    def tell_all(self, askers: Iterable[Asker]) -> None:
        """Says to all that there is a view, a few in each turn. Connections left from an earlier call hear of the newer
        one, too."""
        idle = not self._left
        self._left = list({id(asker): asker for asker in (*self._left, *askers)}.values())
        if idle:
            self._turn()

    def _turn(self) -> None:
        now, self._left = self._left[:NOTIFIED_PER_TURN], self._left[NOTIFIED_PER_TURN:]
        for asker in now:
            outdated = self._view is not None and asker.notified_epoch < self._view.epoch
            if outdated and asker.waiting_bytes < MAX_WAITING_BYTES:
                if self._is_short_for(asker):
                    self.tell(asker)
                else:
                    asker.send(self._notice)
        if self._left:
            self._soon(self._turn)


HOLD_TIMEOUT_S = 10.0


class HeldFrames:
    """Frames that wait for a newer view or roster. need_view, need_roster: fetch one that a peer has named."""

    def __init__(
        self,
        serving: Serving,
        notifier: ViewNotifier,
        clock: Callable[[], float],
        need_view: Callable[[], None],
        need_roster: Callable[[], None],
    ) -> None:
        self._serving = serving
        self._notifier = notifier
        self._clock = clock
        self.need_view = need_view
        self.need_roster = need_roster
        self._since: dict[Asker, float] = {}  # connections that wait
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {Kind.GET_VIEW: self._get_view}

    def wait(self, connection: Asker, header: Header, body: Body) -> bool:
        """Holds a frame until the next view or roster; False once it has waited too long."""
        since = self._since.setdefault(connection, self._clock())
        if self._clock() - since > HOLD_TIMEOUT_S:
            del self._since[connection]
            return False
        connection.hold(header, body)
        return True

    def wait_for_view(self, connection: Asker, header: Header, body: Body) -> bool:
        """Holds a frame that names a newer view. Raises `RequestError` when that view does not come."""
        epoch = self._serving.epoch
        if header.epoch <= epoch:
            return False
        self.need_view()
        if self.wait(connection, header, body):
            return True
        text = f"server {self._serving.me.name} is at epoch {epoch} and cannot get the view of epoch {header.epoch}"
        raise RequestError("stale-view", text, epoch=epoch)

    def _get_view(self, connection: Asker, header: Header, body: Body) -> None:
        """GET_VIEW: the peer wants a view newer than its own, or has one that we want. Epoch 0 asks for the whole."""
        has = GetViewHeader.of(header).epoch
        if has < self._serving.epoch and connection.waiting_bytes < MAX_WAITING_BYTES:
            connection.notified_epoch = has
            self._notifier.tell(connection)
        elif has > self._serving.epoch:
            self.need_view()

    def release(self) -> None:
        """Handles the held frames again: there is a newer view or roster, or time has passed."""
        for connection in list(self._since):
            connection.release()
            if not connection.holding:
                self._since.pop(connection, None)

    def forget(self, connection: Asker) -> None:
        """Drops a connection that is gone."""
        self._since.pop(connection, None)
