"""What each benchmark has measured, as people see it: tables, and lines of text beneath them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table

if TYPE_CHECKING:  # these bring in the client: half a second that the command line does without
    from benchmarks.allreduce import AllReduceRun
    from benchmarks.control import ViewCosts
    from benchmarks.elastic import ElasticRun
    from benchmarks.failover import FailoverRun
    from benchmarks.groups import GroupLine
    from benchmarks.measure import SpeedLine
    from benchmarks.prefetch import PrefetchLine
    from benchmarks.tables import TablesComparison
    from benchmarks.traffic import TrafficLine
    from benchmarks.train import TrainingLine

Shown: TypeAlias = Iterator[Table | str]


def _table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left or name == columns[0] else "right")
    return table


def speeds(lines: Sequence[SpeedLine], title: str, unit: str) -> Shown:
    """Of `sparse` (unit "batch") and `dense` (unit "MB")."""
    rows = ("M rows/s", "CPU µs/row") if unit == "batch" else ()
    several = len({r.replicas for r in lines}) > 1
    replicas = ("replicas", f"of {lines[0].replicas}") if several else ()
    table = _table(title, ("op", unit, *replicas, *rows, "GB/s", "p50 µs", "p99 µs", "socket pair GB/s", "ratio"))
    for r in lines:
        size = f"{r.batch:,}" if unit == "batch" else f"{r.dim * 4 / 1e6:g}"
        figures = f"{r.gb_per_s:.2f}", f"{r.p50_us:,.0f}", f"{r.p99_us:,.0f}"
        copies = (str(r.replicas), f"{r.of_first:.0%}" if r.of_first else "") if several else ()
        rate = (f"{r.rows_per_s / 1e6:.2f}", f"{r.server_cpu_us_per_row or 0:.2f}") if rows else ()
        table.add_row(r.op, size, *copies, *rate, *figures, f"{r.loopback_gb_per_s:.2f}", f"{r.loopback_ratio:.0%}")
    yield table
    if lines:
        yield f"memcpy on this machine: {lines[0].memcpy_gb_per_s:.1f} GB/s"


def training(lines: Sequence[TrainingLine]) -> Shown:
    """Of `train`: a table for each model."""
    for model in dict.fromkeys(each.model for each in lines):
        mine = [each for each in lines if each.model == model]
        columns = ("way", "workers", "replicas", "samples/s", "of alone", "worker CPU µs/sample", "of alone",
                   "each server CPU µs/sample", "ms/step")  # fmt: skip
        table = _table(f"train {model}: {mine[0].batch:,} samples a step, {mine[0].servers} server(s)", columns)
        for each in mine:
            servers = [_range(each.server_cpu_us_per_sample), _range(each.server_cpu_ms_per_step)]
            table.add_row(
                each.way, str(each.workers), str(each.replicas or ""), f"{each.samples_per_s:,.0f}",
                f"{each.of_alone:.2f}", f"{each.worker_cpu_us_per_sample:.1f}", f"{each.worker_cpu_of_alone:.2f}",
                *servers,
            )  # fmt: skip
        yield table


def _range(of_servers: Mapping[str, float]) -> str:
    values = of_servers.values()
    return f"{min(values):.2f}–{max(values):.2f}" if values else ""


def failover(run: FailoverRun) -> Shown:
    """Of `failover`."""
    title = f"failover: ms since {run.signal}, {len(run.kills)} times, {run.rows:,} rows stored"
    table = _table(title, ("", "p50", "p99", "max"))
    for part, name in (("detected", "death detected"), ("written", "view written"),
                       ("adopted", "view adopted by all servers"), ("commits", "next push committed")):  # fmt: skip
        table.add_row(name, *(f"{run.percentile(part, q):.0f}" for q in (50, 99, 100)))
    yield table
    verdict = "all replicas are equal" if run.clean else "the audit found differences"
    yield f"{run.updates:,} updates acknowledged, {run.wrong} values are not their exact sum; {verdict}"


def checkpoint(found: Mapping[str, Any]) -> Shown:
    """Of `checkpoint`, beside what is required."""
    table = _table(
        f"a checkpoint of {found['bytes'] / 1e9:.2f} GB, {found['servers']} servers", ("", "measured", "asked")
    )
    for line, value, required in (
        ("workers are held by a cut, p50 and p99", _both(found, "held"), ""),
        ("a push waits for it, beyond its usual time", _both(found, "waited"), "p99 ≤ 50 ms"),
        ("throughput while it is written, of before", f"{found['throughput_while_writing']:.2f}", "≥ 0.85"),
        ("p99 of an operation, of before", f"{found['p99_while_writing']:.2f}", "≤ 2"),
        ("memory of all servers, of before", f"{found['memory_while_writing']:.2f}", "≤ 1.1"),
        ("written, without work beside it", f"{found['bytes_per_s'] / 1e6:,.0f} MB/s", ""),
        ("of what one plain process writes", f"{found['of_plain_process']:.2f}", "≥ 0.6"),
        ("an increment of 1 %: bytes, of all", f"{found['increment_bytes']:.3f}", "≤ 0.02"),
        ("time, of all", f"{found['increment_time']:.3f}", "≤ 0.10"),
        ("restored in", f"{found['restore_s']:.2f} s", ""),
        ("speed, of reading it into a bare store", f"{found['restore_of_bare_store']:.2f}", "≥ 0.5"),
    ):
        table.add_row(line, value, required)
    yield table


def _both(found: Mapping[str, Any], name: str) -> str:
    return f"{found[f'{name}_ms_p50']:.1f} and {found[f'{name}_ms_p99']:.1f} ms"


def traffic(lines: Sequence[TrafficLine], batch: int, seeds: int) -> Shown:
    """Of `traffic`."""
    links = list(lines[0].samples_per_s)
    speeds = [f"samples/s at {link} Mbit/s" if link else "samples/s" for link in links]
    columns = (
        "model",
        "filters",
        "KB up",
        "KB down",
        "of none",
        "up",
        "keys",
        "rows",
        "oldest",
        *speeds,
        "score",
        "lost",
    )
    table = _table(f"traffic: {batch:,} samples a step, {seeds} seed(s)", columns, left=("filters",))
    for each in lines:
        kilobytes = f"{each.up_per_step / 1e3:.1f}", f"{each.down_per_step / 1e3:.1f}", f"{each.of_none:.3f}"
        rates = (f"{each.samples_per_s[link]:,.0f}" for link in links)
        parts = f"{each.up_of_none:.3f}", f"{each.keys_of_none:.3f}", f"{each.rows_of_none:.3f}", str(each.oldest)
        scores = f"{sum(each.score) / len(each.score):.4f}", f"{each.lost:+.4f}"
        table.add_row(each.model, each.filters, *kilobytes, *parts, *rates, *scores)
    yield table


def prefetch(lines: Sequence[PrefetchLine], batch: int, delay_ms: float, batches: int) -> Shown:
    """Of `ahead`."""
    title = f"ahead: {batch:,} samples a step, {delay_ms:g} ms each way, {batches} batches ahead"
    table = _table(title, ("rows", "samples/s", "of local"))
    for each in lines:
        table.add_row(each.rows, f"{each.samples_per_s:,.0f}", f"{each.of_local:.2f}")
    yield table


def elastic(run: ElasticRun) -> Shown:
    """Of `elastic`."""
    title = f"elastic: {run.rows:,} rows, {run.batch:,} at a time, ms that an operation took"
    table = _table(title, ("", "operations", "p50", "p99", "max"))
    for found, name in ((run.before, "before"), (run.during, "while ranges move"), (run.pulls, "  pulls"),
                        (run.pushes, "  pushes"), (run.heads, "pushes as heads move")):  # fmt: skip
        if found:
            table.add_row(name, f"{found['count']:,}", *(f"{found[key]:.1f}" for key in ("p50", "p99", "max")))
    yield table
    for phase, how in (*((phase, "") for phase in run.phases), (run.idle, " without work")):
        yield (
            f"to {phase.to} servers{how}: {phase.moved_bytes / 1e6:,.0f} MB, {phase.ratio:.2f} of the least "
            f"possible, in {phase.seconds:.1f} s: {phase.mb_per_s:,.0f} MB/s"
        )
    (three, five), (growing, shrinking) = run.operations_per_s, run.of_steady
    yield (
        f"{three:,.0f} operations/s with 3 servers, {five:,.0f} with 5; while ranges move "
        f"{run.throughput:.0%} of the first: {growing:.0%} of what it was before as it grows, {shrinking:.0%} "
        "as it shrinks"
    )
    verdict = "all replicas are equal" if run.clean else "the audit found differences"
    yield (
        f"{run.failed} operations failed; {run.updates:,} updates acknowledged, {run.wrong} values are "
        f"not their exact sum; {verdict}"
    )


def control(costs: ViewCosts) -> Shown:
    """Of `control`."""
    table = Table("", "p50 ms", "max ms", title="control: 1,024 ranges, 100 servers, 1,000 workers")
    lines = [("a worker adopts a view", costs.adopt), ("the leader encodes it", costs.encode)]
    lines += [(f"planned when a server {change}", times) for change, times in costs.plan.items()]
    for name, times in (*lines, ("planned when a worker joins", costs.roster_plan)):
        table.add_row(name, f"{times['p50']:.2f}", f"{times['max']:.2f}")
    yield table
    yield (
        f"a view has {costs.view_bytes:,} bytes, the roster {costs.roster_bytes:,}; ten workers that came and went "
        f"changed {costs.views_for_workers} views and {costs.rosters_for_workers} rosters"
    )


def tables(found: TablesComparison) -> Shown:
    """Of `tables`."""
    title = f"{found.tables} tables, {found.batch:,} samples a step, {found.servers} server(s)"
    table = _table(title, ("layers", "worker CPU ms/step", "ms/step"))
    table.add_row("one for each table", f"{found.separate_cpu_ms:.2f}", f"{found.separate_ms:.2f}")
    table.add_row("one for all", f"{found.collection_cpu_ms:.2f}", f"{found.collection_ms:.2f}")
    yield table
    yield f"one for all takes {found.of_separate:.2f} of the worker's CPU time"


def store(lines: Sequence[Mapping[str, Any]]) -> Shown:
    """Of `store`."""
    table = Table("op", "batch", "M rows/s", "p50 µs", title="store: 1,000,000 rows x 64 float32")
    for line in lines:
        table.add_row(str(line["op"]), f"{line['batch']:,}", f"{line['rows_per_s'] / 1e6:.1f}", f"{line['p50_us']:.1f}")
    yield table


def allreduce(run: AllReduceRun) -> Shown:
    """Of `allreduce`."""
    here = run.machine
    columns = ("MB", "processes", "way", "servers", "taken ms", "predicted ms", "taken of predicted", "of the ring")
    table = Table(title="dense gradients: ms until all have the sum, or the new weights")
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    for line in run.lines:
        times = f"{line.taken_ms:,.1f}", f"{line.predicted_ms:,.1f}", f"{line.taken_ms / line.predicted_ms:.2f}"
        servers = str(line.servers or "")
        table.add_row(f"{line.mb:g}", str(line.processes), line.way, servers, *times, f"{line.of_ring:.2f}")
    yield table
    yield (
        f"memory {here.memory_per_s / 1e9:.1f} GB/s, loopback {here.loopback_per_s / 1e9:.2f} GB/s, a message and its "
        f"answer {here.turn_s * 1e6:.0f} µs, {here.cores} cores"
    )
    yield run.conclusion


def groups(lines: Sequence[GroupLine], processes: int, batch: int, mbit: int) -> Shown:
    """Of `groups`."""
    columns = ("model", "way", "KB up", "KB down", "of separate", "samples/s", "faster", "CPU µs/sample", "of servers")
    title = f"{processes} processes, {batch:,} samples each, a link of {mbit:,} Mbit/s, 2 servers"
    table = _table(title, columns, left=("way",))
    for line in lines:
        kilobytes = f"{line.up_per_step / 1e3:,.0f}", f"{line.down_per_step / 1e3:,.0f}", f"{line.of_separate:.3f}"
        table.add_row(line.model, line.way, *kilobytes, f"{line.samples_per_s:,.0f}", f"{line.faster:.2f}",
                      f"{line.worker_cpu_us_per_sample:.1f}", f"{line.server_cpu_us_per_sample:.1f}")  # fmt: skip
    yield table
