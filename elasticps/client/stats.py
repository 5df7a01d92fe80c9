"""What a client knows of itself, as numbers with names, for experiment trackers (docs/guides/logging.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elasticps.client.tables import Handle, SparseTable
from elasticps.errors import ConfigError
from elasticps.system import html

if TYPE_CHECKING:
    from elasticps.client.client import Client
    from elasticps.client.parts import Parts

PREFIX = "elasticps/"  # before a number's name, where a tracker has others


def read_stats(parts: Parts) -> dict[str, float]:
    """Reads the numbers of a client. Asks nobody, and waits for nothing."""
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
        for what, value in _of_table(handle):
            found[f"table.{name}.{what}"] = value
    return found


def _of_table(handle: Handle) -> Iterator[tuple[str, float]]:
    """What a table or tensor has of its own, where it has something."""
    if isinstance(lr := getattr(handle.optimizer, "lr", None), int | float):
        yield "lr", float(lr)
    if any(feedback := handle.feedback):
        yield "feedback.rows", feedback.rows
        yield "feedback.lost", feedback.lost
    if any(screened := handle.screened):
        yield "kkt.floats", screened.floats
        yield "kkt.dropped", screened.dropped
    if any(saved := handle.zstd_bytes):
        yield "zstd.whole_bytes", saved.whole
        yield "zstd.sent_bytes", saved.sent
    if not isinstance(handle, SparseTable):
        return
    if any(saved := handle.key_bytes):
        yield "keys.whole_bytes", saved.whole
        yield "keys.sent_bytes", saved.sent
    if handle.cache is not None:
        use = handle.cached
        yield "cache.rows", use.rows
        yield "cache.given_up", use.given_up
        yield "cache.pulled", use.asked
        yield "cache.hits", use.hits
        yield "cache.hit_rate", use.hit_rate
        yield "cache.unchanged", use.unchanged
        yield "cache.oldest_steps", use.oldest
        yield "cache.received_bytes", use.nbytes
        yield "cache.whole_bytes", use.whole_bytes


def log_stats(ps: Client, writer: Any, step: int | None = None, *, prefix: str = PREFIX) -> Mapping[str, float]:
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


def target_html(title: str, handle: Handle) -> str:
    """A table or tensor as a notebook shows it: its spec, and what this client knows of it."""
    spec = handle.spec
    described: list[tuple[str, object]] = [
        ("rows" if spec.shape is None else "shape", f"float32 [n, {spec.dim}]" if spec.shape is None else spec.shape),
        ("optimizer", handle.optimizer), ("initial values", spec.init), ("kept as", spec.dtype),
        ("push filters", ", ".join(map(str, spec.push))), ("pull filters", ", ".join(map(str, spec.pull))),
        ("admission", spec.admission or ""), ("eviction", ", ".join(map(str, spec.eviction))), ("usage", spec.usage),
    ]  # fmt: skip
    described += [(name, shown(value)) for name, value in _of_table(handle)]
    return html.described(title, [(name, value) for name, value in described if value != ""])


def shown(value: float) -> str:
    """A number for people."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
