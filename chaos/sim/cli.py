"""`elasticps sim`: whole clusters under faults, in virtual time. Found by the command line as an entry point,
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
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from chaos.sim.run import Result
    from chaos.sim.story import Kind

RUNS_PER_LINE = 50
BROKEN_KEPT = 20
STOPPED = 130  # the exit code of what Ctrl-C ends, also here
MINUTE_S = 60
_NO_END = 1 << 30
MOST_CPU_S = 300.0  # of a story, which takes one or two: virtual time stands still if something goes round and round
FRAMES_TOLD = 8
AHEAD = 4  # seeds given out for each process: one long story does not have the others wait
COUNTED = ("events", "views", "steps", "pulls", "rounds", "shards", "cuts")


@dataclass
class Told:
    """What has been played: sums over all stories, the first ones that broke a promise, and what it took."""

    first: int
    last: int = -1
    runs: int = 0
    failed: int = 0
    cpu_s: float = 0.0  # of all processes
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    broken: list[Result] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, result: Result, cpu_s: float) -> None:
        """One more. They come in the order of their seeds."""
        self.runs += 1
        self.last = result.seed
        self.cpu_s += cpu_s
        for what in COUNTED:
            self.counts[what] += getattr(result, what)
        if not result.ok:
            self.failed += 1
            if len(self.broken) < BROKEN_KEPT:
                self.broken.append(result)

    @property
    def took_s(self) -> float:
        """Real seconds so far."""
        return time.monotonic() - self.began_s

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in {"runs": self.runs, **self.counts}.items())
        return f"{counts}: {self.failed} broke a promise"

    def speed(self, jobs: int) -> str:
        """Which seeds, how long, how many a second. As other runs of the same seeds would not say it."""
        took_s, processes = self.took_s, "1 process" if jobs == 1 else f"{jobs} processes"
        if not self.runs:
            return f"no story came to its end within {_duration(took_s)} in {processes}"
        rates = f"{self.runs / max(took_s, 1e-9):.2f} stories/s, {self.cpu_s / self.runs:.2f} CPU s a story"
        return f"seeds {self.first} to {self.last} took {_duration(took_s)} in {processes}: {rates}"

    def as_json(self, jobs: int) -> str:
        seeds = {"first": self.first, "last": self.last} if self.runs else {}
        took = {"jobs": jobs, "took_s": round(self.took_s, 3), "cpu_s": round(self.cpu_s, 3)}
        broken = {"failed": self.failed, "broken": [asdict(r) | {"trace": None} for r in self.broken]}
        return json.dumps({"runs": self.runs, **self.counts, **seeds, **took, **broken})


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
    kind = _kind(flavour, training, cuts=cuts, short=short, caches=caches, together=together)
    jobs = min(jobs or _cores(), runs or _NO_END)
    told = Told(seed)
    stopped = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a soak in the background ends by it
    try:
        seeds = range(seed, seed + runs) if runs else itertools.count(seed)
        for result, cpu_s in _results(seeds, kind, trace, jobs, as_json):
            told.add(result, cpu_s)
            if trace:
                typer.echo("\n".join(result.trace))
            if runs != 1 and not as_json:
                _tell_meanwhile(told, result, jobs, every=0 if runs else RUNS_PER_LINE)
    except KeyboardInterrupt:  # Ctrl-C: how a soak ends
        stopped = runs > 0
    except BrokenProcessPool as error:
        after = f"after seed {told.last}" if told.runs else f"from seed {seed} on"
        typer.echo(f"a process that played stories is gone, in one of the {AHEAD * jobs} {after}: {error}", err=True)
        stopped = True
    finally:
        signal.signal(signal.SIGTERM, before)
    _tell(told, jobs, as_json, timed=runs != 1)
    raise typer.Exit(1 if told.failed else STOPPED if stopped else 0)


def _tell_meanwhile(told: Told, result: Result, jobs: int, every: int) -> None:
    if not result.ok and told.failed <= BROKEN_KEPT:
        typer.echo(str(result))
    if every and told.runs % every == 0:
        typer.echo(f"up to seed {result.seed}: {told}; {told.speed(jobs)}")


def _tell(told: Told, jobs: int, as_json: bool, timed: bool) -> None:
    if as_json:
        typer.echo(told.as_json(jobs))
        return
    typer.echo(str(told))
    if timed:
        typer.echo(told.speed(jobs))
    for result in told.broken:
        typer.echo(str(result))


def _kind(flavour: str, training: str, **flags: bool) -> Kind:
    import chaos.sim.story

    for name, given, known in (
        ("flavour", flavour, chaos.sim.story.FLAVOURS + chaos.sim.story.ASKED_FOR),
        ("training", training, chaos.sim.story.TRAININGS),
    ):
        if given and given not in known:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(known)}", param_hint=f"--{name}")
    return chaos.sim.story.Kind(flavour, training, **flags)


def _results(seeds: Iterable[int], kind: Kind, trace: bool, jobs: int, as_json: bool) -> Iterable[tuple[Result, float]]:
    """What came of each, in their order, and the CPU seconds that it took."""
    play = partial(_play, kind=kind, trace=trace)
    quiet = as_json or not isinstance(seeds, range) or len(seeds) < 2
    told = track(seeds, "simulating", console=Console(stderr=True), disable=quiet, transient=True)
    if jobs == 1:
        yield from map(play, told)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_leave_interrupts)
    under_way: deque[Future[tuple[Result, float]]] = deque()
    try:
        for seed in told:
            under_way.append(pool.submit(play, seed))
            if len(under_way) >= AHEAD * jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BaseException:  # nobody waits for stories that are not told
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _play(seed: int, kind: Kind, trace: bool) -> tuple[Result, float]:
    import chaos.sim.run  # brings in the servers' code: only this command needs it

    began = time.process_time()
    with _patience():
        result = chaos.sim.run.run(seed, kind=kind, trace=trace)
    return result, time.process_time() - began


@contextmanager
def _patience() -> Iterator[None]:
    """Whatever takes longer than MOST_CPU_S breaks the promise that all come to rest."""

    def give_up(_: int, frame: FrameType | None) -> None:
        from chaos.sim.violation import Violation

        where = "".join(traceback.format_stack(frame)[-FRAMES_TOLD:])
        raise Violation("progress", f"no end within {MOST_CPU_S:g} s of CPU:\n{where}")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal: whoever gave out the seeds ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _duration(seconds: float) -> str:
    """Said as people say it: 4.1 s, 3 min 20 s, 2 h 5 min."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, left_s = divmod(round(seconds), MINUTE_S)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {left_s} s"
