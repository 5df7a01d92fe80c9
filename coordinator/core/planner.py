"""Decides the next view and roster, and why. Pure: the leader writes what is decided here.

One view is one step. Deaths come first, and alone: a member that is gone leaves every chain that has another full or
level replica, and nothing else is decided, so that nothing delays it. Then repair: level joiners become replicas, and
ranges with too few replicas get a new one, some ranges at a time. Then servers that drain are emptied. Then loads are
evened out, for instance after a server came. All that is under way is in the view: a new leader goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.core import reasons
from coordinator.core.balance import even_out, missing, start_moves
from coordinator.core.differences import LONGEST_ROSTER_DIFFERENCE
from coordinator.core.draft import Draft, Flags, Pair, Removal
from coordinator.core.reasons import names
from coordinator.core.repair import Capacity, Limits, start_fills, start_restores
from coordinator.core.ring import Node, place
from coordinator.core.store import VALUE_MAX
from coordinator.core.view import SERVERS_MAX, WORKERS_MAX, ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Chains, CopyState, Member, Ranges, unsafe_transition

_LIMITS = Limits()
_ROSTER_BYTES = VALUE_MAX - LONGEST_ROSTER_DIFFERENCE  # both are written at once
_SURELY_FITS = 4096  # workers with the longest names there are


class UnsafePlan(AssertionError):
    """The planner broke the law of transitions: a bug in it. Such a view is never written."""


@dataclass(frozen=True)
class Members:
    """The servers registered now, in the cluster with the identity `cluster`; names are distinct.

    draining     incarnations that were asked to hand over all they hold
    recoverable  ranges that are restored from a checkpoint when no member is left that has them and could come back
    given_up     members that cannot come back, as a person says
    restores     rows come back from a checkpoint; moves would slow that down, so nothing is evened out
    leaving      those of `draining` whose processes are about to end: if all drain, none of these stays
    """

    cluster: str
    servers: tuple[ServerInfo, ...]
    draining: frozenset[Member] = frozenset()
    recoverable: frozenset[int] = frozenset()
    given_up: frozenset[Member] = frozenset()
    restores: bool = False
    leaving: frozenset[Member] = frozenset()


@dataclass(frozen=True)
class Health:
    """What is known of the servers, beyond their registrations.

    gone      members that must not be counted on, dead or suspected, each with the evidence
    level     fill ids by range, of joiners reported level: valid while the fill id is the view's `since` of the range
    cut       pairs of members that cannot reach each other, though both are well
    stalled   pairs of members of which one could not fill the other: given up, and not tried again for a while
    pending   members that have not been heard yet: they are not listed, or if they are, get no ranges
    capacity  for how many more ranges members have memory; a member that is not in it has no limit
    silent    those of `gone` that may live: only their silence says otherwise
    overdue   those of `silent` that are no longer expected back
    spent     fill ids by range, of late copies whose missing operations no server has any more
    alone     members that have been, for a while, the single replica of ranges since up to an epoch
    epochs    of the views that the members follow that are heard now, 0 for none
    ripe      False: level joiners may wait a little for others under way, so that one view promotes all
    """

    gone: Mapping[Member, str] = field(default_factory=dict)
    level: Mapping[int, int] = field(default_factory=dict)
    cut: frozenset[Pair] = frozenset()
    stalled: frozenset[Pair] = frozenset()
    pending: frozenset[Member] = frozenset()
    capacity: Mapping[Member, Capacity] = field(default_factory=dict)
    silent: frozenset[Member] = frozenset()
    overdue: frozenset[Member] = frozenset()
    spent: Mapping[int, int] = field(default_factory=dict)
    alone: Mapping[Member, int] = field(default_factory=dict)
    epochs: Mapping[Member, int] = field(default_factory=dict)
    ripe: bool = True


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
    """Decides the next step from `view` (None: none was ever written). Returns None if nothing is to be done.

    Raises UnsafePlan for a step that `unsafe_transition` refuses, which only a bug here can cause.
    """
    if view is None:
        return _first(members, config, health)
    return _Step(view, members, health).decide(limits)


def plan_roster(roster: Roster | None, workers: Iterable[WorkerInfo], cluster: str = "") -> RosterPlan | None:
    """Decides the next roster if the workers registered now are not those of `roster` (None: none was ever written).

    It never plans a roster that is too large for the store: listed workers stay, and newcomers wait for room, lowest
    ids first. Nor one with an id or a name twice: workers choose what they register, so the listed worker is right.
    """
    before = () if roster is None else roster.workers
    known = {worker.id for worker in before}  # an id is never used again
    listed = frozenset(before)
    found = sorted(workers, key=lambda worker: (worker not in listed, worker.id))
    ordered = _distinct(found)
    made = _roster(1 if roster is None else roster.version + 1, ordered, cluster)
    if made.workers == before:
        return None
    present = {worker.id for worker in made.workers}
    joined = [worker.name for worker in made.workers if worker.id not in known]
    left = [worker.name for worker in before if worker.id not in present]
    parts = [f"{names(some)} {verb}" for some, verb in ((joined, "joined"), (left, "left")) if some]
    waiting = len(ordered) - len(made.workers)
    parts += [f"{waiting} workers wait: the roster is full"] if waiting else []
    wrong = len(found) - len(ordered)
    parts += [f"{wrong} left out: others have their ids or names"] if wrong else []
    return RosterPlan(made, "; ".join(parts))


def _distinct(workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Returns the first worker of each id and each name."""
    ids: set[int] = set()
    names_: set[str] = set()
    found = []
    for worker in workers:
        if worker.id not in ids and worker.name not in names_:
            ids.add(worker.id)
            names_.add(worker.name)
            found.append(worker)
    return found


def _roster(version: int, ordered: Sequence[WorkerInfo], cluster: str) -> Roster:
    """Returns a roster of the first of these workers, as many as fit."""
    count = min(len(ordered), WORKERS_MAX)
    while True:
        roster = Roster(version, tuple(sorted(ordered[:count], key=lambda worker: worker.id)), cluster)
        size = len(roster.encode()) if count > _SURELY_FITS else 0
        if size <= _ROSTER_BYTES:
            return roster
        count = max(_SURELY_FITS, count * _ROSTER_BYTES // size - 1)


def _first(members: Members, config: ClusterConfig, health: Health) -> Plan:
    present = [server for server in members.servers if server.member not in health.gone]
    present = [server for server in present if server.member not in members.draining] or present
    present = sorted(present, key=lambda server: server.name)[:SERVERS_MAX]
    count = len(present)
    if count < config.min_servers:
        return Plan(None, f"waiting for servers: {count} of {config.min_servers} registered")
    dead = health.gone.keys() - health.silent
    if unheard := [s.name for s in members.servers if s.member in health.pending - dead]:
        # A server that follows a view already shows that this would not be the first one.
        return Plan(None, f"waiting to hear {names(sorted(unheard))} before the first view")
    servers = tuple(present)
    nodes = {server.member: _node(server) for server in servers}
    reason = f"first view: {config.ranges} ranges on {count} servers, {config.replicas} replicas each"
    if count < config.replicas:
        reason += f" wanted, {count} possible"
        reason = reasons.whole_reason([reason], reasons.too_few(config.ranges, config.replicas, count))
    chains = even_out(place(list(nodes.values()), config.ranges, config.replicas), tuple(nodes), nodes)
    view = View(
        cluster=members.cluster,
        epoch=1,
        ranges=config.ranges,
        replicas=config.replicas,
        servers=servers,
        chains=chains,
        joining=np.full(config.ranges, -1, np.int32),
        since=np.ones(config.ranges, np.int64),
        reason=reason,
    )
    return Plan(view, reason)


class _Step:
    """One decision in progress, from a view and what health says to the draft of the next view.

    present   the servers registered now, by name, less those known to be gone
    lost      members that are listed and gone, with the evidence: health's, or that their name has a newer incarnation,
              which proves it even when that one is gone too; silent: those that may live
    known     all who may be in the next view; of them, those not lost:
    serving   who is not asked to drain
    draining  who is; last: one that was asked to, and cannot as there is nobody else
    restores  whether servers bring rows back now; drain_requests, leaving: who was asked to drain, and says so
    ended     of the lost, who cannot come back as they were; recoverable: ranges to recover if these alone had
              them
    """

    def __init__(self, view: View, members: Members, health: Health) -> None:
        self.view = view
        self.health = health
        self.present = {s.name: s for s in members.servers if s.member not in health.gone}
        self.lost: dict[Member, str] = {}
        newest = {s.name: s.incarnation for s in members.servers}
        for server in view.servers:
            if newest.get(server.name, 0) > server.incarnation:
                too = "" if server.name in self.present else ", which is gone too"
                self.lost[server.member] = f"came back as incarnation {newest[server.name]}{too}"
            elif server.member in health.gone:
                self.lost[server.member] = health.gone[server.member]
        self.silent = {m for m in health.silent if self.lost.get(m) == health.gone[m]}
        registered = {s.member for s in members.servers}
        self.ended = (self.lost.keys() - self.silent - registered) | (self.lost.keys() & members.given_up)
        self.recoverable = members.recoverable
        self.restores = members.restores
        self.draft = Draft(view.as_chains, (s.member for s in self.present.values()), view.leaving)
        self.drain_requests, self.leaving = members.draining, members.leaving
        self.known: list[ServerInfo] = []
        self.serving: dict[Member, ServerInfo] = {}
        self.draining: frozenset[Member] = frozenset()
        self.last: Member | None = None
        self.homeless = 0  # ranges to recover, for which no server has memory

    def decide(self, limits: Limits) -> Plan | None:
        before = self.draft.owners
        removal = self.draft.lose(self.lost, self.health.level, self.health.cut, self.silent)
        given_up = self._given_up(removal)
        self.draft.empty(given_up)
        self._sort()
        if self.draft.changed.any():
            done = reasons.losses(removal, self.lost, self.health.cut, len(given_up))
        else:
            done = self._progress(limits)
        servers = self._listed()
        done += self._list_reasons(servers, before)
        standing = reasons.standing_part(self._standing(np.setdiff1d(removal.stuck, given_up)))
        if not self.draft.changed.any() and servers == self.view.servers:
            if standing == reasons.standing_of(self.view.reason):
                return Plan(None, standing) if standing else None
            done = ["nothing has changed" if standing else "nothing waits any more"]
        reason = reasons.whole_reason(done, standing)
        lost = tuple(m for m in removal.removed if m in self.lost)
        return Plan(self._checked(servers, reason), reason, lost)

    def _given_up(self, removal: Removal) -> Ranges:
        """Returns the ranges to recover: no member that has all acknowledged operations can come back."""
        ended = np.array([*(m in self.ended for m in self.view.as_chains.members), True])
        stuck = removal.stuck[ended[self.view.as_chains.copies[removal.stuck]].all(axis=1)]
        return stuck[np.isin(stuck, list(self.recoverable))]

    def _newer(self, server: ServerInfo) -> ServerInfo | None:
        now = self.present.get(server.name)
        return now if now is not None and now.incarnation > server.incarnation else None

    def _sort(self) -> None:
        """Returns the servers that may be in the next view: owners as they are, then spares that are still here, then
        new servers by name. Each name comes once: if its old incarnation may be the last with some range, the name
        stays with that. A new server is listed once it is heard: a key outlives its server, and a new leader does not
        know yet which servers live."""
        owners = self.draft.owners
        for server in self.view.servers:
            now = self._newer(server)
            if server.member in owners or server.member not in self.lost:
                self.known.append(server)
            elif now is not None and now.member not in self.health.pending:
                self.known.append(now)
        new = [self.present[name] for name in sorted(self.present) if self.view.index(name) < 0]
        heard = [server for server in new if server.member not in self.health.pending]
        self.known += heard[: SERVERS_MAX - len(self.known)]
        here = {s.member: s for s in self.known if s.member not in self.lost}
        candidates = self.drain_requests & here.keys()
        self.last = self._last(candidates) if len(candidates) == len(here) else None
        self.draining = candidates - {self.last}
        self.serving = {m: s for m, s in here.items() if m not in self.draining}

    def _last(self, candidates: Iterable[Member]) -> Member | None:
        """Returns the member that stays when all are asked to drain: the one that holds most, so that the choice stays
        the same until the others have left. A member that is about to end is chosen only if all are."""
        chains, members = self.draft.chains, self.draft.members
        held = np.bincount(chains[chains >= 0], minlength=len(members))
        return min(candidates, key=lambda m: (m in self.leaving, -held[members.index(m)], m), default=None)

    def _listed(self) -> tuple[ServerInfo, ...]:
        """Returns the servers of the next view, without those that have drained."""
        owners = self.draft.owners
        return tuple(s for s in self.known if s.member in owners or s.member in self.serving)

    # -- progress ---------------------------------------------------------------------------------------------------

    def _progress(self, limits: Limits) -> list[str]:
        """Plans repair, then drains, then balance; returns the reasons."""
        draft, health = self.draft, self.health
        draft.give_up(self.draining)
        stopped, apart = draft.stop(health.stalled, health.level), health.cut | health.stalled
        back = draft.returned(self.lost, health.cut)
        ended = self.lost.keys() - self.silent
        confirmed = draft.confirm(health.alone, ended, back)
        returned, lost = draft.fetch(self.lost, ended, health.overdue, health.cut, health.spent)
        begun = draft.begin(health.level) if health.ripe else 0
        before, full = draft.joining.copy(), draft.lengths == draft.replicas
        if health.ripe or self._listed() != self.view.servers:
            level = {
                r: fill
                for r, fill in health.level.items()
                if self.view.copy_state[r] in (CopyState.NONE, CopyState.CATCHING_UP)
            }
            draft.promote(level | back, self.draining)
        came = (before >= 0) & (draft.joining < 0)
        if not any(server.member in health.pending for server in self.present.values()):
            draft.release(self.draining, self.serving)
        able = {m: _node(s) for m, s in self.serving.items() if m not in health.pending}
        self.homeless = start_restores(draft, able, health.capacity)
        # Ranges that only draining servers have are as urgent as ranges without replicas; the rest can wait.
        # Who has not been heard yet may be well: what it holds is no reason to move anything.
        unsafe, heard = draft.only_at(self.draining), not (health.pending & draft.owners)
        start_fills(draft, able, limits, apart, self.draining, health.capacity, unsafe)
        if heard:
            start_moves(draft, able, self.draining, limits, apart, even=False, capacity=health.capacity, rows=unsafe)
        fills = start_fills(draft, able, limits, apart, self.draining, health.capacity)
        repairs = (draft.joining >= 0) & (draft.lengths < draft.replicas) & (draft.lengths > 0)
        if not fills.later and heard and draft.lengths.all():
            even = not (self.restores or repairs.any())
            start_moves(draft, able, self.draining, limits, apart, even=even, capacity=health.capacity)
        if not draft.changed.any():
            return []
        return [
            *reasons.stalled(stopped),
            *reasons.confirmed(confirmed),
            *reasons.fetched(returned, lost),
            *reasons.restores(draft, begun),
            *reasons.repairs(draft, int(np.count_nonzero(came & ~full)), repairs & (draft.joining != before)),
            *reasons.drains(draft, self.draining),
            *reasons.moves(draft, int(np.count_nonzero(came & full)), missing(draft, able, self.draining)),
        ]

    # -- reasons ----------------------------------------------------------------------------------------------------

    def _list_reasons(self, servers: Collection[ServerInfo], owners: Collection[Member]) -> list[str]:
        old = {s.name: s for s in self.view.servers}
        new = {s.name: s for s in servers}
        left = [old[name].member for name in old if name not in new]
        drained = [m.name for m in left if m in self.draining]
        spare = [m for m in left if m not in self.draining and m not in owners]
        back = [n for n in new if n in old and new[n].incarnation != old[n].incarnation]
        busy = self.draft.owners
        joined = [n for n in new if n not in old and new[n].member not in busy]
        reasons = [f"{names(joined)} joined"] if joined else []
        reasons += [f"{names([m.name for m in spare])} left, spare ({self.lost[spare[0]]})"] if spare else []
        reasons += [f"{names(drained)} drained: it may stop"] if drained else []
        return reasons + ([f"{names(back)} came back, spare"] if back else [])

    def _standing(self, stuck: Ranges) -> list[str]:
        """Says what cannot be done now: which members are waited for, by how many ranges, and how many servers lack."""
        draft, parts = self.draft, []
        waited = self.view.as_chains.copies[stuck]
        for member in sorted(self.lost):
            held = int((waited == draft.members.index(member)).any(axis=1).sum())
            if held and (now := self.present.get(member.name)) is not None:
                parts.append(
                    f"{member.name} came back as incarnation {now.incarnation} without the data of "
                    f"incarnation {member.incarnation}: {held} ranges wait"
                )
            elif held:
                parts.append(f"{member.name} is gone ({self.lost[member]}): {held} ranges wait for it")
        late = draft.joining[stuck][draft.copy_state[stuck] == CopyState.LATE]
        for index, count in zip(*np.unique(late, return_counts=True), strict=True):
            name = draft.members[index].name
            parts.append(f"{name} has a copy of {count} of them, without what was acknowledged since it fell silent")
        if self.homeless:
            parts.append(f"{self.homeless} ranges cannot come back from a checkpoint: no server can take them")
        short = int(np.count_nonzero(draft.lengths < draft.replicas))
        if short and len(self.serving) < draft.replicas:
            parts.append(reasons.too_few(short, draft.replicas, len(self.serving)))
        parts += reasons.no_memory(draft, self.serving, self.draining, self.health.capacity)
        if self.last is not None:
            parts.append(f"{self.last.name} cannot be drained: it is the last server")
        return parts

    # -- the view ---------------------------------------------------------------------------------------------------

    def _checked(self, servers: tuple[ServerInfo, ...], reason: str) -> View:
        old, draft = self.view, self.draft
        chains = draft.build([s.member for s in servers])
        problem = _unlawful(old.as_chains, chains, self.health.level, self.ended)
        if problem:
            raise UnsafePlan(f"view {chains.epoch} ({reason}) must not follow: {problem}")
        again = [now for server in servers if (now := self._newer(server)) is not None]
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
            leaving=draft.indices([s.member for s in servers])[draft.intended],
            copy_state=chains.copy_state,
            recovery_epoch=chains.recovery_epoch,
            empty=tuple((server.name, server.incarnation) for server in again),
        )


def _node(server: ServerInfo) -> Node:
    return Node(server.name, server.weight, server.zone)


def _unlawful(old: Chains, new: Chains, level: Mapping[int, int], ended: Collection[Member]) -> str:
    """Calls `unsafe_transition` for the ranges that changed alone: it takes its time for each."""
    at = {m: i for i, m in enumerate(new.members)}
    index = np.array([*(at.get(m, -2) for m in old.members), -1])
    same: Flags = (index[old.chains] == new.chains).all(axis=1) & (index[old.joining] == new.joining)
    rows = np.flatnonzero(
        ~same
        | (old.since != new.since)
        | (old.copy_state != new.copy_state)
        | (old.recovery_epoch != new.recovery_epoch)
    )

    def only(view: Chains) -> Chains:
        chains, joining, since, state = view.chains[rows], view.joining[rows], view.since[rows], view.copy_state[rows]
        return Chains(view.epoch, view.members, chains, joining, since, state, view.recovery_epoch[rows])

    some = {i: level[r] for i, r in enumerate(rows.tolist()) if r in level}
    if not unsafe_transition(only(old), only(new), some, ended):
        return ""
    return unsafe_transition(old, new, level, ended)
