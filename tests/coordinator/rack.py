"""Servers that exist only as what a leader hears of them, with faults that tests switch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from coordinator.core.capacities import RowCount
from coordinator.core.clocks import UNKNOWN, ClusterTime
from coordinator.core.differences import apply_encoded
from coordinator.core.health import Report, ServerLink, Tenure
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo, View
from replication.chain import Member
from replication.effects import CaughtUp
from tests.coordinator.support import until

REPORT_S = 0.02


class FakeServer:
    """One incarnation. Flags are switched by tests.

    running    False: killed; connections break, new ones are refused
    frozen     says nothing, answers no connection, and notices nothing
    skew_s     by how much its wall clock is ahead; None: it does not tell its time
    levels     whether it finds the joiners of its ranges level
    deaf       how many views it is to miss
    """

    def __init__(self, info: ServerInfo) -> None:
        self.info = info
        self.running, self.frozen, self.levels = True, False, True
        self.deaf = 0
        self.suspects: dict[Member, float] = {}
        self.skew_s: float | None = None
        self.time = UNKNOWN  # as the leader told it
        self.view: View | None = None
        self.views: list[int] = []
        self.calls = self.beats = 0
        self.lines: set[FakeLine] = set()
        self.requested: set[FakeLine] = set()  # for its view
        self.term = 0
        self.leader: FakeLine | None = None

    def take(self, view: View) -> None:
        self.views.append(view.epoch)
        if self.deaf:
            self.deaf -= 1
        elif self.view is None or view.epoch > self.view.epoch:
            self.view = view

    def beat(self, term: int, line: FakeLine, cluster_time: ClusterTime = UNKNOWN) -> None:
        self.beats += 1
        if term >= self.term:
            self.term, self.leader, self.time = term, line, cluster_time

    def report(self) -> Report:
        view, connected, alone = self.view, self.leader in self.lines, 0
        if view is not None:
            left = (view.copy_state > 0) & (view.tails == view.index(self.info.name))
            alone = int(view.since[left].max(initial=0))
        epoch, tenure = 0 if view is None else view.epoch, Tenure(self.term, connected, 10 - 10 * connected)
        seconds = 0.0 if self.skew_s is None else time.time() + self.skew_s
        return Report(epoch, self._level(), dict(self.suspects), tenure=tenure, alone=alone, seconds=seconds)

    def _level(self) -> tuple[CaughtUp, ...]:
        """The fillings under way from here, as if each took no time."""
        view = self.view
        if view is None or not self.levels or view.index(self.info.name) < 0:
            return ()
        mine = np.flatnonzero((view.tails == view.index(self.info.name)) & (view.joining >= 0)).tolist()
        return tuple(CaughtUp(r, int(view.since[r]), view.servers[view.joining[r]].member) for r in mine)


class FakeLine:
    """A connection. broken: it ends, from outside."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.broken = False

    async def reports(self) -> AsyncIterator[Report | View]:
        while True:
            if self.broken or not self.server.running:
                raise ConnectionResetError("reset by the test")
            if not self.server.frozen:
                yield self.server.report()
                if self in self.server.requested and self.server.view is not None:
                    self.server.requested.discard(self)
                    yield self.server.view
            await asyncio.sleep(REPORT_S)

    def beat(
        self, term: int, epoch: int = 0, allowances: Sequence[RowCount] = (), cluster_time: ClusterTime = UNKNOWN
    ) -> None:
        if not self.broken and self.server.running and not self.server.frozen:
            self.server.beat(term, self, cluster_time)

    def ask_view(self) -> None:
        self.server.requested.add(self)

    def send_view(self, view: View, difference: bytes | None = None) -> None:
        if not self.broken and self.server.running and not self.server.frozen:
            before = self.server.view
            if difference is None or (before is not None and apply_encoded(before, difference) == view):
                self.server.take(view)


class Rack:
    """All servers that ever ran, and the way to call them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.servers: dict[str, FakeServer] = {}
        self.skews: dict[str, float] = {}  # with which servers start that tell their time

    async def start(self, *names: str) -> None:
        """Starts servers, under new incarnations where there were some, and registers them."""
        for name in names:
            old = self.servers.get(name)
            info = ServerInfo(name, 1 if old is None else old.info.incarnation + 1, "h:1")
            if old is not None:
                old.running = False
            self.servers[name] = FakeServer(info)
            self.servers[name].skew_s = self.skews.get(name)
            await self.store.put(f"servers/{name}", info.to_json())

    def kill(self, *names: str) -> None:
        """They die at once; their keys stay until leases run out, which tests do by hand."""
        for name in names:
            self.servers[name].running = False

    async def expire(self, *names: str) -> None:
        """The keys go, as when leases run out."""
        for name in names:
            await self.store.delete(f"servers/{name}")

    def freeze(self, *names: str, frozen: bool = True) -> None:
        for name in names:
            self.servers[name].frozen = frozen

    def find_level(self, levels: bool) -> None:
        for server in self.servers.values():
            server.levels = levels

    def reset_connections(self) -> None:
        for server in self.servers.values():
            for line in server.lines:
                line.broken = True

    @asynccontextmanager
    async def dial(self, info: ServerInfo, cluster: str) -> AsyncIterator[ServerLink]:
        server = self.servers[info.name]
        server.calls += 1
        await asyncio.sleep(0)
        if server.info != info and server.running:
            raise PermissionError(f"this is {server.info.member}")
        if not server.running:
            raise ConnectionRefusedError
        await until(lambda: not server.frozen)
        line = FakeLine(server)
        server.lines.add(line)
        try:
            yield line
        finally:
            server.lines.discard(line)
