"""Asks workers what they do, while a dashboard or an operator looks: each worker is asked by one server of the view.

The cost grows neither with the number of observers nor with that of servers; without observers nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticps.server.core.requests import Body
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.wire.activity import Activity, UseHeader, WatchHeader
from elasticps.wire.frames import FrameError, Header, Kind
from replication.step_records import home_range

EVERY_S = 4.0


class WorkerActivity:
    """Asks workers what they do, those whose home ranges are headed here, and keeps the newest answer of each. workers:
    their connections."""

    def __init__(self, context: Context, workers: Callable[[], Iterable[Connection]]) -> None:
        self._serving = context.serving
        self._workers = workers
        self._clock = context.clock
        self._last_request_s = -EVERY_S
        self._reported: dict[Connection, Activity] = {}
        self.handlers: dict[int, Handler] = {Kind.USE: self._hear}

    def look(self) -> dict[int, Activity]:
        """The newest answers of the workers that this server asks, by id. Asks again every EVERY_S."""
        now = self._clock()
        if now - self._last_request_s >= EVERY_S:
            self._last_request_s = now
            frame = WatchHeader().header().pack()
            for connection in self._workers():
                if self._asks(connection.worker):
                    connection.send(frame)
                else:
                    self._reported.pop(connection, None)
        return {connection.worker: use for connection, use in self._reported.items()}

    def _asks(self, worker: int) -> bool:
        return bool((self._serving.headed == home_range(worker, self._serving.ranges)).any())

    def _hear(self, connection: Connection, header: Header, body: Body) -> None:
        worker = UseHeader.of(header).worker
        if worker != connection.worker:
            raise FrameError(f"worker {connection.worker} says what {worker} does")
        self._reported[connection] = Activity.of(body.tobytes())

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._reported.pop(connection, None)
