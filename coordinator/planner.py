"""What the next view and roster should be, and why. Pure: the leader writes what is decided here.

Once a view exists, the chains of its servers stand: data lives nowhere else. A server that comes later is listed as a
spare and owns nothing; one that is gone, or is back under a new incarnation without its data, keeps its ranges waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.ring import Node, place
from coordinator.view import REASON_MAX, ClusterConfig, Roster, ServerInfo, View, WorkerInfo

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Members:
    """The servers registered now, in the cluster called `cluster`; names are distinct."""

    cluster: str
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True)
class Plan:
    """A decision: the view to write, or None to leave things as they are, and the reason for people to read."""

    view: View | None
    reason: str


@dataclass(frozen=True)
class RosterPlan:
    """The roster to write, and why."""

    roster: Roster
    reason: str


def plan(view: View | None, members: Members, config: ClusterConfig) -> Plan | None:
    """The next step from `view` (None: none was ever written). None when all is well as it is."""
    if view is None:
        return _first(members, config)
    owners = _owners(view)
    present = {server.name: server for server in members.servers}
    servers = _listed(view, owners, present)
    waiting = _waiting(view, owners, present)
    if servers == view.servers:
        return Plan(None, "; ".join(waiting)) if waiting else None
    changes = _differences(view.servers, servers)
    reason = "; ".join(changes + waiting)[:REASON_MAX]
    return Plan(_with_servers(view, servers, reason), reason)


def plan_roster(roster: Roster | None, workers: Iterable[WorkerInfo]) -> RosterPlan | None:
    """The next roster if the workers registered now are not those of `roster` (None: none was ever written)."""
    now = tuple(sorted(workers, key=lambda worker: worker.id))
    before = () if roster is None else roster.workers
    if now == before:
        return None
    joined = [worker.name for worker in now if worker not in before]
    left = [worker.name for worker in before if worker not in now]
    parts = [f"{_names(names)} {verb}" for names, verb in ((joined, "joined"), (left, "left")) if names]
    return RosterPlan(Roster(1 if roster is None else roster.version + 1, now), "; ".join(parts))


def _first(members: Members, config: ClusterConfig) -> Plan:
    count = len(members.servers)
    if count < config.min_servers:
        return Plan(None, f"waiting for servers: {count} of {config.min_servers} registered")
    servers = tuple(sorted(members.servers, key=lambda server: server.name))
    nodes = [Node(server.name, server.weight, server.zone) for server in servers]
    reason = f"first view: {config.ranges} ranges on {count} servers, {config.replicas} replicas each"
    if count < config.replicas:
        reason += f" wanted, {count} possible"
    view = View(
        cluster=members.cluster,
        epoch=1,
        ranges=config.ranges,
        replicas=config.replicas,
        servers=servers,
        chains=place(nodes, config.ranges, config.replicas),
        joining=np.full(config.ranges, -1, np.int32),
        since=np.ones(config.ranges, np.int64),
        reason=reason,
    )
    return Plan(view, reason)


def _owners(view: View) -> set[int]:
    return (set(view.chains.ravel().tolist()) | set(view.joining.tolist())) - {-1}


def _listed(view: View, owners: set[int], present: dict[str, ServerInfo]) -> tuple[ServerInfo, ...]:
    """Owners as they are, then spares that are still here, then new spares by name."""
    kept = [server if i in owners else present.get(server.name) for i, server in enumerate(view.servers)]
    new = [present[name] for name in sorted(present) if view.index(name) < 0]
    return tuple(server for server in (*kept, *new) if server is not None)


def _waiting(view: View, owners: set[int], present: dict[str, ServerInfo]) -> list[str]:
    reasons = []
    for i in sorted(owners):
        server, now = view.servers[i], present.get(view.servers[i].name)
        if now is not None and now.incarnation == server.incarnation:
            continue
        held = int((view.chains == i).any(axis=1).sum())
        if now is None:
            reasons.append(f"{server.name} is gone: {held} ranges wait for it")
        else:
            reasons.append(
                f"{server.name} came back as incarnation {now.incarnation} without the data of "
                f"incarnation {server.incarnation}: {held} ranges wait"
            )
    return reasons


def _differences(before: Sequence[ServerInfo], after: Sequence[ServerInfo]) -> list[str]:
    old = {server.name: server.incarnation for server in before}
    new = {server.name: server.incarnation for server in after}
    cases = (
        ("joined as spare", [name for name in new if name not in old]),
        ("left, spare", [name for name in old if name not in new]),
        ("came back, spare", [name for name in new if old.get(name, new[name]) != new[name]]),
    )
    return [f"{_names(names)} {what}" for what, names in cases if names] or ["a spare changed"]


def _with_servers(view: View, servers: tuple[ServerInfo, ...], reason: str) -> View:
    """The same chains over another list of servers, which has all their owners."""
    at = {server.name: i for i, server in enumerate(servers)}
    moved = np.array([at.get(server.name, -1) for server in view.servers] + [-1], np.int32)  # index -1 stays -1
    return View(
        cluster=view.cluster,
        epoch=view.epoch + 1,
        ranges=view.ranges,
        replicas=view.replicas,
        servers=servers,
        chains=moved[view.chains],
        joining=moved[view.joining],
        since=view.since,
        reason=reason,
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
