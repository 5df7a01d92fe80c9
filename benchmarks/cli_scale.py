"""`elasticps bench control`, `steps`, `servers`, `idle`: what many servers and workers cost; `turns`: and what a change
does to few."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.output import Json, print_result, progress

app = typer.Typer()


@app.command()
def control(
    servers: Annotated[int, typer.Option(min=4, max=4096, help="How many.")] = 100,
    ranges: Annotated[int, typer.Option(min=16, max=1 << 16, help="How many; a power of two.")] = 1024,
    workers: Annotated[int, typer.Option(min=1, max=100_000, help="How many.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is done.")] = 200,
    as_json: Json = False,
) -> None:
    """What a view costs to send, to adopt and to plan. No process is started."""
    from benchmarks import control as bench

    if ranges & (ranges - 1):
        raise typer.BadParameter(f"--ranges is a power of two, got {ranges}")
    print_result(bench.run(servers=servers, ranges=ranges, workers=workers, rounds=rounds, progress=progress), as_json)


@app.command()
def steps(
    servers: Annotated[
        list[int] | None,
        typer.Option(min=1, max=4096, help="May be given several times.  \\[default: 3, 30, 100, 1000]"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=100_000, help="Whose rounds and clocks the head has.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, and steps of each worker; 20 pushes for each.")] = 10,
    as_json: Json = False,
) -> None:
    """What a push takes its worker by the number of servers, and the head of a group range for a synchronous round or a
    step under bounded delay. No process is started."""
    from benchmarks import steps as bench

    print_result(bench.run(servers=servers or bench.SERVERS, workers=workers, count=rounds, progress=progress), as_json)


@app.command("servers")
def many_servers(
    servers: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="May be given several times.  \\[default: 3, 20]")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=64, help="Servers whose ranges a push has rows for.")] = 4,
    workers: Annotated[int, typer.Option(min=1, max=1000, help="Each has one push under way.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each; the one in the middle is shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time spent on each turn.")] = 5.0,
    as_json: Json = False,
) -> None:
    """What a push of 64 rows costs the servers by how many there are, where it touches a few of them."""
    from benchmarks import many_servers as bench

    print_result(
        bench.run(
            servers=servers or (3, 20), heads=heads, workers=workers, rounds=rounds, seconds=seconds, progress=progress
        ),
        as_json,
    )


@app.command()
def idle(
    workers: Annotated[int, typer.Option(min=1, max=1000, help="Each has a table and does nothing.")] = 50,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes that they are in.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time that is measured.")] = 20.0,
    as_json: Json = False,
) -> None:
    """What workers cost that do nothing: processor time of each, and of etcd."""
    from benchmarks import idle as bench

    print_result(
        bench.run(workers=workers, processes=min(processes, workers), seconds=seconds, progress=progress), as_json
    )


@app.command()
def turns(
    other: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Another checkout of elasticps.")],
    servers: Annotated[int, typer.Option(min=1, max=64, help="Of each cluster.")] = 3,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, max=5, help="May be given several times.  \\[default: 1, 2]")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, max=100_000, help="May be given several times.  \\[default: 64, 8192]")
    ] = None,
    starts: Annotated[int, typer.Option(min=1, help="Times that both clusters are started.")] = 4,
    count: Annotated[int, typer.Option("--turns", min=1, help="Of each operation in each start.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time spent on each turn.")] = 0.2,
    as_json: Json = False,
) -> None:
    """Whether pulls and pushes are as fast as with another checkout: both run at once, and take turns."""
    from benchmarks import turns as bench

    if not (other / "elasticps" / "__init__.py").is_file():
        raise typer.BadParameter(f"{other} has no elasticps/__init__.py: name the root of a checkout")
    print_result(
        bench.run(
            other.resolve(), servers=servers, replicas=replicas or bench.REPLICAS, rows=rows or bench.ROWS,
            starts=starts, turns=count, seconds=seconds, progress=progress,
        ),
        as_json,
    )  # fmt: skip
