"""Which server is filled with which range, so that every range has its replicas again. Pure.

A filling copies a range from its tail. So many run at a time in the cluster, from a server and to a server: the rest
waits its turn, and training keeps its share of every server. Whom to fill is chosen as the ring chooses: another zone
first, then within bounds of load, then few different successors behind each server, then the least loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.draft import Draft, Flags, Pair
from coordinator.core.ring import SLACK, SPREAD, Node
from replication.chain import Member

_Counts = NDArray[np.int64]
_NOBODY, _LATER = -1, -2
_FLIGHT_BYTES = 96 << 20
_FILLS_LEAST, _FILLS_MOST = 4, 64
_ANY: Mapping[Member, Capacity] = {}


@dataclass(frozen=True)
class Limits:
    """How many ranges are filled at a time: in the cluster, and per server as source and as target."""

    fills: int = 64
    per_server: int = 16

    @classmethod
    def by_bytes(cls, nbytes: float) -> Limits:
        """Returns the limits for ranges of `nbytes` bytes on average. A view makes all its ranges pause, so small
        ranges are filled many at a time; of large ones a few keep a link busy."""
        per_server = int(min(_FILLS_MOST, max(_FILLS_LEAST, _FLIGHT_BYTES / max(1.0, nbytes))))
        return cls(4 * per_server, per_server)


class Capacity(NamedTuple):
    """For how many more ranges a server has memory: repairs may use all, moves leave some free for repairs."""

    repairs: int
    moves: int


class Fills(NamedTuple):
    """How many fillings were started, and how many ranges wait for nothing but the limits."""

    started: int
    later: int


def start_fills(
    draft: Draft,
    sites: Mapping[Member, Node],
    limits: Limits,
    cut: Collection[Pair] = (),
    sources: Collection[Member] = (),
    capacity: Mapping[Member, Capacity] = _ANY,
    rows: Flags | None = None,
) -> Fills:
    """Starts fillings of ranges that have too few replicas, those with the fewest first. rows: bool [ranges], the
    ranges to look at, by default all.

    sites: the live servers that may be filled. Only they and those in `sources` fill others. capacity: what they have
    memory for; who is not in it has no limit.
    """
    few = (draft.lengths > 0) & (draft.lengths < draft.replicas) & (draft.joining < 0)
    short = np.flatnonzero(few if rows is None else few & rows)
    room = limits.fills - int(np.count_nonzero(draft.filling))
    if short.size == 0 or room <= 0:
        return Fills(0, int(short.size))
    short = short[np.argsort(draft.lengths[short], kind="stable")]
    tails = draft.tails
    cluster = _Cluster(draft, sites, limits, cut, sources, capacity)
    started = later = 0
    for done, r in enumerate(short.tolist()):
        target = cluster.choose(draft.chains[r], int(tails[r]))
        if target < 0:
            later += target == _LATER
            continue
        draft.fill(r, target)
        cluster.count(int(tails[r]), target)
        started += 1
        if started == room:
            return Fills(started, later + int(short.size) - done - 1)
    return Fills(started, later)


def start_restores(draft: Draft, sites: Mapping[Member, Node], capacity: Mapping[Member, Capacity] = _ANY) -> int:
    """Lets servers restore the ranges that begin again from a checkpoint, spread so that all hold about the same;
    returns for how many no server has memory. All start at once: these ranges serve nobody before."""
    rows = np.flatnonzero((draft.lengths == 0) & (draft.joining < 0))
    n = len(draft.members)
    weight = np.array([sites[m].weight if m in sites else np.nan for m in draft.members])
    room = np.array([capacity[m].repairs if m in capacity else len(draft.chains) for m in draft.members])
    held = _count(draft.chains, n) + _count(draft.joining, n)
    for done, r in enumerate(rows.tolist()):
        able = np.flatnonzero(~np.isnan(weight) & (room > 0))
        if able.size == 0:
            return len(rows) - done
        target = int(able[np.argmin((held[able] + 1) / weight[able])])
        draft.bring_back(r, target)
        held[target] += 1
        room[target] -= 1
    return 0


class _Cluster:
    """The loads of servers, kept up to date while fillings are added. Arrays are over the draft's members."""

    def __init__(
        self,
        draft: Draft,
        sites: Mapping[Member, Node],
        limits: Limits,
        cut: Collection[Pair],
        sources: Collection[Member],
        capacity: Mapping[Member, Capacity],
    ) -> None:
        members, n = draft.members, len(draft.members)
        nodes = [sites.get(m) for m in members]
        zones: dict[str, int] = {}
        self._limits = limits
        self._live = np.array([node is not None for node in nodes], dtype=np.bool_)
        self._capacity = np.array([capacity[m].repairs if m in capacity else len(draft.chains) for m in members])
        self._serves = self._live | draft.flags(sources)[:-1]
        self._weight = np.array([1.0 if node is None else node.weight for node in nodes])
        self._zone = np.array([zones.setdefault(n.zone, len(zones)) if n and n.zone else -1 for n in nodes])
        self._cut = draft.pairs(cut)[:-1, :-1]
        filling = draft.filling
        self._into = _count(draft.joining[filling], n)
        self._out_of = _count(draft.tails[filling], n)
        self._held = _count(draft.chains, n) + _count(draft.joining, n)
        self._headed = _count(draft.chains[:, 0], n)
        self._pairs = _neighbours(draft, n)
        replicas = len(draft.chains) * min(draft.replicas, int(np.count_nonzero(self._live)))
        self._cap = np.ceil(SLACK * replicas * self._weight / max(1e-9, float(self._weight[self._live].sum())))

    def choose(self, chain: NDArray[np.int32], source: int) -> int:
        """Returns the best member to fill from `source`, the tail of `chain`; _LATER if limits forbid it now, _NOBODY
        if there is none."""
        chain = chain[chain >= 0]
        free: Flags = self._live & ~self._cut[source]
        free &= self._into < self._capacity
        free[chain] = False
        if not self._serves[source] or not free.any():
            return _NOBODY
        free &= self._into < self._limits.per_server
        at = np.flatnonzero(free)
        if at.size == 0 or self._out_of[source] >= self._limits.per_server:
            return _LATER
        if at.size == 1:
            return int(at[0])
        zones = self._zone[chain]
        near = self._pairs[source]
        # The ranges behind one head go to few successors, evenly: if the head dies, these share what it headed.
        spread_full = int(np.count_nonzero(near)) >= SPREAD
        best = np.lexsort(
            (
                self._headed[at] / self._weight[at],
                near[at],
                self._held[at] / self._weight[at],
                (near[at] == 0) & spread_full,
                self._held[at] >= self._cap[at],
                np.isin(self._zone[at], zones[zones >= 0]),
            )
        )[0]
        return int(at[best])

    def count(self, source: int, target: int) -> None:
        """Counts a filling that was started."""
        self._out_of[source] += 1
        self._into[target] += 1
        self._held[target] += 1
        self._pairs[source, target] += 1


def _count(indices: NDArray[np.int32], n: int) -> _Counts:
    return np.bincount(indices.ravel() + 1, minlength=n + 1)[1:]


def _neighbours(draft: Draft, n: int) -> _Counts:
    """int64 [n, n]: ranges in which the second stands, or will stand, right behind the first."""
    before = [draft.chains[:, i] for i in range(draft.replicas - 1)] + [draft.tails]
    after = [draft.chains[:, i + 1] for i in range(draft.replicas - 1)] + [draft.joining]
    first, second = np.concatenate(before), np.concatenate(after)
    there = (first >= 0) & (second >= 0)
    return np.bincount(first[there] * n + second[there], minlength=n * n).reshape(n, n)
