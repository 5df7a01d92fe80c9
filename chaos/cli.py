"""`elasticps sim`: the replication protocol under faults, in virtual time. Found by the command line as an entry point,
because elasticps itself never imports chaos."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from chaos.simulator import Result, run


def sim(
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="How many seeds, one after another.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event of each run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run the chain-replication protocol through crashes, partitions and outages, in virtual time.

    The same seed gives the same events. Exit code 1 if a promise was broken, with the command that repeats that run.
    """
    seeds = range(seed, seed + runs)
    shown = track(seeds, "simulating", console=Console(stderr=True), disable=runs == 1 or as_json, transient=True)
    results = [run(number, trace) for number in shown]
    broken = [r for r in results if r.invariant]
    if trace:
        for result in results:
            typer.echo("\n".join(result.trace))
    if as_json:
        typer.echo(json.dumps(_summary(results) | {"broken": [vars(r) | {"trace": None} for r in broken]}))
    else:
        figures = _summary(results)
        typer.echo(f"{figures['runs']} runs, {figures['events']:,} events, {figures['views']:,} views, "
                   f"{figures['commits']:,} commits: {len(broken)} broke a promise")  # fmt: skip
        for result in broken:
            typer.echo(f"seed {result.seed}: {result.story}\nreplay it: elasticps sim --seed {result.seed} --trace")
    raise typer.Exit(1 if broken else 0)


def _summary(results: list[Result]) -> dict[str, int]:
    return {
        "runs": len(results),
        "events": sum(r.events for r in results),
        "views": sum(r.epochs for r in results),
        "commits": sum(r.commits for r in results),
    }
