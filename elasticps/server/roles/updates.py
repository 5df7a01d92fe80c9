"""Asks for what a server lacks: a newer view or roster, a registered table. Views that others send arrive here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.core.view import View
from elasticps.server.core.requests import Body
from elasticps.server.core.serving import Serving
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.executor import Executor
from elasticps.wire.frames import Gap, Header, Kind, read_view
from replication.effects import NeedRoster, NeedView

ARRIVES_S = 0.03  # leader and store send a new view to all servers, which mostly have it within this


class UpdateRequests:
    """Notes that something newer exists elsewhere; the process around the server reads it from the store.

    view_or_roster, tables: set while a newer view or roster, or a table whose key is known, has to be read.
    ask_peers: has all peers send their views; set by the links to them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, executor: Executor, serving: Serving, adopt: Callable[[View], None]
    ) -> None:
        self.view_or_roster = asyncio.Event()
        self.tables = asyncio.Event()
        self.ask_peers: Callable[[], None] = lambda: None
        self._loop = loop
        self._waits = False  # for a newer view, to come by itself
        self._serving = serving
        self._adopt = adopt
        self.handlers: dict[int, Handler] = {Kind.VIEW: self._by_server, Kind.VIEW_DIFFERENCE: self._by_server}
        executor.handlers |= {NeedView: lambda _: self.need_view(), NeedRoster: lambda _: self.need_roster()}

    def need_roster(self) -> None:
        """A peer or a worker names a roster, or a table by its id, that is not known here."""
        self.view_or_roster.set()

    def need_tables(self) -> None:
        """A worker creates a table that is not known here."""
        self.tables.set()

    def need_view(self) -> None:
        """A peer or a worker names a newer view: it is asked for unless it arrives within ARRIVES_S."""
        if not self._waits:
            self._waits = True
            self._loop.call_later(ARRIVES_S, self._ask, self._serving.epoch)

    def _ask(self, epoch: int) -> None:
        self._waits = False
        if self._serving.epoch == epoch:
            self.view_or_roster.set()
            self.ask_peers()

    def _by_server(self, connection: Connection, header: Header, body: Body) -> None:
        """A peer sends a view. With TLS only a leader's counts: a peer's is a hint that the store has a newer one."""
        if connection.identity is None:
            self.by_leader(connection, header, body)
        else:
            self.view_or_roster.set()

    def by_leader(self, connection: Connection, header: Header, body: Body) -> None:
        """A leader sends a view, or, without TLS, whoever may be one. After a gap it is asked for."""
        try:
            view = read_view(header, body, self._serving.view)
        except Gap:
            self.need_view()
            return
        if view is not None and view.ranges == self._serving.ranges:
            self._adopt(view)
