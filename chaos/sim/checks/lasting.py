"""The promise of a chain: every operation that was acknowledged, or shown by a tail, is in every complete copy of its
range, and in every joiner that was reported level, because each may be the only copy a moment later. No server goes
back to a view that it has left, or applies operations of ranges that it has left. Looks into servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.sums import Keys, Rows
from chaos.sim.checks.violation import Violation
from coordinator.core.view import View
from elasticps.server.server import Server
from replication.chain import Member, Role
from replication.effects import CaughtUp

_OUT = int(Role.OUT)
EVERY_TURN = 256  # of so many ranges all are looked at after each turn; of more those that a server holds


class _Seen:
    """What was seen after a server's last turn."""

    __slots__ = ("epoch", "looked_at", "ranges", "role", "view")

    def __init__(self) -> None:
        self.epoch = 0
        self.view: View | None = None
        self.role: NDArray[np.int8] | None = None
        self.ranges = np.empty(0, np.int64)  # those that are looked at after each turn
        self.looked_at: tuple[object, ...] = ()


class Lasting:
    """Follows the newest view, and each server after each of its turns. life: returns the server of a member, if it
    lives; on_level: called for each tail that reports a joiner level."""

    def __init__(self, ranges: int, life: Callable[[Member], Server | None]) -> None:
        self.on_level: Callable[[Member, CaughtUp], None] = lambda tail, level: None
        self._life = life
        self._view: View | None = None
        self._ranges = np.arange(ranges)
        self._acked = np.zeros(ranges, np.int64)  # ever, by anybody
        self._levels: dict[CaughtUp, Member] = {}  # level joiners of the newest view, with the tail that reported each
        self._members: list[Member] = []  # of the view that stands
        self._copies_of = np.full((ranges, 1), -1)  # by range, which of these have a copy, -1 for none
        self._seen: dict[Server, _Seen] = {}

    def on_write(self, view: View) -> None:
        """Takes a view that was written."""
        self._view = view
        copies = view.as_chains.copies
        self._copies_of, self._members = copies, [s.member for s in view.servers]
        self._acked[view.recovery_epoch == view.epoch] = 0  # no server has its content any more
        self._levels = {level: tail for level, tail in self._levels.items() if view.since[level.range] == level.fill}
        self._check_acknowledged(self._ranges)

    def turned(self, server: Server) -> None:
        """Looks at a server after its turn."""
        seen = self._seen.get(server)
        if seen is None:
            seen = self._seen[server] = _Seen()
        epoch = server.serving.epoch
        if epoch != seen.epoch:
            before, seen.epoch = seen.epoch, epoch
            if epoch < before:
                raise Violation("views go on", f"{server.member} goes back from epoch {before} to an older one")
        replica = server.replica
        acked, levels = replica.acked, replica.levels()
        if seen.role is not replica.role:  # a view gives all roles at once
            seen.role = replica.role
            few = len(self._ranges) > EVERY_TURN
            seen.ranges = np.flatnonzero(seen.role != _OUT) if few else self._ranges
            self._check_held(server)
        some = seen.ranges
        looked_at = (replica.seq[some].tobytes(), acked[some].tobytes(), levels)
        if seen.view is self._view and seen.looked_at == looked_at:  # most turns change nothing of it
            return
        seen.view, seen.looked_at = self._view, looked_at
        if len(self._ranges) <= EVERY_TURN:
            self._check_held(server)
        grown = some[acked[some] > self._acked[some]]
        self._acked[grown] = acked[grown]
        view, filled = self._view, []
        for level in levels if view is not None else ():
            stands = view is not None and level.fill == view.since[level.range]
            if stands and level not in self._levels:
                self._levels[level] = server.member
                filled.append(level.range)
                self.on_level(server.member, level)
        if grown.size or filled:
            self._check_acknowledged(np.union1d(grown, filled).astype(np.int64))

    @staticmethod
    def _check_held(server: Server) -> None:
        """Checks that a server has steps of ranges that it holds, and of no others."""
        replica = server.replica
        strange = np.flatnonzero((replica.role == _OUT) & (replica.seq > 0))
        if strange.size:
            raise Violation("replicas only", f"{server.member} has steps of range {strange[0]}, and is no replica")

    def shown(self, table: int, keys: Keys, rows: Rows) -> None:
        """Checks rows of sums, which only grow, that a tail has shown."""
        for server, ranges, what in self._copies(self._ranges):
            mine = server.store.tables.get(table)
            if mine is None:
                continue
            there = np.zeros(len(self._acked), np.bool_)
            there[ranges] = True
            chosen = there[mine.ranges_of(keys)]
            if not chosen.any():
                continue
            here = np.empty((np.count_nonzero(chosen), rows.shape[1]), np.float32)
            mine.gather(keys[chosen], here)
            if (here < rows[chosen]).any():
                at = int(np.flatnonzero((here < rows[chosen]).any(axis=1))[0])
                text = f"a tail has shown of key {keys[chosen][at]} what {server.member}, {what}, lacks"
                raise Violation("what is shown lasts", text)

    def _check_acknowledged(self, some: NDArray[np.int64]) -> None:
        """Checks that every complete copy of some ranges has all that was acknowledged."""
        for server, ranges, what in self._copies(some):
            lacks = server.replica.seq[ranges] < self._acked[ranges]
            if lacks.any():
                r = int(ranges[lacks][0])
                text = f"range {r} is acknowledged up to {self._acked[r]}, {server.member}, {what}, has "
                raise Violation("what is acknowledged lasts", f"{text}{server.replica.seq[r]}")

    def _copies(self, some: NDArray[np.int64]) -> Iterator[tuple[Server, NDArray[np.int64], str]]:
        """Yields the servers that live, and of which of some ranges each has a complete copy."""
        copies = self._copies_of[some]
        for i in np.unique(copies[copies >= 0]).tolist():
            server = self._life(self._members[i])
            if server is not None:
                yield server, some[(copies == i).any(axis=1)], "a replica"
        for level in self._levels:
            server = self._life(level.joiner) if np.isin(level.range, some) else None
            if server is not None:
                yield server, np.array([level.range]), "a level joiner"
