"""`elasticps status --hot`: the keys and ranges that workers ask each server for most."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from coordinator.core.view import ServerInfo
from elasticps.admin import fetch_hot
from elasticps.errors import ClusterUnreachable, ServerError
from elasticps.local.scaling import by_number
from elasticps.security import credentials_of
from elasticps.system.coordination import read_servers, read_store

SHOWN = 8


async def look(url: str, seconds: float, timeout_s: float) -> dict[str, Any]:
    """Samples all servers at the same time; plain values, and for a server that does not answer its `error`."""
    credentials = credentials_of(url)
    servers = {server.name: server for server in await read_store(url, timeout_s, read_servers)}

    async def ask(server: ServerInfo) -> dict[str, Any]:
        try:
            found = await fetch_hot(server.admin, seconds, timeout_s, credentials)
        except (ClusterUnreachable, ServerError) as error:
            return {"id": server.name, "error": str(error), "tables": [], "ranges": [], "sampled": 0}
        return {"id": server.name, "error": ""} | found

    names = sorted(servers, key=by_number)
    return {"seconds": seconds, "servers": await asyncio.gather(*(ask(servers[name]) for name in names))}


def render(found: dict[str, Any]) -> Group:
    """Shows for people which share of a table's and of a server's samples each key has."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("server", "table", "keys sampled", "heaviest keys"):
        table.add_column(column, justify="right" if column == "keys sampled" else "left", overflow="fold")
    lines = []
    for server in found["servers"]:
        if server["error"]:
            lines.append(Text(f"{server['id']}: {server['error']}", style="red"))
            continue
        for each in server["tables"]:
            table.add_row(server["id"], each["name"], f"{each['sampled']:,}", _shares(each["keys"], each["sampled"]))
        if not server["tables"]:
            table.add_row(server["id"], "–", "0", "")
        ranges = _shares(server["ranges"], server["sampled"])
        lines += [Text(f"{server['id']}, heaviest ranges: {ranges}")] if ranges else []
    return Group(Text(f"sampled for {found['seconds']:g} s"), table, *lines)


def _shares(pairs: list[list[int]], total: int) -> str:
    return ", ".join(f"{key} ({count / total:.1%})" for key, count in pairs[:SHOWN] if total)
