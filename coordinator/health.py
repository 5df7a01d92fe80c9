"""Failure detection faster than leases. This part says what a leader hears; the rest decides what it means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from coordinator.view import ServerInfo, View
from replication.chain import Member
from replication.effects import Level


@dataclass(frozen=True)
class Report:
    """What a server tells a leader, many times a second: its silence is news too.

    epoch     of the view that it acts under
    levels    joining replicas that are level, as its tails found: state, told again in every report
    suspects  members that it has not been able to reach, and for how many seconds
    nbytes    stored there; requests: done since it started
    """

    epoch: int
    levels: tuple[Level, ...] = ()
    suspects: dict[Member, float] = field(default_factory=dict)
    nbytes: int = 0
    requests: int = 0


class Line(Protocol):
    """A leader's connection to one server. Reports end, or raise OSError, when the connection does."""

    def reports(self) -> AsyncIterator[Report]:
        """What the server says, as it comes."""

    def send_view(self, view: View) -> None:
        """Gives it a view without waiting; it ignores one that it has."""


Dial: TypeAlias = Callable[[ServerInfo], AbstractAsyncContextManager[Line]]
"""Connects to a server. ConnectionRefusedError: nobody listens there. ConnectionError or another OSError: try again.
PermissionError: it is another incarnation, or another cluster's, that answers there."""
