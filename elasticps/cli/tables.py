"""`elasticps tables`: lists, clears and drops a cluster's tables."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from coordinator.core.view import ServerInfo
from elasticps.admin import fetch_tables
from elasticps.cli.local import target, worker_target
from elasticps.cli.options import Json, Name, Url, command
from elasticps.cli.output import ExitCode, out, print_json, size
from elasticps.cli.policies import read_admission, read_evictions, shown
from elasticps.errors import ClusterUnreachable, ConfigError, SpecError, UnknownTable
from elasticps.local.operator_client import OperatorClient
from elasticps.system import background

if TYPE_CHECKING:
    from elasticps.client import SparseTable
    from elasticps.security.credentials import Credentials


_MEND = (
    "Workers cannot open it: write the entry that a backup of etcd has, or delete this key, and the next worker makes "
    "the table again, without its rows"
)
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each server.")]
Which = Annotated[str, typer.Argument(metavar="TABLE", help="The name of a table or tensor.")]
Application = Annotated[str, typer.Option("--app", help="The application that it belongs to.")]
Rate = Annotated[str, typer.Argument(help="A number, or 'none': each worker has its own again.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count what would go, and forget nothing.")]
AdmissionText = Annotated[
    str | None, typer.Option("--admission", metavar="POLICY", help="Which keys get a row; 'none' for all.")
]
EvictionTexts = Annotated[
    list[str] | None,
    typer.Option("--eviction", metavar="POLICY", help="Which rows go; 'none' for none. May be given several times."),
]
Sure = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer(
    help="Show a cluster's tables; clear, sweep or drop one, set its learning rate and its policies.",
    invoke_without_command=True,
)


@app.callback()
@command
def tables(
    ctx: typer.Context, url: Url = None, name: Name = None, as_json: Json = False, timeout: Timeout = 3.0
) -> None:
    """Show a cluster's tables, as `tables list` does; or clear or drop one."""
    if ctx.invoked_subcommand is None:
        _list(url, name, as_json, timeout)
    for option in ("url", "name"):
        source = ctx.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"say --{option} behind {ctx.invoked_subcommand}")


@app.command("list")
@command
def list_command(url: Url = None, name: Name = None, as_json: Json = False, timeout: Timeout = 3.0) -> None:
    """Show what each row is, how many rows there are, and the memory that all replicas take.

    The exit code is 0 if all servers answer, 3 if etcd does not, 4 if a server is silent: its rows are not counted; 4,
    too, if the entry of a table in etcd cannot be read.
    """
    _list(url, name, as_json, timeout)


@app.command()
@command
def show(
    table: Which, url: Url = None, name: Name = None, app: Application = "default", timeout: Timeout = 3.0
) -> None:
    """Print all that is known of a table, as JSON. The exit code is 2 if there is none of that name.

    Of a table that keeps the usage of its rows also keys that wait for a row, what was admitted and evicted by reason
    since servers started, and how many of some rows were used last 2^i to 2^(i+1) seconds ago (ages) and so often
    (counts).
    """
    found = next((t for t in _found(url, name, timeout)["tables"] if (t["app"], t["name"]) == (app, table)), None)
    if found is None:
        raise ConfigError(f"application {app!r} has no table {table!r}")
    if found.get("usage"):
        with _opened(worker_target(url, name), app, table, timeout) as handle:
            found |= handle.state()._asdict()
    print_json(found)


@app.command()
@command
def evict(
    table: Which, url: Url = None, name: Name = None, app: Application = "default", dry_run: DryRun = False,
    as_json: Json = False, timeout: Timeout = 120.0,
) -> None:  # fmt: skip
    """Sweep a table now: forget the rows that its policies choose, and say how many went, by reason."""
    with _opened(worker_target(url, name), app, table, timeout) as handle:
        going = handle.evict(dry_run)
    if as_json:
        print_json({"table": table, "app": app, "dry_run": dry_run, "rows": going})
    else:
        counts = ", ".join(f"{reason} {count:,}" for reason, count in going.items() if count)
        out.print(f"evict: {table}, {counts or 'nothing'}{' would go' * dry_run}")


@app.command("set")
@command
def set_policies(
    table: Which, url: Url = None, name: Name = None, app: Application = "default", admission: AdmissionText = None,
    eviction: EvictionTexts = None, as_json: Json = False, timeout: Timeout = 30.0,
) -> None:  # fmt: skip
    """Put a table under other policies, for all workers: which keys get a row, and which rows are forgotten.

    A policy is written KIND:VALUE,NAME=VALUE…, as min_count:5,forget_after=7d, min_count_sketch:5,nbytes=67108864,
    probability:0.1; idle_for:30d, capacity:50000000,keep=most_used,half_life=7d, small_norm:0.0001; or none.
    """
    if admission is None and not eviction:
        raise ConfigError("say which: --admission POLICY, --eviction POLICY or both")
    try:
        chosen = None if admission is None else read_admission(admission)
        evictions = read_evictions(eviction or [])
        with _opened(worker_target(url, name), app, table, timeout) as handle:
            if eviction:  # before admission: what is refused is refused before anything changes
                handle.set_eviction(evictions)
            if admission is not None:
                handle.set_admission(chosen)
            spec = handle.spec
    except SpecError as error:
        raise ConfigError(str(error)) from None
    policies = {"admission": None if spec.admission is None else spec.admission.to_dict()}
    if as_json:
        print_json({"table": table, "app": app, **policies, "eviction": [each.to_dict() for each in spec.eviction]})
    else:
        out.print(f"set: {table}, admission {shown([spec.admission])}, eviction {shown(spec.eviction)}")


@app.command()
@command
def drop(
    table: Which, url: Url = None, name: Name = None, app: Application = "default", yes: Sure = False,
    timeout: Timeout = 30.0,
) -> None:  # fmt: skip
    """Forget a table: rows, slots and name. Workers that still use it get an error."""
    _erase(worker_target(url, name), app, table, timeout, yes, "drop")


@app.command()
@command
def clear(
    table: Which, url: Url = None, name: Name = None, app: Application = "default", yes: Sure = False,
    timeout: Timeout = 30.0,
) -> None:  # fmt: skip
    """Forget all rows of a table, with what the optimizer keeps of them. Workers may go on using it."""
    _erase(worker_target(url, name), app, table, timeout, yes, "clear")


@app.command("set-lr")
@command
def set_lr(
    table: Which, rate: Rate, url: Url = None, name: Name = None, app: Application = "default",
    timeout: Timeout = 30.0,
) -> None:  # fmt: skip
    """Give a table another learning rate, for all workers, at once and for those that come later."""
    from elasticps.client import connect

    if (lr := None if rate == "none" else _number(rate)) is not None and not 0 <= lr < float("inf"):
        raise ConfigError(f"a learning rate is a number of at least 0, or 'none', got {rate!r}")
    with connect(worker_target(url, name), app=app, timeout=timeout) as ps:
        try:
            ps.open(table).set_lr(lr)
        except UnknownTable as error:
            raise ConfigError(str(error)) from None
    out.print(f"set-lr: {table}, {'each worker its own again' if lr is None else f'{lr:g} for all workers'}")


@contextmanager
def _opened(url: str, app: str, table: str, timeout_s: float) -> Iterator[SparseTable]:
    """Opens a sparse table as a worker does. ConfigError if there is none of that name, or none that can do what is
    asked of it."""
    from elasticps.client import SparseTable, connect

    with connect(url, app=app, timeout=timeout_s) as ps:
        try:
            handle = ps.open(table)
            if not isinstance(handle, SparseTable):
                raise ConfigError(f"{table!r} is a tensor, and has neither admission nor eviction")
            yield handle
        except (UnknownTable, SpecError) as error:
            raise ConfigError(str(error)) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _erase(url: str, app: str, table: str, timeout_s: float, yes: bool, act: str) -> None:
    from elasticps.client import connect  # imports take half a second, which the other commands do without

    with connect(url, app=app, timeout=timeout_s) as ps:
        found = ps.tables().get(table)
        if found is None:
            raise ConfigError(f"application {app!r} has no table {table!r}")
        if not yes:
            typer.confirm(f"{act} table {table!r} of application {app!r}, {found.rows:,} rows?", abort=True)
        if act == "drop":
            ps.drop_table(table)
        else:
            ps.clear_table(table)
    out.print(f"{act}: {table}, {found.rows:,} rows")


def _list(url: str | None, name: str | None, as_json: bool, timeout: float) -> None:
    found = _found(url, name, timeout)
    if as_json:
        print_json(found)
    else:
        out.print(_render(found))
    raise typer.Exit(ExitCode.DEGRADED if found["silent"] or found["unreadable"] else ExitCode.OK)


def _found(url: str | None, name: str | None, timeout: float) -> dict[str, Any]:
    with OperatorClient(target(url, name), timeout) as operator:
        operator.config()  # that there is such a cluster
        (known, unreadable), servers = operator.tables(), operator.registered()
        credentials = operator.credentials
    return background.run(_look(known, servers, timeout, credentials)) | {"unreadable": unreadable}


async def _look(
    known: dict[int, dict[str, Any]],
    servers: Sequence[ServerInfo],
    timeout_s: float,
    credentials: Credentials | None,
) -> dict[str, Any]:
    requests = (fetch_tables(server.admin, timeout_s, credentials) for server in servers)
    answers = await asyncio.gather(*requests, return_exceptions=True)
    nothing: dict[str, int] = {"rows": 0, "bytes": 0, "candidates": 0}
    tables = {number: {**spec, **nothing, "servers": {}} for number, spec in known.items()}
    silent = {}
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, ClusterUnreachable):
            silent[server.name] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for there in answer:
                if (table := tables.get(there["id"])) is not None:
                    table["rows"] += there["rows_headed"]
                    table["bytes"] += there["bytes"]
                    table["candidates"] += there["candidates"]
                    table["servers"][server.name] = {"rows": there["rows"], "bytes": there["bytes"]}
    return {"tables": sorted(tables.values(), key=lambda t: (t["app"], t["name"])), "silent": silent}


def _render(found: dict[str, Any]) -> Group:
    table, waiting = Table(box=None, header_style="bold", pad_edge=False), any(t["candidates"] for t in found["tables"])
    numbers = ["rows", *["waiting"] * waiting, "memory", "servers"]
    for column in ("app", "table", "shape", "type", "optimizer", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    for each in found["tables"]:
        shape = f"[keys, {each['dim']}]" if each["shape"] is None else str(each["shape"])
        table.add_row(
            each["app"], Text(each["name"]), Text(shape), each["dtype"], Text(_optimizer(each)),
            f"{each['rows']:,}", *[f"{each['candidates']:,}"] * waiting, size(each["bytes"]), str(len(each["servers"])),
        )  # fmt: skip
    silent = [Text(f"{name}: {error}; its rows are not counted", "red") for name, error in found["silent"].items()]
    unreadable = [
        Text(f"etcd: {key} cannot be read: {error}. {_MEND}", "red") for key, error in found["unreadable"].items()
    ]
    nothing = Text("no worker has made a table yet") if not unreadable else Text("no table can be read")
    return Group(table if found["tables"] else nothing, *silent, *unreadable)


def _optimizer(table: dict[str, Any]) -> str:
    values, set_for_all = table["optimizer"], table["lr_set"]
    rate = values.get("lr") if set_for_all is None else set_for_all
    text = f"{values['kind']} lr={rate:g}" if rate is not None else str(values["kind"])
    return text if set_for_all is None else f"{text}, set for all"
