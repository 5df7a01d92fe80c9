"""Arrays that compiled code and Python share, each found by the field of the header that holds its address.

`SharedArrays` owns them; `TableRows` mirrors the store's tables there, and `Told` what workers have acknowledged.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.server.fast import layout as at
from elasticps.store import Store, Table
from elasticps.store.updates import KINDS


class Shared:
    """h: the header, int64 [H_FIELDS]. fields: the same memory; one field is read and written faster so."""

    def __init__(self) -> None:
        self.h = np.zeros(at.H_FIELDS, np.int64)
        self.fields = memoryview(cast(Any, self.h))
        self._arrays: dict[int, NDArray[Any]] = {}  # only their addresses in the header refer to some of them

    def __getitem__(self, field: int) -> NDArray[Any]:
        return self._arrays[field]

    def make(self, field: int, shape: int | tuple[int, ...], dtype: type = np.int64) -> NDArray[Any]:
        """Zeros whose address the header gets."""
        return self.share(field, np.zeros(shape, dtype))

    def share(self, field: int, array: NDArray[Any]) -> NDArray[Any]:
        """Has the header point to an array."""
        self._arrays[field] = array
        self.fields[field] = array.ctypes.data
        return array


FIRST_TABLES = 64


class TableRows:
    """A row for each live table of a store, in no order that means anything. written: rows written so far."""

    def __init__(self, shared: Shared) -> None:
        self.written = 0
        self._shared = shared
        self._rows = shared.make(at.H_TABLES, (FIRST_TABLES, at.TABLE))
        self._places: dict[int, int] = {}  # of rows, by the tables' ids
        self._apps: dict[str, int] = {}

    def number_of(self, app: str) -> int:
        """The number by which compiled code knows an application, from 1 on."""
        return self._apps.setdefault(app, len(self._apps) + 1)

    def follow(self, store: Store) -> None:
        """Writes the rows of tables that have changed, and of no others: there may be thousands."""
        changed, store.changed = store.changed, set()
        for number in changed:
            table = store.live.get(number)
            if table is None:
                self._remove(number)
            else:
                self._write(number, table)
        self._shared.fields[at.H_TABLE_COUNT] = len(self._places)

    def _write(self, number: int, table: Table) -> None:
        place = self._places.setdefault(number, len(self._places))
        if place == len(self._rows):
            self._rows = self._shared.share(at.H_TABLES, np.concatenate([self._rows, np.zeros_like(self._rows)]))
        self._rows[place] = self._row(number, table)
        self.written += 1

    def _remove(self, number: int) -> None:
        """The last row takes the place of one that goes."""
        place = self._places.pop(number, None)
        last = len(self._places)
        if place is None or place == last:
            return
        self._rows[place] = self._rows[last]
        self._places[int(self._rows[place, at.TABLE_ID])] = place

    def _row(self, number: int, table: Table) -> NDArray[np.int64]:
        kind = table.spec.optimizer.kind
        row = np.empty(at.TABLE, np.int64)
        row[at.TABLE_ID], row[at.TABLE_HEADER] = number, table.header_address
        row[at.TABLE_UPDATE] = KINDS.index(kind) if kind in KINDS and table.push.code >= 0 else -1
        row[at.TABLE_VALUES] = table.spec.optimizer.step_floats
        row[at.TABLE_APP] = self.number_of(table.app) if table.app else 0
        row[at.TABLE_PUSH], row[at.TABLE_PUSH_WORDS] = table.push.code, table.push.words
        row[at.TABLE_PULL], row[at.TABLE_PULL_WORDS] = table.pull.code, table.pull.words
        return row


Workers = NDArray[np.int64]


class Told:
    """By the rows of clocks. `workers` is whose these are, int64 [rows]: 0 or less is nobody."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._told = shared.make(at.H_TOLD, 16)
        self._owners = np.zeros(0, np.int64)  # of the rows of clocks, when they were looked at last
        self._left: dict[int, int] = {}  # what workers without a row had been told

    def follow(self, workers: Workers) -> None:
        """Rows may belong to others now: each worker's clock goes with it."""
        before, told = self._owners, self._told
        known = min(len(before), len(workers))
        other = np.ones(max(len(before), len(workers)), np.bool_)  # rows that belong to somebody else now
        other[:known] = before[:known] != workers[:known]
        for i in np.flatnonzero(other[: len(before)] & (told[: len(before)] > 0)).tolist():
            self._left[int(before[i])] = int(told[i])
        if len(told) != len(workers):
            self._told = self._shared.share(at.H_TOLD, np.zeros(len(workers), np.int64))
            self._told[:known] = told[:known]
        fresh = np.flatnonzero(other[: len(workers)])
        self._told[fresh] = 0
        for i in fresh[workers[fresh] > 0].tolist():
            self._told[i] = self._left.pop(int(workers[i]), 0)
        self._owners = workers.copy()

    def of_all(self, workers: Workers) -> dict[int, int]:
        """By worker, those with a row and those without."""
        here = {int(workers[i]): int(self._told[i]) for i in np.flatnonzero(self._told[: len(workers)])}
        return self._left | here

    def note(self, workers: Workers, worker: int, clock: int) -> None:
        """Python heard it."""
        self._told[: len(workers)][workers == worker] = clock
