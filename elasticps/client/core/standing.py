"""The servers that a worker is always connected to. Pure.

The head of its home range and the head of its application's group range tell it whatever a worker has to hear unasked,
and hear whether it takes part; to others it connects when it has something to ask there.
"""

from __future__ import annotations

from elasticps.client.core.routing import Routes
from elasticps.kernels.hashing import group_range
from replication.chain import Member
from replication.step_records import home_range


def standing_ranges(worker: int, app: str, ranges: int) -> tuple[int, int]:
    """A worker's home range, and its application's group range."""
    return home_range(worker, ranges), group_range(app, ranges)


def standing_servers(worker: int, app: str, routes: Routes) -> list[Member]:
    """Who heads these two; if nobody does, one of the others, of which it hears of views."""
    found = routes.heads_of(standing_ranges(worker, app, routes.view.ranges))
    others = routes.serving or list(routes.members)
    return found or ([others[worker % len(others)]] if others else [])
