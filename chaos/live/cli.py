"""`elasticps chaos run PLAN`, `plans` and `summary`: injects faults on purpose, and checks whether the promises hold.

The command line finds this module as an entry point, so modules of the command line are imported only when it runs.
"""

from __future__ import annotations

import enum
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from chaos.live.plan import Plan, PlanError, parse
from elasticps.errors import ConfigError


class What(enum.StrEnum):
    """The subcommands of `elasticps chaos`."""

    RUN = "run"
    PLANS = "plans"
    SUMMARY = "summary"


def chaos(
    what: Annotated[What, typer.Argument(help="run a plan, list the ready plans, or summarise reports of runs.")],
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PLAN]", help="A ready plan's name or a YAML file; for summary: folders."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What the plan leaves to chance comes from this.")] = 0,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds of load, instead of the plan's; later faults are left out.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the report and the logs.  \\[default: runs/chaos/PLAN-SEED]"),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="Disturb the network by a user-space proxy instead of namespaces.")
    ] = False,
    tls: Annotated[
        bool, typer.Option("--tls", help="With TLS on every connection, by an authority that is thrown away.")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Servers that hold each range, instead of the plan's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Kill, freeze and cut off processes under load, then check that nothing was lost and nothing applied twice.

    Exit code 1 if a promise was broken, or nothing could be tried, with the command that repeats the run.
    """
    names = which or []
    if what is What.PLANS:
        _list(as_json)
    elif what is What.SUMMARY:
        from chaos.live.report import summary
        from elasticps.cli.output import out

        out.print(summary([Path(name) for name in names or ["runs/chaos"]]), markup=False, soft_wrap=True)
    elif len(names) != 1:
        raise ConfigError(f"run needs one plan: a YAML file, or one of {', '.join(ready_plans())}")
    else:
        from chaos.live.runner import changed, command_line

        plan = changed(find_plan(names[0]), proxy=proxy, tls=tls, replicas=replicas)
        command = command_line(names[0], seed, duration, proxy, tls, replicas)
        _run(plan, seed, duration, output, command, as_json)


def ready_plans() -> dict[str, str]:
    """Returns the plans that come with elasticps: YAML texts by name."""
    folder = resources.files("chaos.live") / "plans"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}


def find_plan(which: str) -> Plan:
    """Reads a plan, by the name of a ready one or by its file. Raises PlanError, which says what is wrong with it."""
    ready = ready_plans()
    if which in ready:
        return parse(ready[which], which, f"plan {which}")
    path = Path(which)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"no ready plan is called {which!r} ({', '.join(ready)}), and as a file: {error}") from None
    return parse(text, path.stem, which)


def _list(as_json: bool) -> None:
    from elasticps.cli.output import out, print_json

    plans = [parse(text, name, f"plan {name}") for name, text in ready_plans().items()]
    if as_json:
        print_json([{"name": p.name, "about": p.about, "seconds": p.duration, "kind": p.cluster.kind} for p in plans])
        return
    table = Table("plan", "seconds", "cluster", "what happens", box=None, header_style="bold", pad_edge=False)
    for plan in plans:
        table.add_row(plan.name, f"{plan.duration:g}", plan.cluster.kind, Text(plan.about))
    out.print(table)


def _run(plan: Plan, seed: int, duration: float | None, output: Path | None, command: str, as_json: bool) -> None:
    from chaos.live import netns, runner
    from elasticps.cli.output import ExitCode, err, make_folder, print_json, sigterm_interrupts

    folder = output or Path("runs") / "chaos" / f"{plan.name}-{seed}"
    make_folder(folder)
    if plan.cluster.kind == "netns":
        netns.enter()
    from chaos.live.report import write
    from chaos.live.screen import screen

    with sigterm_interrupts(), _errors_only(), screen(err) as show:
        run = runner.Run(
            plan, seed, duration=duration, command=command, show=show,
            progress=lambda text: err.print(text, style="dim", markup=False),
        )  # fmt: skip
        outcome = run.carry_out(folder / "logs")
        show(run)
        report = write(outcome, folder)
    if as_json:
        print_json(report)
    else:
        _tell(report, folder)
    raise typer.Exit(ExitCode.OK if outcome.passed else ExitCode.FAILED)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Silences warnings that etcd is away, which is what the run is for."""
    logger = logging.getLogger("coordinator")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tell(report: dict[str, object], folder: Path) -> None:
    from chaos.live.figures import by_kind
    from chaos.live.report import reader_words, recovery_rows, verdict
    from elasticps.cli.output import out

    table = Table("fault", box=None, header_style="bold", pad_edge=False)
    for column in ("how many", "p50 ms", "p99 ms", "most ms"):
        table.add_column(column, justify="right")
    for row in recovery_rows(by_kind([report])):
        table.add_row(*map(str, row))
    out.print(table)
    operations, stall = json.loads(json.dumps([report["operations"], report["longest_stall"]]))
    out.print(
        f"{operations['steps_committed']:,} steps committed, {operations['steps_failed']} failed; longest stall "
        f"{stall['ms']:g} ms; report in {os.path.relpath(folder)}/index.html",
        markup=False,
    )
    readers = report["readers"]
    assert isinstance(readers, list)
    for found in readers:
        out.print(f"reader {found['reader']}: {reader_words(found)}", markup=False)
    broken, notes = report["broken"], report["notes"]
    assert isinstance(broken, list)
    assert isinstance(notes, list)
    for text in notes:
        out.print(f"note: {text}", style="dim", markup=False)
    for text in broken:
        out.print(Text.assemble(("broken: ", "bold red"), str(text)))
    out.print(Text(verdict(report), "bold green" if report["kept"] else "bold red"))
    out.print(f"again: {report['command']}", markup=False)


def main() -> None:
    """Runs `python -m chaos.live.cli chaos run …`, as `elasticps chaos run …`, for a run that moves into namespaces."""
    from elasticps.cli.output import guarded

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("chaos")(guarded(chaos))
    app()


if __name__ == "__main__":
    main()
