"""Runs chaos against real processes: a cluster under load, faults by a plan, then a check of every promise."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chaos.live import churn, figures, load
from chaos.live import observer as observer
from chaos.live.nemesis import FaultRecord, Nemesis
from chaos.live.netns import Namespaces
from chaos.live.network import Loopback, ProcessNetwork
from chaos.live.plan import Action, Plan, PlanError, expand
from chaos.live.proxy import Proxy
from chaos.live.readers import Findings, Readers
from chaos.live.stage import LocalStage, Processes
from chaos.live.targets import Situation, whole
from chaos.live.verdict import audit_words, epochs_back, excused, given_up, unwatched
from chaos.live.watch import LOOK_S, START_S, Seen, Watch
from coordinator.core.errors import CoordinationError
from elasticps.admin.audit import AuditReport, audit
from elasticps.errors import Error
from elasticps.system.memory import parse_size

TICK_S = 0.01
OVERTIME_S = 120.0  # for faults that have begun, or were put off, when the time is over
AUDIT_S = 60.0
WORKERS_END_S = load.TIMEOUT_S + 10.0
LINES_SHOWN = 12

T = TypeVar("T")


@dataclass
class Outcome:
    """The result of a run. broken: the promises that were not kept, a sentence each; notes: other things worth
    knowing."""

    plan: Plan
    seed: int
    seconds: float
    command: str
    faults: list[FaultRecord] = field(default_factory=list)
    incarnations: list[figures.Life] = field(default_factory=list)
    views: list[Seen] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    audit: AuditReport | None = None
    settled_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)  # the most bytes that each server used, with a limit
    readers: list[Findings] = field(default_factory=list)
    stall: figures.Stall = field(default_factory=lambda: figures.Stall(0.0, "", 0.0))

    @property
    def tried(self) -> bool:
        """Whether any fault was done, if the plan names some: without faults, promises are kept easily."""
        return not self.plan.faults or any(fault.began >= 0 for fault in self.faults)

    @property
    def passed(self) -> bool:
        """Whether every promise was kept, and some fault was done."""
        return self.tried and not self.broken

    def recovery_ms(self, fault: FaultRecord) -> dict[str, float]:
        """Returns for each worker the milliseconds from the fault to the next step that was committed."""
        if fault.began < 0:
            return {}
        return {name: round(s * 1e3, 1) for name, s in figures.recovery(self.incarnations, fault.began).items()}


class Load:
    """The workers of a run, and the ledgers of their lives."""

    def __init__(self, plan: Plan, seed: int, stage: Processes) -> None:
        self.jobs: list[load.Job] = []
        self._started: list[float] = []  # when each job was started, time.time()
        self._stop_requested: dict[str, float] = {}  # when each worker that ran at the end was asked to end, likewise
        self._plan = plan
        self._seed = seed
        self._stage = stage
        self.names = [f"w{i}" for i in range(plan.load.workers)]
        self.readers = Readers(plan, seed, stage)  # beside

    def start(self) -> None:
        """Starts all workers, and waits until each is ready."""
        for number, name in enumerate(self.names):
            says_ready = not self._plan.load.command
            self._stage.add_worker(name, partial(self._command, number), says_ready=says_ready)
        if not self._plan.load.command:
            words = [self._stage.url, str(self._stage.folder), str(self._plan.cluster.ranges)]
            self.names.append(observer.NAME)
            self._stage.add_worker(observer.NAME, lambda: [sys.executable, "-m", "chaos.live.observer", *words])
            numbers = itertools.count(1)
            self.names.append(churn.NAME)
            self._stage.add_worker(
                churn.NAME, lambda: [sys.executable, "-m", "chaos.live.churn", *words, str(next(numbers))]
            )
        self._stage.wait_ready(self.names)

    def _command(self, number: int) -> list[str]:
        plan = self._plan.load
        if plan.command:
            values = {"url": self._stage.url, "worker": f"w{number}", "number": number}
            return [sys.executable if word == "python" else word.format(**values) for word in plan.command]
        life = 1 + sum(job.worker == number for job in self.jobs)
        ledger = str(self._stage.folder / f"w{number}.{life}.ledger")
        job = load.Job(
            self._stage.url, self._seed, number, life, plan.keys, plan.window, plan.pause_ms / 1e3,
            self._plan.cluster.ranges, ledger,
        )  # fmt: skip
        self.jobs.append(job)
        self._started.append(time.time())
        return load.command_of(job)

    def finish(self) -> list[str]:
        """Asks the workers to end when all their steps are acknowledged, and waits. Returns what went wrong."""
        running = [name for name in self.names if self._stage.running(name)]
        for name in running:
            self._stop_requested[name] = time.time()
            self._stage.terminate(name)
        deadline = time.monotonic() + WORKERS_END_S
        while any(self._stage.running(name) for name in running) and time.monotonic() < deadline:
            time.sleep(TICK_S)
        hanging = [name for name in running if self._stage.running(name)]
        wrong = [f"worker {name} did not get its last steps acknowledged in {WORKERS_END_S:g} s" for name in hanging]
        if not self._plan.load.command:
            codes = {name: self._stage.code(name) for name in running if name not in hanging}
            wrong += [f"worker {name} ended with exit code {code}" for name, code in codes.items() if code]
        return wrong

    def incarnations(self, began: float) -> list[figures.Life]:
        """Reads the ledgers of all lives; times are seconds since the load began."""
        found = [
            figures.Life(job.name, job.life, _records(Path(job.ledger), began), self._ended(number) - began)
            for number, job in enumerate(self.jobs)
        ]
        return [*found, figures.Life(observer.NAME, 1, _records(observer.ledger_of(self._stage.folder), began))]

    def _ended(self, number: int) -> float:
        """Returns when the life with this index was over at the latest; NaN if unknown."""
        worker = self.jobs[number].worker
        later = (at for at, job in zip(self._started, self.jobs, strict=True) if job.worker == worker)
        after = next(itertools.islice(later, self.jobs[number].life, None), None)
        return self._stop_requested.get(self.jobs[number].name, math.nan) if after is None else after

    def committed(self) -> int:
        """Returns how many steps have been committed so far."""
        return sum(load.newest(Path(job.ledger), load.COMMITTED) for job in self.jobs)


def _records(path: Path, began: float) -> figures.Records:
    records = load.read_ledger(path).copy()
    records["time"] -= began
    return records


Show = Callable[["Run"], None]


class Run:
    """A run under way. progress: called with each phase, in words; show: called about ten times a second."""

    def __init__(
        self, plan: Plan, seed: int, *, duration: float | None = None, command: str = "",
        progress: Callable[[str], None] = lambda text: None, show: Show = lambda run: None,
    ) -> None:  # fmt: skip
        seconds = plan.duration if duration is None else duration
        self.outcome = Outcome(plan, seed, seconds, command)
        self.actions: tuple[Action, ...] = expand(plan, seed, duration)
        self.lines: list[tuple[float, str]] = []
        self.began = time.time()
        self.watch: Watch | None = None
        self.load: Load | None = None
        self.nemesis: Nemesis | None = None
        self.over = False
        self._plan = plan
        self._progress = progress
        self._show = show
        self._shown = self._weighed = 0.0
        self._over_limit: set[str] = set()  # servers that have used too much memory
        self._heat: NDArray[np.float64] = np.empty(0)

    @property
    def now(self) -> float:
        """Seconds since the start of the load."""
        return time.time() - self.began

    def carry_out(self, logs_to: Path | None = None) -> Outcome:
        """Runs everything from the first process to the last check. When this returns or raises, all processes have
        ended and temporary files are removed."""
        self._progress("making the network")
        stage = open_stage(self._plan, self.actions, self._progress)
        try:
            stage.start_all()
            self._with_cluster(stage)
        except BaseException:
            for left in stage.close(logs_to):
                self._progress(left)  # there will be no report to say it
            raise
        self.outcome.broken += stage.close(logs_to)
        return self.outcome

    def _with_cluster(self, stage: Any) -> None:
        self.watch = Watch(stage.own_url, lambda: self.began)
        try:
            _, missing = self._settle(stage, START_S)
            if missing:
                raise Error(f"nothing was tried: {START_S:g} s after its start the cluster is not whole: {missing}")
            self._progress("filling rows and starting workers")
            plan = self._plan
            load.fill(stage.reader_url, plan.load.filling)
            if plan.cluster.memory and not plan.load.command:
                load.make_rows(stage.reader_url, plan.load.workers, plan.load.keys, plan.cluster.ranges)
            self.load = Load(self._plan, self.outcome.seed, stage)
            self.load.start()
            if not self._plan.load.command:
                self._heat = load.heat(stage.reader_url, self._plan.load.keys, self._plan.cluster.ranges)
            self._progress("starting readers")
            self.load.readers.start()
            self._torment(stage)
            self._judge(stage)
        finally:
            self.over = True
            self.watch.close()

    def _torment(self, stage: Any) -> None:
        """Does the faults, under load."""
        assert self.watch is not None
        self.began = time.time()
        self.watch.seen[:] = [replace(seen, at=0.0) for seen in self.watch.seen[-1:]]
        least = self._plan.cluster.servers if self._plan.cluster.memory else 0  # fewer could not hold what is stored
        self.nemesis = Nemesis(stage, self.actions, lambda: self._scene(stage), lambda: self.now, least)
        self.outcome.faults = self.nemesis.faults
        while self.now < self.outcome.seconds or (self._unfinished() and self.now < self.outcome.seconds + OVERTIME_S):
            self._tell(self.nemesis.step(self.now))
            self._look_after(stage)
        self._tell(self.nemesis.stop(self.now))

    def _unfinished(self) -> bool:
        """Whether faults that were due before the end still wait or go on: none is cut short."""
        return self.nemesis is not None and self.nemesis.busy

    def _judge(self, stage: Any) -> None:
        """Waits until all ranges are whole and workers have their last answers, then checks everything."""
        assert self.nemesis is not None
        assert self.load is not None
        outcome, started = self.outcome, time.monotonic()
        patience_s = max(START_S, self._plan.promises.settle_s)  # a server that drains copies all that it has first
        while self.nemesis.busy and time.monotonic() - started < patience_s:
            self._tell(self.nemesis.step(self.now))
            self._look_after(stage)
        outcome.broken += [f"did not end: {fault}" for fault in self.nemesis.faults if fault.state == "running"]
        outcome.settled_s, unsettled = self._settle(stage, self._plan.promises.settle_s)
        if unsettled:
            outcome.broken.append(f"not whole {self._plan.promises.settle_s:g} s after the last fault: {unsettled}")
        names = [*self.load.names, *self.load.readers.names]
        _, late = self._wait(stage, START_S, lambda: stage.late(names))
        outcome.broken += [
            f"{name} was not ready again {START_S:g} s after all was whole; its log may say why" for name in late
        ]
        self._progress("waiting for the last answers")
        self._note_deaths(stage.ended())
        outcome.broken += self.load.finish()
        outcome.incarnations = self.load.incarnations(self.began)
        assert self.watch is not None
        outcome.views = list(self.watch.seen)
        self._check_ledgers()
        self._progress("comparing every value with the pushes, and every replica with the others")
        self._check_content(stage)
        self._check_readers(stage)
        self._note_deaths(stage.ended())  # the last look was when all was whole

    # ------------------------------------------------------------------------------------------------------ the checks

    def _check_ledgers(self) -> None:
        outcome = self.outcome
        totals = figures.counts(outcome.incarnations)
        for key, what in (
            ("steps_failed", "pushes failed"), ("pulls_failed", "pulls failed"), ("pulls_stale", "pulls were stale"),
        ):  # fmt: skip
            if totals[key]:
                outcome.broken.append(f"{totals[key]} {what}; the workers' logs say which")
        outcome.broken += epochs_back(outcome.views, outcome.faults)
        if not self._plan.load.command:
            outcome.broken += unwatched(outcome.incarnations, outcome.faults)
        if (limit := self._plan.cluster.memory) and not any(outcome.memory.values()):
            outcome.broken.append(f"nothing was seen of what servers used, of {limit} each")
        outcome.notes += [
            f"{life.worker}, life {life.number} ended before its first step"
            for life in figures.idle(outcome.incarnations)
        ]
        outcome.stall = figures.longest_stall(outcome.incarnations, excused(outcome.faults))
        allowed, stall = self._plan.promises.stall_s, outcome.stall
        if allowed is not None and stall.seconds > allowed:
            outcome.broken.append(
                f"{stall.worker} had no commit for {stall.seconds:.2f} s, at {stall.at:.1f} s; {allowed:g} s is allowed"
            )
        if not self._plan.load.command:
            for fault in outcome.faults:
                if fault.began >= 0 and not figures.progressed(outcome.incarnations, fault.began):
                    outcome.broken.append(f"no worker committed anything that it began after: {fault}")

    def _check_content(self, stage: Any) -> None:
        outcome = self.outcome
        assert self.load is not None
        try:
            ledgers = [load.Ledger.of(job) for job in self.load.jobs]
            outcome.broken += load.check_run(stage.reader_url, ledgers, self._plan.load.filling)
            outcome.audit = audit(stage.own_url, AUDIT_S)
        except (Error, CoordinationError) as error:
            outcome.broken.append(f"the content could not be checked: {error}")
        else:
            outcome.broken += audit_words(outcome.audit)

    def _check_readers(self, stage: Any) -> None:
        assert self.load is not None
        readers = self.load.readers
        if readers.names:
            self._progress("comparing what readers have with the servers")
            self.outcome.broken += readers.finish(lambda: self._look_after(stage))
            self.outcome.readers = readers.findings()

    # -------------------------------------------------------------------------------------------------------- plumbing

    def _settle(self, stage: Any, seconds: float) -> tuple[float, str]:
        """Waits until all ranges are whole. Returns how long that took, and what is missing if it took too long."""
        assert self.watch is not None
        watch = self.watch

        def missing() -> str:
            return "no view was formed" if watch.view is None else whole(watch.view, stage.names("server"))

        return self._wait(stage, seconds, missing)

    def _wait(self, stage: Any, seconds: float, missing: Callable[[], T]) -> tuple[float, T]:
        """Waits until nothing is missing. Returns how long that took, and what is missing if it took too long."""
        began = time.monotonic()
        while (what := missing()) and time.monotonic() - began < seconds:
            self._look_after(stage)
        return time.monotonic() - began, what

    def _scene(self, stage: Any) -> Situation:
        assert self.watch is not None
        roles = ("server", "coordinator", "worker", "etcd", "reader")
        running = {role: stage.names(role, paused=False) for role in roles}
        down = frozenset((member.name, member.incarnation) for member in self.watch.draining)  # they may end
        return Situation(self.watch.view, running, down, self.watch.leader, self._heat)

    def _look_after(self, stage: Any) -> None:
        self._note_deaths(stage.poll())
        self._weigh(stage)
        if time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self._show(self)
        time.sleep(TICK_S)

    def _note_deaths(self, ended: list[tuple[str, str]]) -> None:
        for name, text in ended:
            line = f"ended by itself at {self.now:.1f} s: {text}"
            if why := given_up(name, self.outcome.faults, self.now, text):
                self.outcome.notes.append(f"{line} ({why})")
            else:
                self.outcome.broken.append(line)
            self._tell([f"{'' if why else 'BROKEN: '}{line}"])

    def _weigh(self, stage: Any) -> None:
        """Checks a few times a second that no server uses more memory than the plan allows; names each server once."""
        limit, now = self._plan.cluster.memory, time.monotonic()
        if not limit or now - self._weighed < LOOK_S:
            return
        self._weighed = now
        for name in stage.names("server"):
            used = self.outcome.memory[name] = max(stage.memory_used(name), self.outcome.memory.get(name, 0))
            if used > parse_size(limit) and name not in self._over_limit:
                self._over_limit.add(name)
                line = f"{name} used {used >> 20} MiB at {self.now:.1f} s, its limit is {limit}"
                self.outcome.broken.append(line)
                self._tell([f"BROKEN: {line}"])

    def _tell(self, lines: list[str]) -> None:
        self.lines += [(self.now, line) for line in lines]


def open_stage(plan: Plan, actions: tuple[Action, ...], progress: Callable[[str], None]) -> Any:
    """Makes the stage that a plan names. Raises PlanError if this machine cannot provide it."""
    if plan.cluster.kind == "kubernetes":
        from chaos.live.kubernetes import KubernetesStage

        return KubernetesStage(plan.cluster)
    network: ProcessNetwork = Loopback()
    if plan.cluster.kind == "netns":
        if any(action.do in ("delay", "loss") for action in actions) and not Namespaces.can_shape():
            raise PlanError(
                f"plan {plan.name}: this kernel has no netem, so packets in network namespaces cannot be delayed or "
                "lost; the user-space proxy can: --proxy, or cluster: {kind: local, proxy: true}"
            )
        network = Namespaces()
    elif plan.cluster.proxy:
        network = Proxy()
    return LocalStage(plan.cluster, network, progress)


def changed(plan: Plan, *, proxy: bool = False, tls: bool = False, replicas: int | None = None) -> Plan:
    """Returns the plan with the user-space proxy as its network, with TLS, or with another number of replicas."""
    cluster = plan.cluster
    if cluster.kind == "kubernetes" and (proxy or tls or replicas):
        raise PlanError(f"plan {plan.name}: its cluster is there already, so nothing about it can be changed")
    if proxy:
        cluster = replace(cluster, kind="local", proxy=True)
    replicas = replicas or cluster.replicas
    if replicas > cluster.servers:
        raise PlanError(f"plan {plan.name}: {replicas} replicas need as many servers, not {cluster.servers}")
    return replace(plan, cluster=replace(cluster, tls=tls or cluster.tls, replicas=replicas))


def command_line(
    plan: str, seed: int, duration: float | None, proxy: bool, tls: bool = False, replicas: int | None = None
) -> str:
    """The command that repeats a run."""
    words = ["elasticps", "chaos", "run", plan, "--seed", str(seed)]
    words += [] if duration is None else ["--duration", f"{duration:g}"]
    words += [] if replicas is None else ["--replicas", str(replicas)]
    return shlex.join([*words, *(["--proxy"] if proxy else []), *(["--tls"] if tls else [])])
