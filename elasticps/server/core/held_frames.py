"""Frames that speak of a view or a roster to come are held, with all that follow on their connections. Pure."""

from __future__ import annotations

from collections.abc import Callable

from elasticps.server.core.asker import Asker, Body
from elasticps.server.core.herald import MAX_WAITING_BYTES, Herald
from elasticps.server.core.request_error import RequestError
from elasticps.server.core.serving import Serving
from elasticps.wire.frames import Header, Kind
from elasticps.wire.headers import GetViewHeader

HOLD_TIMEOUT_S = 10.0


class HeldFrames:
    """need_view, need_roster: somebody speaks of a newer one, get it."""

    def __init__(
        self,
        serving: Serving,
        herald: Herald,
        clock: Callable[[], float],
        need_view: Callable[[], None],
        need_roster: Callable[[], None],
    ) -> None:
        self._serving = serving
        self._herald = herald
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
        """Holds a frame that speaks of a view to come. Raises `RequestError` when that does not come."""
        epoch = self._serving.epoch
        if header.epoch <= epoch:
            return False
        self.need_view()
        if self.wait(connection, header, body):
            return True
        text = f"server {self._serving.me.name} is at epoch {epoch} and cannot get the view of epoch {header.epoch}"
        raise RequestError("stale-view", text, epoch=epoch)

    def _get_view(self, connection: Asker, header: Header, body: Body) -> None:
        """GET_VIEW: the peer wants a view newer than its own, or has one that we want."""
        has = GetViewHeader.of(header).epoch
        if has < self._serving.epoch and connection.waiting_bytes < MAX_WAITING_BYTES:
            connection.told_epoch = min(connection.told_epoch, has)
            self._herald.tell(connection)
        elif has > self._serving.epoch:
            self.need_view()

    def release(self) -> None:
        """There is a newer view or roster, or time has passed: those that wait are handled again."""
        for connection in list(self._since):
            connection.release()
            if not connection.holding:
                self._since.pop(connection, None)

    def forget(self, connection: Asker) -> None:
        """It is gone."""
        self._since.pop(connection, None)
