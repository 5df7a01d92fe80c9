"""How much servers may hold, and how many servers a cluster needs for what it holds and does. Pure.

`scale --dry-run` shows these estimates, and `autoscale` decides by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator.core.view import View

FREE_SHARE = 0.1  # of the limit: so much, or so many bytes but no more than a quarter, is kept free above the upper
FREE_BYTES = 80 << 20  # mark: what a process needs besides rows does not grow with them
ROWS_SHARE = 0.8  # of the limit: the lower mark, or less where that is what keeps room for a neighbour's ranges
NEEDED_MAX = 4096  # servers that an estimate of memory looks at


def rows_mark(limit: int, servers: int, replicas: int) -> int:
    """The lower mark. When one of `servers` dies, what it held is filled at the others: each gets 1 / (servers - 1) of
    what it has more, and that has to fit below the upper mark. Where nothing is filled then, nothing is kept free."""
    most = fill_mark(limit)
    if 1 < replicas < servers:
        most = most * (servers - 1) // servers
    return min(int(ROWS_SHARE * limit), most)


def fill_mark(limit: int) -> int:
    """The upper mark."""
    return limit - max(int(FREE_SHARE * limit), min(limit // 4, FREE_BYTES))


@dataclass(frozen=True)
class ClusterUse:
    """What all servers of a cluster use together, and would use if there were more or fewer like these.

    rows      bytes of all replicas of all ranges, missing ones included: they come back
    base      bytes that each server uses besides
    limit     the smallest memory limit of a server, in bytes; 0: there is none
    replicas  copies of each range
    load      seconds of CPU time per second that all their event loops use; each can use 1
    """

    rows: float
    base: float
    limit: int
    replicas: int
    load: float = 0.0

    def memory(self, servers: int) -> int:
        """Bytes that each of `servers` servers would use."""
        return int(self.base + self.rows / servers * min(1.0, servers / self.replicas))

    def mark(self, servers: int) -> int:
        """Bytes up to which each of `servers` servers would take new rows."""
        return rows_mark(self.limit, servers, self.replicas)


@dataclass(frozen=True)
class MemoryEstimate:
    """What a number of servers means for each of them, by what is stored now. Bytes; servers is 0 where no number is
    enough.

    each     that each would use; mark: up to where each would take new rows; limit: what each may use
    servers  how many it takes so that each uses less than that: as many as asked for, or fewer, or else the next
             number. One more than there are replicas may be too few where fewer would do: it keeps room for repairs
    """

    each: int
    mark: int
    limit: int
    servers: int


def measure(statuses: Collection[Mapping[str, Any]], view: View, load: float = 0.0) -> ClusterUse:
    """Adds up what servers with these statuses (`StatusResponse` of admin.proto) use. load: of all of them."""
    whole = view.ranges * view.replicas / max(1, int((view.chains >= 0).sum()))
    rows = whole * sum(status["bytes"] for status in statuses)
    base = median(max(0, status["memory_used"] - status["bytes"]) for status in statuses) if statuses else 0
    limit = min((status["memory_limit"] for status in statuses), default=0)
    return ClusterUse(rows, base, limit, view.replicas, load)


def estimate(use: ClusterUse, servers: int) -> MemoryEstimate | None:
    """Estimates the memory of `servers` servers; None if they have no limits."""
    if not use.limit:
        return None

    def enough(count: int) -> bool:
        return use.memory(count) < use.mark(count)

    least = max(servers, use.replicas)
    least = fewest(least, use.replicas, enough) if enough(least) else next_enough(least, NEEDED_MAX, enough)
    return MemoryEstimate(use.memory(servers), use.mark(servers), use.limit, least)


def fewest(servers: int, least: int, enough: Callable[[int], bool]) -> int:
    """The number that is reached from `servers` by leaving out one after the other, as long as each number is enough;
    never below `least`."""
    while servers > least and enough(servers - 1):
        servers -= 1
    return servers


def next_enough(servers: int, most: int, enough: Callable[[int], bool]) -> int:
    """The first number from `servers` to `most` that is enough; 0 if none is."""
    return next(filter(enough, range(servers, most + 1)), 0)
