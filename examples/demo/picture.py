"""report.png: loss, AUC, each batch around the kill; throughput with what happened, and who held the ranges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from examples.demo.report import BIN_S, Kill, Report, Run, recovery, smooth, throughput

ZOOM_S = (-0.3, 0.7)  # around the kill

_SERVERS, _WORKERS, _REFERENCE = "#1f5fbf", ("#1f5fbf", "#12a0a0", "#7a4fc9", "#c2408f"), "#e07b1a"
_INK, _QUIET, _RED = "#22262b", "#8a929c", "#c0392b"
_BANDS = ("#1f5fbf", "#12a0a0", "#7a4fc9", "#e0a11b", "#c2408f", "#6c8f2c", "#8a929c", "#3f7fbf")
_LABEL_ROWS = 5  # of what happened, above the throughput
_LETTER = 0.0066  # of the axes' width


def draw(report: Report, path: Path) -> None:
    """Loss and AUC of both runs, each starting at 0; throughput and ranges of the one through the servers."""
    figure = Figure(
        figsize=(11, 10.4), dpi=150, facecolor="white", layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.12)
    )
    zoomed = report.kill is not None
    grid = figure.add_gridspec(3, 6, height_ratios=(1, 1.15, 0.85))
    loss = figure.add_subplot(grid[0, :2] if zoomed else grid[0, :3])
    auc = figure.add_subplot(grid[0, 2:4] if zoomed else grid[0, 3:])
    speed = figure.add_subplot(grid[1, :])
    bands = figure.add_subplot(grid[2, :], sharex=speed)
    s = report.settings
    figure.suptitle(
        f"{s['model']} on {s['data']}: {s['servers']} parameter servers, {s['workers']} workers",
        x=0.016, ha="left", fontsize=16, fontweight="bold", color=_INK,
    )  # fmt: skip
    _prepare(loss, "Training loss")
    _prepare(auc, "Test AUC after each epoch")
    _prepare(speed, f"Samples/s through the servers, in steps of {BIN_S:g} s")
    _prepare(bands, "Ranges held by each server, replicas counted")
    end = max(report.servers.seconds, report.reference.seconds)
    _losses(loss, report)
    _aucs(auc, report, end)
    _speeds(speed, report)
    _ranges(bands, report)
    for axes in (loss, auc):
        axes.set_xlim(0, end * 1.03)
        axes.set_xlabel("seconds of training", color=_INK, fontsize=10)
    speed.set_xlim(0, report.servers.seconds)
    _events(speed, bands, report)
    if report.kill is not None:
        zoom = figure.add_subplot(grid[0, 4:])
        _prepare(zoom, f"Each batch around the kill:\n{recovery(report.kill).partition(',')[0]}")
        _batches(zoom, report, report.kill)
    figure.supxlabel(f"Audit at the end: {report.audit}.", x=0.016, ha="left", fontsize=10,
                     color=_INK if report.audit.clean else _RED)  # fmt: skip
    figure.savefig(path)


def _events(speed: Axes, bands: Axes, report: Report) -> None:
    """A line for each thing that happened while training, and what it was, in rows above the throughput."""
    events = [m for m in report.timeline if m.kind != "phase" and 0 <= m.t <= report.servers.seconds]
    speed.set_ylim(0, speed.get_ylim()[1] * (1.65 if events else 1.05))
    free = [-1.0] * _LABEL_ROWS  # from when on there is room in each row
    span = report.servers.seconds or 1.0
    for event in events:
        colour = _RED if event.kind == "membership" else _INK
        for axes in (speed, bands):
            axes.axvline(event.t, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        wide = len(event.event) * _LETTER * span
        late = event.t + wide > span
        begins = event.t - wide if late else event.t
        row = next((i for i, until in enumerate(free) if until <= begins), int(np.argmin(free)))
        free[row] = begins + wide
        speed.annotate(
            event.event, (event.t, 1), xycoords=("data", "axes fraction"), fontsize=8.5, color=colour, va="top",
            xytext=(-4 if late else 4, -3 - 14 * row), textcoords="offset points", ha="right" if late else "left",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
        )  # fmt: skip


def _ranges(axes: Axes, report: Report) -> None:
    names = sorted({name for _, held in report.ranges for name in held}, key=lambda name: (len(name), name))
    axes.set_xlabel("seconds of training", color=_INK, fontsize=11)
    if not names:
        return
    points = [*report.ranges, (report.servers.seconds, report.ranges[-1][1])]
    held = np.array([[counts.get(name, 0) for _, counts in points] for name in names])
    colours = [_BANDS[i % len(_BANDS)] for i in range(len(names))]
    times = [t for t, _ in points]
    axes.stackplot(times, held, labels=names, colors=colours, step="post", alpha=0.85, linewidth=0)
    axes.set_ylim(0, held.sum(axis=0).max() * 1.02)
    axes.legend(frameon=True, framealpha=0.9, fontsize=9, ncols=len(names), loc="lower left", labelcolor=_INK)


def _prepare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, color=_INK, pad=8)
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
    close = abs(report.servers.seconds - report.reference.seconds) < 0.1 * end
    _auc_line(axes, report.servers, _SERVERS, "through the servers", below=close and report.difference < 0)
    _auc_line(axes, report.reference, _REFERENCE, "one torch process", below=close and report.difference >= 0)
    axes.legend(frameon=False, fontsize=10, labelcolor=_INK, loc="lower right")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low))  # room for the figures over the lines' ends


def _speeds(axes: Axes, report: Report) -> None:
    """The last step is left out: training ended somewhere in it."""
    points = throughput(report.servers.ends, report.settings["batch"])[:-1]
    if points:
        times, speeds = np.array(points).T
        axes.step(times, speeds, where="post", color=_SERVERS, linewidth=1.0)
        axes.fill_between(times, speeds, step="post", color=_SERVERS, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")


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
