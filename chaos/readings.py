"""What reads promise: a worker sees its own pushes; a tail shows only what stays, and never less than before. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from chaos.frames import Shown
from chaos.sim.violation import Violation
from chaos.taking_part import PartChecks
from elasticps.wire.headers import PullHeader
from replication.chain import Role

if TYPE_CHECKING:
    from chaos.checks import Checks
    from chaos.readers import Pull
    from chaos.servers import Server

MOST_KEPT = 500


class ReadChecks:
    """What was shown to whom. The values that tails showed are compared at the end with those of the whole history."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.parts = PartChecks()
        self._seen: dict[tuple[int, int], int] = {}
        self._kept: dict[int, list[Shown]] = {}
        self.count = 0

    def floor(self, worker: int, ranges: Iterable[int]) -> dict[int, int]:
        """What a pull that begins now must show at least: range -> seq."""
        return {r: self._seen.get((worker, r), 0) for r in ranges}

    def on_gather(self, server: Server, worker: int, header: PullHeader, shown: tuple[Shown, ...]) -> None:
        """A server is about to answer a pull."""
        clock = header.clock
        if header.bound is not None:
            self.parts.on_gather(server, worker, clock - header.bound, shown)
        self._checks.decisions.on_gather(server, worker, clock, shown)
        for part in shown:
            r = part.range
            where = f"{server.member} shows range {r} at seq {part.seq} to worker {worker} of clock {clock}"
            if server.replica.role[r] != Role.FULL:
                raise Violation("reads of replicas", where)
            missing = self._checks.parts_of(worker, clock) - server.done[r].keys()
            if missing:
                _, after = min(missing)
                raise Violation("read your writes", f"{where}, without its {after >> 16}.{after & 0xFFFF}")

    def on_shown(self, worker: int, pull: Pull, shown: Shown) -> None:
        """A worker has the answer."""
        self.count += 1
        if pull.anywhere:
            return
        r = shown.range
        if shown.seq < pull.floor[r]:
            text = f"worker {worker} sees range {r} at seq {shown.seq}, and has seen {pull.floor[r]} before"
            raise Violation("monotonic reads", text)
        self._seen[worker, r] = max(self._seen.get((worker, r), 0), shown.seq)
        kept = self._kept.setdefault(r, [])
        if len(kept) < MOST_KEPT:
            kept.append(shown)

    def of(self, r: int) -> dict[int, list[Shown]]:
        """What tails have shown of a range, by position."""
        found: dict[int, list[Shown]] = {}
        for shown in self._kept.get(r, ()):
            found.setdefault(shown.seq, []).append(shown)
        return found
