"""served.png: how old was what was served, and how long answers took, with the servers that were killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.serving.load import Served

_INK, _QUIET, _BLUE, _RED = "#22262b", "#8a929c", "#1f5fbf", "#c0392b"


def draw(served: Sequence[Served], kills: Sequence[tuple[float, str]], path: Path) -> None:
    """Age and latency of each answer, in milliseconds, over the seconds of the run."""
    figure = Figure(figsize=(11, 6.4), dpi=150, facecolor="white", layout="constrained")
    ages, latencies, steps = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    figure.suptitle("A service whose model is trained meanwhile", x=0.016, ha="left", fontsize=15, color=_INK)
    times = [one.t for one in served]
    _plot(ages, times, [one.age_s * 1e3 for one in served], "Age of the oldest rows that each answer used, ms")
    _plot(latencies, times, [one.latency_s * 1e3 for one in served], "Time that the answer took, ms")
    _plot(steps, times, [one.step for one in served], "Newest step of training that it shows", log=False)
    steps.set_xlabel("seconds", color=_INK)
    for at, name in kills:
        for axes in (ages, latencies, steps):
            axes.axvline(at, color=_RED, linewidth=1, linestyle=(0, (4, 3)))
        ages.annotate(
            f"{name} killed", (at, 1), xycoords=("data", "axes fraction"), color=_RED, fontsize=9, va="top",
            xytext=(4, -4), textcoords="offset points",
        )  # fmt: skip
    figure.savefig(path)


def _plot(axes: Axes, x: Sequence[float], y: Sequence[float], title: str, *, log: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.plot(x, y, ".", markersize=2, color=_BLUE)
    if log and any(y):
        axes.set_yscale("log")
    axes.grid(axis="y", color="#e6e9ed")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_INK, length=0)
    axes.spines["bottom"].set_color(_QUIET)
