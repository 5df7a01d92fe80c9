"""Gathers windows of changes until a target takes them: each key at most once in a batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from elasticps.model.spec import TableSpec
    from elasticps.readers.values import AppliedWindow, AsOf, TableChange

Change: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]
"""Keys whose rows go, int64 [k]; then keys int64 [n], each once, and their rows [n, dim]."""
CHANGE_BYTES = 256  # what a change costs beside its rows


class TableBatch(NamedTuple):
    """Changes of one table, each key in one place only.

    replaced  whatever a target has of an earlier table of this name is to go first
    gone      the table was dropped: there is nothing else then
    deleted   int64 [k], ascending
    keys      int64 [n], ascending
    rows      float32 [n, dim], their newest values
    """

    spec: TableSpec
    replaced: bool
    gone: bool
    deleted: NDArray[np.int64]
    keys: NDArray[np.int64]
    rows: NDArray[np.float32]


class PublishBatch(NamedTuple):
    """What a target writes at once.

    tables    what changed, by name
    as_of     how new it is
    begins    the first batch of a listing: after its last one a target has the listed rows and no others
    listing   a part of a listing that is not over
    complete  the last part of one
    """

    tables: dict[str, TableBatch]
    as_of: AsOf
    begins: bool
    listing: bool
    complete: bool


class _PendingTable:
    """Changes of one table in the order in which they came."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.replaced = self.gone = False
        self.changes: list[TableChange] = []

    def restart(self, *, gone: bool) -> None:
        """Forgets what came: the table was dropped, or is a new one."""
        self.replaced, self.gone, self.changes = True, gone, []

    def merged(self) -> TableBatch:
        """All of it, of each key what came last."""
        keys, positions, rows = latest([(change.deleted, change.keys, change.rows) for change in self.changes])
        there = positions >= 0
        shown = rows[positions[there]] if there.any() else np.empty((0, self.spec.dim), np.float32)
        return TableBatch(self.spec, self.replaced, self.gone, keys[~there], keys[there], shown)


def latest(changes: Sequence[Change]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Merges changes in their order: every key once, ascending; the place of its newest row among the rows that are
    returned last, -1 where it was deleted."""
    parts, positions, at = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for deleted, keys, _ in changes:
        parts += [deleted, keys]
        positions += [np.full(len(deleted), -1), np.arange(at, at + len(keys))]
        at += len(keys)
    together, order = np.concatenate(parts), np.concatenate(positions)
    distinct, last = np.unique(together[::-1], return_index=True)
    rows = [rows for _, keys, rows in changes if len(keys)]
    return distinct, order[::-1][last], np.concatenate(rows) if rows else np.empty((0, 0), np.float32)


class PendingChanges:
    """Windows that no target has taken yet. nbytes: what they take, about."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._tables: dict[str, _PendingTable] = {}
        self._as_of: AsOf | None = None  # of the newest window
        self._listing = False  # a listing has begun, and is not over
        self._begins = self._complete = False  # what came since the last batch

    def add(self, window: AppliedWindow) -> None:
        """Takes the next window."""
        if window.listing and not self._listing:
            self._tables.clear()  # a listing says all of it again
            self.nbytes = 0
            self._listing = self._begins = True
            self._complete = False
        for change in window.changes:
            self._add(change, window.listing)
        if window.listing and window.complete:
            self._listing, self._complete = False, True
        self._as_of = window.as_of

    def _add(self, change: TableChange, listing: bool) -> None:
        table = self._tables.get(change.table)
        if table is None:
            table = self._tables[change.table] = _PendingTable(change.spec)
        if change.dropped:
            table.restart(gone=True)
            return
        table.spec = change.spec
        if change.new and not listing:
            table.restart(gone=False)
        table.gone = False
        table.changes.append(change)
        self.nbytes += CHANGE_BYTES + 8 * (len(change.deleted) + len(change.keys)) + change.rows.nbytes

    def take(self) -> PublishBatch | None:
        """Everything since the last one; None if no window has come."""
        if self._as_of is None:
            return None
        tables = {name: table.merged() for name, table in self._tables.items()}
        batch = PublishBatch(tables, self._as_of, self._begins, self._listing, self._complete)
        self._tables, self.nbytes, self._as_of = {}, 0, None
        self._begins = self._complete = False
        return batch
