"""The whole demo: a cluster, two workers and an evaluator, then the reference, then the report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from elasticps import background
from elasticps.admin import fetch_status
from elasticps.audit import audit
from elasticps.demo import data
from elasticps.demo.processes import Children, Event
from elasticps.demo.report import AGREE, AuditAnswer, Evaluation, Kill, Moment, Report, Run, longest_pause
from elasticps.demo.screen import Screen
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster
from elasticps.local.story import failover

INTERRUPTED = 130  # exit code that shells give to Ctrl-C
AUDIT_TIMEOUT_S = 30.0


def run(
    *,
    servers: int = 3,
    replicas: int = 2,
    workers: int = 2,
    epochs: int = 10,
    out: Path = Path("runs/demo"),
    seed: int = 1,
    kill: bool = True,
    console: Console | None = None,
) -> int:
    """Trains through the servers and without them, and writes the report to `out`. Returns the exit code:

    0 both AUCs agree and all replicas are equal, 1 if not or something failed, 2 unusable arguments or no ratings,
    130 interrupted. With `kill`, and a second replica, the server that heads most ranges is killed on the way.
    """
    console = console or Console()
    try:
        if workers < 1 or epochs < 1:
            raise ConfigError(f"the demo needs at least one worker and one epoch, not {workers} and {epochs}")
        ratings = data.load(data.find())
        out.mkdir(parents=True, exist_ok=True)
        with _sigterm_interrupts():
            report = _Demo(console, ratings, servers, replicas, workers, epochs, out, seed, kill).run()
    except ConfigError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        return 2
    except Error as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that the demo had started has been ended")
        return INTERRUPTED
    console.print()
    console.print(report.table())
    for line in report.story():
        console.print(line, highlight=False)
    files = report.write(out)
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


class _Demo:
    def __init__(
        self, console: Console, ratings: data.Ratings, servers: int, replicas: int, workers: int, epochs: int,
        out: Path, seed: int, kill: bool,
    ) -> None:  # fmt: skip
        self._console = console
        self._training, self._test = data.split(ratings, seed)
        self._servers, self._replicas, self._epochs, self._out, self._seed = servers, replicas, epochs, out, seed
        self._kill = Kill() if kill and min(servers, replicas) > 1 else None
        self._audit = AuditAnswer()
        self._workers = [f"w{i}" for i in range(workers)]
        self._timeline: list[tuple[float, str, str]] = []  # times of day

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
        return Report(settings, through_servers, reference, timeline, self._audit, kill)

    def _note(self, text: str, *, at: float | None = None, kind: str = "phase") -> None:
        self._timeline.append((time.time() if at is None else at, text, kind))

    def _samples(self, worker: int, workers: int) -> int:
        shares = [data.batches(len(self._training), self._seed, e, worker, workers) for e in range(self._epochs)]
        return sum(len(batch) for share in shares for batch in share)

    # -- through the servers

    def _through_servers(self) -> tuple[float, Run]:
        self._note("start")
        with self._console.status("starting etcd, a coordinator and the servers (the first start compiles)") as status:
            cluster = LocalCluster(name="demo", servers=self._servers, replicas=self._replicas, progress=status.update)
            cluster.start()
        try:
            names = ", ".join(server.name for server in cluster.servers)
            self._note(f"{self._servers} servers ready")
            self._console.print(f"servers {names} found through [bold]{cluster.url}[/]", highlight=False)
            with Children(self._out) as children:
                return self._train_and_evaluate(cluster, children)
        finally:
            cluster.stop()

    def _train_and_evaluate(self, cluster: LocalCluster, children: Children) -> tuple[float, Run]:
        common = {"url": cluster.url, "epochs": self._epochs, "seed": self._seed}
        with self._console.status("starting the workers"):
            for i, name in enumerate(self._workers):
                job = {"role": "train", "name": name, "worker": i, "workers": len(self._workers)}
                children.start(name, {**common, **job})
            children.start("evaluator", {**common, "role": "evaluate", "name": "evaluator"})
            self._wait_ready(children, {*self._workers, "evaluator"})
        began = time.time()
        self._note("training begins", at=began)
        result = Run(loss={name: [] for name in self._workers})
        finished = dict.fromkeys(self._workers, 0)  # epochs
        samples = dict.fromkeys(self._workers, 0)
        kill_at = sum(self._samples(i, len(self._workers)) for i in range(len(self._workers))) // 3
        asked: list[tuple[int, float]] = []  # evaluations under way: epoch, and when its last worker finished it
        with Screen(self._console) as screen:
            for i, name in enumerate(self._workers):
                screen.add(name, self._samples(i, len(self._workers)))
                children.say(name, "go")
            while len(result.evaluations) < self._epochs:
                self._watch(cluster, screen)
                event = children.next_event(timeout_s=0.5)
                if event is None:
                    continue
                if event.kind == "progress":
                    self._progress(screen, result, event, began)
                    samples[event.source] = event.values["samples"]
                    if self._kill is not None and not self._kill.server and sum(samples.values()) >= kill_at:
                        self._kill_one(self._kill, cluster, screen, began)
                elif event.kind == "epoch":
                    finished[event.source] = event.values["epoch"]
                    if min(finished.values()) == event.values["epoch"]:
                        asked.append((event.values["epoch"], event.t))
                        children.say("evaluator", "evaluate")
                elif event.kind == "evaluated":
                    epoch, at = asked.pop(0)
                    self._verdict(
                        screen, result, Evaluation(epoch, at - began, event.values["auc"], event.values["loss"])
                    )
        result.seconds = result.evaluations[-1].t
        result.samples = sum(samples.values())
        self._note("training ends", at=began + result.seconds)
        if self._kill is not None and self._kill.server:
            self._recovery(self._kill, cluster, result, began)
        with self._console.status("comparing the replicas"):
            self._audit = AuditAnswer.of(audit(cluster.url, AUDIT_TIMEOUT_S))
        return began, result

    def _kill_one(self, kill: Kill, cluster: LocalCluster, screen: Screen, began: float) -> None:
        heads = {
            server.name: background.run(fetch_status(server.admin, 5.0))["ranges_headed"] for server in cluster.servers
        }
        kill.server = max(heads, key=lambda name: heads[name])
        kill.ranges = heads[kill.server]
        kill.member = f"{kill.server}#{cluster.server(kill.server).incarnation}"
        kill.t = time.time() - began
        cluster.kill(kill.server)
        text = f"kill -9 of {kill.server}, which headed {kill.ranges} of {cluster.config.ranges} ranges"
        self._note(text, at=began + kill.t, kind="membership")
        screen.say(f"[red]{text}[/]")

    @staticmethod
    def _recovery(kill: Kill, cluster: LocalCluster, result: Run, began: float) -> None:
        """Batches that ended before the view without the server stood may owe nothing to it: the first later counts."""
        found = failover(cluster.log("c0"), kill.member)
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

    def _watch(self, cluster: LocalCluster, screen: Screen) -> None:
        for text in cluster.ended():
            self._note(text, kind="membership")
            screen.say(f"[yellow]{text}[/]")

    @staticmethod
    def _progress(screen: Screen, result: Run, event: Event, began: float) -> None:
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
