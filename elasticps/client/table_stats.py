"""What a client knows of one table or tensor: numbers, and how a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticps.system import html


def table_stats(handle: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a `SparseTable` or `DenseTensor`, which import this; of filters and caches only where there are
    any."""
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
    if handle.spec.shape is not None:
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


def target_html(title: str, handle: Any) -> str:
    """A `SparseTable` or `DenseTensor` as a notebook shows it: its spec, and what this client knows of it."""
    spec = handle.spec
    described: list[tuple[str, object]] = [
        ("rows" if spec.shape is None else "shape", f"float32 [n, {spec.dim}]" if spec.shape is None else spec.shape),
        ("optimizer", handle.optimizer), ("initial values", spec.init), ("kept as", spec.dtype),
        ("push filters", ", ".join(map(str, spec.push))), ("pull filters", ", ".join(map(str, spec.pull))),
        ("admission", spec.admission or ""), ("eviction", ", ".join(map(str, spec.eviction))), ("usage", spec.usage),
    ]  # fmt: skip
    described += [(name, shown(value)) for name, value in table_stats(handle)]
    return html.described(title, [(name, value) for name, value in described if value != ""])


def shown(value: float) -> str:
    """A number for people."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
