"""`elasticps status`: what etcd says about a cluster, and what its servers say about themselves."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.connect import open_store
from coordinator.store import Store
from coordinator.url import parse
from coordinator.view import Roster, ServerInfo, View
from elasticps import background
from elasticps.admin import fetch_status
from elasticps.cli.local import find
from elasticps.cli.output import ExitCode, out, print_json, size
from elasticps.errors import ClusterUnreachable, ConfigError

_ASKED_AT_ONCE = 64


def status(
    url: Annotated[str | None, typer.Option(help="A cluster anywhere, as etcd://host:port/name.")] = None,
    name: Annotated[str | None, typer.Option(help="A local cluster; may be left out if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every --interval seconds.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each server.")] = 3.0,
) -> None:
    """Show a cluster: its view, its servers and what each of them holds, its workers.

    The exit code is 0 if all servers answer, 3 if etcd does not, 4 if the cluster has no view or a server is silent.
    """
    if url is not None and name is not None:
        raise ConfigError("--url and --name exclude each other")
    target = url if url is not None else find(name).url
    if not watch:
        found = background.run(look(target, timeout))
        if as_json:
            print_json(found)
        else:
            out.print(_render(found))
        raise typer.Exit(ExitCode.OK if found["healthy"] else ExitCode.DEGRADED)
    with suppress(KeyboardInterrupt):
        _watch(target, as_json=as_json, interval_s=interval, timeout_s=timeout)


def _watch(url: str, *, as_json: bool, interval_s: float, timeout_s: float) -> None:
    if as_json:
        while True:
            print_json(background.run(look(url, timeout_s)))
            time.sleep(interval_s)
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            live.update(_render(background.run(look(url, timeout_s))), refresh=True)
            time.sleep(interval_s)


async def look(url: str, timeout_s: float) -> dict[str, Any]:
    """The cluster at `url` as plain values. StoreUnavailable when etcd does not answer within `timeout_s`; a server
    that does not is listed with the state "no answer"."""
    try:
        cluster = parse(url)
        store = await open_store(url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        view, roster, registered = await asyncio.wait_for(_read(store), timeout_s)
    except asyncio.TimeoutError:
        raise ClusterUnreachable(
            f"etcd at {', '.join(cluster.endpoints)} did not answer within {timeout_s:g} s"
        ) from None
    finally:
        await store.close()
    limit = asyncio.Semaphore(_ASKED_AT_ONCE)
    known = {server.name: server for server in (*(view.servers if view else ()), *registered)}
    servers = await asyncio.gather(
        *(_ask(known[name], view, limit, timeout_s) for name in sorted(known, key=_by_number))
    )
    return {
        "cluster": cluster.cluster,
        "url": url,
        "healthy": view is not None and not any(server["error"] for server in servers),
        "epoch": view.epoch if view else 0,
        "reason": view.reason if view else "no view has been formed",
        "ranges": view.ranges if view else 0,
        "replicas": view.replicas if view else 0,
        "ranges_short": _short(view) if view else 0,
        "ranges_joining": int((view.joining >= 0).sum()) if view else 0,
        "servers": servers,
        "workers": [
            {"id": worker.id, "name": worker.name, "incarnation": worker.incarnation, "app": worker.app}
            for worker in (roster.workers if roster else ())
        ],
    }


async def _read(store: Store) -> tuple[View | None, Roster | None, list[ServerInfo]]:
    view, roster, listing = await asyncio.gather(store.get("view"), store.get("roster"), store.list("servers/"))
    return (
        View.decode(view.value) if view else None,
        Roster.decode(roster.value) if roster else None,
        [ServerInfo.from_json(entry.value) for entry in listing.entries],
    )


async def _ask(server: ServerInfo, view: View | None, limit: asyncio.Semaphore, timeout_s: float) -> dict[str, Any]:
    index = view.index(server.name) if view is not None else -1
    from_view = {
        "id": server.name,
        "pid": None,
        "address": server.address,
        "admin": server.admin,
        "incarnation": server.incarnation,
        "state": "no answer",
        "ranges_headed": int((view.heads == index).sum()) if view is not None and index >= 0 else 0,
        "ranges_held": int((view.chains == index).any(axis=1).sum()) if view is not None and index >= 0 else 0,
        "ranges_joining": int((view.joining == index).sum()) if view is not None and index >= 0 else 0,
        "rows": None,
        "bytes": None,
        "log_bytes": None,
        "zone": server.zone,
        "weight": server.weight,
        "error": "",
    }
    async with limit:
        try:
            answer = await fetch_status(server.admin, timeout_s)
        except ClusterUnreachable as error:
            return {**from_view, "error": str(error)}
    if answer["id"] != server.name or answer["incarnation"] != server.incarnation:
        return {**from_view, "error": f"{server.admin} now belongs to {answer['id']} {answer['incarnation']}"}
    return {**from_view, **answer}


def _short(view: View) -> int:
    """Ranges with fewer replicas than wanted."""
    return int((view.chains < 0).any(axis=1).sum())


def _by_number(name: str) -> tuple[str, int, str]:
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0), name


def _render(found: dict[str, Any]) -> Group:
    head = Text.assemble(
        (found["cluster"], "bold"),
        f"  epoch {found['epoch']}, {found['ranges']} ranges × {found['replicas']} replicas: {found['reason']}",
    )
    if found["ranges_short"]:
        text = f"\n{found['ranges_short']} ranges have fewer replicas; {found['ranges_joining']} are being filled"
        head.append(text, "yellow")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("server", "pid", "inc", "state", "heads", "holds", "joining", "rows", "memory", "log"):
        table.add_column(column, justify="left" if column in ("server", "state") else "right", no_wrap=True)
    table.add_column("address", overflow="fold")  # gives way first on a narrow terminal
    for server in found["servers"]:
        table.add_row(
            server["id"],
            "–" if server["pid"] is None else str(server["pid"]),
            str(server["incarnation"]),
            server["state"],
            str(server["ranges_headed"]),
            str(server["ranges_held"]),
            str(server["ranges_joining"]),
            "–" if server["rows"] is None else f"{server['rows']:,}",
            "–" if server["bytes"] is None else size(server["bytes"]),
            "–" if server["log_bytes"] is None else size(server["log_bytes"]),
            server["address"],
            style="red" if server["error"] else "",
        )
    workers = ", ".join(f"{worker['name']} (id {worker['id']})" for worker in found["workers"]) or "none"
    silent = [Text(f"{server['id']}: {server['error']}", style="red") for server in found["servers"] if server["error"]]
    return Group(head, table, Text(f"workers: {workers}"), *silent)
