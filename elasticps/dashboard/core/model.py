"""A cluster as the page shows it: events of store and servers go in, plain values for viewers come out. Pure.

Every method that takes an event takes the Unix time at which it came. Memory is bounded: an hour of samples and
entries, and servers that have left for some minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.core.cluster_state import ClusterState, Drain
from coordinator.core.planner import Members
from coordinator.core.store import Change
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View
from elasticps.dashboard.core import ring
from elasticps.dashboard.core.fleet import Fleet
from elasticps.dashboard.core.history import History
from elasticps.dashboard.core.past import PastSamples
from elasticps.dashboard.core.samples import CLUSTER_COLUMNS, SERVER_COLUMNS, Samples
from elasticps.dashboard.core.tables import TableStates
from elasticps.dashboard.core.timeline import Recoveries, Timeline, TimelineEntry, names

Update = tuple[str, Any]
"""A kind of message and its content, as the page gets them."""

URGENT_S = 2.0  # after a loss: so long servers are asked as often as can be, for when they went on


class Model:
    """One cluster. `take_updates` gives what viewers that had the last `snapshot` or news do not know yet."""

    def __init__(self, name: str, now: float, samples: int = 3600) -> None:
        self.name = name  # the cluster's
        self._store = ClusterState(name)  # what the store says
        self.view: View | None = None  # the newest
        self.config: ClusterConfig | None = None  # as it was created
        self.fleet = Fleet()  # servers
        self.tables = TableStates()  # in the store and at the servers
        self.timeline = Timeline()  # entries for people
        self._recoveries = Recoveries(self.timeline)  # losses under way
        self._samples = Samples(samples)  # rates, second by second
        self._roster: Roster | None = None  # workers
        self._leader = ""  # the coordinator that leads; "" if none
        self._checkpoint: dict[str, Any] | None = None  # the newest, by the store
        self._checkpoints: dict[str, Any] | None = None  # found where they are stored
        self._store_error = "not asked yet"  # "" while etcd answers
        self._store_since = now  # when it began or ceased to answer
        self._outage: TimelineEntry | None = None  # of etcd, while it lasts
        self._restore: TimelineEntry | None = None  # from a checkpoint, while it lasts
        self._peak = 0  # of copies under way since nothing was last
        self._changed: dict[str, None] = {}  # kinds of updates since the last `take_updates`
        self._sent: dict[str, Any] = {}  # the last content of each kind
        self._drawn: tuple[View, dict[str, Any]] | None = None  # the view that was drawn last

    # --- the store --------------------------------------------------------------------------------------------------

    def follow(self, now: float, change: Change) -> None:
        """Takes a change of the store. Entries that make no sense are left out: others report them."""
        before, state = self._store, self._store.apply(change)
        self._store = state
        self.config = state.config or self.config
        if state.leader or not state.term:  # a leader may have left no name
            self._elect(now, state.leader)
        if state.checkpoint is not None and state.checkpoint != before.checkpoint:
            self._newest_checkpoint(now, *state.checkpoint)
        if state.failover is not None and state.failover != before.failover:
            self._recoveries.detected(state.failover.epoch, state.failover.written - state.failover.detected)
        if state.restoring != before.restoring:
            self._restoring(now, state.restoring)
        if state.servers is not before.servers:
            self._register(now, before.servers, state.servers)
        if state.drains is not before.drains:
            self._drain(now, before.drains, state.drains)
        if state.tables is not before.tables or state.rates is not before.rates:
            self.tables.follow(state.tables, state.rates)
            self._change("tables")
        if state.roster is not None and state.roster is not before.roster:
            self._enrol(now, state.roster)
        if state.view is not None and state.view is not before.view:  # last: its entry names the servers that are there
            self._adopt(now, state.view)

    def store_answers(self, now: float) -> None:
        """Notes that the store answers."""
        if self._outage is not None:
            self.timeline.end(self._outage, now)
            self._outage = None
        if self._store_error:
            self._store_error, self._store_since = "", now
            self._change("state")

    def store_fails(self, now: float, error: str) -> None:
        """Notes that the store gives no answer."""
        if self._outage is None:
            self._outage = self.timeline.note(now, "outage", "etcd does not answer", error, lasts=True)
            self._store_since = now
        self._store_error = error
        self._change("state")

    # --- what it says -----------------------------------------------------------------------------------------------

    def _adopt(self, now: float, view: View) -> None:
        before = self.view
        if before is not None and view.cluster != before.cluster:
            self.timeline.note(now, "view", "another cluster has this name now", view.reason, epoch=view.epoch)
            before = None
        elif before is not None and view.epoch <= before.epoch:
            return
        self.view = view
        lost, left = self.fleet.adopt(now, before, view)
        for name in (*lost, *left):
            self._recoveries.left(name)
        short, filling, moving = ring.under_way(view)
        if lost and before is not None:
            here = {name for name, server in self.fleet.servers.items() if server.answers}
            self._recoveries.begin(now, before, view, lost, self.fleet.gone, here)
        elif before is None:
            self.timeline.note(now, "view", f"view {view.epoch}", view.reason, epoch=view.epoch)
        elif filling or moving or self._peak:
            self.timeline.repeat("repair", now, f"view {view.epoch}", view.reason, view.epoch)
        else:
            self.timeline.note(now, "view", f"view {view.epoch}", view.reason, epoch=view.epoch)
        copies = short + moving
        self._peak = max(self._peak, copies) if copies else 0
        self._recoveries.look(now, whole=not short)
        self._change("view", "servers", "state")

    def _enrol(self, now: float, roster: Roster) -> None:
        before = self._roster
        if before is not None and before.cluster == roster.cluster and roster.version <= before.version:
            return
        was = {w.id: w.name for w in before.workers} if before is not None else {}
        there = {w.id: w.name for w in roster.workers}
        came, went = there.keys() - was.keys(), was.keys() - there.keys()
        again = {was[i] for i in went} & {there[i] for i in came}
        for title, who in (
            ("came back", again),
            ("joined", {there[i] for i in came} - again),
            ("left", {was[i] for i in went} - again),
        ):
            if who and before is not None:
                self.timeline.note(now, "worker", f"worker{'s' if len(who) > 1 else ''} {names(who)} {title}")
        self._roster = roster
        self._samples.workers.keep(there)
        self._change("workers")

    def _elect(self, now: float, leader: str) -> None:
        if leader == self._leader:
            return
        if leader:
            self.timeline.note(now, "election", f"{leader} leads")
        else:
            self.timeline.note(now, "election", "no coordinator leads", f"{self._leader} gave up, or its lease ended")
        self._leader = leader
        self._change("state")

    def _restoring(self, now: float, begins: bool) -> None:
        if begins:
            self._restore = self.timeline.note(now, "checkpoint", "restore from a checkpoint", lasts=True)
        elif self._restore is not None:
            self.timeline.end(self._restore, now)
            self._restore = None

    def _newest_checkpoint(self, now: float, cut: int, made: float) -> None:
        if cut and (self._checkpoint is None or self._checkpoint["cut"] != cut):
            if self._checkpoint is not None:
                self.timeline.note(now, "checkpoint", f"checkpoint {cut} made")
            self._checkpoint = {"cut": cut, "time": made}
            self._change("checkpoints")

    def _register(self, now: float, before: Mapping[str, ServerInfo], servers: Mapping[str, ServerInfo]) -> None:
        for name, info in servers.items():
            known = self.fleet.servers.get(name)
            if before.get(name) == info:
                continue
            if known is not None and known.info.incarnation < info.incarnation and known.status:
                self.timeline.note(now, "server", f"{name} has registered again", f"as incarnation {info.incarnation}")
            self.fleet.register(now, info)
        self.fleet.registered = servers
        self._change("servers")

    def _drain(self, now: float, before: Mapping[str, Drain], drains: Mapping[str, Drain]) -> None:
        for name, drain in drains.items():
            if name not in before or before[name].member != drain.member:
                self.timeline.note(now, "drain", f"drain of {name} asked")
        for name in before.keys() - drains.keys():
            there = self.fleet.registered.get(name)
            if there is not None and there.member == before[name].member:
                self.timeline.note(now, "drain", f"{name} is asked to drain no more")
        self.fleet.drains = {name: drain.member.incarnation for name, drain in drains.items()}
        self._change("servers")

    # --- the servers ------------------------------------------------------------------------------------------------

    def status(self, now: float, name: str, incarnation: int, answer: Mapping[str, Any]) -> None:
        """Takes a server's status (StatusResponse)."""
        silent_s = self.fleet.answered(now, name, incarnation, answer)
        if silent_s is None:
            return
        if silent_s >= 1.0:
            self.timeline.note(now - silent_s, "server", f"{name} did not answer for {silent_s:.1f} s").until = now
        self._recoveries.status(now, name, answer["epoch"], answer["pushes"])
        self._change("servers")

    def silent(self, now: float, name: str, incarnation: int, error: str) -> None:
        """A server gave no answer, or its connection broke."""
        if self.fleet.is_silent(now, name, incarnation, error):
            self._change("servers")

    def activity(self, now: float, name: str, answer: Mapping[str, Any]) -> None:
        """Takes a server's traffic (ActivityResponse)."""
        self._samples.activity(now, name, answer)

    def table_statuses(self, answers: Mapping[str, list[dict[str, Any]]]) -> None:
        """Takes the tables' sizes at each server that answers."""
        self.tables.count(answers)
        self._change("tables")

    def catalog(self, found: dict[str, Any]) -> None:
        """Takes the list of checkpoints in storage."""
        if found != self._checkpoints:
            self._checkpoints = found
            self._change("checkpoints")

    def remember(self, past: PastSamples) -> None:
        """Takes samples from before this began; viewers get them with the next snapshot."""
        self._samples.remember(past.cluster, past.servers)

    def urgent(self, now: float) -> set[str]:
        """Servers whose next answer tells when the cluster went on after a loss."""
        recoveries = self._recoveries.under_way
        return set().union(*(r.watched for r in recoveries if now - r.began < URGENT_S))

    def tick(self, now: float) -> None:
        """Takes a sample, once a second."""
        self.fleet.forget(now)
        if self.view is not None:
            self._recoveries.look(now, whole=not ring.under_way(self.view)[0])
        workers = () if self._roster is None else self._roster.workers
        self._samples.take(now, self.fleet.servers, workers)
        self._change("sample")

    # --- what viewers get -------------------------------------------------------------------------------------------

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything but histories of single servers, for a new viewer."""
        kinds = ("state", "view", "servers", "workers", "tables", "checkpoints", "sample")
        return {
            "now": now,
            "columns": {"cluster": CLUSTER_COLUMNS, "server": SERVER_COLUMNS},
            "history": self._samples.cluster.document(),
            "entries": [entry.document() for entry in self.timeline.entries],
            **{kind: self._content(kind) for kind in kinds},
        }

    def take_updates(self) -> list[Update]:
        """What has changed since the last call, each kind once."""
        found: list[Update] = []
        for kind in self._changed:
            content = self._content(kind)
            if kind in ("sample", "view") or self._sent.get(kind) != content:
                found.append((kind, content))
            if kind not in ("sample", "view"):
                self._sent[kind] = content
        self._changed.clear()
        return found + [("entry", entry) for entry in self.timeline.take()]

    @property
    def workers(self) -> int:
        """The number of workers."""
        return 0 if self._roster is None else len(self._roster.workers)

    def server_history(self, name: str) -> History | None:
        """One server's history; None if there is no server of that name."""
        return self._samples.servers.get(name)

    def members(self) -> Members:
        """The registered servers, as the planner sees them."""
        servers = self._store.registered
        return Members(self.name, servers, self._store.draining & {server.member for server in servers})

    def _change(self, *kinds: str) -> None:
        self._changed.update(dict.fromkeys(kinds))

    def _content(self, kind: str) -> Any:
        if kind == "state":
            return self._state()
        if kind == "view":
            return self._view()
        if kind == "servers":
            return self.fleet.document()
        if kind == "workers":
            workers = () if self._roster is None else self._roster.workers
            return [{"id": w.id, "name": w.name, "app": w.app, "incarnation": w.incarnation} for w in workers]
        if kind == "tables":
            return self.tables.document()
        if kind == "checkpoints":
            return {"newest": self._checkpoint, "catalog": self._checkpoints}
        return self._samples.newest

    def _view(self) -> dict[str, Any] | None:
        view = self.view
        if view is None:
            return None
        if self._drawn is None or self._drawn[0] is not view:
            self._drawn = view, ring.draw(view)
        short, filling, moving = ring.under_way(view)
        return {**self._drawn[1], "short": short, "filling": filling, "moving": moving, "peak": self._peak}

    def _state(self) -> dict[str, Any]:
        return {
            "cluster": self.name,
            "store_error": self._store_error,
            "store_since": self._store_since,
            "leader": self._leader,
            "epoch": 0 if self.view is None else self.view.epoch,
            "reason": "no view has been formed" if self.view is None else self.view.reason,
        }
