"""What a server lacks: a newer view or roster, a table that is registered. Asked for here, as soon as anybody speaks of
it; and the views that others send come in here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.core.view import View
from elasticps.server.core.requests import Body
from elasticps.server.core.serving import Serving
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.executor import Executor
from elasticps.wire.frames import Header, Kind, read_view
from replication.effects import NeedRoster, NeedView

COMES_S = 0.03  # a view that others have is told by the leader and by the store; all hear of it within this, mostly


class News:
    """behind: set when something is lacking; whoever runs this server then gets it. lacking: the same of tables whose
    keys are known. adopt: takes a view; ask_peers: has
    all peers send theirs, set by whoever has the links."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, executor: Executor, serving: Serving, adopt: Callable[[View], None]
    ) -> None:
        self.behind = asyncio.Event()
        self.lacking = asyncio.Event()
        self.ask_peers: Callable[[], None] = lambda: None
        self._loop = loop
        self._waits = False  # for a newer view, to come by itself
        self._serving = serving
        self._adopt = adopt
        self.handlers: dict[int, Handler] = {Kind.VIEW: self._by_server}
        executor.handlers |= {NeedView: lambda _: self.need_view(), NeedRoster: lambda _: self.need()}

    def need(self) -> None:
        """Somebody speaks of a roster, or of a table, that is not known here."""
        self.behind.set()

    def need_keys(self) -> None:
        """Somebody makes a table that is not known here."""
        self.lacking.set()

    def need_view(self) -> None:
        """Somebody speaks of a newer view: it is asked for if it does not come by itself."""
        if not self._waits:
            self._waits = True
            self._loop.call_later(COMES_S, self._ask, self._serving.epoch)

    def _ask(self, epoch: int) -> None:
        self._waits = False
        if self._serving.epoch == epoch:
            self.behind.set()
            self.ask_peers()

    def _by_server(self, connection: Connection, header: Header, body: Body) -> None:
        """Counts only where nobody has to prove that they lead; else it is a hint that there is a newer one."""
        if connection.identity is None:
            self.by_leader(connection, header, body)
        else:
            self.behind.set()

    def by_leader(self, connection: Connection, header: Header, body: Body) -> None:
        """VIEW of whoever leads, or may."""
        view = read_view(header, body, self._serving.epoch)
        if view is not None and view.ranges == self._serving.ranges:
            self._adopt(view)
