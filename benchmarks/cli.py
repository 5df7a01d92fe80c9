"""`elasticps bench …`: tables for people, `--json` for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import groups_cli
from benchmarks.measure import Result
from elasticps.cli.output import sigterm_interrupts

if TYPE_CHECKING:
    from benchmarks.train import Line  # brings in the client: half a second that other commands do without

app = typer.Typer(help="Measure this machine, and elasticps on it.", no_args_is_help=True)
app.command()(groups_cli.allreduce)
app.command()(groups_cli.groups)


@app.callback()
def _ends_as_by_ctrl_c(context: typer.Context) -> None:
    context.with_resource(sigterm_interrupts())


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Servers = Annotated[int, typer.Option(min=1, max=16, help="Servers of the local cluster.")]
Tls = Annotated[bool, typer.Option("--tls", help="With TLS, certificates required of everybody.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Time spent on each line.")]


def _progress(text: str) -> None:
    Console(stderr=True).print(f"[dim]{text}…[/dim]")


def _out() -> Console:
    """Standard output; 120 columns where there is no terminal that says how many it has."""
    return Console(width=None if sys.stdout.isatty() else 120)


def _show(results: Iterator[Result], title: str, as_json: bool, unit: str) -> None:
    lines = list(results)
    if as_json:
        typer.echo(json.dumps([r.to_dict() for r in lines], indent=2))
        return
    table = Table(title=title)
    rows = ("M rows/s", "CPU µs/row") if unit == "batch" else ()
    several = len({r.replicas for r in lines}) > 1
    replicas = ("replicas", f"of {lines[0].replicas}") if several else ()
    for name in ("op", unit, *replicas, *rows, "GB/s", "p50 µs", "p99 µs", "socket pair GB/s", "ratio"):
        table.add_column(name, justify="left" if name == "op" else "right")
    for r in lines:
        size = f"{r.batch:,}" if unit == "batch" else f"{r.dim * 4 / 1e6:g}"
        speeds = f"{r.gb_per_s:.2f}", f"{r.p50_us:,.0f}", f"{r.p99_us:,.0f}"
        copies = (str(r.replicas), f"{r.of_first:.0%}" if r.of_first else "") if several else ()
        rate = (f"{r.rows_per_s / 1e6:.2f}", f"{r.server_cpu_us_per_row or 0:.2f}") if rows else ()
        table.add_row(r.op, size, *copies, *rate, *speeds, f"{r.loopback_gb_per_s:.2f}", f"{r.loopback_ratio:.0%}")
    _out().print(table)
    if lines:
        typer.echo(f"memcpy on this machine: {lines[0].memcpy_gb_per_s:.1f} GB/s")


@app.command()
def sparse(
    batch: Annotated[list[int] | None, typer.Option(help="Rows per operation; may be given several times.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Floats per row.")] = 64,
    servers: Servers = 1,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Copies of each range; several are compared.  [default: 1]")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Outstanding steps in push-window.")] = 4,
    tls: Tls = False,
    seconds: Seconds = 4.0,
    as_json: Json = False,
) -> None:
    """Pull and push rows of a sparse table with Adagrad."""
    from benchmarks import sparse as bench

    results = bench.run(batches=batch or bench.BATCHES, rows=rows, dim=dim, servers=servers, replicas=replicas or [1],
                        window=window, tls=tls, seconds=seconds, progress=_progress)  # fmt: skip
    secured = ", TLS" * tls
    _show(results, f"sparse: {rows:,} rows x {dim} float32, {servers} server(s), one worker{secured}", as_json, "batch")


@app.command()
def dense(
    size: Annotated[list[int] | None, typer.Option(help="Megabytes; may be given several times.")] = None,
    servers: Servers = 1,
    seconds: Seconds = 4.0,
    as_json: Json = False,
) -> None:
    """Pull and push dense tensors with SGD."""
    from benchmarks import dense as bench

    results = bench.run(sizes_mb=size or bench.SIZES_MB, servers=servers, seconds=seconds, progress=_progress)
    _show(results, f"dense: {servers} server(s), one worker", as_json, "MB")


class Model(enum.StrEnum):
    """What is trained."""

    DEEPFM = "deepfm"
    DLRM = "dlrm"


@app.command()
def train(
    model: Annotated[
        list[Model] | None,
        typer.Option(help="The demo's DeepFM on MovieLens, or DLRM on clicks that are made up.  [default: both]"),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="May be given several times.  [default: 1, 2, 4]")
    ] = None,
    replicas: Annotated[list[int] | None, typer.Option(min=1, help="Copies of each range.  [default: 1, 2]")] = None,
    servers: Servers = 3,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step of each worker.")] = 256,
    seconds: Seconds = 6.0,
    line: Annotated[
        bool, typer.Option("--line", help="One line: DeepFM, 3 servers, 2 replicas, 1 worker, 256 samples.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model through the servers, in one torch process, and by all-reduce between as many processes."""
    from benchmarks import train as bench

    if line:
        model, workers, replicas, servers, batch = [Model.DEEPFM], [1], [2], 3, 256
    lines = list(bench.run(models=model or list(Model), workers=workers or bench.WORKERS, batch=batch, servers=servers,
                           replicas=replicas or bench.REPLICAS, seconds=seconds, progress=_progress))  # fmt: skip
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in lines], indent=2))
        return
    for name in dict.fromkeys(each.model for each in lines):
        _show_training([each for each in lines if each.model == name])


def _show_training(lines: list[Line]) -> None:
    first = lines[0]
    table = Table(title=f"train {first.model}: {first.batch:,} samples a step, {first.servers} server(s)")
    for name in ("way", "workers", "replicas", "samples/s", "of alone", "worker CPU µs/sample", "of alone",
                 "each server CPU µs/sample", "ms/step"):  # fmt: skip
        table.add_column(name, justify="left" if name == "way" else "right")
    for each in lines:
        servers = [
            _spread(list(found.values())) for found in (each.server_cpu_us_per_sample, each.server_cpu_ms_per_step)
        ]
        table.add_row(
            each.way, str(each.workers), str(each.replicas or ""), f"{each.samples_per_s:,.0f}", f"{each.of_alone:.2f}",
            f"{each.worker_cpu_us_per_sample:.1f}", f"{each.worker_cpu_of_alone:.2f}", *servers,
        )  # fmt: skip
    _out().print(table)


def _spread(values: list[float]) -> str:
    """The least and the greatest."""
    return f"{min(values):.2f}–{max(values):.2f}" if values else ""


class Signal(enum.StrEnum):
    """What a server dies of."""

    KILL = "KILL"
    STOP = "STOP"


@app.command()
def failover(
    kills: Annotated[int, typer.Option(min=1, help="How often a server dies.")] = 20,
    signal: Annotated[Signal, typer.Option(help="STOP freezes it until the others have recovered.")] = Signal.KILL,
    rows: Annotated[int, typer.Option(min=0, help="Rows of 64 floats stored first, 2/3 of them on each server.")] = 0,
    tls: Tls = False,
    as_json: Json = False,
) -> None:
    """Time from the death of a server to the next committed push on its ranges: 3 servers, 2 replicas, 2 workers.

    The exit code is 1 if a push was lost, or two replicas differ.
    """
    from benchmarks import failover as bench

    outcome = bench.run(kills=kills, stop=signal is Signal.STOP, rows=rows, tls=tls, progress=_progress)
    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=2))
    else:
        table = Table(title=f"failover: ms since {outcome.signal}, {len(outcome.kills)} times, {rows:,} rows stored")
        for name in ("", "p50", "p99", "max"):
            table.add_column(name, justify="right" if name else "left")
        for part, name in (("detected", "death detected"), ("written", "view written"),
                           ("adopted", "view adopted by all servers"), ("commits", "next push committed")):  # fmt: skip
            table.add_row(name, *(f"{outcome.percentile(part, q):.0f}" for q in (50, 99, 100)))
        _out().print(table)
        verdict = "all replicas are equal" if outcome.clean else "the audit found differences"
        typer.echo(
            f"{outcome.updates:,} updates acknowledged, {outcome.wrong} values are not their exact sum; {verdict}"
        )
    if outcome.wrong or not outcome.clean:
        raise typer.Exit(1)


@app.command()
def checkpoint(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of 64 floats, with Adagrad.")] = 1_000_000,
    servers: Servers = 3,
    seconds: Seconds = 5.0,
    as_json: Json = False,
) -> None:
    """What a checkpoint costs a worker that pulls and pushes all the time, and how fast it is written."""
    from benchmarks import checkpoint as bench

    found = bench.run(rows=rows, servers=servers, seconds=seconds, progress=_progress)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(title=f"a checkpoint of {found['bytes'] / 1e9:.2f} GB, {servers} servers")
    for name in ("", "measured", "asked"):
        table.add_column(name, justify="right" if name else "left")
    for line, value, asked in (
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
        table.add_row(line, value, asked)
    _out().print(table)


def _both(found: dict[str, Any], name: str) -> str:
    return f"{found[f'{name}_ms_p50']:.1f} and {found[f'{name}_ms_p99']:.1f} ms"


@app.command()
def traffic(
    filters: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, int8, top_k+int8, … as printed; may be given several times.  [default: all]"),
    ] = None,
    mbit: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Mbit/s of a link; may be given several times.  [default: 1000, 100]"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often each is trained.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps until the model is scored.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step.")] = 256,
    as_json: Json = False,
) -> None:
    """What filters and a cache save: bytes of a step of DLRM, and of a small network on handwritten digits, samples/s
    over slow links, and AUC or accuracy beside that without them."""
    from benchmarks import traffic as bench

    lines = list(bench.run(filters=filters or (), mbit=mbit or bench.MBIT, seeds=seeds, steps=steps,
                           batch=batch, progress=_progress))  # fmt: skip
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in lines], indent=2))
        return
    table = Table(title=f"traffic: {batch:,} samples a step, {seeds} seed(s)")
    links = list(lines[0].samples_per_s)
    speeds = [f"samples/s at {link} Mbit/s" if link else "samples/s" for link in links]
    shown = "KB up", "KB down", "of none", "up", "keys", "rows", "oldest"
    for name in ("model", "filters", *shown, *speeds, "score", "lost"):
        table.add_column(name, justify="left" if name in ("model", "filters") else "right")
    for each in lines:
        kilobytes = f"{each.up_per_step / 1e3:.1f}", f"{each.down_per_step / 1e3:.1f}", f"{each.of_none:.3f}"
        rates = (f"{each.samples_per_s[link]:,.0f}" for link in links)
        shares = f"{each.up_of_none:.3f}", f"{each.keys_of_none:.3f}", f"{each.rows_of_none:.3f}", str(each.oldest)
        scores = f"{sum(each.score) / len(each.score):.4f}", f"{each.lost:+.4f}"
        table.add_row(each.model, each.filters, *kilobytes, *shares, *rates, *scores)
    _out().print(table)


@app.command()
def ahead(
    delay: Annotated[float, typer.Option(min=0, help="Milliseconds that each byte takes, each way.")] = 5.0,
    batches: Annotated[int, typer.Option(min=1, max=64, help="How many are looked at ahead.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each turn.")] = 60,
    turns: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 3,
    as_json: Json = False,
) -> None:
    """What looking ahead saves on a link with a delay: samples/s of DLRM, beside rows that never leave the worker."""
    from benchmarks import ahead as bench

    lines = bench.run(delay_ms=delay, ahead=batches, batch=batch, steps=steps, turns=turns, progress=_progress)
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in lines], indent=2))
        return
    table = Table(title=f"ahead: {batch:,} samples a step, {delay:g} ms each way, {batches} batches ahead")
    for name in ("rows", "samples/s", "of local"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    for each in lines:
        table.add_row(each.rows, f"{each.samples_per_s:,.0f}", f"{each.of_local:.2f}")
    _out().print(table)


@app.command()
def elastic(
    rows: Annotated[int, typer.Option(min=1, help="Rows of 64 floats, with Adagrad.")] = 1_000_000,
    batch: Annotated[int, typer.Option(min=1, help="Rows in each pull and each push.")] = 256,
    rate: Annotated[
        float, typer.Option(min=0, help="Pulls and pushes per second of each worker; 0: as many as there can be.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """What workers notice when 3 servers become 5 and 3 again: 2 replicas, 2 workers that pull and push all the time.

    The exit code is 1 if an operation failed, a push was lost, or two replicas differ.
    """
    from benchmarks import elastic as bench

    outcome = bench.run(rows=rows, batch=batch, rate=rate, progress=_progress)
    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=2))
    else:
        table = Table(title=f"elastic: {rows:,} rows, {batch:,} at a time, ms that an operation took")
        for name in ("", "operations", "p50", "p99", "max"):
            table.add_column(name, justify="right" if name else "left")
        for found, name in ((outcome.before, "before"), (outcome.during, "while ranges move"),
                            (outcome.pulls, "  pulls"), (outcome.pushes, "  pushes"),
                            (outcome.heads, "pushes as heads move")):  # fmt: skip
            if found:
                table.add_row(name, f"{found['count']:,}", *(f"{found[key]:.1f}" for key in ("p50", "p99", "max")))
        _out().print(table)
        for phase, how in (*((phase, "") for phase in outcome.phases), (outcome.idle, " without work")):
            typer.echo(
                f"to {phase.to} servers{how}: {phase.moved_bytes / 1e6:,.0f} MB, {phase.ratio:.2f} of the least "
                f"possible, in {phase.seconds:.1f} s: {phase.mb_per_s:,.0f} MB/s"
            )
        (three, five), (growing, shrinking) = outcome.operations_per_s, outcome.of_steady
        typer.echo(
            f"{three:,.0f} operations/s with 3 servers, {five:,.0f} with 5; while ranges move "
            f"{outcome.throughput:.0%} of the first: {growing:.0%} of what it was before as it grows, {shrinking:.0%} "
            "as it shrinks"
        )
        verdict = "all replicas are equal" if outcome.clean else "the audit found differences"
        typer.echo(
            f"{outcome.failed} operations failed; {outcome.updates:,} updates acknowledged, {outcome.wrong} values are "
            f"not their exact sum; {verdict}"
        )
    if outcome.failed or outcome.wrong or not outcome.clean:
        raise typer.Exit(1)


@app.command()
def control(as_json: Json = False) -> None:
    """What a view of 1,024 ranges, 100 servers and 1,000 workers costs to send, to adopt and to plan."""
    from benchmarks import control as bench

    _progress("planning")
    outcome = bench.run()
    if as_json:
        typer.echo(json.dumps(outcome.as_dict(), indent=2))
        return
    table = Table("", "p50 ms", "max ms", title="control: 1,024 ranges, 100 servers, 1,000 workers")
    lines = [("a worker adopts a view", outcome.adopt), ("the leader encodes it", outcome.encode)]
    lines += [(f"planned when a server {change}", times) for change, times in outcome.plan.items()]
    for name, times in (*lines, ("planned when a worker joins", outcome.roster_plan)):
        table.add_row(name, f"{times['p50']:.2f}", f"{times['max']:.2f}")
    _out().print(table)
    typer.echo(
        f"a view has {outcome.view_bytes:,} bytes, the roster {outcome.roster_bytes:,}; ten workers that came and went "
        f"changed {outcome.views_for_workers} views and {outcome.rosters_for_workers} rosters"
    )


@app.command()
def tables(
    count: Annotated[int, typer.Option("--tables", min=1, max=256, help="How many.")] = 26,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step.")] = 256,
    dim: Annotated[int, typer.Option(min=1, max=1024, help="Floats of a row.")] = 16,
    servers: Servers = 3,
    seconds: Seconds = 10.0,
    as_json: Json = False,
) -> None:
    """Many tables in one layer, with one pull and one push a step, beside as many layers: the worker's CPU time."""
    from benchmarks import tables as bench

    found = bench.run(tables=count, batch=batch, dim=dim, servers=servers, seconds=seconds, progress=_progress)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    table = Table(title=f"{count} tables, {batch:,} samples a step, {servers} server(s)")
    for name in ("layers", "worker CPU ms/step", "ms/step"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    table.add_row("one for each table", f"{found.separate_cpu_ms:.2f}", f"{found.separate_ms:.2f}")
    table.add_row("one for all", f"{found.collection_cpu_ms:.2f}", f"{found.collection_ms:.2f}")
    _out().print(table)
    typer.echo(f"one for all takes {found.of_separate:.2f} of the worker's CPU time")


@app.command()
def memory(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the table.")] = 5_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Floats per row.")] = 64,
    as_json: Json = False,
) -> None:
    """Memory that a server takes for each row."""
    from benchmarks import memory as bench

    figures = bench.run(rows=rows, dim=dim, progress=_progress)
    text = json.dumps(figures, indent=2) if as_json else (
        f"{figures['bytes_per_row']:.0f} bytes per row of {dim} floats and as many slots "
        f"({figures['row_and_slots_bytes']:.0f} bytes); allowed {figures['allowed_bytes_per_row']:.0f}"
    )  # fmt: skip
    typer.echo(text)


@app.command()
def startup(as_json: Json = False) -> None:
    """Time from starting a server to its being registered, kernels warm."""
    from benchmarks import memory as bench

    figures = bench.startup(progress=_progress)
    typer.echo(json.dumps(figures, indent=2) if as_json else f"ready in {figures['ready_s']:.2f} s")


@app.command()
def store(as_json: Json = False) -> None:
    """Lookup, gather and Adagrad on one core, without sockets."""
    from benchmarks.store import bench_store

    _progress("filling 1,000,000 rows")
    lines = bench_store()
    if as_json:
        typer.echo(json.dumps(lines, indent=2))
        return
    table = Table("op", "batch", "M rows/s", "p50 µs", title="store: 1,000,000 rows x 64 float32")
    for line in lines:
        table.add_row(str(line["op"]), f"{line['batch']:,}", f"{line['rows_per_s'] / 1e6:.1f}", f"{line['p50_us']:.1f}")
    _out().print(table)
