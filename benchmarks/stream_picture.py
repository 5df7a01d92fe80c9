"""The picture of `elasticps bench stream`: rows of both tables, and their AUC, over the hours."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.stream import BOUNDED, UNBOUNDED, StreamReport

_COLOURS = {UNBOUNDED: "#e07b1a", BOUNDED: "#1f5fbf"}
_QUIET = "#8a929c"


def draw(report: StreamReport, path: Path) -> None:
    """Draws a report as a PNG."""
    figure = Figure(figsize=(10, 6.4), dpi=130, facecolor="white", layout="constrained")
    rows, auc = figure.subplots(2, 1, sharex=True)
    hours = [point.hour for point in report.points]
    for name, colour in _COLOURS.items():
        rows.plot(hours, [point.rows[name] / 1e3 for point in report.points], color=colour, label=name)
        auc.plot(hours, [point.auc[name] for point in report.points], color=colour, label=name)
    waiting = [point.candidates / 1e3 for point in report.points]
    rows.plot(hours, waiting, color=_COLOURS[BOUNDED], linestyle=":", label="ids that wait for a row")
    rows.axhline(report.lines[1].capacity / 1e3, color=_QUIET, linewidth=0.8, linestyle="--", label="capacity")
    rows.set(title="Rows", ylabel="thousands", ylim=(0, None))
    auc.set(title="AUC of each part of an hour, scored before it is learnt", xlabel="hours of the stream")
    for axes in (rows, auc):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    rows.legend(frameon=False)
    figure.savefig(path)
