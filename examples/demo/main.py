"""The whole demo: a cluster, two workers and an evaluator, then the reference, then the report."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from coordinator.core.errors import CoordinationError
from elasticps.admin.audit import audit
from elasticps.dashboard import PORT
from elasticps.dashboard.serve import Dashboard, begin_beside
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster
from elasticps.local.failover_log import failover
from elasticps.local.operator_client import OperatorClient, held
from examples.demo import data
from examples.demo.evaluations import Evaluations
from examples.demo.faults import DemoCheckpoints, LossWatch, choose_victim, kill_everything
from examples.demo.processes import ChildEvent, Children
from examples.demo.report import AGREE, AuditAnswer, Evaluation, Kill, Moment, Report, Run, longest_pause
from examples.demo.screen import Screen
from examples.demo.serving import AgeWatch

if TYPE_CHECKING:
    from coordinator.core.view import View

INTERRUPTED = 130  # exit code that shells give to Ctrl-C
AUDIT_TIMEOUT_S = 30.0
SCALE_TIMEOUT_S = 60.0
MORE = 2  # servers that come and go
QUIET_S = 2.0  # between one change and the next, to be seen


def run(
    *,
    servers: int = 3,
    replicas: int = 2,
    workers: int = 2,
    epochs: int = 14,
    out: Path = Path("runs/demo"),
    seed: int = 1,
    kill: bool = True,
    elastic: bool = True,
    lose: bool = True,
    console: Console | None = None,
) -> int:
    """Trains through the servers and without them, and writes the report to `out`. Returns the exit code:

    0 both AUCs agree and all replicas are equal, 1 if not or something failed, 2 unusable arguments or no ratings,
    130 interrupted. With `kill`, and a second replica, the server that heads most ranges is killed on the way.
    With `elastic`, two servers are added later and drained again, and a worker is killed and goes on. With `lose`, a
    checkpoint is taken; later every process is killed, and the cluster comes back from it with one server less.
    """
    console = console or Console()
    try:
        if workers < 1 or epochs < 1:
            raise ConfigError(f"the demo needs at least one worker and one epoch, not {workers} and {epochs}")
        ratings = data.load(data.find())
        out.mkdir(parents=True, exist_ok=True)
        with _sigterm_interrupts(), _logs_to(out / "demo.log"):
            options = DemoOptions(servers, replicas, workers, epochs, out, seed, kill, elastic, lose)
            report = _Demo(console, ratings, options).run()
    except ConfigError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    except Error as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that the demo had started has been ended")
        return INTERRUPTED
    console.print()
    console.print(report.table())
    for line in report.story():
        console.print(line, highlight=False)
    files = out / "report.json", out / "report.png"
    report.write(files[0])
    from examples.demo.picture import draw  # only here: matplotlib takes half a second

    draw(report, files[1])
    console.print(f"written: {', '.join(str(file) for file in files)}", highlight=False)
    if not report.agrees:
        console.print(f"[red]the AUCs differ by more than {AGREE}[/]")
    return 0 if report.agrees and report.audit.clean else 1


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM end the demo as Ctrl-C does. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _logs_to(path: Path) -> Iterator[None]:
    """Writes warnings of this process to a file: they are about processes that the demo kills itself, and would stand
    between the lines of its story."""
    handler = logging.FileHandler(path, mode="w", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("coordinator", "elasticps")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


@dataclass(frozen=True)
class DemoOptions:
    """What `run` takes; see there."""

    servers: int
    replicas: int
    workers: int
    epochs: int
    out: Path
    seed: int
    kill: bool
    elastic: bool
    lose: bool


class _Demo:
    """One run of the demo."""

    def __init__(self, console: Console, ratings: data.Ratings, options: DemoOptions) -> None:
        self._console = console  # where progress is shown
        self._training, self._test = data.split(ratings, options.seed)  # ratings
        self._servers = options.servers  # how many serve now, without those that come and go
        self._replicas = options.replicas  # copies of each range
        self._epochs = options.epochs  # passes over the ratings
        self._out = options.out  # folder of logs, checkpoints and the report
        self._seed = options.seed  # of initial values and of the order of ratings
        self._kill = Kill() if options.kill and min(options.servers, options.replicas) > 1 else None  # the one server
        self._elastic = options.elastic  # servers and a worker come and go
        self._checkpoints = DemoCheckpoints(options.out / "checkpoints") if options.lose else None  # None: no loss
        self._due: deque[tuple[float, str]] = deque()  # what is still to be done at which share of the samples
        self._change: threading.Thread | None = None  # of the number of servers, or a checkpoint
        self._quiet_from = 0.0  # time of day
        self._loss = LossWatch()  # of ranges
        self._messages: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()  # text and kind, from other threads
        self._ranges: list[tuple[float, dict[str, int]]] = []  # time of day
        self._view: View | None = None  # the newest
        self._audit = AuditAnswer()  # of the replicas, at the end
        self._ages = AgeWatch()  # of a reader beside
        self._workers = [f"w{i}" for i in range(options.workers)]  # names
        self._evaluations = Evaluations(self._workers)  # requested and not answered
        self._timeline: list[tuple[float, str, str]] = []  # times of day
        self._page_stack = ExitStack()  # closes what follows the cluster
        self._cluster: LocalCluster  # made by `_through_servers`, and again after the loss of everything
        self._page: Dashboard  # the dashboard's page
        self._operator: OperatorClient  # follows the view

    def run(self) -> Report:
        self._console.rule("[bold]elasticps demo", align="left")
        self._console.print(
            f"DeepFM learns from {len(self._training):,} ratings of MovieLens-100K what people like; "
            f"{len(self._test):,} ratings test it.",
            highlight=False,
        )
        began, through_servers = self._through_servers()
        reference = self._reference()
        settings = {
            "model": "DeepFM",
            "data": "MovieLens-100K",
            "servers": self._servers,
            "replicas": self._replicas,
            "workers": len(self._workers),
            "epochs": self._epochs,
            "batch": data.BATCH,
            "seed": self._seed,
            "training_samples": len(self._training),
            "test_samples": len(self._test),
        }
        timeline = [Moment(t - began, text, kind) for t, text, kind in self._timeline]
        kill = self._kill if self._kill is not None and self._kill.server else None
        ranges = [(max(0.0, t - began), held) for t, held in self._ranges]
        return Report(settings, through_servers, reference, timeline, self._audit, kill, ranges, self._ages.summary())

    def _note(self, text: str, *, at: float | None = None, kind: str = "phase") -> None:
        self._timeline.append((time.time() if at is None else at, text, kind))

    def _samples(self, worker: int, workers: int) -> int:
        shares = [data.batches(len(self._training), self._seed, e, worker, workers) for e in range(self._epochs)]
        return sum(len(batch) for share in shares for batch in share)

    # -- through the servers

    def _through_servers(self) -> tuple[float, Run]:
        self._note("start")
        with self._console.status("starting etcd, a coordinator and the servers (the first start compiles)") as status:
            cluster = LocalCluster(
                name="demo", servers=self._servers, replicas=self._replicas, measure=True, progress=status.update
            )
            cluster.start()
        self._cluster = cluster
        self._page = begin_beside(cluster.operator_url, PORT)
        try:
            names = ", ".join(server.name for server in cluster.servers)
            self._note(f"{self._servers} servers ready")
            self._console.print(f"servers {names} found through [bold]{escape(cluster.url)}[/]", highlight=False)
            self._console.print(f"look on while it trains: [bold]{self._page.address}[/]", highlight=False)
            with ExitStack() as self._page_stack, Children(self._out) as children:
                self._follow()
                try:
                    return self._train_and_evaluate(children)
                except Error:
                    self._loss.check(self._view, self._cluster, patience_s=0.0)  # that is why a worker fails
                    raise
        finally:
            self._page.stop()
            self._cluster.stop()

    def _follow(self) -> None:
        self._operator = self._page_stack.enter_context(OperatorClient(self._cluster.operator_url))
        self._operator.on_view(self._keep)
        self._page_stack.enter_context(self._ages.follow(self._cluster.url))

    def _keep(self, view: View) -> None:
        self._view = view
        self._ranges.append((time.time(), held(view)))

    def _train_and_evaluate(self, children: Children) -> tuple[float, Run]:
        common = {"epochs": self._epochs, "seed": self._seed}
        with self._console.status("starting the workers"):
            jobs = {
                name: {**common, "role": "train", "name": name, "worker": i, "workers": len(self._workers)}
                for i, name in enumerate(self._workers)
            }
            jobs["evaluator"] = {**common, "role": "evaluate", "name": "evaluator"}
            for name, job in jobs.items():
                self._start(children, name, job)
            self._wait_ready(children, {*self._workers, "evaluator"})
        began = time.time()
        self._note("training begins", at=began)
        result = Run(loss={name: [] for name in self._workers})
        samples = dict.fromkeys(self._workers, 0)
        total = sum(self._samples(i, len(self._workers)) for i in range(len(self._workers)))
        self._due.extend([(0.2, "kill")] if self._kill is not None else [])
        self._due.extend([(0.3, "grow"), (0.45, "worker"), (0.5, "shrink")] if self._elastic else [])
        self._due.extend([(0.7, "save"), (0.75, "lose")] if self._checkpoints is not None else [])
        with Screen(self._console) as screen:
            for i, name in enumerate(self._workers):
                screen.add(name, self._samples(i, len(self._workers)))
                children.say(name, "go")
            while len(result.evaluations) < self._epochs:
                self._watch(screen)
                event = children.next_event(timeout_s=0.5)
                if event is None:
                    continue
                if event.kind == "progress":
                    self._progress(screen, result, event, began)
                    samples[event.source] = event.values["samples"]
                    if self._is_due(sum(samples.values()) / total):
                        self._act(self._due.popleft()[1], children, jobs, screen, result, began)
                elif event.kind == "ready" and event.source == "evaluator":  # it is back, too
                    self._evaluate(children, self._evaluations.back())
                elif event.kind == "ready":  # a worker is back
                    self._tell(
                        f"{event.source} goes on at its step {event.values['steps'] + 1:,}", "membership", screen
                    )
                    children.say(event.source, "go")
                elif event.kind == "epoch":
                    due = self._evaluations.finished(event.source, event.values["epoch"], event.t)
                    self._evaluate(children, due)
                elif event.kind == "evaluated":
                    epoch, at = self._evaluations.answered()
                    self._verdict(
                        screen, result, Evaluation(epoch, at - began, event.values["auc"], event.values["loss"])
                    )
        result.seconds = result.evaluations[-1].t
        result.samples = sum(samples.values())
        self._note("training ends", at=began + result.seconds)
        if self._change is not None:
            with self._console.status("waiting until no range moves any more"):
                self._change.join()
                self._hear(None)
        self._recovery(result, began)
        with self._console.status("comparing the replicas"):
            self._audit = AuditAnswer.of(audit(self._cluster.operator_url, AUDIT_TIMEOUT_S))
        return began, result

    # -- what happens on the way

    def _is_due(self, trained: float) -> bool:
        """Whether it is time for the next event. Servers wait for their last change to be over; a worker for nothing,
        so that training does not end before its turn."""
        if not self._due or trained < self._due[0][0]:
            return False
        what = self._due[0][1]
        if what == "kill":  # waits for somebody who can be spared, until the next event's turn
            overdue = len(self._due) > 1 and trained >= self._due[1][0]
            return overdue or self._victim() is not None
        return what == "worker" or self._free() or (what == "lose" and not (self._change and self._change.is_alive()))

    def _free(self) -> bool:
        """Whether no change of the number of servers is under way, nor was a moment ago."""
        return time.time() >= self._quiet_from and (self._change is None or not self._change.is_alive())

    def _act(
        self, what: str, children: Children, jobs: Mapping[str, dict[str, object]], screen: Screen, result: Run,
        began: float,
    ) -> None:  # fmt: skip
        if what == "kill" and self._kill is not None:
            self._kill_one(self._kill, screen, began)
        elif what == "worker":
            name = self._workers[-1]
            self._tell(f"kill -9 of worker {name}", "membership", screen)
            children.kill(name)
            self._start(children, name, jobs[name], again=True)
        elif what == "save":
            self._begin(self._save)
        elif what == "lose":
            self._recovery(result, began)  # the story of the cluster's log, which goes
            self._lose(children, jobs, screen, result, began)
        else:
            servers = self._servers + (MORE if what == "grow" else 0)
            self._tell(f"scale to {servers} servers", "change", screen)
            self._begin(lambda: self._scale(servers))

    def _begin(self, change: Callable[[], str]) -> None:
        """Does it beside training, and tells how it went."""

        def run() -> None:
            try:
                self._messages.put((change(), "change"))
            except (Error, CoordinationError) as error:
                self._messages.put((f"failed: {error}", "change"))
            self._quiet_from = time.time() + QUIET_S

        self._change = threading.Thread(target=run, name="change", daemon=True)
        self._change.start()

    def _scale(self, servers: int) -> str:
        outcome = self._cluster.scale(servers, timeout_s=SCALE_TIMEOUT_S)
        return f"{len(outcome.servers)} servers, nothing moves"

    def _save(self) -> str:
        assert self._checkpoints is not None
        return self._checkpoints.take(self._cluster)

    def _lose(
        self, children: Children, jobs: Mapping[str, dict[str, object]], screen: Screen, result: Run, began: float
    ) -> None:
        """Everything dies, workers too; they go on from the checkpoint, and train again what came after it."""
        assert self._checkpoints is not None
        self._hear(screen)
        left = time.time()
        self._tell("kill -9 of everything", "membership", screen)
        self._page_stack.close()  # or it tells what it misses
        self._evaluations.goes()
        for name in jobs:
            children.kill(name)
        kill_everything(self._cluster)
        self._ranges.append((time.time(), {}))
        servers = max(1, self._servers - 1)
        self._cluster, text = self._checkpoints.bring_back(servers, self._replicas, lambda text: None)
        self._follow()
        self._page.follow(self._cluster.operator_url)
        self._tell(text, "change", screen)
        for name, job in jobs.items():
            self._start(children, name, job, again=True)
        result.away.append((left - began, time.time() - began))

    def _start(self, children: Children, name: str, job: dict[str, object], *, again: bool = False) -> None:
        children.start(name, {"url": self._cluster.url, **job}, again=again)

    def _tell(self, text: str, kind: str, screen: Screen | None) -> None:
        self._note(text, kind=kind)
        if screen is not None:
            screen.say(f"[{'red' if kind == 'membership' else 'cyan'}]{escape(text)}[/]")

    def _hear(self, screen: Screen | None) -> None:
        while not self._messages.empty():
            self._tell(*self._messages.get(), screen)

    def _kill_one(self, kill: Kill, screen: Screen, began: float) -> None:
        cluster, victim = self._cluster, self._victim()
        if victim is None:
            self._messages.put(("no server is killed: a range would have no replica left", "change"))
            return
        kill.server, kill.ranges = victim
        kill.member = f"{kill.server}#{cluster.server(kill.server).incarnation}"
        kill.t = time.time() - began
        cluster.kill(kill.server)
        text = f"kill -9 of {kill.server}, head of {kill.ranges} ranges"
        self._note(text, at=began + kill.t, kind="membership")
        screen.say(f"[red]{escape(text)}[/]")

    def _victim(self) -> tuple[str, int] | None:
        try:
            drains = self._operator.draining()
        except (Error, CoordinationError):  # nobody knows who stays
            return None
        staying = {(s.name, s.incarnation) for s in self._cluster.servers if s.running and s.name not in drains}
        return None if self._view is None else choose_victim(self._view, staying)

    def _recovery(self, result: Run, began: float) -> None:
        """Batches that ended before the view without the server stood may owe nothing to it: the first later counts."""
        kill = self._kill
        if kill is None or not kill.server or kill.recovered_ms:
            return
        found = failover(self._cluster.log("c0"), kill.member)
        if found is None:
            return
        written = found.written - began
        kill.detected_ms = (found.detected - began - kill.t) * 1e3
        kill.written_ms = (written - kill.t) * 1e3
        later = [next((t for t in ends if t > written), None) for ends in result.ends.values()]
        if None not in later:
            kill.recovered_ms = (max(t for t in later if t is not None) - kill.t) * 1e3
        kill.pause_ms = max(longest_pause(ends, kill.t) for ends in result.ends.values()) * 1e3

    def _wait_ready(self, children: Children, names: set[str]) -> None:
        while names:
            event = children.next_event(timeout_s=60.0)
            if event is None:
                raise Error(f"{', '.join(sorted(names))} did not get ready within a minute")
            if event.kind == "ready":
                names.remove(event.source)

    def _watch(self, screen: Screen) -> None:
        self._loss.check(self._view, self._cluster)
        self._hear(screen)
        for text in self._cluster.ended():
            if "as it was asked to" not in text:
                self._note(text, kind="membership")
            screen.say(f"[yellow]{escape(text)}[/]")

    @staticmethod
    def _evaluate(children: Children, times: int) -> None:
        for _ in range(times):
            children.say("evaluator", "evaluate")

    @staticmethod
    def _progress(screen: Screen, result: Run, event: ChildEvent, began: float) -> None:
        result.loss[event.source].append((event.t - began, event.values["loss"]))
        result.ends.setdefault(event.source, []).extend(t - began for t in event.values["ends"])
        screen.update(event.source, event.values["samples"], event.values["epoch"], event.values["loss"])

    @staticmethod
    def _verdict(screen: Screen, result: Run, verdict: Evaluation) -> None:
        result.evaluations.append(verdict)
        screen.say(f"epoch {verdict.epoch:>2}: test AUC {verdict.auc:.4f} after {verdict.t:.1f} s")

    # -- without them

    def _reference(self) -> Run:
        self._console.print("now the same model in one torch process, without servers, as the reference")
        result = Run(loss={"reference": []})
        with Children(self._out) as children:
            children.start("reference", {"role": "reference", "epochs": self._epochs, "seed": self._seed})
            self._wait_ready(children, {"reference"})
            began = time.time()
            evaluating = 0.0  # its time counts for nobody: through the servers another process evaluates
            with Screen(self._console) as screen:
                screen.add("reference", self._samples(0, 1))
                children.say("reference", "go")
                while len(result.evaluations) < self._epochs:
                    event = children.next_event(timeout_s=0.5)
                    if event is None:
                        continue
                    if event.kind == "progress":
                        self._progress(screen, result, event, began + evaluating)
                        result.samples = event.values["samples"]
                    elif event.kind == "epoch":
                        evaluating += event.values["evaluating_s"]
                        at = event.t - began - evaluating
                        values = event.values
                        self._verdict(screen, result, Evaluation(values["epoch"], at, values["auc"], values["loss"]))
        result.seconds = result.evaluations[-1].t
        return result
