"""Whether the leader is gone, as its servers see it. Pure.

Its lease in the store says so too, seconds later. Servers notice at once that its connections end, and its beats. So
who stands by listens to them, and takes the office away from a leader that at least half of the servers have lost while
none has it any more. It may be wrong, at no cost but an election: the key of the office is deleted at its own revision,
and a deposed leader cannot write.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from replication.chain import Member

BEAT_S = 0.1  # how often a leader speaks to each server
LOST_S = 0.05  # a leader whose connection breaks makes another one much sooner
SILENT_S = 2.0  # a leader that says nothing for so long on connections that are open; plans of large views take a while
FRESH_S = 0.3  # servers report ten times a second


class Tenure(NamedTuple):
    """What a server knows of the leader. term: the newest that has spoken to it, 0 for none; connected: whether that
    has a connection; silent_s: for how long it has said nothing there, or has had none."""

    term: int = 0
    connected: bool = False
    silent_s: float = 0.0


class Succession:
    """What the servers say of the leader: told to who stands by."""

    def __init__(self) -> None:
        self._reports: dict[Member, tuple[Tenure, float]] = {}

    def heard(self, member: Member, tenure: Tenure, now: float) -> None:
        """A server has reported."""
        self._reports[member] = tenure, now

    def lost_term(self, servers: Collection[Member], now: float) -> int:
        """The term whose leader at least half of these servers have lost, and none has; 0 for none."""
        self._reports = {member: reports for member, reports in self._reports.items() if member in servers}
        fresh = [(tenure, now - at) for tenure, at in self._reports.values() if now - at <= FRESH_S]
        term = max((tenure.term for tenure, _ in fresh), default=0)
        lost = [
            tenure.silent_s + since > (SILENT_S if tenure.connected else LOST_S)
            for tenure, since in fresh
            if tenure.term == term
        ]
        return term if lost and all(lost) and 2 * len(lost) >= len(servers) else 0
