"""`elasticps bench …`: tables for people, `--json` for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import show
from elasticps.cli.output import sigterm_interrupts

app = typer.Typer(help="Measure this machine, and elasticps on it.", no_args_is_help=True)


@app.callback()
def _ends_as_by_ctrl_c(context: typer.Context) -> None:
    context.with_resource(sigterm_interrupts())


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Servers = Annotated[int, typer.Option(min=1, max=16, help="Servers of the local cluster.")]
Tls = Annotated[bool, typer.Option("--tls", help="With TLS, certificates required of everybody.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Time spent on each line.")]


def _progress(text: str) -> None:
    Console(stderr=True).print(f"[dim]{text}…[/dim]")


def _finish(found: Any, as_json: bool, shown: Iterable[Table | str], *, ok: bool = True) -> None:
    """Prints what a benchmark has measured: as JSON, or as tables and lines for people. Exit code 1 unless `ok`."""
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        out = Console(width=None if sys.stdout.isatty() else 120)
        for part in shown:
            if isinstance(part, str):
                typer.echo(part)
            else:
                out.print(part)
    if not ok:
        raise typer.Exit(1)


def _plain(found: Any) -> Any:
    if isinstance(found, list):
        return [_plain(each) for each in found]
    if hasattr(found, "as_dict"):
        return found.as_dict()
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else found


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

    found = bench.run(batches=batch or bench.BATCHES, rows=rows, dim=dim, servers=servers, replicas=replicas or [1],
                      window=window, tls=tls, seconds=seconds, progress=_progress)  # fmt: skip
    title = f"sparse: {rows:,} rows x {dim} float32, {servers} server(s), one worker{', TLS' * tls}"
    lines = list(found)
    _finish(lines, as_json, show.speeds(lines, title, "batch"))


@app.command()
def dense(
    size: Annotated[list[int] | None, typer.Option(help="Megabytes; may be given several times.")] = None,
    servers: Servers = 1,
    seconds: Seconds = 4.0,
    as_json: Json = False,
) -> None:
    """Pull and push dense tensors with SGD."""
    from benchmarks import dense as bench

    lines = list(bench.run(sizes_mb=size or bench.SIZES_MB, servers=servers, seconds=seconds, progress=_progress))
    _finish(lines, as_json, show.speeds(lines, f"dense: {servers} server(s), one worker", "MB"))


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
    _finish(lines, as_json, show.training(lines))


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

    run = bench.run(kills=kills, stop=signal is Signal.STOP, rows=rows, tls=tls, progress=_progress)
    _finish(run, as_json, show.failover(run), ok=not run.wrong and run.clean)


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
    _finish(found, as_json, show.checkpoint(found))


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
    _finish(lines, as_json, show.traffic(lines, batch, seeds))


@app.command("ahead")
def prefetch(
    delay: Annotated[float, typer.Option(min=0, help="Milliseconds that each byte takes, each way.")] = 5.0,
    batches: Annotated[int, typer.Option(min=1, max=64, help="How many are looked at ahead.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each turn.")] = 60,
    turns: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 3,
    as_json: Json = False,
) -> None:
    """What looking ahead saves on a link with a delay: samples/s of DLRM, beside rows that never leave the worker."""
    from benchmarks import prefetch as bench

    lines = bench.run(delay_ms=delay, batches=batches, batch=batch, steps=steps, turns=turns, progress=_progress)
    _finish(lines, as_json, show.prefetch(lines, batch, delay, batches))


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

    run = bench.run(rows=rows, batch=batch, rate=rate, progress=_progress)
    _finish(run, as_json, show.elastic(run), ok=not run.failed and not run.wrong and run.clean)


@app.command()
def control(as_json: Json = False) -> None:
    """What a view of 1,024 ranges, 100 servers and 1,000 workers costs to send, to adopt and to plan."""
    from benchmarks import control as bench

    _progress("planning")
    costs = bench.run()
    _finish(costs, as_json, show.control(costs))


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
    _finish(found, as_json, show.tables(found))


@app.command()
def memory(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the table.")] = 5_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Floats per row.")] = 64,
    as_json: Json = False,
) -> None:
    """Memory that a server takes for each row."""
    from benchmarks import memory as bench

    figures = bench.run(rows=rows, dim=dim, progress=_progress)
    text = (
        f"{figures['bytes_per_row']:.0f} bytes per row of {dim} floats and as many slots "
        f"({figures['row_and_slots_bytes']:.0f} bytes); allowed {figures['allowed_bytes_per_row']:.0f}"
    )
    _finish(figures, as_json, [text])


@app.command()
def startup(as_json: Json = False) -> None:
    """Time from starting a server to its being registered, kernels warm."""
    from benchmarks import memory as bench

    figures = bench.startup(progress=_progress)
    _finish(figures, as_json, [f"ready in {figures['ready_s']:.2f} s"])


@app.command()
def store(as_json: Json = False) -> None:
    """Lookup, gather and Adagrad on one core, without sockets."""
    from benchmarks.store import bench_store

    _progress("filling 1,000,000 rows")
    lines = bench_store()
    _finish(lines, as_json, show.store(lines))


@app.command()
def allreduce(
    size: Annotated[
        list[float] | None,
        typer.Option(min=0.001, max=2000, help="MB of gradients; may be given several times.  [default: 1, 16]"),
    ] = None,
    processes: Annotated[
        list[int] | None, typer.Option(min=2, max=16, help="May be given several times.  [default: 2, 4]")
    ] = None,
    servers: Annotated[
        list[int] | None, typer.Option(min=1, max=8, help="May be given several times.  [default: 1, 2, 3]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured of each.")] = 3,
    as_json: Json = False,
) -> None:
    """Add up dense gradients by ring all-reduce, through servers, and in groups that go through servers, beside what
    the bandwidths of this machine say."""
    from benchmarks import allreduce as bench

    run = bench.run(sizes_mb=size or bench.SIZES_MB, processes=processes or bench.PROCESSES,
                        servers=servers or bench.SERVERS, steps=steps, progress=_progress)  # fmt: skip
    _finish(run, as_json, show.allreduce(run))


@app.command()
def groups(
    processes: Annotated[int, typer.Option(min=2, max=16, help="Ranks of the group, or separate workers.")] = 4,
    mbit: Annotated[int, typer.Option(min=0, help="Mbit/s of their machine's link; 0: any amount.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each process in a step.")] = 64,
    dim: Annotated[int, typer.Option(min=1, max=1024, help="Floats of a row, of DLRM.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time spent on each line.")] = 6.0,
    as_json: Json = False,
) -> None:
    """What a LocalGroup saves: bytes of a step, and samples/s over a link, beside as many separate workers; DLRM on
    clicks that are made up, and a model whose weights are all dense."""
    from benchmarks import groups as bench

    lines = list(bench.run(processes=processes, mbit=mbit, batch=batch, dim=dim, seconds=seconds, progress=_progress))
    _finish(lines, as_json, show.groups(lines, processes, batch, mbit))
