"""What a server counts of its workers' requests."""

from __future__ import annotations

from collections import Counter

from elasticps.server.fast import layout as at
from elasticps.server.fast.path import FastPath

COUNTED = {
    "pushes": at.H_PUSHES, "pulls": at.H_PULLS, "rows_pushed": at.H_ROWS_PUSHED, "rows_pulled": at.H_ROWS_PULLED,
}  # fmt: skip


class Counts(Counter[str]):
    """Pushes, pulls, rows_pushed and rows_pulled that Python handled; `count` has those of the compiled path too."""

    def __init__(self, path: FastPath) -> None:
        super().__init__()
        self._path = path

    def count(self, what: str) -> int:
        """How many there were."""
        return self[what] + self._path.counter(COUNTED[what])
