"""What a worker may keep of the rows that it pulls, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from elasticps.model.optimizers import Checked, integer

MAX_ROWS = 1 << 28


@dataclass(frozen=True)
class Cache(Checked):
    """Rows of a table that a worker keeps, at most `rows` of them; who was used least recently gives way.

    A row that is shown may be up to `staleness` of the worker's steps old; with 0 servers are asked each time, and send
    what has changed only. The worker's own pushes are seen at once. Each row takes about 120 bytes, and those of its
    weights and slots, as they come (docs/guides/caches.md).
    """

    rows: int
    staleness: int

    def __post_init__(self) -> None:
        self._set(
            rows=integer(self.rows, "Cache.rows", 1, MAX_ROWS),
            staleness=integer(self.staleness, "Cache.staleness", 0, 2**31 - 1),
        )
