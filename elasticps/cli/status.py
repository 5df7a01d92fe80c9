"""`elasticps status`: what etcd says about a cluster, and what its servers say about themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.core.cluster_state import ClusterState
from coordinator.core.data_loss import DataLoss, describe_loss, find_loss, spans
from coordinator.core.handover import find_handover
from coordinator.core.keys import CONFIG, merge_losses
from coordinator.core.reasons import names
from coordinator.core.store import Store
from coordinator.core.url import parse
from coordinator.core.view import ServerInfo, View
from coordinator.trouble import find_lost_view, find_trouble
from elasticps.admin import fetch_status
from elasticps.admin.attached_readers import merge_readers
from elasticps.cli import hot as hottest
from elasticps.cli.local import target
from elasticps.cli.options import Json, Name, Url
from elasticps.cli.output import ExitCode, out, print_json, size
from elasticps.errors import ClusterUnreachable, ServerError
from elasticps.local.scaling import by_number
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import NO_CLUSTER, NOT_YET, read_state, read_store
from replication.chain import Member

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

_Value = TypeVar("_Value")

_REQUESTS_AT_ONCE = 64
_LOSSES_SHOWN = 3  # the newest
WARN_SHARE = 0.8  # of what a server may use for new rows: from here on `status` says so


def status(
    url: Url = None,
    name: Name = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every --interval seconds.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each server.")] = 3.0,
    hot: Annotated[
        bool, typer.Option("--hot", help="Show the keys and ranges that workers ask each server for most instead.")
    ] = False,
    sample: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds for which --hot looks.")] = 2.0,
) -> None:
    """Show a cluster: its view, its servers and what each of them holds, its workers.

    The exit code is 0 if all servers answer, 3 if etcd does not, 4 if the cluster has no view, a server is silent, or
    ranges have no replica.

    It is 4, too, if no coordinator leads, or if etcd takes no writes or has lost keys of the cluster: the first lines
    say what to do then.
    """
    cluster = target(url, name)
    if hot:
        seen = background.run(hottest.look(cluster, sample, timeout))
        if as_json:
            print_json(seen)
        else:
            out.print(hottest.render(seen))
        raise typer.Exit(ExitCode.DEGRADED if any(each["error"] for each in seen["servers"]) else ExitCode.OK)
    if not watch:
        found = background.run(look(cluster, timeout))
        if as_json:
            print_json(found)
        else:
            out.print(_render(found))
        raise typer.Exit(ExitCode.OK if found["healthy"] else ExitCode.DEGRADED)
    with suppress(KeyboardInterrupt):
        _watch(cluster, as_json=as_json, interval_s=interval, timeout_s=timeout)


def _watch(url: str, *, as_json: bool, interval_s: float, timeout_s: float) -> None:
    before: dict[str, Any] | None = None
    if as_json:
        while True:
            before = background.run(look(url, timeout_s, before))
            print_json(before)
            time.sleep(interval_s)
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            before = background.run(look(url, timeout_s, before))
            live.update(_render(before), refresh=True)
            time.sleep(interval_s)


async def look(url: str, timeout_s: float, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The cluster at `url` as plain values. StoreUnavailable when etcd does not answer within `timeout_s`; a server
    that does not is listed with the state "no answer". Requests are counted since `before`, an earlier look."""
    credentials = credentials_of(url)

    async def read(store: Store) -> tuple[ClusterState, list[str]]:
        return await read_state(store), await find_trouble(store)

    state, trouble = await read_store(url, timeout_s, read)
    view, roster, registered, drains = state.view, state.roster, state.registered, state.draining
    limit = asyncio.Semaphore(_REQUESTS_AT_ONCE)
    known = {server.name: server for server in (*(view.servers if view else ()), *registered)}
    servers = await asyncio.gather(
        *(_ask(known[name], view, limit, timeout_s, credentials) for name in sorted(known, key=by_number))
    )
    staying = {server.member for server in registered} - drains
    for server in servers:
        member = Member(server["id"], server["incarnation"])
        server["draining"] = member in drains
        server["waits_for"] = str(find_handover(view, member, staying)) if view and member in drains else ""
    epochs = [server["epoch"] for server in servers if not server["error"]]
    if any(epoch > (view.epoch if view else 0) for epoch in epochs):
        lost = await read_store(url, timeout_s, lambda store: find_lost_view(store, epochs))
        trouble = [*trouble, lost] if lost else trouble
    cluster = parse(url).cluster
    loss = None if view is None else find_loss(view, registered)
    return {
        "cluster": cluster,
        "url": url,
        "healthy": view is not None and not trouble and not loss and not any(server["error"] for server in servers),
        "trouble": trouble,
        "epoch": view.epoch if view else 0,
        "reason": view.reason if view else (NOT_YET if state.revisions[CONFIG] else NO_CLUSTER).format(cluster),
        "ranges": view.ranges if view else 0,
        "replicas": view.replicas if view else 0,
        **_short(view, loss, [server["id"] for server in servers if server["error"]]),
        "ranges_lost": [] if loss is None else loss.lost.tolist(),
        "ranges_waiting": [] if loss is None else loss.waiting.tolist(),
        "loss": []
        if loss is None
        else [*loss.lines, *([f"they are not brought back: {state.held_up}"] if state.held_up else [])],
        "losses": merge_losses(state.losses),
        "ranges_joining": int((view.joining >= 0).sum()) if view else 0,
        "ranges_moving": int(((view.joining >= 0) & (view.chains >= 0).all(axis=1)).sum()) if view else 0,
        "balance": balance(servers, [] if before is None else before["servers"]),
        "servers": servers,
        "readers": merge_readers(servers),
        "workers": [
            {"id": worker.id, "name": worker.name, "incarnation": worker.incarnation, "app": worker.app}
            for worker in (roster.workers if roster else ())
        ],
    }


def balance(servers: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]] = ()) -> dict[str, float | None]:
    """How uneven the servers' loads are: the largest over the mean, each divided by its server's weight; 1 is even.

    bytes     allocated for rows
    rows      pulled and pushed since `before`, an earlier look at the same servers, or since each server started
    requests  the same of frames

    Servers that drain, hold nothing or do not answer do not count. None where there is nothing to compare. Since the
    start, a server's rows and requests are those of a second of its life: they have not all lived as long.
    """
    earlier = {(s["id"], s["incarnation"]): s for s in before if s["rows"] is not None}
    counted = [s for s in servers if s["rows"] is not None and s["ranges_held"] and not s["draining"]]

    def done(server: dict[str, Any], *names: str) -> float:
        was = earlier.get((server["id"], server["incarnation"]))
        if was is not None:
            return float(sum(server[name] - was[name] for name in names))
        span = 1.0 if before else max(server["uptime_s"], 1e-3)
        return float(sum(server[name] for name in names)) / span

    loads = {
        "bytes": [float(s["bytes"]) for s in counted],
        "rows": [done(s, "rows_pulled", "rows_pushed") for s in counted],
        "requests": [done(s, "pulls", "pushes") for s in counted],
    }
    weights = [s["weight"] for s in counted]
    return {name: _uneven(values, weights) for name, values in loads.items()}


def _uneven(loads: Sequence[float], weights: Sequence[float]) -> float | None:
    if len(loads) < 2 or sum(loads) <= 0:
        return None
    mean = sum(loads) / sum(weights)
    return round(max(load / weight for load, weight in zip(loads, weights, strict=True)) / mean, 3)


async def _ask(
    server: ServerInfo, view: View | None, limit: asyncio.Semaphore, timeout_s: float, credentials: Credentials | None
) -> dict[str, Any]:
    index = view.index(server.name) if view is not None else -1
    from_view: dict[str, Any] = {
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
        "readers": [],
        "memory_used": None,
        "memory_mark": None,
        "memory_limit": None,
        "zone": server.zone,
        "weight": server.weight,
        "error": "",
    }
    async with limit:
        try:
            answer = await fetch_status(server.admin, timeout_s, credentials)
        except (ClusterUnreachable, ServerError) as error:
            return {**from_view, "error": str(error)}
    if answer["id"] != server.name or answer["incarnation"] != server.incarnation:
        return {**from_view, "error": f"{server.admin} now belongs to {answer['id']} {answer['incarnation']}"}
    return {**from_view, **answer}


def _short(view: View | None, loss: DataLoss | None, silent: Collection[str]) -> dict[str, Any]:
    """Ranges that have fewer replicas than they should: those that have some, how many of these are being filled, and
    in words those that nobody has but `silent` servers. Leases of these may live still, so that the leader need not
    have said anything."""
    if view is None or loss is None:
        return {"ranges_short": 0, "ranges_repairing": 0, "ranges_filling": 0, "silent": []}
    away = np.array([*(server.name in silent for server in view.servers), True])  # index -1, nobody, finds the last
    explained = np.zeros(view.ranges, bool)
    explained[np.concatenate([loss.lost, loss.waiting, loss.coming])] = True
    unheard = away[view.chains].all(axis=1) & ~explained
    ranges, short = np.flatnonzero(unheard), (view.chains < 0).any(axis=1)
    who = [view.servers[i].name for i in np.unique(view.chains[ranges]).tolist() if i >= 0]
    text = f"{len(ranges)} ranges ({spans(ranges)}) are only at {names(who)}: no answer"
    repairing = short & ~explained & ~unheard
    return {
        "ranges_short": int(short.sum()),
        "ranges_repairing": int(repairing.sum()),
        "ranges_filling": int((repairing & (view.joining >= 0)).sum()),
        "silent": [text] if len(ranges) else [],
    }


def _render(found: dict[str, Any]) -> Group:
    head = Text.assemble(
        (found["cluster"], "bold"),
        f"  epoch {found['epoch']}, {found['ranges']} ranges × {found['replicas']} replicas: {found['reason']}",
    )
    for line in found["trouble"]:
        head.append(f"\n{line}", "bold red")
    for line in found["loss"]:
        head.append(f"\n{line}", "bold red")
    for each in found["losses"][-_LOSSES_SHOWN:]:
        head.append(f"\n{'; '.join(describe_loss(each))}", "yellow")
    for line in found["silent"]:
        head.append(f"\n{line}", "red")
    if found["ranges_repairing"]:
        few = f"fewer replicas than {found['replicas']}; {found['ranges_filling']} are being filled"
        head.append(f"\n{found['ranges_repairing']} ranges have {few}", "yellow")
    if found["ranges_moving"]:
        head.append(f"\n{found['ranges_moving']} ranges are on their way to another server", "cyan")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("server", "pid", "inc", "state", "heads", "holds", "joining", "rows", "memory", "room", "log"):
        table.add_column(column, justify="left" if column in ("server", "state") else "right", no_wrap=True)
    table.add_column("address", overflow="fold")  # gives way first on a narrow terminal
    for server in found["servers"]:
        table.add_row(
            server["id"],
            "–" if server["pid"] is None else str(server["pid"]),
            str(server["incarnation"]),
            "draining" if server["draining"] else server["state"],
            str(server["ranges_headed"]),
            str(server["ranges_held"]),
            str(server["ranges_joining"]),
            "–" if server["rows"] is None else f"{server['rows']:,}",
            "–" if server["bytes"] is None else size(server["bytes"]),
            size(max(0, server["memory_mark"] - server["memory_used"])) if server["memory_limit"] else "–",
            "–" if server["log_bytes"] is None else size(server["log_bytes"]),
            server["address"],
            style="red" if server["error"] else "cyan" if server["draining"] else "",
        )
    even = ", ".join(f"{name} {value:.2f}" for name, value in found["balance"].items() if value is not None)
    lines = [Text(f"largest load over the mean: {even}")] if even else []
    workers = ", ".join(f"{worker['name']} (id {worker['id']})" for worker in found["workers"]) or "none"
    silent = [Text(f"{server['id']}: {server['error']}", style="red") for server in found["servers"] if server["error"]]
    drains = [Text(f"{s['id']} drains: {s['waits_for']}", style="cyan") for s in found["servers"] if s["waits_for"]]
    texts = [*lines, *drains, *_fullness(found["servers"]), Text(f"workers: {workers}")]
    if found["readers"]:
        texts.append(Text(f"readers: {', '.join(map(_reader, found['readers']))}"))
    return Group(head, table, *texts, *silent)


def _reader(reader: dict[str, Any]) -> str:
    age = "reads all rows" if reader["age_s"] is None else f"{reader['age_s']:.3f} s old"
    return f"{reader['name']} ({age})"


def _fullness(servers: Sequence[dict[str, Any]]) -> Iterator[Text]:
    """Says which servers take no new rows, and which soon will not."""
    for server in servers:
        used, mark = server["memory_used"], server["memory_mark"]
        if not mark or used < WARN_SHARE * mark:
            continue
        how = f"uses {size(used)}, and takes new rows up to {size(mark)} of its limit of {size(server['memory_limit'])}"
        if used < mark:
            yield Text(f"{server['id']} {how}: add servers", style="yellow")
        else:
            yield Text(f"{server['id']} is full: it {how}; pushes that add rows are refused: add servers", style="red")
