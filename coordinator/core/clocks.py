"""Which time it is when machines' clocks differ: the median of all that are known. Pure.

Servers report their wall clocks to every coordinator. The leader's beats tell servers its own time and the median of
all clocks, its own included, so that one wrong clock changes nothing, whichever it is: rows keep that time for good.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from replication.chain import Member

MOST_SECONDS = (1 << 32) - 1  # since 1970, as messages have them
MOST_SKEW_S = 60.0  # between a clock and the median, before that is logged
ENOUGH = 3  # clocks, of which one may be wrong


class ClusterTime(NamedTuple):
    """Seconds since 1970, by the leader's own clock and by the median of all; 0 while it does not know."""

    own: int = 0
    median: int = 0


UNKNOWN = ClusterTime()


class ServerClocks:
    """By how many seconds each server's clock is ahead of this coordinator's, as it reported last."""

    def __init__(self) -> None:
        self._skews: dict[Member, float] = {}

    def heard(self, member: Member, seconds: float, wall_s: float) -> None:
        """A server has reported its time, 0 if it does not tell, at this coordinator's `wall_s`."""
        if seconds:
            self._skews[member] = seconds - wall_s

    def watch(self, members: Collection[Member]) -> None:
        """Forgets all servers but these."""
        self._skews = {member: skew for member, skew in self._skews.items() if member in members}

    def forget(self, member: Member) -> None:
        """Forgets a server."""
        self._skews.pop(member, None)

    def time(self, wall_s: float, gone: Collection[Member], awaited: bool) -> ClusterTime:
        """The time now. gone: servers that do not count; awaited: others may yet report. Until they have, and there
        are ENOUGH clocks, nothing is said: the first server to report, or this machine, may be the one that is wrong.
        """
        skews = self._counted(gone)
        if awaited and len(skews) < ENOUGH:
            return UNKNOWN
        return ClusterTime(_seconds(wall_s), _seconds(wall_s + median(skews.values())))

    def differing(self, gone: Collection[Member]) -> dict[Member | None, float]:
        """The clocks that differ from the median by more than MOST_SKEW_S, and by how many seconds they are ahead of
        it; None stands for this coordinator."""
        skews = self._counted(gone)
        middle = median(skews.values())
        return {who: each - middle for who, each in skews.items() if abs(each - middle) > MOST_SKEW_S}

    def _counted(self, gone: Collection[Member]) -> dict[Member | None, float]:
        return {None: 0.0} | {member: skew for member, skew in self._skews.items() if member not in gone}


def median(clocks: Collection[float]) -> float:
    """The median of some clocks; of an even number the later one in the middle, by which rows are kept longer."""
    return sorted(clocks)[len(clocks) // 2]


def _seconds(wall_s: float) -> int:
    """Whole seconds as a message has room for them; 0 would say that the time is not known."""
    return int(min(max(wall_s, 1.0), MOST_SECONDS))
