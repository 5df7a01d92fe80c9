"""The servers: registered, in the view, answering, lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.core.view import ServerInfo, View
from elasticps.dashboard.core.ring import counts
from replication.chain import Member

LOST_SHOWN_S = 600.0  # so long the page shows a server that is gone
LOST_MAX = 256
_NOTHING = {"heads": 0, "held": 0, "joining": 0}


@dataclass
class ServerState:
    """One name, in its newest incarnation. ranges: heads, held and joining in the view; peak: the most that were
    joining since none was; lost: why the view left it out while it had ranges, "" if it did not; since: of that;
    status: its last answer, and when it came; error: why it does not answer, "" if it does."""

    info: ServerInfo
    listed: bool = False
    ranges: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    peak: int = 0
    lost: str = ""
    since: float = 0.0
    status: Mapping[str, Any] | None = None
    at: float = 0.0
    error: str = ""

    @property
    def answers(self) -> bool:
        """Whether it answered the last request."""
        return self.status is not None and not self.error

    def state(self, draining: bool, registered: bool) -> str:
        """One word for people."""
        if self.lost and not self.listed and not (registered and self.answers):
            return "lost"
        if self.error and self.status is not None:
            return "silent"
        if draining:
            return "draining"
        if self.ranges["joining"]:
            return "filling"
        return "serving" if self.ranges["held"] else "spare"


class Fleet:
    """servers: all that are known, by name; registered, drains: as the store has them; gone: when the connections of
    those that do not answer broke."""

    def __init__(self) -> None:
        self.servers: dict[str, ServerState] = {}
        self.registered: Mapping[str, ServerInfo] = {}
        self.drains: Mapping[str, int] = {}
        self.gone: dict[str, float] = {}
        self._drained: dict[Member, None] = {}  # to drain, ever; the newest of them

    def register(self, now: float, info: ServerInfo) -> None:
        """Takes a server's registration."""
        known = self.servers.get(info.name)
        if known is None or known.info.incarnation < info.incarnation:
            self._renew(now, info)

    def _renew(self, now: float, info: ServerInfo) -> ServerState:
        """Starts a new incarnation of a name. That the old one was lost is shown until the new one answers."""
        before = self.servers.get(info.name)
        server = self.servers[info.name] = ServerState(info, since=now)
        if before is not None and before.lost:
            server.lost, server.since = before.lost, before.since
        self.gone.pop(info.name, None)
        return server

    def adopt(self, now: float, before: View | None, view: View) -> tuple[list[str], list[str]]:
        """Takes a view; returns the names of servers that are lost (they had ranges and no drain), and of those that
        left as intended."""
        for name, incarnation in self.drains.items():
            self._drained[Member(name, incarnation)] = None
        for member in list(self._drained)[:-LOST_MAX]:
            del self._drained[member]
        found = counts(view)
        for info in view.servers:
            server = self.servers.get(info.name)
            if server is None or server.info.incarnation < info.incarnation:
                server = self._renew(now, info)
            server.listed, server.ranges = True, found[info.name]
            server.lost = ""
            server.peak = max(server.peak, server.ranges["joining"]) if server.ranges["joining"] else 0
        lost, left = self._left_out(before, view)
        for name in (*lost, *left):
            self._leave(now, name, view.reason if name in lost else "", again=name in found)
        return lost, left

    def _left_out(self, before: View | None, view: View) -> tuple[list[str], list[str]]:
        if before is None:
            return [], []
        listed = {server.member for server in view.servers}
        full = {before.servers[i].member for i in np.unique(before.chains).tolist() if i >= 0}
        out = {server.member for server in before.servers} - listed
        lost = sorted(m.name for m in out if m in full and m not in self._drained)
        return lost, sorted(m.name for m in out if m.name not in lost)

    def _leave(self, now: float, name: str, reason: str, *, again: bool) -> None:
        """again: another incarnation of that name is listed."""
        server = self.servers.get(name)
        if server is None:
            return
        server.lost, server.since = reason, self.gone.get(name, now)
        if not again:
            server.listed, server.ranges, server.peak = False, _NOTHING, 0

    def answered(self, now: float, name: str, incarnation: int, answer: Mapping[str, Any]) -> float | None:
        """Seconds that it had been silent for before; None if the answer is not of the incarnation that is known."""
        server = self.servers.get(name)
        if server is None or server.info.incarnation != incarnation or answer["incarnation"] != incarnation:
            return None
        silent_s = max(0.0, now - self.gone[name]) if name in self.gone and server.status is not None else 0.0
        server.status, server.at, server.error = answer, now, ""
        self.gone.pop(name, None)
        return silent_s

    def is_silent(self, now: float, name: str, incarnation: int, error: str) -> bool:
        """Notes that a server gives no answer; returns whether that is new."""
        server = self.servers.get(name)
        if server is None or server.info.incarnation != incarnation or server.error == error:
            return False
        server.error = error
        self.gone.setdefault(name, now)
        return True

    def forget(self, now: float) -> None:
        """Drops servers that left long ago, or beyond LOST_MAX."""
        away = [n for n, s in self.servers.items() if not s.listed and n not in self.registered]
        away.sort(key=lambda name: self.servers[name].since)
        for i, name in enumerate(away):
            server = self.servers[name]
            if not server.lost or now - server.since > LOST_SHOWN_S or i < len(away) - LOST_MAX:
                del self.servers[name]
                self.gone.pop(name, None)

    def document(self) -> list[dict[str, Any]]:
        """The servers as the page gets them."""
        found = []
        for name, server in sorted(self.servers.items()):
            info = server.info
            draining = self.drains.get(name) == info.incarnation
            state = server.state(draining, name in self.registered)
            found.append(
                {
                    "id": name,
                    "incarnation": info.incarnation,
                    "address": info.address,
                    "zone": info.zone,
                    "weight": info.weight,
                    "state": state,
                    "reason": server.lost if state == "lost" else server.error if state == "silent" else "",
                    "since": server.since if state == "lost" else self.gone.get(name, 0.0),
                    **server.ranges,
                    "peak": server.peak,
                }
            )
        return found
