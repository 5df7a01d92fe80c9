"""`elasticps audit`: are all replicas equal, and has every acknowledged step been applied?"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from elasticps.admin import audit as auditing
from elasticps.cli.local import target
from elasticps.cli.options import Json, Name, Url
from elasticps.cli.output import ExitCode, err, out, print_json

_SHOWN = 10


def audit(
    url: Url = None,
    name: Name = None,
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that it may take.")] = 30.0,
) -> None:
    """Compare all replicas of every range bit for bit, and each worker's acknowledged steps with what is applied.

    A worker says with its next push what was acknowledged, so one that has stopped is shown a step behind.

    Training goes on meanwhile. The exit code is 0 if all is equal, 1 if a replica differs or an acknowledged step is
    missing, 3 if not everything could be compared in time or nothing could, 4 if a server was lost meanwhile.
    """
    with err.status("comparing replicas"):
        report = auditing.audit(target(url, name), timeout)
    if as_json:
        print_json(report.as_dict())
    else:
        out.print(_render(report))
    if report.wrong:
        raise typer.Exit(ExitCode.FAILED)
    if report.lost:
        raise typer.Exit(ExitCode.DEGRADED)
    raise typer.Exit(ExitCode.UNREACHABLE if report.unjudged or report.idle else ExitCode.OK)


def _render(report: auditing.AuditReport) -> Group:
    head = Text.assemble((report.cluster, "bold"), f"  epoch {report.epoch}: ")
    compared = report.ranges - len(report.unjudged)
    head.append(f"{report.compared} replicas of {compared} ranges compared in {report.seconds:.1f} s: ")
    if report.differences:
        head.append(f"{len(report.differences)} differ", "bold red")
    elif compared > report.alone:
        head.append("all equal", "bold green")
    else:
        head.append("nothing was compared", "bold yellow")
    lines = [head, *_shown([f"range {d.range} at {d.server}: {d.text}" for d in report.differences], "red")]
    lines += _shown([f"{name} was lost meanwhile: {reason}" for name, reason in report.lost.items()], "red")
    if report.alone:
        lines.append(Text(f"{report.alone} ranges have one replica, which was compared with nothing", "yellow"))
    if report.short:
        lines.append(Text(f"{report.short} ranges have fewer than {report.replicas} replicas", "yellow"))
    reasons = Counter(report.unjudged.values())
    lines += _shown([f"{count} ranges were not compared: {reason}" for reason, count in reasons.items()], "yellow")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("worker")
    for column in ("id", "acknowledged", "applied", "lag"):
        table.add_column(column, justify="right")
    table.add_column("")
    for worker in report.workers:
        missing = worker.acknowledged - worker.applied
        verdict = f"acknowledged, but not in all ranges: {missing} steps" if worker.broken else ""
        # Nobody knows what a worker that has left knew last.
        known = worker.acknowledged and (worker.name or worker.broken)
        table.add_row(
            worker.name or "(gone)", str(worker.id), str(worker.acknowledged) if known else "–", str(worker.applied),
            str(worker.lag) if known else "–", verdict, style="red" if worker.broken else "",
        )  # fmt: skip
    return Group(*lines, table) if report.workers else Group(*lines, Text("no worker has pushed yet"))


def _shown(texts: list[str], style: str) -> list[Text]:
    more = len(texts) - _SHOWN
    return [Text(text, style) for text in texts[:_SHOWN]] + ([Text(f"… and {more} more", style)] if more > 0 else [])
