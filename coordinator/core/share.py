"""Each server's fair share of the replicas, and when a load is too far from it. Pure.

A server's share follows its weight, within two limits: it holds each range at most once, and a zone holds each range no
more often than the number of zones requires. The rest goes to other servers, in proportion.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.ring import Node

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_HALVINGS = 60


@lru_cache(maxsize=64)  # every plan asks, and servers rarely change
def held_shares(nodes: tuple[Node, ...], ranges: int, replicas: int, total: int) -> Floats:
    """Returns how many of `total` replicas each node should hold: float64 [nodes], read-only; in sum `total` if
    possible.

    No node holds more than `ranges`, no zone more than distinct zones require. Nodes without a zone are each their own.
    """
    if not nodes:
        return np.zeros(0)
    names = [node.zone or f"/{i}" for i, node in enumerate(nodes)]
    zones = sorted(set(names))
    zone = np.array([zones.index(name) for name in names])
    weight = np.array([node.weight for node in nodes])
    size = np.bincount(zone)
    cap = np.minimum(size, max(1, replicas - len(zones) + 1)) * float(ranges)
    floor = np.full(len(zones), float(ranges) if len(zones) <= replicas else 0.0)

    def by_zone(level: float) -> Floats:
        held = np.bincount(zone, np.minimum(ranges, level * weight), len(zones))
        return np.clip(held, np.minimum(floor, cap), cap)

    quota = by_zone(_level(lambda level: float(by_zone(level).sum()), total, ranges / weight.min()))
    shares = np.empty(len(nodes))
    for z in range(len(zones)):
        mine = np.flatnonzero(zone == z)
        shares[mine] = _poured(weight[mine], float(quota[z]), ranges)
    shares.setflags(write=False)
    return shares


class Band(NamedTuple):
    """One kind of load, and how far from its share it may be: arrays over servers, or several kinds [kinds, servers].

    share      the load that each server should have
    low, high  the bounds of the load, whole numbers around the share
    price      the cost of each range outside the bounds
    pull       the cost of distance from the share
    """

    share: Floats
    low: Floats
    high: Floats
    price: float | Floats
    pull: float | Floats

    @classmethod
    def around(cls, share: Floats, low: float, high: float, price: float, pull: float) -> Band:
        """Makes a band whose bounds are multiples of the share. It always contains the two whole numbers next to the
        share."""
        return cls(share, np.floor(low * share), np.maximum(np.ceil(share), np.floor(high * share)), price, pull)

    @classmethod
    def stack(cls, *bands: Band) -> Band:
        """Makes one band of several kinds of load."""
        return cls(*(np.stack(each) for each in zip(*((*b[:3], [b.price], [b.pull]) for b in bands), strict=True)))

    def cost(self, load: Counts) -> Floats:
        """Returns the cost of each load. It is convex, so that a lower sum means more even loads."""
        far = (load - self.share) ** 2 / np.maximum(1.0, self.share)
        outside = np.maximum(0.0, load - self.high) + np.maximum(0.0, self.low - load)
        cost: Floats = self.pull * far + self.price * outside
        return cost


def _poured(weight: Floats, total: float, cap: int) -> Floats:
    level = _level(lambda level: float(np.minimum(cap, level * weight).sum()), total, cap / float(weight.min()))
    return np.minimum(cap, level * weight)


def _level(amount: Callable[[float], float], total: float, high: float) -> float:
    """Returns the level, at most `high`, at which a growing amount reaches the total."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if amount(middle) < total else (low, middle)
    return high
