"""Plays a story from beginning to end: training under faults, then rest, then a check of everything that is stored."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from chaos.sim.checkpointer import PLACE, Checkpointer, ask_restore
from chaos.sim.checks.counts import CountedPushes
from chaos.sim.checks.cuts import CutCheck
from chaos.sim.checks.growth import Growth
from chaos.sim.checks.rounds import Rounds
from chaos.sim.checks.shards import Handed
from chaos.sim.checks.sums import KEYS, Sums
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import Cluster
from chaos.sim.cuts import Cutter
from chaos.sim.faults import inject
from chaos.sim.following import Followers
from chaos.sim.growing import LAG_S, LEAD_S, Growing
from chaos.sim.injector import RESTART_S, Injector
from chaos.sim.large import KEYS_PER_RANGE, Counting, Waves, check_all, enlarged
from chaos.sim.monitor import OutOfTime, StoryMonitor
from chaos.sim.programs import Free, Sharded, Synchronous, Worker, sums_table
from chaos.sim.small_limits import turned
from chaos.sim.story import ANY, FLAGS, SIZES, App, Kind, Story, tell
from chaos.sim.tables import Fickle, Known
from chaos.sim.threads import Threads
from coordinator.core import differences
from coordinator.core.view import ClusterConfig
from elasticps import store as table_store
from elasticps.admin.admin_pb2 import RestoreRequest, RestoreResponse
from elasticps.checkpoint import catalog, range_recovery
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.storage import Storage
from elasticps.model.spec import ASP
from elasticps.server.core.audit import digest
from elasticps.server.core.operations import AuditMark
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.server.server import Server
from replication.effects import Distrust

SETTLED_S = 1.0  # after so long all replicas have what no worker waits for
BOUND_S = 25.0  # after faults have ended, everything must have come to rest


@dataclass(frozen=True)
class Result:
    """The result of one seed. invariant: the promise that was broken, "" if none was; story: where and how."""

    seed: int
    kind: Kind = ANY
    invariant: str = ""
    story: str = ""
    flavour: str = ""
    events: int = 0
    views: int = 0
    steps: int = 0
    pulls: int = 0
    rounds: int = 0
    shards: int = 0
    cuts: int = 0
    ended_s: float = 0.0
    digest: int = 0
    trace: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.invariant

    def __str__(self) -> str:
        if self.ok:
            return f"seed {self.seed}: {self.steps} steps, {self.pulls} pulls, {self.views} views"
        return f"seed {self.seed} ({self.flavour}): {self.story}\nreplay it: elasticps sim{self.options} --trace"

    @property
    def options(self) -> str:
        """The options of the command that repeats the story."""
        kind = self.kind
        flavour = f" --flavour {kind.flavour}" * bool(kind.flavour)
        training = f" --training {kind.training!r}" * bool(kind.training)
        flags = "".join(f" --{name}" for name in FLAGS if getattr(kind, name))
        sizes = "".join(f" --{name} {getattr(kind, name)}" for name in SIZES if getattr(kind, name))
        return f"{flavour}{training}{flags}{sizes} --seed {self.seed}"


@dataclass
class Models:
    """What the checks know of each application, by its name: by how it trains; known: of tables that come and go, by
    their ids."""

    sums: dict[str, Sums] = field(default_factory=dict)
    rounds: dict[str, Rounds] = field(default_factory=dict)
    handed: dict[str, Handed] = field(default_factory=dict)
    counts: dict[str, CountedPushes] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)


class Scene:
    """One story under way. on: workers begin new steps."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.on = True
        config = ClusterConfig(ranges=story.ranges, replicas=story.replicas, min_servers=story.servers)
        self.cluster = Cluster(story.seed, story.weather, config, story.calm, proven=story.proven)
        if story.drain_timeout_s is not None:
            self.cluster.drain_timeout_s = story.drain_timeout_s
        self.models = Models()
        self.cluster.on_roster = self._roster
        lag_s, lead_s = LAG_S[story.calm], LEAD_S[story.calm]
        self.growth = Growth(story.ranges, self.cluster.wall_s, self.cluster.broken, lag_s, lead_s)
        self.workers: dict[str, Worker] = {}
        self._doubled: dict[str, list[Worker]] = {}  # those before them that lived as they started
        self._app_of: dict[str, App] = {}
        self.processes: dict[str, Threads] = {}
        self.injector = Injector(self.cluster, self.processes, self.restart, self.double)
        check = CutCheck(self.models.sums, self.models.rounds, self._tables)
        self.cutter = Cutter(
            self.cluster, check, lambda: self.on, story.flavour == "calm", max(app.think_s for app in story.apps)
        )
        if story.cuts:
            self.cluster.on_server = lambda server: check.follow(server, self.cluster.broken)
        # Where tables grow, cuts are those of checkpoints.
        self.checkpointer = Checkpointer(self.cluster, lambda: self.on) if story.cuts and story.grows else None
        self.followers = Followers(self.cluster, story, self.models.sums, lambda: self.on)
        if story.grows:
            self.cluster.on_build = self.growth.follow
            self.cluster.wrong_clocks = dict([story.wrong_clock])

    def _roster(self, counted: set[int]) -> None:
        for sums in self.models.sums.values():
            sums.follow(counted, self.cluster.clock.now)

    def begin(self) -> None:
        """Starts all processes, and schedules the faults."""
        story = self.story
        for leader in ("c0", "c1"):
            self.cluster.start_leader(leader)
        for i in range(story.servers):
            self.cluster.start_server(f"s{i}")
        for app in story.apps:
            for i in range(app.workers):
                name = f"{app.name}-w{i}"
                self._app_of[name] = app
                self.workers[name] = self._worker(name)
                if not story.counted:
                    self._start(name)
        self.followers.start()
        if self.checkpointer is not None:
            self.checkpointer.start()
        elif story.cuts:
            self.cutter.start()
        for fault in story.faults:
            self.cluster.clock.at(fault.at_s, inject, self.injector, fault)

    def _worker(self, name: str) -> Worker:
        app, cluster = self._app_of[name], self.cluster
        if app.kind == "rounds":
            rounds = self.models.rounds.setdefault(app.name, Rounds(app.name, few=self.story.few))
            rounds.calm = self.story.calm
            return Synchronous(cluster, name, app, self, rounds)
        if app.kind in ("shards", "shards in rounds"):
            return Sharded(cluster, name, app, self, self.models.handed.setdefault(app.name, Handed(app.name, KEYS)))
        if app.kind == "counted":
            keys = KEYS_PER_RANGE * self.story.ranges
            return Counting(cluster, name, app, self, self.models.counts.setdefault(app.name, CountedPushes(keys)))
        if app.kind == "tables":
            return Fickle(cluster, name, app, self, self.models.known)
        if app.kind == "growing":
            return Growing(cluster, name, app, self, self.growth)
        sums = self.models.sums.setdefault(app.name, Sums(app.name, app.bound if app.kind == "bounded" else None))
        sums.calm = self.story.calm
        return Free(cluster, name, app, self, sums, self.story.tight)

    def _start(self, name: str) -> None:
        if not self.cluster.over:
            self.processes[name] = self.cluster.start_worker(name, self.workers[name].run)

    def restart(self, name: str) -> None:
        """Kills a worker, and starts its successor a little later."""
        process = self.processes[name].process
        if not process.alive or self.workers[name].done:
            return
        self.cluster.kill(process, power=False)
        self.cutter.died_s = self.cluster.clock.now
        self.workers[name].fenced()
        self.cluster.clock.after(RESTART_S, self._start, name)

    def double(self, name: str) -> None:
        """Starts a worker's successor while the worker lives."""
        self.cutter.died_s = self.cluster.clock.now
        self.workers[name].fenced()
        self._doubled.setdefault(name, []).append(self.workers[name])
        self.workers[name] = self._worker(name)
        self._start(name)

    def _tables(self) -> dict[int, tuple[str, str]]:
        """The application and name of each registered table, by id."""
        store = self.cluster.store
        entries = store.run(store.data.list("tables/")).entries
        found = ((json.loads(entry.value)["id"], *entry.key.split("/")[1:]) for entry in entries)
        return {id_: (app, name) for id_, app, name in found}

    # --- the end ----------------------------------------------------------------------------------------------------

    def play(self, monitor: StoryMonitor | None = None) -> None:
        """Plays the whole story. Raises Violation for the first promise that was broken, OutOfTime if `monitor` ends
        it."""
        self.begin()
        clock, monitor = self.cluster.clock, monitor or StoryMonitor()
        waves = Waves(self.injector, self.workers, self._start) if self.story.counted else None

        def broken() -> bool:
            monitor.look()
            return self.cluster.violation is not None

        monitor.stage = lambda: self._stage("training", waves)
        if waves is not None:
            waves.play(broken)
        else:
            clock.run(self.story.training_s, broken)
        self._judge("")
        self.on = False
        monitor.stage = lambda: self._stage("coming to rest", waves)
        self.injector.end()
        until = clock.now + BOUND_S
        why = "there was no time"
        while not broken() and clock.now < until:
            clock.run(clock.now + 0.1, broken)
            why = self.unfinished()
            if not why:
                break
        self._judge(why)
        monitor.stage = lambda: self._stage("checking everything", waves)
        self._audit(broken)

    def _stage(self, name: str, waves: Waves | None) -> str:
        """Says how far the story is."""
        cluster = self.cluster
        epoch = 0 if cluster.view is None else cluster.view.epoch
        steps, connections = sum(worker.steps for worker in self.workers.values()), len(cluster.network.sockets) // 2
        text = f"{name}, {cluster.clock.now:.2f} s of virtual time, epoch {epoch}, {steps:,} steps, "
        if waves is not None:
            text += f"{waves.started:,} of {len(self.workers):,} workers started, {waves.trained:,} have taken theirs, "
        return f"{text}{cluster.clock.events:,} events, {connections:,} connections"

    def _judge(self, why: str) -> None:
        if self.cluster.violation is not None:
            raise self.cluster.violation
        if why:
            raise Violation("progress", f"{BOUND_S:g} s after the last fault {why}")

    def unfinished(self) -> str:
        """Says what has not come to rest; "" if all has."""
        for name, worker in self.workers.items():
            # one that stood still as it registered may have taken the name from its successor
            if not worker.done and not (worker.lost and any(each.done for each in self._doubled.get(name, ()))):
                return f"{self.processes[name].process} has not finished"
        return self.cluster.settled()

    def _audit(self, broken: Callable[[], bool]) -> None:
        """Lets a worker of each application check all that it can read, then compares all replicas."""
        ended: list[str] = []
        for app in self.story.apps:

            def look(threads: Threads, app: App = app) -> None:
                with self.cluster.connect(threads, f"{app.name}-auditor", ASP(), 1, app.name) as ps:
                    if app.name in self.models.sums:
                        table = sums_table(ps, "sums", self.story.short)
                        rows = table.pull(np.arange(KEYS))
                        running = (server.now for server in self.cluster.servers.values())
                        server = next(s for s in running if s is not None and table.id in s.store.tables)
                        ranges = server.store.tables[table.id].ranges_of(np.arange(KEYS))
                        self.models.sums[app.name].check_end(rows, ranges)
                    elif app.name in self.models.counts:
                        check_all(ps, self.models.counts[app.name], threads)
                    elif app.name in self.models.handed:
                        trained = sums_table(ps, "trained", self.story.short).pull(np.arange(KEYS))
                        self.models.handed[app.name].check_end(trained)
                ended.append(app.name)

            self.cluster.start_worker(f"{app.name}-auditor", look)
        clock = self.cluster.clock
        until = clock.now + BOUND_S
        clock.run(until, lambda: len(ended) == len(self.story.apps) or broken())
        self._judge("" if len(ended) == len(self.story.apps) else "the auditors have not finished")
        self.cluster.views.check_end()
        if self._different():  # a cut is on its way along a chain, perhaps
            clock.run(clock.now + SETTLED_S, lambda: not self._different())
        if different := self._different():
            raise Violation("replicas agree", different)
        if self.story.grows:
            self._check_growth()
        clock.run(clock.now + BOUND_S, lambda: not self.followers.differ() or self.cluster.violation is not None)
        self._judge("")
        if different := self.followers.differ():
            raise Violation("a reader at rest", different)

    def _check_growth(self) -> None:
        """Compares checkpoints and all replicas of tables that grow with the model, and waits for what they may have at
        most."""
        clock = self.cluster.clock
        for cut in () if self.checkpointer is None else sorted(self.checkpointer.made):
            storage = Storage(PLACE)
            self.growth.check_checkpoint(Contents(storage, catalog.chain(storage, cut)))

        def too_many() -> str:
            self.growth.check_end(self._replicas())
            return self.growth.check_capacity()

        until = clock.now + BOUND_S
        while (why := too_many()) and clock.now < until:
            clock.run(clock.now + SETTLED_S)
            clock.run(clock.now + SETTLED_S, lambda: not self._different())
        if why:
            raise Violation("capacity", why)

    def _replicas(self) -> list[tuple[Server, int]]:
        """The servers that live, with each range of which they are replicas."""
        view = self.cluster.view
        assert view is not None
        processes = [self.cluster.life(server.name, server.incarnation) for server in view.servers]
        found = [(processes[i], r) for r, chain in enumerate(view.chains.tolist()) for i in chain if i >= 0]
        return [(server, r) for server, r in found if server is not None]

    def _different(self) -> str:
        """Says which range has replicas that differ, and which; "" if all agree."""
        view = self.cluster.view
        assert view is not None
        for r, chain in enumerate(view.chains.tolist()):
            found = {}
            for i in chain:
                server = self.cluster.life(view.servers[i].name, view.servers[i].incarnation) if i >= 0 else None
                if server is not None:
                    words = server.executor.words(r)
                    clocks = [a.tobytes() for a in server.replica.clocks.column(r)]
                    found[server.me.name] = digest(server.store.tables, r, AuditMark(0), words), clocks
            if any(other != first for first in found.values() for other in found.values()):
                return f"range {r} differs between {', '.join(found)}"
        return ""


def run(seed: int, kind: Kind = ANY, trace: bool = False, monitor: StoryMonitor | None = None) -> Result:
    """Plays the story of a seed to its end, or until `monitor` ends it."""
    story = tell(seed, kind)
    if kind.servers:
        story = enlarged(story, kind)
    limits = turned(story.small, story.tight, story.short, story.grows, story.counted)
    with virtual() as machine, limits, _collected_afterwards():
        return _play(story, trace, machine, monitor)


def _play(story: Story, trace: bool, machine: Machine, monitor: StoryMonitor | None) -> Result:
    scene = Scene(story)
    machine(scene.cluster)
    try:
        with _traced(scene.cluster) if trace else nullcontext():
            result = _result(scene, *_promises(scene, monitor))
        left = scene.cluster.end()
        assert not (left and result.ok), left  # what broke a promise may leave things in the middle
    finally:
        machine.cluster = None
    return result


def _promises(scene: Scene, monitor: StoryMonitor | None) -> tuple[str, str]:
    """Plays a story; returns the promise that was broken, and how."""
    try:
        scene.play(monitor)
    except Violation as violation:
        return violation.invariant, f"at {scene.cluster.clock.now:.6f} s {violation}"
    except OutOfTime as over:
        return "time", f"{over}. Until then no promise was broken; what is checked at the end was not"
    return "", ""


def _result(scene: Scene, invariant: str, text: str) -> Result:
    cluster, story = scene.cluster, scene.story
    view = cluster.view
    mark = repr((cluster.clock.now, cluster.clock.events, cluster.network.sent_bytes, scene.injector.happened))
    return Result(
        seed=story.seed,
        kind=story.kind,
        invariant=invariant,
        story=text,
        flavour=story.flavour,
        events=cluster.clock.events,
        views=0 if view is None else view.epoch,
        steps=sum(w.steps for w in scene.workers.values()),
        pulls=sum(w.pulls for w in scene.workers.values()),
        rounds=sum(r.rounds for r in scene.models.rounds.values()),
        shards=sum(w.steps for w in scene.workers.values() if isinstance(w, Sharded)),
        cuts=scene.cutter.taken if scene.checkpointer is None else len(scene.checkpointer.made),
        ended_s=cluster.clock.now,
        digest=zlib.crc32(mark.encode()),
        trace=tuple(cluster.clock.trace or ()),
    )


class Trace(logging.Handler):
    """Turns the log lines of all processes into lines of the trace."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(logging.INFO)
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        self._cluster.clock.note(f"{self._cluster.running()}: {record.getMessage()}")


class Machine:
    """Takes the place of a process's machine (its clock, its end, its log), by the cluster that runs now."""

    cluster: Cluster | None = None

    def __call__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def now(self) -> float:
        return 0.0 if self.cluster is None else self.cluster.clock.now

    def wall(self) -> float:
        return 0.0 if self.cluster is None else self.cluster.wall_s(self.cluster.host)

    def exit(self, code: int) -> None:
        assert self.cluster is not None
        self.cluster.exited(code)

    async def ask_restore(
        self, address: str, timeout_s: float, request: RestoreRequest, credentials: None = None
    ) -> RestoreResponse:
        assert self.cluster is not None
        return await ask_restore(self.cluster, address, request)

    def distrust(self, effect: Distrust) -> None:
        """Takes the place of the links' method: here every peer is correct, so that distrust breaks a promise."""
        assert self.cluster is not None
        self.cluster.broken(Violation("no peer says what no correct one can", effect.why))


@contextmanager
def virtual() -> Iterator[Machine]:
    """Puts the yielded machine in the place of the real one: its cluster's clock is the only one, processes end in it
    alone, and no log line reaches the terminal."""
    table_store.warm()
    machine = Machine()
    with ExitStack() as stack:
        stack.enter_context(patch.object(differences, "WHOLE_BYTES", 0))  # the views of stories are short
        for name in ("monotonic", "thread_time"):
            stack.enter_context(patch.object(time, name, machine.now))
        stack.enter_context(patch.object(time, "time", machine.wall))
        stack.enter_context(patch.object(os, "_exit", machine.exit))
        stack.enter_context(patch.object(range_recovery, "ask_restore", machine.ask_restore))
        stack.enter_context(patch.object(ReplicaLinks, "distrust", machine.distrust))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield machine


@contextmanager
def _collected_afterwards() -> Iterator[None]:
    """Collects a story's garbage after it, not in the middle, where finalizers would run at odd moments."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # objects of before need not be looked at
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _traced(cluster: Cluster) -> Iterator[None]:
    """Writes everything that happens into the cluster's trace."""
    cluster.clock.trace = []
    root, level, handler = logging.getLogger(), logging.getLogger().level, Trace(cluster)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        logging.disable(logging.CRITICAL)
