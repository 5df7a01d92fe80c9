"""What a run of the demo found: numbers for programs, a picture and a table for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGREE = 0.01  # largest difference between the two AUCs

_SERVERS, _WORKERS, _REFERENCE = "#1f5fbf", ("#1f5fbf", "#12a0a0", "#7a4fc9", "#c2408f"), "#e07b1a"
_INK, _QUIET = "#22262b", "#8a929c"


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

    @property
    def auc(self) -> float:
        """After the last epoch."""
        return self.evaluations[-1].auc

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


@dataclass
class Report:
    """A finished demo."""

    settings: dict[str, Any]
    servers: Run
    reference: Run
    timeline: list[Moment]

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
            return {"auc": r.auc, "samples_per_s": r.samples_per_s, **asdict(r)}

        content = {
            "settings": self.settings,
            "machine": {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
            "elasticps": run(self.servers),
            "reference": run(self.reference),
            "auc_difference": self.difference,
            "agrees": self.agrees,
            "timeline": [asdict(moment) for moment in self.timeline],
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
    """Loss and AUC over time, both runs starting at 0."""
    from matplotlib.figure import Figure  # only here: it takes half a second
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(11, 7.4), dpi=150, facecolor="white", layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.12)
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    s = report.settings
    figure.suptitle(
        f"{s['model']} on {s['data']}: {s['servers']} parameter servers, {s['workers']} workers",
        x=0.016, ha="left", fontsize=16, fontweight="bold", color=_INK,
    )  # fmt: skip
    for axes, title in ((upper, "Training loss (binary cross-entropy)"), (lower, "Test AUC after each epoch")):
        axes.set_title(title, loc="left", fontsize=12, color=_INK, pad=10)
        axes.grid(axis="y", color="#e6e9ed")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_QUIET)
        axes.tick_params(colors=_INK, length=0, labelsize=10)

    for i, (name, points) in enumerate(report.servers.loss.items()):
        _loss_line(upper, points, _WORKERS[i % len(_WORKERS)], f"worker {name}, through the servers")
    for points in report.reference.loss.values():
        _loss_line(upper, points, _REFERENCE, "one torch process")
    upper.legend(frameon=False, fontsize=10, labelcolor=_INK)

    _auc_line(lower, report.servers, _SERVERS, "through the servers", below=report.difference < 0)
    _auc_line(lower, report.reference, _REFERENCE, "one torch process", below=report.difference >= 0)
    lower.legend(frameon=False, fontsize=10, labelcolor=_INK, loc="lower right")
    lower.set_xlabel("seconds of training", color=_INK, fontsize=11)
    end = max(report.servers.seconds, report.reference.seconds)
    lower.set_xlim(0, end * 1.03)
    low, high = lower.get_ylim()
    lower.set_ylim(low, high + 0.12 * (high - low))  # room for the figures over the lines' ends

    for moment in report.timeline:
        if moment.kind == "membership":
            for axes in (upper, lower):
                axes.axvline(moment.t, color="#c0392b", linewidth=1, linestyle=(0, (4, 3)))
            upper.annotate(
                moment.event, (moment.t, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", va="top", fontsize=9, color="#c0392b",
            )  # fmt: skip
    figure.savefig(path)


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
    )  # fmt: skip
