"""Plans of small clusters, each checked against the law of transitions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.core.planner import Health, Members, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import unsafe_transition

LIMITS = Limits()


def server(i: int, zone: str = "", weight: float = 1.0) -> ServerInfo:
    return ServerInfo(f"s{i}", 1, "h:1", zone=zone, weight=weight)


def members(servers: Sequence[ServerInfo], *draining: ServerInfo) -> Members:
    return Members("c", tuple(servers), frozenset(s.member for s in draining))


def first(servers: Sequence[ServerInfo], config: ClusterConfig) -> View:
    decision = plan(None, members(servers), config)
    assert decision is not None
    assert decision.view is not None
    return decision.view


def step(view: View, of: Members, config: ClusterConfig, limits: Limits = LIMITS, health: Health | None = None) -> View:
    """The next view, with every filling level at once; the same one if there is nothing to do. Checks the law."""
    level = {r: int(view.since[r]) for r in np.flatnonzero(view.joining >= 0).tolist()}
    health = Health(level=level) if health is None else health
    decision = plan(view, of, config, health, limits)
    if decision is None or decision.view is None:
        return view
    new = decision.view
    assert unsafe_transition(view.as_chains, new.as_chains, health.level) == ""
    assert View.decode(new.encode()) == new
    assert new.heads.min() >= 0
    filling = new.joining >= 0
    assert int(filling.sum()) <= limits.fills
    if filling.any():
        assert np.bincount(new.joining[filling]).max() <= limits.per_server
        assert np.bincount(new.tails[filling]).max() <= limits.per_server
    return new


def settled(view: View, of: Members, config: ClusterConfig, limits: Limits = LIMITS) -> View:
    for _ in range(400):
        new = step(view, of, config, limits)
        if new is view:
            return view
        view = new
    raise AssertionError(f"no end of moving: {view.reason}")


def spread(indices: np.ndarray[tuple[int, ...], np.dtype[np.int32]], view: View) -> float:
    """Maximum over mean of a load, by weight."""
    weights = np.array([s.weight for s in view.servers])
    loads = np.bincount(indices[indices >= 0], minlength=len(weights))
    return float((loads / weights).max() * weights.sum() / loads.sum())
