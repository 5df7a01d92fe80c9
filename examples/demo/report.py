"""What a run of the demo found: numbers for programs, and a table for people; `picture` draws it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

if TYPE_CHECKING:
    from elasticps.admin.audit import AuditReport
    from examples.demo.serving import ServedAges

AGREE = 0.01  # largest difference between the two AUCs
BIN_S = 0.1  # of throughput


@dataclass
class Moment:
    """Something worth knowing about when: `t` in seconds since training began (before it: negative).

    kind: "phase" for what the demo does; "membership" for processes that die or come back while it trains,
    "change" for servers that are asked to come or go, and for when that is done.
    """

    t: float
    event: str
    kind: str = "phase"


@dataclass
class Evaluation:
    """The test set's verdict at the end of an epoch."""

    epoch: int
    t: float
    auc: float
    loss: float


@dataclass
class Run:
    """One training, through the servers or in one process; times in seconds since it began."""

    seconds: float = 0.0
    samples: int = 0
    loss: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # process -> (t, mean training loss)
    evaluations: list[Evaluation] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=dict)  # process -> when each of its batches ended
    away: list[tuple[float, float]] = field(default_factory=list)  # from when to when there was no cluster at all

    @property
    def auc(self) -> float:
        """After the last epoch."""
        return self.evaluations[-1].auc

    @property
    def samples_per_s(self) -> float:
        return self.samples / (self.seconds - self.away_s)

    @property
    def away_s(self) -> float:
        """For how long there was no cluster at all."""
        return sum(until - since for since, until in self.away)


@dataclass
class Kill:
    """The death of a server while training: `t` in seconds since it began, the rest in ms since `t` (0: not known).

    detected_ms, written_ms  when the leader knew, and when the view without the server stood
    recovered_ms             when every worker had ended a batch under that view
    pause_ms                 longest time without the end of a batch, around the kill, of any worker
    """

    server: str = ""
    member: str = ""
    ranges: int = 0
    t: float = 0.0
    detected_ms: float = 0.0
    written_ms: float = 0.0
    recovered_ms: float = 0.0
    pause_ms: float = 0.0


@dataclass
class AuditAnswer:
    """What the audit at the end said, while the cluster lived.

    clean  nothing was found amiss; with one server left, whose ranges have nothing to be compared with, that is idle
    """

    clean: bool = False
    compared: int = 0
    differences: int = 0
    broken_promises: int = 0
    short: int = 0
    unjudged: int = 0
    idle: bool = False

    @classmethod
    def of(cls, report: AuditReport) -> AuditAnswer:
        broken = sum(worker.broken for worker in report.workers)
        clean = not (report.wrong or report.unjudged or report.lost)
        return cls(
            clean, report.compared, len(report.differences), broken, report.short, len(report.unjudged), report.idle
        )

    def __str__(self) -> str:
        if self.clean and self.idle:
            text = "one server is left, so nothing could be compared; no acknowledged step is missing"
        elif self.clean:
            text = f"all {self.compared} replicas of ranges are equal, no acknowledged step is missing"
        else:
            text = f"{self.differences} replicas differ, {self.broken_promises} workers miss acknowledged steps"
            text += f", {self.unjudged} ranges could not be compared" if self.unjudged else ""
        return text + (f"; {self.short} ranges are short of a replica" if self.short else "")


@dataclass
class Report:
    """A finished demo."""

    settings: dict[str, Any]
    servers: Run
    reference: Run
    timeline: list[Moment]
    audit: AuditAnswer
    kill: Kill | None = None
    ranges: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # (t, ranges that each server holds)
    served: ServedAges | None = None  # how old a reader's rows were beside

    @property
    def difference(self) -> float:
        """AUC through the servers minus that of one process."""
        return self.servers.auc - self.reference.auc

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= AGREE

    def as_dict(self) -> dict[str, Any]:
        """The content of report.json; `timeline` is a list of {t, event, kind}."""

        def run(r: Run) -> dict[str, Any]:
            content = {"auc": r.auc, "samples_per_s": r.samples_per_s, **asdict(r)}
            content["throughput"] = throughput(r.ends, self.settings["batch"])
            return content | {"loss": content.pop("loss"), "ends": content.pop("ends")}  # long: at the end

        content = {
            "settings": self.settings,
            "machine": {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
            "auc_difference": self.difference,
            "agrees": self.agrees,
            "kill": None if self.kill is None else asdict(self.kill),
            "audit": asdict(self.audit),
            "served": None if self.served is None else asdict(self.served),
            "timeline": [asdict(moment) for moment in self.timeline],
            "ranges": self.ranges,
            "elasticps": run(self.servers),
            "reference": run(self.reference),
        }
        rounded: dict[str, Any] = json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 5))
        return rounded

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The two runs side by side."""
        table = Table(title="The same model, trained twice", title_justify="left", title_style="bold")
        table.add_column("")
        table.add_column("through the servers", justify="right")
        table.add_column("one torch process", justify="right")
        table.add_column("difference", justify="right")
        mark = "[green]✓[/] " if self.agrees else "[red]✗[/] "
        a, b = self.servers, self.reference
        table.add_row("test AUC", f"{a.auc:.4f}", f"{b.auc:.4f}", f"{mark}{self.difference:+.4f}")
        table.add_row("test loss", f"{a.evaluations[-1].loss:.4f}", f"{b.evaluations[-1].loss:.4f}", "")
        table.add_row("samples/s", f"{a.samples_per_s:,.0f}", f"{b.samples_per_s:,.0f}", "")
        table.add_row("training time", f"{a.seconds:.1f} s", f"{b.seconds:.1f} s", "")
        if a.away:
            table.add_row("of it, without a cluster", f"{a.away_s:.1f} s", "", "")
        return table

    def story(self) -> list[str]:
        """What became of the killed server's ranges, and what the audit said, a line each."""
        lines = [f"audit: {self.audit}"]
        if self.served is not None:
            lines.append(f"a reader beside: {self.served}")
        if self.kill is not None:
            k = self.kill
            lines.insert(0, f"{k.server} was killed after {k.t:.1f} s: {recovery(k)}")
        return lines


def recovery(kill: Kill) -> str:
    """In words, for example "recovered in 48 ms, longest pause of a worker 52 ms"."""
    if not kill.recovered_ms:
        return "no recovery was seen"
    return f"recovered in {kill.recovered_ms:.0f} ms, longest pause of a worker {kill.pause_ms:.0f} ms"


def throughput(ends: Mapping[str, Sequence[float]], batch: int) -> list[tuple[float, float]]:
    """(time, samples/s) in steps of BIN_S, over all processes, from when each of their batches ended."""
    times = np.concatenate([np.asarray(each, np.float64) for each in ends.values()]) if ends else np.empty(0)
    counts = np.bincount((times[times >= 0] / BIN_S).astype(int)) if len(times) else np.empty(0)
    return [(i * BIN_S, float(count) * batch / BIN_S) for i, count in enumerate(counts)]


def longest_pause(ends: Sequence[float], t: float, within: float = 5.0) -> float:
    """The longest time without the end of a batch, of those that were over after `t` and no later than `within` s."""
    times = np.asarray(ends)
    last = int(np.searchsorted(times, t))
    nearby = times[max(0, last - 1) :]
    gaps = np.diff(nearby[nearby <= t + within])
    return float(gaps.max()) if len(gaps) else 0.0


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average over about `span` values, without the bias of its start."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight)
    return out
