"""What workers do, as they say it themselves: they are asked while somebody looks, each by one server of the view.

So what it costs does not grow with those who look, nor with the number of servers; when nobody looks nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticps.server.core.requests import Body
from elasticps.server.core.serving import Serving
from elasticps.server.network.connection import Connection, Handler
from elasticps.wire.frames import FrameError, Header, Kind
from elasticps.wire.headers import Activity, UseHeader, WatchHeader

EVERY_S = 4.0


class Uses:
    """workers: the connections that are theirs; clock: seconds, never going back."""

    def __init__(
        self, serving: Serving, workers: Callable[[], Iterable[Connection]], clock: Callable[[], float]
    ) -> None:
        self._serving = serving
        self._workers = workers
        self._clock = clock
        self._asked_s = -EVERY_S
        self._told: dict[Connection, Activity] = {}
        self.handlers: dict[int, Handler] = {Kind.USE: self._hear}

    def look(self) -> dict[int, Activity]:
        """What those workers have said that this server asks, by id. Has them asked, if it is time."""
        now = self._clock()
        if now - self._asked_s >= EVERY_S:
            self._asked_s = now
            frame = WatchHeader().header().pack()
            for connection in self._workers():
                if self._asks(connection.worker):
                    connection.send(frame)
                else:
                    self._told.pop(connection, None)
        return {connection.worker: use for connection, use in self._told.items()}

    def _asks(self, worker: int) -> bool:
        view = self._serving.view
        if view is None or not view.servers:
            return False
        return view.servers[worker % len(view.servers)].member == self._serving.me

    def _hear(self, connection: Connection, header: Header, body: Body) -> None:
        worker = UseHeader.of(header).worker
        if worker != connection.worker:
            raise FrameError(f"worker {connection.worker} says what {worker} does")
        self._told[connection] = Activity.of(body.tobytes())

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        self._told.pop(connection, None)
