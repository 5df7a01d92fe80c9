"""A small cluster, and what the planner makes of it."""

from __future__ import annotations

from coordinator.core.planner import Health, Members, Plan, plan
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import Member

CONFIG = ClusterConfig(ranges=16, replicas=2, min_servers=3)


def server(name: str, incarnation: int = 1) -> ServerInfo:
    return ServerInfo(name, incarnation, "h:1")


WELL = Health()


def lost(*servers: ServerInfo) -> Health:
    return Health(gone={s.member: "killed" for s in servers})


def names(view: View, r: int) -> tuple[Member, ...]:
    return view.as_chains.members_of(r)


def joiner(view: View, r: int) -> Member | None:
    return view.as_chains.joiner_of(r)


def decide(
    view: View | None, *servers: ServerInfo, config: ClusterConfig = CONFIG, health: Health = WELL
) -> Plan | None:
    return plan(view, Members("demo", servers), config, health)


def written(view: View | None, *servers: ServerInfo, config: ClusterConfig = CONFIG, health: Health = WELL) -> View:
    decision = decide(view, *servers, config=config, health=health)
    assert decision is not None
    assert decision.view is not None
    assert decision.view.reason == decision.reason
    return decision.view
