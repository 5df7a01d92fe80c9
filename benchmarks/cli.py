"""`elasticps bench …`: tables for people, `--json` for programs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import cli_scale
from benchmarks.output import Json, print_result, progress
from elasticps.cli.output import sigterm_interrupts

app = typer.Typer(help="Measure this machine, and elasticps on it.", no_args_is_help=True)
app.add_typer(cli_scale.app)

Servers = Annotated[int, typer.Option(min=1, max=16, help="Servers of the local cluster.")]
Tls = Annotated[bool, typer.Option("--tls", help="With TLS, certificates required of everybody.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Time spent on each line.")]


@app.callback()
def _ends_as_by_ctrl_c(context: typer.Context) -> None:
    context.with_resource(sigterm_interrupts())


@app.command()
def sparse(
    batch: Annotated[list[int] | None, typer.Option(help="Rows per operation; may be given several times.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Floats per row.")] = 64,
    servers: Servers = 1,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Copies of each range; several are compared.  \\[default: 1]")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Outstanding steps in push-window.")] = 4,
    tls: Tls = False,
    seconds: Seconds = 4.0,
    as_json: Json = False,
) -> None:
    """Pull and push rows of a sparse table with Adagrad."""
    from benchmarks import speed

    print_result(
        speed.sparse(
            batches=batch or speed.BATCHES, rows=rows, dim=dim, servers=servers, replicas=replicas or [1],
            window=window, tls=tls, seconds=seconds, progress=progress,
        ),
        as_json,
    )  # fmt: skip


@app.command()
def dense(
    size: Annotated[list[int] | None, typer.Option(help="Megabytes; may be given several times.")] = None,
    servers: Servers = 1,
    seconds: Seconds = 4.0,
    as_json: Json = False,
) -> None:
    """Pull and push dense tensors with SGD."""
    from benchmarks import speed

    print_result(
        speed.dense(sizes_mb=size or speed.SIZES_MB, servers=servers, seconds=seconds, progress=progress), as_json
    )


class Model(enum.StrEnum):
    """What is trained."""

    DEEPFM = "deepfm"
    DLRM = "dlrm"


@app.command()
def train(
    model: Annotated[
        list[Model] | None,
        typer.Option(help="The demo's DeepFM on MovieLens, or DLRM on clicks that are made up.  \\[default: both]"),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="May be given several times.  \\[default: 1, 2, 4]")
    ] = None,
    replicas: Annotated[list[int] | None, typer.Option(min=1, help="Copies of each range.  \\[default: 1, 2]")] = None,
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
    print_result(
        bench.run(
            models=model or list(Model), workers=workers or bench.WORKERS, replicas=replicas or bench.REPLICAS,
            servers=servers, batch=batch, seconds=seconds, progress=progress,
        ),
        as_json,
    )  # fmt: skip


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

    print_result(bench.run(kills=kills, stop=signal is Signal.STOP, rows=rows, tls=tls, progress=progress), as_json)


@app.command()
def checkpoint(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of 64 floats, with Adagrad.")] = 1_000_000,
    servers: Servers = 3,
    seconds: Seconds = 5.0,
    as_json: Json = False,
) -> None:
    """What a checkpoint costs a worker that pulls and pushes all the time, and how fast it is written."""
    from benchmarks import checkpoint as bench

    print_result(bench.run(rows=rows, servers=servers, seconds=seconds, progress=progress), as_json)


@app.command()
def traffic(
    filters: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, int8, top_k+int8, … as printed; may be given several times.  \\[default: all]"),
    ] = None,
    mbit: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Mbit/s of a link; may be given several times.  \\[default: 1000, 100]"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often each is trained.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps until the model is scored.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step.")] = 256,
    as_json: Json = False,
) -> None:
    """What filters and a cache save: bytes of a step of DLRM, and of a small network on handwritten digits, samples/s
    over slow links, and AUC or accuracy beside that without them."""
    from benchmarks import traffic as bench

    print_result(
        bench.run(
            filters=filters or (), mbit=mbit or bench.MBIT, seeds=seeds, steps=steps, batch=batch, progress=progress
        ),
        as_json,
    )


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
    from benchmarks.traffic import prefetching

    print_result(
        prefetching(delay_ms=delay, batches=batches, batch=batch, steps=steps, turns=turns, progress=progress), as_json
    )


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

    print_result(bench.run(rows=rows, batch=batch, rate=rate, progress=progress), as_json)


class ReaderDtype(enum.StrEnum):
    """In what a reader has rows."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


@app.command()
def readers(
    every: Annotated[float, typer.Option(min=1, help="Milliseconds from window to window.")] = 5.0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of 64 floats, with Adagrad.")] = 200_000,
    layers: Annotated[int, typer.Option(min=0, help="How much workers compute in a step.")] = 6,
    skew: Annotated[
        float, typer.Option(min=0, max=4, help="Exponent of Zipf's law for keys, over shuffled ids; 0: uniform.")
    ] = 0.0,
    dtype: Annotated[
        ReaderDtype | None, typer.Option(help="In which the reader has rows.  \\[default: the table's]")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Without a reader, with one, with one that is stopped.")] = 5,
    seconds: Seconds = 3.0,
    as_json: Json = False,
) -> None:
    """How soon a reader shows what is committed, and what it costs two workers at full speed."""
    from benchmarks import readers as bench

    found = bench.run(
        every_ms=every, rows=rows, layers=layers, skew=skew, dtype=None if dtype is None else dtype.value, turns=turns,
        seconds=seconds, progress=progress,
    )  # fmt: skip
    print_result(found, as_json)


@app.command("reader-cost")
def reader_cost(
    model: Annotated[Model, typer.Option(help="The demo's DeepFM, or DLRM on clicks that are made up.")] = Model.DEEPFM,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Each trains at full speed.")] = 2,
    servers: Servers = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step of each worker.")] = 256,
    every: Annotated[float, typer.Option(min=1, help="Milliseconds from window to window.")] = 20.0,
    dtype: Annotated[
        ReaderDtype | None, typer.Option(help="In which the reader has rows.  \\[default: the tables']")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Without a reader, and beside one.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time spent on each turn.")] = 3.0,
    as_json: Json = False,
) -> None:
    """Samples a second of a model that trains beside a reader, of those without."""
    from benchmarks import reader_cost as bench

    found = bench.run(
        model.value, workers=workers, servers=servers, batch=batch, every_ms=every,
        dtype=None if dtype is None else dtype.value, turns=turns, seconds=seconds, progress=progress,
    )  # fmt: skip
    print_result(found, as_json)


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

    print_result(
        bench.run(tables=count, batch=batch, dim=dim, servers=servers, seconds=seconds, progress=progress), as_json
    )


@app.command()
def memory(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the table.")] = 5_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Floats per row.")] = 64,
    as_json: Json = False,
) -> None:
    """Memory that a server takes for each row."""
    from benchmarks import server

    print_result(server.memory(rows=rows, dim=dim, progress=progress), as_json)


@app.command()
def startup(as_json: Json = False) -> None:
    """Time from starting a server to its being registered, kernels warm."""
    from benchmarks import server

    print_result(server.startup(progress=progress), as_json)


@app.command()
def store(as_json: Json = False) -> None:
    """Lookup, gather and Adagrad on one core, without sockets."""
    from benchmarks import server

    print_result(server.store(progress=progress), as_json)


@app.command()
def allreduce(
    size: Annotated[
        list[float] | None,
        typer.Option(min=0.001, max=2000, help="MB of gradients; may be given several times.  \\[default: 1, 16]"),
    ] = None,
    processes: Annotated[
        list[int] | None, typer.Option(min=2, max=16, help="May be given several times.  \\[default: 2, 4]")
    ] = None,
    servers: Annotated[
        list[int] | None, typer.Option(min=1, max=8, help="May be given several times.  \\[default: 1, 2, 3]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured of each.")] = 3,
    as_json: Json = False,
) -> None:
    """Add up dense gradients by ring all-reduce, through servers, and in groups that go through servers, beside what
    the bandwidths of this machine say."""
    from benchmarks import allreduce as bench

    print_result(
        bench.run(
            sizes_mb=size or bench.SIZES_MB, processes=processes or bench.PROCESSES, servers=servers or bench.SERVERS,
            steps=steps, progress=progress,
        ),
        as_json,
    )  # fmt: skip


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

    print_result(
        bench.run(processes=processes, mbit=mbit, batch=batch, dim=dim, seconds=seconds, progress=progress), as_json
    )


@app.command()
def stream(
    ids: Annotated[int, typer.Option(min=100, help="Ids that are alive at any time.")] = 100_000,
    hours: Annotated[int, typer.Option(min=1, help="Hours of the stream.")] = 24,
    hour_s: Annotated[float, typer.Option(min=0.1, help="Seconds that an hour takes; policies' times follow.")] = 5.0,
    churn: Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of the ids that an hour replaces.")] = 0.2,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step, of 8 ids each.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps of an hour.")] = 40,
    share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Of all ids that come, how many rows the bounded table may have.")
    ] = 0.2,
    min_count: Annotated[int, typer.Option(min=1, help="Pushes until an id gets its row there.")] = 2,
    servers: Servers = 2,
    picture: Annotated[Path | None, typer.Option(help="Draws rows and AUC over time: a PNG.")] = None,
    as_json: Json = False,
) -> None:
    """A stream whose ids churn: a table that keeps them all beside one that grows and forgets: rows, bytes, AUC."""
    from benchmarks import stream as bench

    print_result(
        bench.run(
            ids=ids, hours=hours, hour_s=hour_s, churn=churn, batch=batch, steps=steps, share=share,
            min_count=min_count, servers=servers, picture=picture, progress=progress,
        ),
        as_json,
    )  # fmt: skip


@app.command()
def compare(
    contestant: Annotated[
        list[str] | None, typer.Option(help="Its name; may be given several times.  \\[default: all]")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=16, help="Samples of a step.  \\[default: 256, 1024, 4096]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant with each batch.")] = 5,
    steps: Annotated[
        int, typer.Option(min=2, help="Of a turn with 256 samples; with 4 times as many samples half of them.")
    ] = 64,
    values: Annotated[int, typer.Option(min=200, help="Ids of each of the 26 categories at most.")] = 100_000,
    deaths: Annotated[bool, typer.Option(help="At last kill a process that holds rows, with SIGKILL.")] = True,
    environment: Annotated[
        Path | None,
        typer.Option(help="Virtual environment of the contestants, made if it is not there.  \\[default: this one]"),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Writes the tables to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """What one would take instead: the same DLRM through torchrec with FBGEMM, DDP, torch.distributed.rpc, a Ray actor
    and elasticps: samples/s, CPU time, memory of a row, AUC, and what `kill -9` of a process that holds rows does."""
    from benchmarks import compare as bench

    print_result(
        bench.run(
            names=contestant or (), batches=batch or bench.BATCHES, rounds=rounds, steps=steps, most_values=values,
            deaths=deaths, folder=environment, page=markdown, progress=progress,
        ),
        as_json,
    )  # fmt: skip
