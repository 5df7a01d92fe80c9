"""Handles JOIN: which workers take part, and near which clocks a new one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.delay_coordinator import DelayCoordinator
from elasticps.server.core.requests import Body
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.wire.frames import FrameError, Header, Kind
from elasticps.wire.joining import MOST_HOMES, JoinedAnswer, JoinHeader
from replication.progress import MAX_CLOCK


class ParticipationHandler:
    """Notes who takes part. changed: a worker may read from a higher clock on now."""

    def __init__(
        self, context: Context, active: ActiveWorkers, delay: DelayCoordinator, changed: Callable[[], None]
    ) -> None:
        self._serving = context.serving
        self._active = active
        self._delay = delay
        self._changed = changed
        self._participation: dict[Connection, int | None] = {}  # the clock above which each takes part; None: it pauses
        self.handlers: dict[int, Handler] = {Kind.JOIN: self._join}

    def _join(self, connection: Connection, header: Header, body: Body) -> None:
        request = JoinHeader.of(header)
        if request.base is not None and request.base >= MAX_CLOCK:
            raise FrameError(f"a base clock of {request.base} is over the limit of {MAX_CLOCK}")
        if request.base is not None:
            connection.base = request.base
        if request.base is not None or request.pause:
            self._participation[connection] = request.base
            self._note(connection, request.base)
        active, app, worker = self._active, connection.app, connection.worker
        at_homes = active.lowest_at_homes(app, self._serving.headed.tolist(), worker)
        homes = active.homes(app, min(request.homes, MOST_HOMES), worker)
        connection.send(JoinedAnswer(header.request, self._serving.epoch, at_homes, homes).frame())
        self._changed()

    def _note(self, connection: Connection, base: int | None) -> None:
        if base is None:
            self._active.remove(connection.worker)
        elif connection.worker in self._serving.workers:
            self._active.add(connection.worker, base, connection.app)
        self._delay.heard(connection)

    def follow(self, workers: Iterable[int], came_back: Iterable[Connection]) -> None:
        """Follows the roster. came_back: connections of workers whose leases had run out, and that are in it again: a
        worker says once per connection whether it takes part."""
        for worker in self._active.bases.keys() - workers:
            self._active.remove(worker)
        for connection in came_back:
            if connection in self._participation:
                self._note(connection, self._participation[connection])

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._participation.pop(connection, None)
        self._delay.forget(connection)
