"""`elasticps checkpoint` and `restore`: make, list, verify and delete checkpoints; bring clusters back from them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

from coordinator.core.data_loss import describe_loss
from coordinator.core.view import RANGES_MAX
from elasticps.cli.bars import bar, restore_with_bar
from elasticps.cli.local import target
from elasticps.cli.options import Json, Name, Url, command, number, usable_place
from elasticps.cli.output import ExitCode, err, out, print_json, size
from elasticps.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from elasticps.checkpoint.retention import Keep

app = typer.Typer(help="Checkpoints: make, list, look into, verify, delete and merge them.", no_args_is_help=True)

Place = Annotated[
    str,
    typer.Argument(
        metavar="URL", callback=usable_place, help="Where they lie: a folder, s3://bucket/prefix, gs://…, az://…."
    ),
]
Cut = Annotated[int | None, typer.Argument(help="Its number.  \\[default: the newest]", show_default=False)]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd.")]
_CUTS = 10**9  # more are never there


@app.command()
@command
def create(
    place: Place,
    full: Annotated[bool, typer.Option("--full", help="All rows, not only those that changed.")] = False,
    hold: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds that workers may be held for it.")] = 5.0,
    url: Url = None,
    name: Name = None,
    as_json: Json = False,
    timeout: Timeout = 30.0,
) -> None:
    """Make a checkpoint of a live cluster, while training goes on.

    It is a consistent cut: of each worker the steps up to one, in all tables, and none later. Workers hold their pushes
    until it is taken, some milliseconds as a rule; then servers write. It adds to the newest one there if that is this
    cluster's.
    """
    from elasticps.checkpoint.create import checkpoint_cluster

    with bar("write", None, MofNCompleteColumn(), TextColumn("ranges")) as tell:
        manifest = checkpoint_cluster(target(url, name), place, full=full, hold_s=hold, timeout_s=timeout, tell=tell)
    if as_json:
        print_json({"cut": manifest.cut, "since": manifest.since, "rows": manifest.rows, "bytes": manifest.nbytes})
    else:
        added = f"adds to {manifest.since}" if manifest.since else "full"
        what = f"{added}, {manifest.rows:,} rows, {size(manifest.nbytes)}, {len(manifest.workers)} workers"
        out.print(f"checkpoint {manifest.cut}: {what}", markup=False)


@app.command("list")
@command
def list_command(place: Place, as_json: Json = False) -> None:
    """Show which checkpoints there are. The exit code is 4 if one cannot be read."""
    from elasticps.checkpoint import catalog  # brings in obstore: other commands do without
    from elasticps.checkpoint.storage import Storage

    there = catalog.look(Storage(place))
    if as_json:
        found = [
            {"cut": m.cut, "since": m.since, "time": m.time, "cluster": m.cluster, "rows": m.rows, "bytes": m.nbytes}
            for m in there.manifests.values()
        ]
        print_json({"checkpoints": found, "unreadable": there.unreadable, "unpublished": there.unpublished})
    else:
        table = Table("checkpoint", "made", "adds to", "rows", "size", "tables", "cluster", box=None, pad_edge=False)
        for m in there.manifests.values():
            table.add_row(
                str(m.cut), _moment(m.time), str(m.since) if m.since else "full", f"{m.rows:,}", size(m.nbytes),
                str(len(m.tables)), m.cluster,
            )  # fmt: skip
        out.print(table if there.manifests else f"{place} has no checkpoint", markup=False)
        if there.unpublished:
            cuts = ", ".join(map(str, there.unpublished))
            err.print(
                f"without a manifest, being written or given up: {cuts}", style="yellow", markup=False, soft_wrap=True
            )
        for text in there.unreadable.values():
            err.print(text, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(ExitCode.DEGRADED if there.unreadable else ExitCode.OK)


@app.command()
@command
def show(place: Place, cut: Cut = None, as_json: Json = False) -> None:
    """Show what a checkpoint has: tables, workers with their clocks, and what it builds on."""
    from elasticps.checkpoint import catalog
    from elasticps.checkpoint.storage import Storage

    *before, manifest = catalog.chain(Storage(place), cut)
    if as_json:
        out.print(manifest.encode().decode(), markup=False)
        return
    builds = f"builds on {', '.join(str(m.cut) for m in before)}" if before else "full"
    out.print(
        f"checkpoint {manifest.cut} of cluster {manifest.cluster}, made {_moment(manifest.time)}, {builds}; "
        f"{manifest.ranges} ranges, {len(manifest.files)} files, {size(manifest.nbytes)}",
        markup=False,
    )
    tables = Table("table", "id", "rows written", "dim", "optimizer", "dtype", box=None, pad_edge=False)
    for name, (id_, spec) in sorted(manifest.tables.items()):
        rows = sum(file.rows for file in manifest.files if file.table == id_)
        tables.add_row(name, str(id_), f"{rows:,}", str(spec.dim), spec.optimizer.kind, spec.dtype)
    out.print(tables)
    workers = Table("worker", "goes on above step", "application", box=None, pad_edge=False)
    for name, worker in sorted(manifest.workers.items()):
        workers.add_row(name, str(worker.clock), worker.app)
    if manifest.workers:
        out.print(workers)
    if manifest.left_out:
        err.print(f"workers lost as it was made: {len(manifest.left_out)}", style="yellow")


@app.command()
@command
def verify(place: Place, cut: Cut = None, as_json: Json = False) -> None:
    """Read all of a checkpoint, and of what it builds on, and hold it against its sums. The exit code is 1 if anything
    is wrong."""
    from elasticps.checkpoint import catalog, maintenance
    from elasticps.checkpoint.storage import Storage

    storage = Storage(place)
    chain = catalog.chain(storage, cut)
    with bar("verify", sum(manifest.nbytes for manifest in chain), DownloadColumn()) as tell:
        problems = [problem for manifest in chain for problem in maintenance.verify(storage, manifest, tell)]
    left = {manifest.cut: found for manifest in chain if (found := catalog.unnamed(storage, manifest)).files}
    if as_json:
        of = {cut: found._asdict() for cut, found in left.items()}
        print_json({"checkpoints": [manifest.cut for manifest in chain], "problems": problems, "unnamed": of})
    else:
        for number, found in left.items():
            text = f"checkpoint {number}: {found.files} files, {size(found.bytes)}, that it does not need"
            text += ": a merge died, or is at it (delete --left-overs)"
            err.print(text, style="yellow", markup=False, soft_wrap=True)
        for problem in problems:
            err.print(problem, style="red", markup=False, soft_wrap=True)
        cuts = ", ".join(str(manifest.cut) for manifest in chain)
        rows = sum(manifest.rows for manifest in chain)
        out.print(f"checkpoint {cuts}: {len(problems)} problems, {rows:,} rows", markup=False)
    raise typer.Exit(ExitCode.FAILED if problems else ExitCode.OK)


@app.command()
@command
def delete(
    place: Place,
    cuts: Annotated[list[int] | None, typer.Argument(help="Their numbers.", show_default=False)] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="Delete all but these, such as last=3,hourly=24,daily=7: the newest ones, and the newest one of each "
            "of the last hours and days."
        ),
    ] = "",
    left_overs: Annotated[
        bool,
        typer.Option(
            "--left-overs", help="Delete files that no checkpoint needs: of given-up ones, and of merges that died."
        ),
    ] = False,
    still: Annotated[
        float,
        typer.Option(
            min=0, help="With --left-overs: where nothing was written for so many seconds. 0: nobody writes there now."
        ),
    ] = 3600.0,
) -> None:
    """Delete checkpoints; never one that another builds on that stays."""
    from elasticps.checkpoint import catalog
    from elasticps.checkpoint.storage import Storage

    storage = Storage(place)
    gone: list[int] = []
    if not (cuts or keep or left_overs):
        raise ConfigError("say which: numbers, --keep or --left-overs")
    if cuts:
        catalog.delete(storage, cuts, gone.append)
    if keep:
        gone += catalog.thin_out(storage, parse_keep(keep))
    if left_overs:
        gone += catalog.clean(storage, still_s=still)
    out.print(f"deleted: {', '.join(map(str, gone)) or 'nothing'}", markup=False)


@app.command()
@command
def merge(place: Place, cut: Cut = None) -> None:
    """Make a full checkpoint of an increment and all that it builds on, under its number."""
    from elasticps.checkpoint import catalog, maintenance
    from elasticps.checkpoint.storage import Storage

    storage = Storage(place)
    chain = catalog.chain(storage, cut)
    with bar("merge", None) as tell:
        merged = maintenance.merge(storage, chain, tell)
    out.print(f"checkpoint {merged.cut} is full: {merged.rows:,} rows, {size(merged.nbytes)}", markup=False)


def restore(
    place: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            callback=usable_place,
            help="Where they lie. With --ranges it may be left out: where the newest one went.",
            show_default=False,
        ),
    ] = "",
    tables: Annotated[
        str,
        typer.Option(
            help="Names, with commas in between, or APPLICATION/NAME; one that has a comma in double quotes. All, and "
            "all else, if left out."
        ),
    ] = "",
    cut: Annotated[
        int | None, typer.Option(help="Which checkpoint.  \\[default: the newest]", show_default=False)
    ] = None,
    ranges: Annotated[
        str,
        typer.Option(
            help="Only these ranges of a live cluster, of which every replica is gone: 3,8-11, or all-lost.",
            show_default=False,
        ),
    ] = "",
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="With --ranges: also those that a server may have which is only away."),
    ] = False,
    url: Url = None,
    name: Name = None,
    as_json: Json = False,
    timeout: Timeout = 30.0,
) -> None:
    """Bring a cluster back from a checkpoint, or some tables of one, or ranges that are lost.

    All of it needs a cluster without tables and workers: workers wait until it is there, and go on where the checkpoint
    was taken. Some tables, which must not exist, come back while others are trained. The number of servers, replicas
    and ranges may be another. Ranges of which nobody is left come back while all others are trained on; what is
    missing in them of later steps is told.
    """
    if ranges:
        _restore_ranges(target(url, name), place, ranges, cut, accept_loss, timeout, as_json=as_json)
        return
    if not place or accept_loss:
        raise ConfigError("say where the checkpoint lies, or --ranges" if not place else "--accept-loss needs --ranges")
    restore_with_bar(target(url, name), place, cut, tables, timeout, as_json=as_json)


def _restore_ranges(
    cluster: str, place: str, ranges: str, cut: int | None, accept_loss: bool, timeout_s: float, *, as_json: bool
) -> None:
    from elasticps.checkpoint.range_recovery import restore_ranges

    def tell(text: str) -> None:
        err.print(text, markup=False, soft_wrap=True)

    chosen = None if ranges == "all-lost" else _numbers(ranges)
    report = restore_ranges(cluster, place, chosen, cut=cut, accept_loss=accept_loss, tell=tell, timeout_s=timeout_s)
    if as_json:
        print_json(report)
        return
    for line in describe_loss(report):
        out.print(line, markup=False, soft_wrap=True)


def _numbers(text: str) -> set[int]:
    """3,8-11 as numbers, none of which is beyond what a cluster can have: the set of them has a limit."""
    found: set[int] = set()
    for each in text.split(","):
        left, dash, right = each.strip().partition("-")
        first, last = number(left, RANGES_MAX - 1), number(right if dash else left, RANGES_MAX - 1)
        if first is None or last is None:
            raise ConfigError(f"--ranges takes numbers below {RANGES_MAX}, such as 3,8-11, or all-lost, got {text!r}")
        found.update(range(first, last + 1))
    return found


def parse_keep(text: str) -> Keep:
    """Parses `--keep`."""
    from elasticps.checkpoint.retention import Keep

    found = {}
    for each in text.split(","):
        what, _, text_of = each.partition("=")
        count = number(text_of, _CUTS)
        if what not in ("last", "hourly", "daily") or count is None:
            raise ConfigError(f"--keep takes last=N,hourly=N,daily=N, got {text!r}")
        found[what] = count
    try:
        return Keep(**found)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
