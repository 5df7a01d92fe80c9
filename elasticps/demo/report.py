"""What a run of the demo found: numbers for programs, a picture and a table for people."""

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
    from matplotlib.axes import Axes

    from elasticps.audit import AuditReport

AGREE = 0.01  # largest difference between the two AUCs
BIN_S = 0.1  # of throughput
ZOOM_S = (-0.3, 0.7)  # around the kill

_SERVERS, _WORKERS, _REFERENCE = "#1f5fbf", ("#1f5fbf", "#12a0a0", "#7a4fc9", "#c2408f"), "#e07b1a"
_INK, _QUIET, _RED = "#22262b", "#8a929c", "#c0392b"


@dataclass
class Moment:
    """Something worth knowing about when: `t` in seconds since training began (before it: negative).

    kind: "phase" for what the demo does, "membership" for processes that come or go while it trains.
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

    @property
    def auc(self) -> float:
        """After the last epoch."""
        return self.evaluations[-1].auc

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


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
    """What the audit at the end said, while the cluster lived."""

    clean: bool = False
    compared: int = 0
    differences: int = 0
    broken_promises: int = 0
    short: int = 0
    unjudged: int = 0

    @classmethod
    def of(cls, report: AuditReport) -> AuditAnswer:
        broken = sum(worker.broken for worker in report.workers)
        return cls(report.clean, report.compared, len(report.differences), broken, report.short, len(report.unjudged))

    def __str__(self) -> str:
        if self.clean:
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
            "timeline": [asdict(moment) for moment in self.timeline],
            "elasticps": run(self.servers),
            "reference": run(self.reference),
        }
        rounded: dict[str, Any] = json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 5))
        return rounded

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes report.json and report.png."""
        data, picture = folder / "report.json", folder / "report.png"
        data.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        draw(self, picture)
        return data, picture

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
        return table

    def story(self) -> list[str]:
        """What became of the killed server's ranges, and what the audit said, a line each."""
        lines = [f"audit: {self.audit}"]
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


def draw(report: Report, path: Path) -> None:
    """Loss, AUC and throughput over time, both runs starting at 0, and each batch around the kill."""
    from matplotlib.figure import Figure  # only here: it takes half a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(11, 10.4), dpi=150, facecolor="white", layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.12)
    )
    zoomed = report.kill is not None
    grid = figure.add_gridspec(3, 3, height_ratios=(1, 1, 0.72))
    upper = figure.add_subplot(grid[0, :])
    lower = figure.add_subplot(grid[1, :], sharex=upper)
    speed = figure.add_subplot(grid[2, :2] if zoomed else grid[2, :])
    s = report.settings
    figure.suptitle(
        f"{s['model']} on {s['data']}: {s['servers']} parameter servers, {s['workers']} workers",
        x=0.016, ha="left", fontsize=16, fontweight="bold", color=_INK,
    )  # fmt: skip
    _prepare(upper, "Training loss (binary cross-entropy)")
    _prepare(lower, "Test AUC after each epoch")
    _prepare(speed, f"Samples/s through the servers, in steps of {BIN_S:g} s")
    end = max(report.servers.seconds, report.reference.seconds)
    _losses(upper, report)
    _aucs(lower, report, end)
    _speeds(speed, report)
    for axes in (upper, lower):
        axes.set_xlim(0, end * 1.03)
    for moment in report.timeline:
        if moment.kind == "membership":
            for axes in (upper, lower, speed):
                axes.axvline(moment.t, color=_RED, linewidth=1, linestyle=(0, (4, 3)))
            text = moment.event if report.kill is None else f"{moment.event}\n{recovery(report.kill)}"
            upper.annotate(
                text, (moment.t, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", va="top", fontsize=9, color=_RED,
            )  # fmt: skip
    if report.kill is not None:
        zoom = figure.add_subplot(grid[2, 2])
        _prepare(zoom, "Each batch around the kill")
        _batches(zoom, report, report.kill)
    figure.supxlabel(f"Audit at the end: {report.audit}.", x=0.016, ha="left", fontsize=10,
                     color=_INK if report.audit.clean else _RED)  # fmt: skip
    figure.savefig(path)


def _prepare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=_INK, pad=10)
    axes.grid(axis="y", color="#e6e9ed")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.tick_params(colors=_INK, length=0, labelsize=10)


def _losses(axes: Axes, report: Report) -> None:
    for i, (name, points) in enumerate(report.servers.loss.items()):
        _loss_line(axes, points, _WORKERS[i % len(_WORKERS)], f"worker {name}, through the servers")
    for points in report.reference.loss.values():
        _loss_line(axes, points, _REFERENCE, "one torch process")
    axes.legend(frameon=False, fontsize=10, labelcolor=_INK)


def _aucs(axes: Axes, report: Report, end: float) -> None:
    crowded = abs(report.servers.seconds - report.reference.seconds) < 0.1 * end
    _auc_line(axes, report.servers, _SERVERS, "through the servers", below=crowded and report.difference < 0)
    _auc_line(axes, report.reference, _REFERENCE, "one torch process", below=crowded and report.difference >= 0)
    axes.legend(frameon=False, fontsize=10, labelcolor=_INK, loc="lower right")
    axes.set_xlabel("seconds of training", color=_INK, fontsize=11)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low))  # room for the figures over the lines' ends


def _speeds(axes: Axes, report: Report) -> None:
    """The last step is left out: training ended somewhere in it."""
    points = throughput(report.servers.ends, report.settings["batch"])[:-1]
    if points:
        times, speeds = np.array(points).T
        axes.step(times, speeds, where="post", color=_SERVERS, linewidth=1.2)
        axes.fill_between(times, speeds, step="post", color=_SERVERS, alpha=0.12, linewidth=0)
        axes.set_xlim(0, times[-1] + BIN_S)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("seconds of training", color=_INK, fontsize=11)


def _batches(axes: Axes, report: Report, kill: Kill) -> None:
    names = list(report.servers.ends)
    for i, name in enumerate(names):
        ends = np.asarray(report.servers.ends[name]) - kill.t
        ends = ends[(ends >= ZOOM_S[0]) & (ends <= ZOOM_S[1])] * 1e3
        axes.vlines(ends, i - 0.32, i + 0.32, color=_WORKERS[i % len(_WORKERS)], linewidth=1.2)
    axes.axvline(0, color=_RED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(ZOOM_S[0] * 1e3, ZOOM_S[1] * 1e3)
    axes.grid(False)
    axes.set_xlabel("ms since the kill", color=_INK, fontsize=11)


def _loss_line(axes: Axes, points: Sequence[tuple[float, float]], colour: str, label: str) -> None:
    times, values = np.array(points).T
    axes.plot(times, values, color=colour, alpha=0.16, linewidth=0.8)
    axes.plot(times, smooth(values.tolist(), max(5, len(values) // 20)), color=colour, linewidth=1.9, label=label)


def _auc_line(axes: Axes, run: Run, colour: str, label: str, *, below: bool) -> None:
    times, aucs = [e.t for e in run.evaluations], [e.auc for e in run.evaluations]
    axes.plot(times, aucs, color=colour, linewidth=1.9, marker="o", markersize=6, markeredgecolor="white", label=label)
    axes.annotate(
        f"{run.auc:.4f}", (times[-1], aucs[-1]), xytext=(0, -17 if below else 9), textcoords="offset points",
        ha="center", fontsize=11, fontweight="bold", color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )  # fmt: skip
