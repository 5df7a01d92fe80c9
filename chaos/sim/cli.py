"""`elasticps sim`: whole clusters under faults, in virtual time. Found by the command line as an entry point,
because elasticps itself never imports chaos."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from multiprocessing.pool import AsyncResult
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from chaos.sim.run import Result
    from chaos.sim.story import Kind

RUNS_PER_LINE = 50
BROKEN_KEPT = 20


def sim(
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    runs: Annotated[int, typer.Option(min=0, help="How many seeds, one after another; 0: until stopped.")] = 1,
    flavour: Annotated[str, typer.Option(help="What goes wrong, in all of them; otherwise the seed says it.")] = "",
    training: Annotated[str, typer.Option(help="How they train, likewise.")] = "",
    cuts: Annotated[bool, typer.Option("--cuts", help="Take consistent cuts meanwhile.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Send keys once, or as differences; compress.")] = False,
    caches: Annotated[bool, typer.Option("--caches", help="Keep rows at workers.")] = False,
    together: Annotated[
        bool, typer.Option("--together", help="Pull several tables at once, and behind pushes.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="So many seeds at once, each in a process.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event of each run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run whole clusters through crashes, partitions and outages, in virtual time.

    Servers, leaders and workers are the real ones, on virtual links that cut, stall, lose one way and break. Workers
    push and pull under no bound or bounded delay, train in synchronous rounds, or on shards that are handed out;
    servers and workers die, freeze, come and go meanwhile. What every pull shows is checked.

    The same seed gives the same events. Exit code 1 if a promise was broken, with the command that repeats that run.
    """
    kind = _kind(flavour, training, cuts=cuts, short=short, caches=caches, together=together)
    totals = dict.fromkeys(("runs", "events", "views", "steps", "pulls", "rounds", "shards", "cuts"), 0)
    broken: list[Result] = []
    try:
        for result in _results(range(seed, seed + runs) if runs else itertools.count(seed), kind, trace, jobs, as_json):
            _count(totals, result)
            if trace:
                typer.echo("\n".join(result.trace))
            if result.invariant and len(broken) < BROKEN_KEPT:
                broken.append(result)
                if runs == 0:
                    typer.echo(str(result))
            if runs == 0 and totals["runs"] % RUNS_PER_LINE == 0 and not as_json:
                typer.echo(f"up to seed {result.seed}: {_summary(totals, len(broken))}")
    except KeyboardInterrupt:  # how a soak ends
        if runs:
            raise
    if as_json:
        typer.echo(json.dumps(totals | {"broken": [asdict(r) | {"trace": None} for r in broken]}))
    else:
        typer.echo(_summary(totals, len(broken)))
        for result in broken:
            typer.echo(str(result))
    raise typer.Exit(1 if broken else 0)


def _kind(flavour: str, training: str, **flags: bool) -> Kind:
    import chaos.sim.story

    for name, given, known in (
        ("flavour", flavour, chaos.sim.story.FLAVOURS + chaos.sim.story.ASKED_FOR),
        ("training", training, chaos.sim.story.TRAININGS),
    ):
        if given and given not in known:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(known)}", param_hint=f"--{name}")
    return chaos.sim.story.Kind(flavour, training, **flags)


def _results(seeds: Iterable[int], kind: Kind, trace: bool, jobs: int, as_json: bool) -> Iterable[Result]:
    import chaos.sim.run  # brings in the servers' code: only this command needs it

    play = partial(chaos.sim.run.run, kind=kind, trace=trace)
    quiet = as_json or not isinstance(seeds, range) or len(seeds) < 2
    told = track(seeds, "simulating", console=Console(stderr=True), disable=quiet, transient=True)
    if jobs == 1:
        yield from map(play, told)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        under_way: deque[AsyncResult[Result]] = deque()
        for seed in told:
            under_way.append(pool.apply_async(play, (seed,)))
            if len(under_way) > jobs:
                yield under_way.popleft().get()
        while under_way:
            yield under_way.popleft().get()


def _count(totals: dict[str, int], result: Result) -> None:
    totals["runs"] += 1
    totals["events"] += result.events
    totals["views"] += result.views
    totals["steps"] += result.steps
    totals["pulls"] += result.pulls
    totals["rounds"] += result.rounds
    totals["shards"] += result.shards
    totals["cuts"] += result.cuts


def _summary(totals: dict[str, int], broken: int) -> str:
    counts = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    return f"{counts}: {broken} broke a promise"
