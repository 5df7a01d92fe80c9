"""`elasticps sim`: whole clusters under faults, in virtual time. The command line finds this module as an entry point,
because elasticps itself never imports chaos."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import track

from chaos.sim.totals import BROKEN_LISTED, Record, RecordError, Totals

if TYPE_CHECKING:
    from chaos.sim.run import Result
    from chaos.sim.story import Kind

Play: TypeAlias = "Callable[[int], tuple[Result, float]]"
RUNS_PER_LINE = 50
STOPPED = 130  # the exit code of what Ctrl-C ends, also here
_NO_END = 1 << 30
MOST_CPU_S = 300.0  # of a story, which takes one or two: virtual time stands still if something goes round and round
LARGE_TIMES = 100  # as much for a large cluster
FRAMES_SHOWN = 8
QUEUED_SEEDS = 4  # seeds given out for each process: one long story does not have the others wait


def sim(
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed; 0 unless a record goes on.")] = None,
    runs: Annotated[
        int, typer.Option(min=0, max=1 << 62, help="How many seeds, one after another; 0: until stopped.")
    ] = 1,
    record: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Keep what they came to in this file, and go on behind it while the code that stories play is the "
            "same, until there are so many RUNS in all.",
        ),
    ] = None,
    flavour: Annotated[str, typer.Option(help="What goes wrong, in all of them; otherwise the seed says it.")] = "",
    training: Annotated[str, typer.Option(help="How they train, likewise.")] = "",
    cuts: Annotated[bool, typer.Option("--cuts", help="Take consistent cuts meanwhile.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Send keys once, or as differences; compress.")] = False,
    caches: Annotated[bool, typer.Option("--caches", help="Keep rows at workers.")] = False,
    together: Annotated[
        bool, typer.Option("--together", help="Pull several tables at once, and behind pushes.")
    ] = False,
    few: Annotated[
        bool, typer.Option("--few", help="Push few keys at once: most steps tick some ranges only.")
    ] = False,
    drops: Annotated[bool, typer.Option("--drops", help="Have tables come and go beside.")] = False,
    proven: Annotated[
        bool, typer.Option("--proven", help="Have workers ask the store about views, as with certificates.")
    ] = False,
    grows: Annotated[
        bool, typer.Option("--grows", help="Have tables admit keys and forget rows beside, and one clock be wrong.")
    ] = False,
    readers: Annotated[
        bool, typer.Option("--readers", help="Have readers follow tables, and hold now and then.")
    ] = False,
    servers: Annotated[
        int, typer.Option(min=0, max=4096, help="Play a large cluster of so many servers; with --workers, --ranges.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=0, max=100_000, help="Of so many workers.")] = 0,
    ranges: Annotated[int, typer.Option(min=0, max=1 << 16, help="Of so many ranges, a power of two.")] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of virtual time that they train; 0: the seed says it, and in a large cluster each worker takes "
            "two steps, while a server dies and one joins.",
        ),
    ] = 0.0,
    minutes: Annotated[
        float, typer.Option(min=0, help="End the story of a large cluster after so much wall time; 0: never.")
    ] = 0.0,
    jobs: Annotated[
        int, typer.Option(min=0, help="So many seeds at once, each in a process; 0: one for each core.")
    ] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event of each run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run whole clusters through crashes, partitions and outages, in virtual time.

    Servers, leaders and workers are the real ones, on virtual links that cut, stall, lose one way and break. Workers
    push and pull under no bound or bounded delay, train in synchronous rounds, or on shards that are handed out;
    servers and workers die, freeze, come and go meanwhile. What every pull shows is checked.

    The same seed gives the same events. Exit code 1 if a promise was broken, with the command that repeats that run.
    """
    flags = {"cuts": cuts, "short": short, "caches": caches, "together": together, "drops": drops, "proven": proven}
    flags |= {"grows": grows, "few": few, "readers": readers}
    kind = _large(_kind(flavour, training, **flags), servers, workers, ranges, seconds)
    jobs = min(jobs or _cores(), runs or _NO_END)
    record_file = None if record is None else Record(record, _code(), asdict(kind))
    try:
        totals = _begin(record_file, seed)
        play = partial(_play, kind=kind, trace=trace, minutes=minutes)
        stopped = _play_all(totals, record_file, play, runs, jobs, trace=trace, as_json=as_json)
    except RecordError as error:
        raise typer.BadParameter(str(error), param_hint="--record") from None
    _tell(totals, jobs, as_json, timed=runs != 1)
    raise typer.Exit(1 if totals.failed else STOPPED if stopped else 0)


def _begin(record: Record | None, seed: int | None) -> Totals:
    """Returns the totals of a record, or empty ones."""
    totals = None if record is None else record.read()
    if record is None or totals is None:
        if record is not None and record.path.exists():
            typer.echo(f"{record.path} is of other code than this: it begins anew", err=True)
        return Totals(seed or 0)
    if seed not in (None, totals.first):
        message = f"{record.path} goes on behind seed {totals.last}: leave --seed out, or name another file"
        raise typer.BadParameter(message, param_hint="--seed")
    return totals


def _play_all(
    totals: Totals, record: Record | None, play: Play, runs: int, jobs: int, *, trace: bool, as_json: bool
) -> bool:
    """Plays the stories beyond those in the totals. Returns whether it was stopped before their end."""
    if record is not None:
        record.write(totals, jobs)  # where that cannot be done, better now than after hours
    begin = totals.last + 1 if totals.runs else totals.first
    seeds = range(begin, totals.first + runs) if runs else itertools.count(begin)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a soak in the background ends by it
    try:
        for result, cpu_s in _results(seeds, play, jobs, as_json):
            totals.add(result, cpu_s)
            if record is not None and totals.runs % RUNS_PER_LINE == 0:
                record.write(totals, jobs)
            if trace:
                typer.echo("\n".join(result.trace))
            if runs != 1 and not as_json:
                _tell_meanwhile(totals, result, jobs, every=0 if runs else RUNS_PER_LINE)
    except KeyboardInterrupt:  # Ctrl-C: how a soak ends
        return runs > 0
    except BrokenProcessPool as error:
        after = f"after seed {totals.last}" if totals.runs else f"from seed {begin} on"
        typer.echo(
            f"a process that played stories is gone, in one of the {QUEUED_SEEDS * jobs} {after}: {error}", err=True
        )
        return True
    finally:
        signal.signal(signal.SIGTERM, before)
        if record is not None:
            record.write(totals, jobs)
    return False


def _tell_meanwhile(totals: Totals, result: Result, jobs: int, every: int) -> None:
    if not result.ok and totals.failed <= BROKEN_LISTED:
        typer.echo(str(result))
    if every and totals.runs % every == 0:
        typer.echo(f"up to seed {result.seed}: {totals}; {totals.speed(jobs)}")


def _tell(totals: Totals, jobs: int, as_json: bool, timed: bool) -> None:
    if as_json:
        typer.echo(json.dumps(totals.as_json(jobs)))
        return
    typer.echo(str(totals))
    if timed:
        typer.echo(totals.speed(jobs))
    for broken in totals.broken:
        typer.echo(broken["told"])


def _code() -> str:
    from chaos.sim.code import digest  # starts a process that imports the servers' code

    return digest()


def _kind(flavour: str, training: str, **flags: bool) -> Kind:
    import chaos.sim.story

    for name, given, known in (
        ("flavour", flavour, chaos.sim.story.FLAVOURS + chaos.sim.story.ON_REQUEST),
        ("training", training, chaos.sim.story.TRAININGS),
    ):
        if given and given not in known:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(known)}", param_hint=f"--{name}")
    return chaos.sim.story.Kind(flavour, training, **flags)


def _large(kind: Kind, servers: int, workers: int, ranges: int, seconds: float) -> Kind:
    """Returns the kind of stories with these numbers. Large clusters have a program of workers of their own."""
    if not (servers or workers or ranges):
        return replace(kind, seconds=seconds)
    if not (servers > 1 and workers and ranges):
        raise typer.BadParameter("give --servers (2 or more), --workers and --ranges together")
    if ranges & (ranges - 1):
        raise typer.BadParameter(f"{ranges} is no power of two", param_hint="--ranges")
    if kind != type(kind)(flavour=kind.flavour):
        raise typer.BadParameter("large clusters have one way to train: leave the other options out")
    flavour = kind.flavour or "large"
    return replace(kind, flavour=flavour, servers=servers, workers=workers, ranges=ranges, seconds=seconds)


def _results(seeds: Iterable[int], play: Play, jobs: int, as_json: bool) -> Iterable[tuple[Result, float]]:
    """Yields the result of each seed, in their order, and the CPU seconds that it took."""
    quiet = as_json or not isinstance(seeds, range) or len(seeds) < 2
    totals = track(seeds, "simulating", console=Console(stderr=True), disable=quiet, transient=True)
    if jobs == 1:
        yield from map(play, totals)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_leave_interrupts)
    under_way: deque[Future[tuple[Result, float]]] = deque()
    try:
        for seed in totals:
            under_way.append(pool.submit(play, seed))
            if len(under_way) >= QUEUED_SEEDS * jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BaseException:  # whatever ends this, such as Ctrl-C: nobody waits for the stories under way
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _play(seed: int, kind: Kind, trace: bool, minutes: float) -> tuple[Result, float]:
    import chaos.sim.run  # brings in the servers' code: only this command needs it
    from chaos.sim.monitor import StoryMonitor

    def tell(text: str) -> None:
        typer.echo(f"seed {seed}: {text}", err=True)

    began = time.process_time()
    monitor = StoryMonitor(tell, 60 * minutes) if kind.servers else None
    with _patience(MOST_CPU_S * (LARGE_TIMES if kind.servers else 1)):
        result = chaos.sim.run.run(seed, kind=kind, trace=trace, monitor=monitor)
    return result, time.process_time() - began


@contextmanager
def _patience(most_s: float) -> Iterator[None]:
    """Breaks the promise that every story comes to rest if it takes longer than `most_s` of CPU."""

    def give_up(_: int, frame: FrameType | None) -> None:
        from chaos.sim.checks.violation import Violation

        where = "".join(traceback.format_stack(frame)[-FRAMES_SHOWN:])
        raise Violation("progress", f"no end within {most_s:g} s of CPU:\n{where}")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, most_s, most_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _leave_interrupts() -> None:
    """Ignores Ctrl-C, which reaches all processes of a terminal: the one that gave out the seeds ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
