"""`elasticps export` and `import`: write tables into files that others read, and load tables from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from elasticps.cli.bars import bar
from elasticps.cli.local import worker_target
from elasticps.cli.options import Name, Url, names, number, usable_place
from elasticps.cli.output import out
from elasticps.errors import ConfigError

App = Annotated[str, typer.Option(help="The application that the tables belong to.")]
_KEYS = 2**63  # as many as an int64 has from 0 on
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that servers may take for one answer.")]


def export(
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist, or be empty.")],
    tables: Annotated[
        str, typer.Option(help="Names, with commas in between; one that has a comma in double quotes. All if left out.")
    ] = "",
    kind: Annotated[str, typer.Option("--format", help="safetensors, npz, npy or parquet.")] = "safetensors",
    with_slots: Annotated[bool, typer.Option(help="What optimizers keep of each row and tensor, too.")] = False,
    dtype: Annotated[str, typer.Option(help="Of weights: float32 or float16.")] = "float32",
    rows: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=N: its keys are 0 … N - 1, and all are written, in order; may be repeated."),
    ] = None,
    strip_prefix: Annotated[
        str,
        typer.Option(help="Left out of the names of tensors that begin with it, such as model.", show_default=False),
    ] = "",
    module: Annotated[
        list[str] | None,
        typer.Option(
            help="TABLE=PATH: the module of a plain torch model that has the table's rows: they are PATH.weight; may "
            "be repeated."
        ),
    ] = None,
    from_checkpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            callback=usable_place,
            help="Those of a checkpoint there, without a cluster.",
            show_default=False,
        ),
    ] = "",
    cut: Annotated[
        int | None, typer.Option(help="Which checkpoint.  \\[default: the newest]", show_default=False)
    ] = None,
    min_count: Annotated[
        float | None,
        typer.Option(
            help="Of a checkpoint, in tables that keep usage: only rows pushed to so often.", show_default=False
        ),
    ] = None,
    used_within: Annotated[
        str, typer.Option(help="The same: only rows used so shortly before it, such as 30d.", show_default=False)
    ] = "",
    top: Annotated[
        int | None, typer.Option(help="The same: only so many rows, those pushed to most often.", show_default=False)
    ] = None,
    with_usage: Annotated[
        bool, typer.Option(help="Of a checkpoint: last use, count and score of each row, too.")
    ] = False,
    url: Url = None,
    name: Name = None,
    app: App = "default",
    timeout: Timeout = 30.0,
) -> None:
    """Write tables and tensors into files that torch and others read: those of a live cluster, which may be trained
    meanwhile, or of a checkpoint."""
    from elasticps.client import connect  # imports take half a second, which other commands do without
    from elasticps.exchange.checkpoint import export_checkpoint
    from elasticps.exchange.export import export
    from elasticps.exchange.usage import UsageFilter
    from elasticps.exchange.writers import check_format

    check_format(kind)
    counts = {}
    for table, count in _pairs("--rows", "TABLE=N", rows):
        if (rows_there := number(count, _KEYS)) is None:
            raise ConfigError(f"--rows takes TABLE=N, got {table}={count}")
        counts[table] = rows_there
    chosen = names(tables)
    how: dict[str, Any] = {
        "tables": chosen, "kind": kind, "with_slots": with_slots, "dtype": dtype, "rows": counts,
        "strip_prefix": strip_prefix, "modules": dict(_pairs("--module", "TABLE=PATH", module)),
    }  # fmt: skip
    if from_checkpoint:
        if url or name:
            raise ConfigError("--from-checkpoint needs no cluster: leave --url and --name out")
        with _bar("export", None) as tell:
            by = UsageFilter(min_count, used_within or None, top)
            written = export_checkpoint(
                from_checkpoint, to, cut=cut, app=app, tell=tell, with_usage=with_usage, chosen_by=by, **how
            )
    elif with_usage or UsageFilter(min_count, used_within or None, top):
        raise ConfigError("--min-count, --used-within, --top and --with-usage are for --from-checkpoint")
    else:
        with connect(worker_target(url, name), app=app, timeout=timeout) as ps:
            total = sum(counts.get(n, one.rows) for n, one in ps.tables().items() if not chosen or n in chosen)
            with _bar("export", total) as tell:
                written = export(ps, to, tell=tell, **how)
    out.print(f"{to}: {len(written)} tables, {sum(written.values()):,} rows", markup=False)


def import_(
    source: Annotated[Path, typer.Argument(help="What export wrote, or a .safetensors, .npz, .parquet or .pt file.")],
    table: Annotated[
        list[str] | None, typer.Option(help="TABLE=TENSOR: which tensor of a file a table is; may be repeated.")
    ] = None,
    with_slots: Annotated[
        bool, typer.Option(help="What optimizers keep of each row and tensor, too, from an export that has it.")
    ] = False,
    url: Url = None,
    name: Name = None,
    app: App = "default",
    timeout: Timeout = 30.0,
) -> None:
    """Load tables and tensors from files into a live cluster, past their optimizers. Nobody should train meanwhile.

    Of an export, tables that are not there are made. Of a state_dict nothing but tensors is read.
    """
    from elasticps.client import connect
    from elasticps.exchange.load import load

    chosen = {tensor: known for known, tensor in _pairs("--table", "TABLE=TENSOR", table)}
    with connect(worker_target(url, name), app=app, timeout=timeout) as ps, _bar("import", None) as tell:
        loaded = load(ps, source, names=chosen, with_slots=with_slots, tell=tell)
    out.print(f"{source}: {len(loaded)} tables, {sum(loaded.values()):,} rows", markup=False)


def _pairs(option: str, form: str, given: list[str] | None) -> Iterator[tuple[str, str]]:
    for each in given or ():
        left, _, right = each.rpartition("=") if form.endswith("=N") else each.partition("=")
        if not left or not right:
            raise ConfigError(f"{option} takes {form}, got {each!r}")
        yield left, right


def _bar(title: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    return bar(title, total, MofNCompleteColumn(), TextColumn("rows"))
