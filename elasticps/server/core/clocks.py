"""Chooses times from clocks that may be wrong: what a head logs, and by what a sweep judges. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Clocks(NamedTuple):
    """Seconds since 1970: by this server's clock; by the leader's and by the median of the leader's and all servers',
    each 0 while unknown."""

    own: float
    leader: float = 0.0
    median: float = 0.0

    @property
    def known(self) -> bool:
        """Whether a leader has said what time it is."""
        return bool(self.leader or self.median)

    @property
    def logged(self) -> float:
        """What a head logs. While no median is known (an older leader says none), the later clock: it makes no row look
        older than it is."""
        return self.median or max(self.own, self.leader)

    @property
    def swept(self) -> float:
        """By what a sweep judges: the earliest of all."""
        return min(each for each in self if each)

    @property
    def skew(self) -> float:
        """Seconds by which this server's clock is ahead of the median, or of the leader's where no median is known; 0
        while neither is."""
        return self.own - (self.median or self.leader or self.own)
