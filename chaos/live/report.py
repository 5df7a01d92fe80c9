"""The report of a chaos run: report.json for programs, timeline.png, and index.html, which needs no other file."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from chaos.live import figures
from chaos.live.runner import Outcome
from elasticps.errors import ConfigError

BUCKET_S = 0.25
_COLOURS = {"server": "#c0392b", "coordinator": "#8e44ad", "worker": "#2471a3", "etcd": "#b9770e",
            "reader": "#117a65", "": "#566573"}  # fmt: skip


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns the whole run as plain values."""
    report = outcome.audit
    return {
        "plan": outcome.plan.name,
        "about": outcome.plan.about,
        "seed": outcome.seed,
        "seconds": outcome.seconds,
        "command": outcome.command,
        "kept": outcome.passed,
        "tried": outcome.tried,
        "broken": outcome.broken,
        "notes": outcome.notes,
        "operations": figures.counts(outcome.incarnations),
        "longest_stall": {
            "ms": round(outcome.stall.seconds * 1e3, 1), "worker": outcome.stall.worker,
            "at": round(outcome.stall.at, 3),
        },
        "settled_s": round(outcome.settled_s, 2),
        "epochs": len(outcome.views),
        "memory_limit": outcome.plan.cluster.memory,
        "memory": dict(sorted(outcome.memory.items())),
        "readers": [found.as_dict() for found in outcome.readers],
        "audit": None if report is None else {
            "clean": report.clean, "epoch": report.epoch, "compared": report.compared, "short": report.short,
            "differences": len(report.differences), "unjudged": len(report.unjudged),
        },
        "faults": [fault.as_dict() | {"recovery_ms": outcome.recovery_ms(fault)} for fault in outcome.faults],
        "views": [{"at": round(s.at, 3), "epoch": s.epoch, "short": s.short, "joining": s.joining, "reason": s.reason}
                  for s in outcome.views],
        "throughput": {"bucket_s": BUCKET_S, "commits_per_s": _throughput(outcome).round(1).tolist()},
    }  # fmt: skip


def verdict(report: Mapping[str, Any]) -> str:
    """Says in a few words how a run ended; also reads reports of earlier versions."""
    if report["broken"]:
        return f"{len(report['broken'])} promises were broken"
    if report.get("tried", True):
        return "every promise was kept"
    skipped = len(report["faults"])
    return f"nothing was tried: {f'all {skipped} faults were skipped' if skipped else 'no fault came due'}"


def write(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Writes the three files into `folder`, and returns the report as plain values. Without matplotlib there is no
    picture."""
    folder.mkdir(parents=True, exist_ok=True)
    found = as_dict(outcome)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    picture = _picture(outcome, verdict(found))
    if picture:
        (folder / "timeline.png").write_bytes(picture)
    (folder / "index.html").write_text(page(found, picture), encoding="utf-8")
    return found


def _throughput(outcome: Outcome) -> Any:
    return figures.throughput(outcome.incarnations, max(outcome.seconds, BUCKET_S), BUCKET_S)


def _picture(outcome: Outcome, ended: str) -> bytes:
    """Draws the timeline as PNG; returns b"" if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return b""
    rates = _throughput(outcome)
    figure = Figure(figsize=(min(40.0, max(12.0, outcome.seconds / 6)), 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, max(1.5, len(outcome.faults) / 8)))
    upper.fill_between(np.arange(len(rates)) * BUCKET_S, rates, step="post", color="#aab7b8")
    upper.set_ylabel("steps committed / s")
    upper.set_title(f"{outcome.plan.name}, seed {outcome.seed}: {ended}")
    times = [seen.at for seen in outcome.views]
    lower.step(times, [seen.short for seen in outcome.views], where="post", color="#c0392b", label="short of replicas")
    lower.step(times, [seen.joining for seen in outcome.views], where="post", color="#2471a3", label="being filled")
    lower.set_ylabel("ranges")
    lower.legend(loc="upper right", fontsize="small")
    _bars(bottom, outcome)
    bottom.set_xlim(0, max([outcome.seconds, *(fault.ended for fault in outcome.faults)]))
    bottom.set_xlabel("seconds")
    for axes in (upper, lower, bottom):
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _bars(axes: Any, outcome: Outcome) -> None:
    """Draws each fault as a bar from its beginning to its end."""
    done = [fault for fault in outcome.faults if fault.began >= 0]
    for row, fault in enumerate(done):
        length = max(0.1, fault.ended - fault.began)
        axes.barh(row, length, left=fault.began, color=_COLOURS.get(fault.role, "#566573"), height=0.8)
        if len(done) <= 60:
            axes.text(fault.began + length + 0.1, row, f"{fault.action.do} {fault.target}", va="center", fontsize=7)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_ylabel("faults")


# --------------------------------------------------------------------------------------------------------------- page


def page(report: Mapping[str, Any], picture: bytes) -> str:
    """Returns the report as one HTML page."""
    parts = [
        f"<h1>{_text(report['plan'])}, seed {report['seed']}: "
        f"<span class={'good' if report['kept'] else 'bad'}>{verdict(report)}</span></h1>",
        f"<p>{_text(report['about'])}</p>",
        f"<p>Again: <code>{_text(report['command'])}</code></p>",
    ]
    if report["broken"]:
        parts.append("<ul class=bad>" + "".join(f"<li>{_text(each)}</li>" for each in report["broken"]) + "</ul>")
    parts += [f"<p>{_text(note)}</p>" for note in report["notes"]]
    if picture:
        parts.append(f'<img alt="timeline" src="data:image/png;base64,{base64.b64encode(picture).decode()}">')
    parts += ["<h2>In short</h2>", _table(("", ""), _summary(report))]
    kinds = figures.by_kind([report])
    if kinds:
        parts += ["<h2>From a fault to the next commit of the slowest worker, in ms</h2>",
                  _table(("fault", "how many", "p50", "p99", "most"), recovery_rows(kinds))]  # fmt: skip
    parts += ["<h2>Faults</h2>", _table(_FAULT_COLUMNS, [_fault_row(fault) for fault in report["faults"]])]
    views = [(f"{v['at']:.2f}", v["epoch"], v["short"], v["joining"], v["reason"]) for v in report["views"]]
    parts += [
        "<details><summary>Views</summary>",
        _table(("s", "epoch", "short", "filling", "reason"), views),
        "</details>",
    ]
    title = f"{report['plan']}, seed {report['seed']}"
    return f"<!doctype html><meta charset=utf-8><title>{_text(title)}</title><style>{_STYLE}</style>{''.join(parts)}\n"


def _summary(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    operations, stall = report["operations"], report["longest_stall"]
    return [
        ("steps committed", f"{operations['steps_committed']:,} of {operations['steps_begun']:,} begun"),
        ("steps failed", str(operations["steps_failed"])),
        ("pulls", f"{operations['pulls']:,}, {operations['pulls_failed']} failed, {operations['pulls_stale']} stale"),
        ("longest stall", f"{stall['ms']:g} ms ({stall['worker']}, at {stall['at']:g} s)"),
        ("whole again after", f"{report['settled_s']:g} s"),
        ("views", str(report["epochs"])),
        ("most memory used", _memory(report)),
        ("replicas compared", str(report["audit"]["compared"]) if report["audit"] else "none"),
        *((f"reader {found['reader']}", reader_words(found)) for found in report.get("readers", ())),
    ]


def reader_words(found: Mapping[str, Any]) -> str:
    """Says what a reader has shown, and how old it was."""
    age, lag = found["age_ms"], found.get("lag_ms", {"p50": 0.0, "p99": 0.0, "most": 0.0})
    return (
        f"{found['looks']:,} looks, rows {age['p50']:g} ms old (p50), {age['p99']:g} (p99), {age['most']:g} at most; "
        f"what was committed was missing for {lag['p50']:g} ms (p50), {lag['p99']:g} (p99), {lag['most']:g} "
        f"at most; "
        f"{found['held']} moments held, {found['apart']} not found; {found['compared']:,} rows compared at rest; "
        f"{found['failed']} pulls without an answer, {found['undecided']} rows undecided"
    )


def _memory(report: Mapping[str, Any]) -> str:
    used = ", ".join(f"{name} {most >> 20} MiB" for name, most in report["memory"].items())
    return f"{used}; each may use {report['memory_limit']}" if used else "not looked at, there is no limit"


_FAULT_COLUMNS = ("s", "fault", "target", "asked", "values", "for s", "recovery ms", "")


def _fault_row(fault: Mapping[str, Any]) -> tuple[str, ...]:
    began = fault["began"] >= 0
    lasted = f"{fault['ended'] - fault['began']:.2f}" if began and fault["ended"] >= 0 else ""
    recovery = ", ".join(f"{name} {ms:g}" for name, ms in fault["recovery_ms"].items())
    values = ", ".join(f"{name} {value:g}" for name, value in fault["values"].items())
    return (
        f"{fault['began']:.2f}" if began else f"({fault['planned_at']:.2f})", fault["do"], fault["target"],
        fault["asked"], values, lasted, recovery, fault["note"] if began else f"{fault['state']}: {fault['note']}",
    )  # fmt: skip


def recovery_rows(kinds: Mapping[str, list[float]]) -> list[tuple[str, ...]]:
    """Returns a row for each kind of fault: how many there were, and p50, p99 and maximum of the recovery in ms."""
    return [
        (kind, str(len(times)), *(f"{np.percentile(times, q):.0f}" for q in (50, 99, 100)))
        for kind, times in kinds.items()
    ]


def _table(columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}code{background:#f2f2f2;padding:.2rem .4rem}.good{color:#1e8449}.bad{color:#c0392b}"
)


# ------------------------------------------------------------------------------------------------------------ summary


def summary(folders: Iterable[Path]) -> str:
    """Returns a Markdown table of recovery by kind of fault, over all reports in these folders and below."""
    files = sorted({file for folder in folders for file in folder.rglob("report.json")})
    if not files:
        raise ConfigError("there is no report.json in these folders; a run writes one into its --out")
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    broken = sum(bool(report["broken"]) for report in reports)
    untried = sum(not report.get("tried", True) for report in reports)
    lines = ["| fault | how many | p50 ms | p99 ms | most ms |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in recovery_rows(figures.by_kind(reports))]
    idle = f", {untried} in which nothing was tried" if untried else ""
    lines.append(f"\n{len(reports)} runs, {broken} with a broken promise{idle}.")
    lines += [
        f"- `{report['command']}`: {'; '.join(report['broken']) or verdict(report)}"
        for report in reports if not report["kept"]
    ]  # fmt: skip
    return "\n".join(lines)
