"""`elasticps bench allreduce` and `groups`, as people see them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _progress(text: str) -> None:
    Console(stderr=True).print(f"[dim]{text}…[/dim]")


def _out() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


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

    outcome = bench.run(sizes_mb=size or bench.SIZES_MB, processes=processes or bench.PROCESSES,
                        servers=servers or bench.SERVERS, steps=steps, progress=_progress)  # fmt: skip
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), indent=2))
        return
    here = outcome.machine
    table = Table(title="dense gradients: ms until all have the sum, or the new weights")
    for name in ("MB", "processes", "way", "servers", "taken ms", "predicted ms", "taken of predicted", "of the ring"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for line in outcome.lines:
        times = f"{line.taken_ms:,.1f}", f"{line.predicted_ms:,.1f}", f"{line.taken_ms / line.predicted_ms:.2f}"
        servers_ = str(line.servers or "")
        table.add_row(f"{line.mb:g}", str(line.processes), line.way, servers_, *times, f"{line.of_ring:.2f}")
    _out().print(table)
    typer.echo(
        f"memory {here.memory_per_s / 1e9:.1f} GB/s, loopback {here.loopback_per_s / 1e9:.2f} GB/s, a message and its "
        f"answer {here.turn_s * 1e6:.0f} µs, {here.cores} cores"
    )
    typer.echo(outcome.conclusion)


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
    if as_json:
        typer.echo(json.dumps([line.to_dict() for line in lines], indent=2))
        return
    table = Table(title=f"{processes} processes, {batch:,} samples each, a link of {mbit:,} Mbit/s, 2 servers")
    cpu = "CPU µs/sample", "of servers"
    for name in ("model", "way", "KB up", "KB down", "of separate", "samples/s", "faster", *cpu):
        table.add_column(name, justify="left" if name in ("model", "way") else "right")
    for line in lines:
        kilobytes = f"{line.up_per_step / 1e3:,.0f}", f"{line.down_per_step / 1e3:,.0f}", f"{line.of_separate:.3f}"
        table.add_row(line.model, line.way, *kilobytes, f"{line.samples_per_s:,.0f}", f"{line.faster:.2f}",
                      f"{line.worker_cpu_us_per_sample:.1f}", f"{line.server_cpu_us_per_sample:.1f}")  # fmt: skip
    _out().print(table)
