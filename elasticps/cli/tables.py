"""`elasticps tables`: what a cluster stores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from coordinator.view import ServerInfo
from elasticps import background
from elasticps.admin import fetch_tables
from elasticps.cli.local import target
from elasticps.cli.options import Json, Name, Url
from elasticps.cli.output import ExitCode, out, print_json, size
from elasticps.errors import ClusterUnreachable
from elasticps.local.following import Following

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials


def tables(
    url: Url = None,
    name: Name = None,
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each server.")] = 3.0,
) -> None:
    """Show a cluster's tables: what each row is, how many rows there are, and the memory that all replicas take.

    The exit code is 0 if all servers answer, 3 if etcd does not, 4 if a server is silent: its rows are not counted.
    """
    with Following(target(url, name), timeout) as following:
        following.config()  # that there is such a cluster
        known, servers, credentials = following.tables(), following.registered(), following.credentials
    found = background.run(_look(known, servers, timeout, credentials))
    if as_json:
        print_json(found)
    else:
        out.print(_render(found))
    raise typer.Exit(ExitCode.DEGRADED if found["silent"] else ExitCode.OK)


async def _look(
    known: dict[int, dict[str, Any]],
    servers: Sequence[ServerInfo],
    timeout_s: float,
    credentials: Credentials | None,
) -> dict[str, Any]:
    asked = (fetch_tables(server.admin, timeout_s, credentials) for server in servers)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    tables = {number: {**spec, "rows": 0, "bytes": 0, "servers": {}} for number, spec in known.items()}
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
                    table["servers"][server.name] = {"rows": there["rows"], "bytes": there["bytes"]}
    return {"tables": sorted(tables.values(), key=lambda t: (t["app"], t["name"])), "silent": silent}


def _render(found: dict[str, Any]) -> Group:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("app", "table", "shape", "type", "optimizer", "rows", "memory", "servers"):
        table.add_column(column, justify="right" if column in ("rows", "memory", "servers") else "left")
    for each in found["tables"]:
        shape = f"[keys, {each['dim']}]" if each["shape"] is None else str(each["shape"])
        table.add_row(
            each["app"], Text(each["name"]), Text(shape), each["dtype"], Text(_optimizer(each["optimizer"])),
            f"{each['rows']:,}", size(each["bytes"]), str(len(each["servers"])),
        )  # fmt: skip
    silent = [Text(f"{name}: {error}; its rows are not counted", "red") for name, error in found["silent"].items()]
    return Group(table if found["tables"] else Text("no worker has made a table yet"), *silent)


def _optimizer(values: dict[str, Any]) -> str:
    rate = values.get("lr")
    return f"{values['kind']} lr={rate:g}" if rate is not None else str(values["kind"])
