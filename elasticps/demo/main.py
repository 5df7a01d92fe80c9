"""The whole demo: a cluster, two workers and an evaluator, then the reference, then the report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from elasticps.demo import data
from elasticps.demo.processes import Children, Event
from elasticps.demo.report import AGREE, Evaluation, Moment, Report, Run
from elasticps.demo.screen import Screen
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster

INTERRUPTED = 130  # exit code that shells give to Ctrl-C


def run(
    *,
    servers: int = 3,
    workers: int = 2,
    epochs: int = 10,
    out: Path = Path("runs/demo"),
    seed: int = 1,
    console: Console | None = None,
) -> int:
    """Trains through the servers and without them, and writes the report to `out`. Returns the exit code:

    0 both AUCs agree, 1 they do not or something failed, 2 unusable arguments or no ratings, 130 interrupted.
    """
    console = console or Console()
    try:
        if workers < 1 or epochs < 1:
            raise ConfigError(f"the demo needs at least one worker and one epoch, not {workers} and {epochs}")
        ratings = data.load(data.find())
        out.mkdir(parents=True, exist_ok=True)
        with _sigterm_interrupts():
            report = _Demo(console, ratings, servers, workers, epochs, out, seed).run()
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
    files = report.write(out)
    console.print(f"written: {', '.join(str(file) for file in files)}", highlight=False)
    if not report.agrees:
        console.print(f"[red]the AUCs differ by more than {AGREE}[/]")
    return 0 if report.agrees else 1


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
        self, console: Console, ratings: data.Ratings, servers: int, workers: int, epochs: int, out: Path, seed: int
    ) -> None:
        self._console = console
        self._training, self._test = data.split(ratings, seed)
        self._servers, self._epochs, self._out, self._seed = servers, epochs, out, seed
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
            "workers": len(self._workers),
            "epochs": self._epochs,
            "batch": data.BATCH,
            "seed": self._seed,
            "training_samples": len(self._training),
            "test_samples": len(self._test),
        }
        timeline = [Moment(t - began, text, kind) for t, text, kind in self._timeline]
        return Report(settings, through_servers, reference, timeline)

    def _note(self, text: str, *, at: float | None = None, kind: str = "phase") -> None:
        self._timeline.append((time.time() if at is None else at, text, kind))

    def _samples(self, worker: int, workers: int) -> int:
        shares = [data.batches(len(self._training), self._seed, e, worker, workers) for e in range(self._epochs)]
        return sum(len(batch) for share in shares for batch in share)

    # -- through the servers

    def _through_servers(self) -> tuple[float, Run]:
        self._note("start")
        with self._console.status("starting etcd, a coordinator and the servers (the first start compiles)") as status:
            cluster = LocalCluster(name="demo", servers=self._servers, progress=status.update)
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
        return began, result

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
