"""What a client knows of itself, as numbers with names, for experiment trackers (docs/guides/logging.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from elasticps.client.table_stats import shown, table_stats
from elasticps.errors import ConfigError
from elasticps.system import html

if TYPE_CHECKING:
    from elasticps.client.parts import Parts

PREFIX = "elasticps/"  # before a number's name, where a tracker has others


def read_stats(parts: Parts) -> dict[str, float]:
    """Reads the numbers of a client. Asks nobody, and waits for nothing but the lock of a row cache, which nobody has
    while servers are asked."""
    dispatcher = parts.dispatcher
    session, connections, views = dispatcher.session, dispatcher.connections, dispatcher.new_views
    committed, clock, view = session.committed, session.clock, dispatcher.routes.view
    sent, received = connections.traffic
    found: dict[str, float] = {
        "steps.pushed": clock,
        "steps.committed": min(committed, clock),
        "steps.outstanding": max(clock - committed, 0),
        "steps.window": session.window,
        "bytes.sent": sent,
        "bytes.received": received,
        "answers.received": views.heard,
        "servers.known": len(view.servers),
        "servers.connected": len(connections.ready),
        "servers.reconnects": connections.breaks,
        "ranges.total": view.ranges,
        "ranges.without_server": session.headless,
        "view.epoch": view.epoch,
        "view.age_s": dispatcher.runtime.monotonic() - views.since_s,
        "view.changes": views.changes,
        "shards.held": parts.shards.held,
        "tables.open": len(parts.tables.opened),
    }
    if parts.reads.bound is not None:
        found["staleness.bound"] = parts.reads.bound
    for name, handle in list(parts.tables.opened.items()):
        for what, value in table_stats(handle):
            found[f"table.{name}.{what}"] = value
    return found


class CountedClient(Protocol):
    """A client, or a rank's."""

    @property
    def clock(self) -> int: ...
    def stats(self) -> Mapping[str, float]: ...


def log_stats(ps: CountedClient, writer: Any, step: int | None = None, *, prefix: str = PREFIX) -> Mapping[str, float]:
    """Writes the numbers of `ps.stats()` to an experiment tracker, as of `step` (the client's clock if None), and
    returns them. writer: TensorBoard's `SummaryWriter`, or whatever has `add_scalar(name, number, step)`; else a run of
    Weights & Biases, or whatever has `log({name: number}, step=…)`. prefix: before each name.

    A few dozen microseconds, and what the tracker takes; call it every some steps. ConfigError for a writer with
    neither method.
    """
    stats = {name: value for name, value in ps.stats().items() if math.isfinite(value)}
    at = ps.clock if step is None else step
    if hasattr(writer, "add_scalar"):
        for name, value in stats.items():
            writer.add_scalar(f"{prefix}{name}", value, at)
    elif hasattr(writer, "log"):
        writer.log({f"{prefix}{name}": value for name, value in stats.items()}, step=at)
    else:
        raise ConfigError(
            f"log_stats writes to what has add_scalar, as TensorBoard's SummaryWriter, or log, as a run of Weights & "
            f"Biases; a {type(writer).__name__} has neither"
        )
    return stats


_SHOWN = ("steps.", "bytes.", "servers.", "ranges.", "view.", "staleness.", "shards.")


def client_html(title: str, parts: Parts) -> str:
    """A client as a notebook shows it: what it knows by itself, without a question to anybody."""
    if parts.closed:
        return html.described(title, [])
    tables = html.table(
        ("table", "shape", "optimizer"),
        [
            (name, f"dim {handle.dim}" if handle.spec.shape is None else handle.spec.shape, handle.optimizer)
            for name, handle in list(parts.tables.opened.items())
        ],
    )
    numbers = [(name, shown(value)) for name, value in read_stats(parts).items() if name.startswith(_SHOWN)]
    return html.described(title, numbers, tables if parts.tables.opened else "")
