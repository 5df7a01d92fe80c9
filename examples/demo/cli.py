"""`elasticps demo`: a recommender on real ratings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from elasticps.cli.output import make_folder
from elasticps.errors import ConfigError


def demo(
    servers: Annotated[int, typer.Option(min=1, help="How many servers.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of each range of parameters.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="How many worker processes.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the ratings.")] = 14,
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.png and demo.log.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of initial values and of the order of ratings.")] = 1,
    kill: Annotated[
        bool, typer.Option(help="Kill the server that heads most ranges (kill -9) a third of the way.")
    ] = True,
    elastic: Annotated[
        bool, typer.Option(help="Then add two servers, drain them again, kill a worker and start it again.")
    ] = True,
    lose: Annotated[
        bool,
        typer.Option(
            help="At last take a checkpoint, kill every process (kill -9), and go on from it with a server less."
        ),
    ] = True,
) -> None:
    """Train a recommender on real ratings through servers that die, come and go, then in one process, and compare.

    The exit code is 1 if the two do not agree, or if the replicas differ at the end.
    """
    if missing := [
        name for name in ("torch", "matplotlib", "sklearn", "starlette", "uvicorn") if find_spec(name) is None
    ]:
        raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'elasticps[demo]'")
    make_folder(out)
    from examples.demo import main  # torch takes seconds to import: only this command waits for it

    raise typer.Exit(
        main.run(
            servers=servers,
            replicas=replicas,
            workers=workers,
            epochs=epochs,
            out=out,
            seed=seed,
            kill=kill,
            elastic=elastic,
            lose=lose,
        )
    )
