"""What filters save: bytes of a training step, its speed over slow links, and what they do to the model. And what
looking ahead saves on a link that takes its time.

One worker trains DLRM on clicks that are made up, or a small network on handwritten digits, through a relay that counts
bytes, and holds them back as a link of so many Mbit/s, or with a delay, would.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.relay import Link
from benchmarks.runner import Progress, Result, Side, in_turns, silent, table
from benchmarks.workers import Process
from elasticps.local import LocalCluster

FILTERS = {
    "dlrm": (
        "none", "bfloat16", "float16", "int8", "int8+once", "int8+keys", "int8+keys+top_k", "cache", "cache+int8+keys",
    ),
    "digits": ("none", "top_k", "top_k+int8", "random_k+int8", "threshold+top_k", "threshold+zstd"),
}  # fmt: skip
"""By model; the digits' network pulls without filters."""
MBIT = (1000, 100)
LEAST_STEPS = 4
WARM_STEPS = 30
ROWS = {
    "local": ("none", "local"), "pulled": ("none", "pulled"), "ahead": ("none", "ahead"), "cache": ("cache", "pulled"),
    "cache, ahead": ("cache", "ahead"),
}  # fmt: skip
"""Where rows come from as one looks ahead, and beside it: filters and rows as the model has them."""


@dataclass(frozen=True)
class TrafficLine:
    """What one kind of filter came to, over all seeds.

    model                        "dlrm" or "digits"
    up_per_step, down_per_step   bytes that left the worker, and bytes that came to it
    of_none, up_of_none          all bytes together, and those that left, as a part of what they are without filters
    keys_of_none                 the bytes of a table's keys, in pulls and pushes, as a part of those without filters
    rows_of_none                 bytes that a cache received for rows, with slots and digests, as such a part
    oldest                       the greatest age, in steps, of a row that it showed
    score                        of each seed, on samples that were not trained: AUC, or the part that is recognised
    lost                         how far the score is below that without filters of the same seed: the mean
    samples_per_s                by the link's Mbit/s, 0 for one without a limit: the median of the seeds
    """

    model: str
    filters: str
    up_per_step: float
    down_per_step: float
    of_none: float
    up_of_none: float
    keys_of_none: float
    rows_of_none: float
    oldest: int
    score: list[float]
    lost: float
    samples_per_s: dict[int, float]


@dataclass(frozen=True)
class PrefetchLine:
    """rows: where they come from; samples_per_s: the median of the turns; of_local: that, by what local rows reach."""

    rows: str
    samples_per_s: float
    of_local: float


@dataclass
class FilterRun:
    """How training with one kind of filter and one seed went.

    speeds  samples/s, by Mbit/s
    keys    bytes sent of keys, and without filters
    rows    bytes received of rows, and without a cache
    """

    up: float
    down: float
    score: float
    speeds: dict[int, float]
    keys: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    oldest: int = 0


def run(
    *,
    filters: Sequence[str] = (),
    mbit: Sequence[int] = MBIT,
    seeds: int = 5,
    steps: int = 1000,
    batch: int = 256,
    servers: int = 2,
    progress: Progress = silent,
) -> Result:
    """Measures each of `filters` (none given: all) with each model, after training without any. Each has tables of its
    own, begins from the same seeds, and trains `steps` steps with each seed, then some more over each link."""
    lines = []
    with LocalCluster(servers=servers, replicas=1) as cluster:
        for model, known in FILTERS.items():
            names = [name for name in known[1:] if not filters or name in filters]
            none: list[FilterRun] = []
            for name in ("none", *names) if names else ():
                runs = []
                for seed in range(1, seeds + 1):
                    app = f"{model}-{name.replace('+', '-')}-{seed}"
                    with _trainer(cluster, model, batch, name, app, seed=seed) as (worker, link):
                        progress(f"{model}, {name}: seed {seed}")
                        runs.append(_trained(worker, link, name, steps, batch, mbit))
                none = none or runs
                lines.append(line_of(model, name, runs, none))
    columns: list[tuple[str, Callable[[TrafficLine], object]]] = [
        ("model", lambda line: line.model), ("filters", lambda line: line.filters),
        ("KB up", lambda line: f"{line.up_per_step / 1e3:.1f}"),
        ("KB down", lambda line: f"{line.down_per_step / 1e3:.1f}"), ("of none", lambda line: f"{line.of_none:.3f}"),
        ("up", lambda line: f"{line.up_of_none:.3f}"), ("keys", lambda line: f"{line.keys_of_none:.3f}"),
        ("rows", lambda line: f"{line.rows_of_none:.3f}"), ("oldest", lambda line: line.oldest),
        *((f"samples/s at {each} Mbit/s" if each else "samples/s", _speed_at(each)) for each in (0, *mbit)),
        ("score", lambda line: f"{statistics.mean(line.score):.4f}"), ("lost", lambda line: f"{line.lost:+.4f}"),
    ]  # fmt: skip
    title = f"traffic: {batch:,} samples a step, {seeds} seed(s)"
    return Result(lines, [table(title, lines, columns, left=("filters",))])


def _speed_at(mbit: int) -> Callable[[TrafficLine], str]:
    return lambda line: f"{line.samples_per_s[mbit]:,.0f}"


def line_of(model: str, name: str, runs: Sequence[FilterRun], none: Sequence[FilterRun]) -> TrafficLine:
    """The line of some runs, beside those without filters."""
    up, down = (statistics.mean(getattr(each, way) for each in runs) for way in ("up", "down"))
    whole, whole_up = (statistics.mean(each.up + all_of_it * each.down for each in none) for all_of_it in (1, 0))
    lost = statistics.mean(before.score - each.score for before, each in zip(none, runs, strict=True))
    keys, rows = (_part([getattr(each, what) for each in runs]) for what in ("keys", "rows"))
    speeds = {mbit: statistics.median(each.speeds[mbit] for each in runs) for mbit in runs[0].speeds}
    return TrafficLine(
        model, name, round(up), round(down), round((up + down) / whole, 4), round(up / whole_up, 4),
        keys, rows, max(each.oldest for each in runs), [round(each.score, 5) for each in runs], round(lost, 5),
        {mbit: round(speed, 1) for mbit, speed in speeds.items()},
    )  # fmt: skip


def _part(pairs: Sequence[tuple[int, int]]) -> float:
    """The sum of the first of each pair, by that of the second."""
    whole = sum(pair[1] for pair in pairs)
    return round(sum(pair[0] for pair in pairs) / whole, 4) if whole else 1.0


@contextmanager
def _trainer(
    cluster: LocalCluster, model: str, batch: int, filters: str, app: str, *, seed: int = 1, **options: object
) -> Iterator[tuple[Process, Link]]:
    """A worker that reaches the servers through a link of its own."""
    with (
        Link([server.address for server in cluster.servers]) as link,
        Process("training:Trainer", model=model, batch=batch, seed=seed) as worker,
    ):
        worker.ask("build_filtered", way=filters, url=cluster.url, ports=link.ports, app=app, **options)
        yield worker, link


def _train_s(worker: Process, filters: str, steps: int) -> float:
    answer = worker.ask("train", way=filters, steps=steps)
    return float(answer["ended"] - answer["began"])


def _trained(worker: Process, link: Link, filters: str, steps: int, batch: int, mbit: Sequence[int]) -> FilterRun:
    _train_s(worker, filters, LEAST_STEPS)  # tables are made, connections open
    before = link.count()
    speeds = {0: batch * steps / _train_s(worker, filters, steps)}
    up, down = ((now - then) / steps for now, then in zip(link.count(), before, strict=True))
    scored = worker.ask("score", way=filters)
    for each in mbit:
        link.limit(each)
        some = max(LEAST_STEPS, min(steps, int(each * 1e6 / 8 / (up + down))))  # a second or two
        speeds[each] = batch * some / _train_s(worker, filters, some)
    return FilterRun(up, down, scored["score"], speeds, *(scored[each] for each in ("keys", "rows", "oldest")))


def prefetching(
    *,
    delay_ms: float = 5.0,
    batches: int = 4,
    batch: int = 2048,
    steps: int = 60,
    turns: int = 3,
    servers: int = 2,
    progress: Progress = silent,
) -> Result:
    """Trains DLRM with rows of each kind, over a link that holds every byte back for so many milliseconds each way:
    `steps` steps each, `turns` times in turns. Dense weights are at the servers in any case: a step waits for them as
    long as the link takes to and fro."""
    with LocalCluster(servers=servers, replicas=1) as cluster, ExitStack() as stack:
        sides = {}
        for kind, (filters, rows) in ROWS.items():
            app = kind.replace(", ", "-")
            worker, link = stack.enter_context(_trainer(cluster, "dlrm", batch, filters, app, rows=rows, depth=batches))
            link.delay(delay_ms)
            progress(f"rows {kind}: {WARM_STEPS} steps to begin with")
            _train_s(worker, filters, WARM_STEPS)
            sides[kind] = Side(_steps_of(worker, filters), steps)
        taken = in_turns(sides, turns, lambda text: progress(f"rows {text}"))
    speeds = {kind: statistics.median(batch * steps / turn.seconds for turn in made) for kind, made in taken.items()}
    lines = [PrefetchLine(kind, round(each, 1), round(each / speeds["local"], 3)) for kind, each in speeds.items()]
    title = f"ahead: {batch:,} samples a step, {delay_ms:g} ms each way, {batches} batches ahead"
    shown = table(title, lines, [
        ("rows", lambda line: line.rows), ("samples/s", lambda line: f"{line.samples_per_s:,.0f}"),
        ("of local", lambda line: f"{line.of_local:.2f}"),
    ])  # fmt: skip
    return Result(lines, [shown])


def _steps_of(worker: Process, filters: str) -> Callable[[int], float]:
    return lambda steps: _train_s(worker, filters, steps)
