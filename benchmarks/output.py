"""What commands of `elasticps bench` share: options, progress, and how results are printed."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.runner import Result

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def progress(text: str) -> None:
    """Tells people what is measured now."""
    Console(stderr=True).print(f"[dim]{text}…[/dim]")


def print_result(result: Result, as_json: bool) -> None:
    """Prints a result: as JSON, or as tables and lines for people."""
    if as_json:
        typer.echo(json.dumps(result.document, indent=2))
    else:
        out = Console(width=None if sys.stdout.isatty() else 120)
        for part in result.shown:
            if isinstance(part, str):
                typer.echo(part)
            else:
                out.print(part)
    if not result.ok:
        raise typer.Exit(1)
