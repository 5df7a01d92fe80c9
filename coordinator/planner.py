"""What the next view and roster should be, and why. Pure: the leader writes what is decided here.

One view is one step. Deaths come first, and by themselves: who is gone leaves every chain that another full or level
replica survives, and nothing else is decided, so that nothing delays it. Then repair: level joiners become replicas,
and ranges that have too few get a new one, some at a time. Servers that came are listed as spares, to be filled later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.draft import Draft, Loss, Pair
from coordinator.repair import Limits, start_fills
from coordinator.ring import Node, place
from coordinator.view import REASON_MAX, ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Member, unsafe_transition

_NAMES_SHOWN = 5
_LIMITS = Limits()


class UnsafePlan(AssertionError):
    """The planner broke the law of transitions: a bug in it. Such a view is never written."""


@dataclass(frozen=True)
class Members:
    """The servers registered now, in the cluster called `cluster`; names are distinct."""

    cluster: str
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True)
class Health:
    """What is known of the servers beyond who is registered.

    gone     members that must not be counted on, dead or suspected, each with the evidence
    level    range -> fill id that its tail reported level: valid while it is the view's `since` of the range
    cut      pairs of members that cannot reach each other, though both are well
    pending  members that have not been heard yet: they are given nothing to do
    """

    gone: Mapping[Member, str] = field(default_factory=dict)
    level: Mapping[int, int] = field(default_factory=dict)
    cut: frozenset[Pair] = frozenset()
    pending: frozenset[Member] = frozenset()


_WELL = Health()


@dataclass(frozen=True)
class Plan:
    """A decision: the view to write, or None to leave things as they are, and the reason for people to read.

    lost: the members that leave chains because they are gone.
    """

    view: View | None
    reason: str
    lost: tuple[Member, ...] = ()


@dataclass(frozen=True)
class RosterPlan:
    """The roster to write, and why."""

    roster: Roster
    reason: str


def plan(
    view: View | None, members: Members, config: ClusterConfig, health: Health = _WELL, limits: Limits = _LIMITS
) -> Plan | None:
    """The next step from `view` (None: none was ever written). None when all is well as it is.

    UnsafePlan if it is one that `unsafe_transition` refuses, which only a bug here can bring about.
    """
    if view is None:
        return _first(members, config, health)
    return _Step(view, members, health).decide(limits)


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


def _first(members: Members, config: ClusterConfig, health: Health) -> Plan:
    present = [server for server in members.servers if server.member not in health.gone]
    count = len(present)
    if count < config.min_servers:
        return Plan(None, f"waiting for servers: {count} of {config.min_servers} registered")
    servers = tuple(sorted(present, key=lambda server: server.name))
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


class _Step:
    """One decision in progress.

    present  the servers registered now, by name, less those known to be gone
    lost     members that are listed and gone, with the evidence: health's, or that their name has a newer incarnation
    """

    def __init__(self, view: View, members: Members, health: Health) -> None:
        self.view = view
        self.health = health
        self.present = {s.name: s for s in members.servers if s.member not in health.gone}
        self.lost: dict[Member, str] = {}
        for server in view.servers:
            now = self._newer(server)
            if now is not None:
                self.lost[server.member] = f"came back as incarnation {now.incarnation}"
            elif server.member in health.gone:
                self.lost[server.member] = health.gone[server.member]
        self.draft = Draft(view.as_chains, (s.member for s in self.present.values()))

    def decide(self, limits: Limits) -> Plan | None:
        before = self.draft.owners
        loss = self.draft.lose(self.lost, self.health.level, self.health.cut)
        failover = bool(self.draft.changed.any())
        servers = self._listed()
        if failover:
            done = self._loss_reasons(loss)
        else:
            done = self._repair(servers, limits)
        reasons = [*done, *self._list_reasons(servers, before), *self._waiting(loss)]
        reason = "; ".join(reasons)[:REASON_MAX]
        if not self.draft.changed.any() and servers == self.view.servers:
            return Plan(None, reason) if reason else None
        lost = tuple(m for m in loss.removed if m in self.lost)
        return Plan(self._checked(servers, reason), reason, lost)

    def _newer(self, server: ServerInfo) -> ServerInfo | None:
        now = self.present.get(server.name)
        return now if now is not None and now.incarnation > server.incarnation else None

    def _listed(self) -> tuple[ServerInfo, ...]:
        """Owners as they are, then spares that are still here, then new spares by name. Each name once: a name whose
        old incarnation may be the last to have some range stays with that."""
        owners = self.draft.owners
        kept = []
        for server in self.view.servers:
            if server.member in owners or server.member not in self.lost:
                kept.append(server)
            elif (now := self._newer(server)) is not None:
                kept.append(now)
        new = [self.present[name] for name in sorted(self.present) if self.view.index(name) < 0]
        return (*kept, *new)

    def _repair(self, servers: Sequence[ServerInfo], limits: Limits) -> list[str]:
        draft = self.draft
        promoted = draft.promote(self.health.level)
        before = draft.joining.copy()
        live = [s for s in servers if s.member not in self.lost]
        able = {s.member: Node(s.name, s.weight, s.zone) for s in live if s.member not in self.health.pending}
        started = start_fills(draft, able, limits, self.health.cut)
        waiting = int(np.count_nonzero((draft.lengths < draft.replicas) & (draft.joining < 0)))
        if not promoted and not started:
            if not waiting or len(live) >= draft.replicas:
                return []
            return [f"{waiting} ranges have fewer than {draft.replicas} replicas, with {len(live)} servers left"]
        parts = [f"{promoted} ranges got a level replica"] if promoted else []
        if started:
            fresh = np.unique(draft.joining[draft.joining != before])
            names = _names(sorted(draft.members[i].name for i in fresh))
            parts.append(f"{started} fillings started on {names}")
        under_way = int(np.count_nonzero(draft.joining >= 0))
        return [f"repair: {', '.join(parts)}; {under_way} under way, {waiting} to follow"]

    def _loss_reasons(self, loss: Loss) -> list[str]:
        reasons = []
        if lost := [m for m in loss.removed if m in self.lost]:
            text = f"{_evidence(lost, self.lost)}: {loss.heads} ranges have a new head"
            if loss.promoted:
                text += f", {loss.promoted} level replicas take their places"
            text += f", {loss.restarted} fillings start again"
            reasons.append(text + (f", {loss.ended} are given up" if loss.ended else ""))
        if loss.parted:
            pairs = [f"{a.name} and {b.name}" for a, b in sorted(self.health.cut)]
            reasons.append(f"{_names(pairs)} cannot reach each other: {loss.parted} ranges go on without the second")
        return reasons

    def _list_reasons(self, servers: Sequence[ServerInfo], owners: Collection[Member]) -> list[str]:
        old = {s.name: s for s in self.view.servers}
        new = {s.name: s for s in servers}
        left = [old[name].member for name in old if name not in new and old[name].member not in owners]
        back = [n for n in new if n in old and new[n].incarnation != old[n].incarnation]
        joined = [n for n in new if n not in old]
        reasons = [f"{_names(joined)} joined as spare"] if joined else []
        reasons += [f"{_names([m.name for m in left])} left, spare ({self.lost[left[0]]})"] if left else []
        return reasons + ([f"{_names(back)} came back, spare"] if back else [])

    def _waiting(self, loss: Loss) -> list[str]:
        """Who is waited for, and by how many ranges."""
        reasons = []
        for member in sorted(self.lost):
            index = self.draft.members.index(member)
            held = int((self.draft.chains[loss.stuck] == index).any(axis=1).sum())
            if held and (now := self.present.get(member.name)) is not None:
                reasons.append(
                    f"{member.name} came back as incarnation {now.incarnation} without the data of "
                    f"incarnation {member.incarnation}: {held} ranges wait"
                )
            elif held:
                reasons.append(f"{member.name} is gone ({self.lost[member]}): {held} ranges wait for it")
        return reasons

    def _checked(self, servers: tuple[ServerInfo, ...], reason: str) -> View:
        old = self.view
        chains = self.draft.build([s.member for s in servers])
        problem = unsafe_transition(old.as_chains, chains, self.health.level)
        if problem:
            raise UnsafePlan(f"view {chains.epoch} ({reason}) must not follow: {problem}")
        return View(
            cluster=old.cluster,
            epoch=chains.epoch,
            ranges=old.ranges,
            replicas=old.replicas,
            servers=servers,
            chains=chains.chains,
            joining=chains.joining,
            since=chains.since,
            reason=reason,
        )


def _evidence(lost: Sequence[Member], why: Mapping[Member, str]) -> str:
    """Who is lost and how we know; said once if it is the same for all."""
    if len({why[m] for m in lost}) == 1:
        return f"{_names([m.name for m in lost])} lost ({why[lost[0]]})"
    return _names([f"{m.name} ({why[m]})" for m in lost]) + " lost"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
