"""The store's tables, as compiled code finds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.server.fast import layout as at
from elasticps.server.fast.shared import Shared
from elasticps.store import Store, Table
from elasticps.store.updates import KINDS

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
