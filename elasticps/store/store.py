"""All tables of one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from coordinator.core.capacities import RowCount
from elasticps.errors import SpecError
from elasticps.model.policies import half_life_of
from elasticps.model.spec import Assign, Init, TableSpec
from elasticps.store.admission import check_sketch
from elasticps.store.cuts import PassedCuts
from elasticps.store.journal import Journal
from elasticps.store.memory import Allocator
from elasticps.store.table import Table


class Store:
    """Tables by id, in shared memory chunks. Every table is cut into the same ranges.

    A table is dropped range by range, each at its own place of the range's log. From the first one on workers know it
    no more; but until the last one its operations may still come down the chains of other ranges, and until those of
    all ranges are acknowledged they may have to be sent again. An id never comes again, so what was dropped is
    remembered, a bit for each range; at which places, only as long as the table is here.

    tables: all of them, also those; live: without those. dropped: for each id that was dropped, the ranges in which it
    was, as packed bits, the lowest first. new: live tables made since somebody has emptied it. changed: ids of tables
    that were made, dropped or given an owner since somebody has emptied it. unowned: live tables whose application is
    not known. times: cluster time of each range in seconds, int64 [ranges], 0 where none was logged.
    journal: of changed keys, while readers follow; see `keep_journal`. on_gap: hears of ranges whose rows come from
    elsewhere, or go, without operations.
    """

    def __init__(self, ranges: int) -> None:
        self.ranges = ranges
        self.tables: dict[int, Table] = {}
        self.live: dict[int, Table] = {}
        self.dropped: dict[int, NDArray[np.uint8]] = {}
        self._dropped_at: dict[int, NDArray[np.int64]] = {}  # of logs, int64 [ranges], -1 where a table was not dropped
        self.new: list[tuple[int, Table]] = []
        self.changed: set[int] = set()
        self.unowned: set[int] = set()
        self._apps: dict[int, str] = {}
        self.cuts = PassedCuts(ranges)
        self.times = np.zeros(ranges, np.int64)
        self.journal: Journal | None = None
        self.on_gap: Callable[[NDArray[np.int64]], None] = lambda ranges: None
        self._memory = Allocator()

    def create(self, spec: TableSpec, table_id: int, app: str = "") -> Table:
        """Makes a table, or returns the one that exists. app: its owner, if the caller knows; an owner never changes.
        Raises SpecError if the one that exists differs, saying in what; and for a sketch that is too large."""
        check_sketch(spec.admission, self.ranges)
        table = self.tables.get(table_id)
        if table is None:
            table = self.tables[table_id] = Table(spec, table_id, self.ranges, self._memory, self.cuts, self.times)
            table.dropped = table_id in self.dropped
            table.journal = self.journal
            table.app = app or self._apps.get(table_id, "")
            if not table.dropped:
                self.live[table_id] = table
                self.new.append((table_id, table))
                self._note(table_id, table)
        elif difference := spec.difference(table.spec):
            raise SpecError(f"table {table.spec.name!r} (id {table_id}) exists with another spec: {difference}")
        elif app and not table.app:
            table.app = app
            self._note(table_id, table)
        return table

    def _note(self, table_id: int, table: Table) -> None:
        """Notes that a live table was made, or given an owner."""
        self.changed.add(table_id)
        if table.app:
            self.unowned.discard(table_id)
        else:
            self.unowned.add(table_id)

    def keep_journal(self, journal: Journal | None) -> None:
        """From now on the keys of all that changes go into a journal; None: no more."""
        self.journal = journal
        for table in self.tables.values():
            table.journal = journal

    def note_changed(self, table_id: int, keys: NDArray[np.int64]) -> None:
        """Rows of these keys have changed, or are new."""
        if self.journal is not None:
            self.journal.note(table_id, self.tables[table_id].spec.dim, keys)

    def belong(self, apps: Mapping[int, str]) -> None:
        """Sets the owners of tables, by id. A table whose owner is known keeps it."""
        self._apps |= {number: self._apps.get(number, app) for number, app in apps.items()}
        for number in apps.keys() & self.unowned:
            self.live[number].app = apps[number]
            self._note(number, self.live[number])

    def drop(self, table_id: int, ranges: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Forgets a table's rows in some ranges, for good, at these places of their logs; whoever asks for the table is
        told that there is none."""
        if table_id not in self.dropped:
            self.dropped[table_id] = self._bits(ranges[:0])
            self.live.pop(table_id, None)
            self.unowned.discard(table_id)
            self.changed.add(table_id)
        self.dropped[table_id] |= self._bits(ranges)
        table = self.tables.get(table_id)
        if table is not None:
            self._dropped_at.setdefault(table_id, self._positions_of(table_id))[ranges] = positions
            table.dropped = True
            table.keep(None)
            for r in ranges.tolist():
                table.deletions.erase(r)
                table.drop_range(r)

    def dropped_in(self, r: int) -> list[int]:
        """Tables that were dropped in range r."""
        return sorted(table for table, ranges in self.dropped.items() if ranges[r >> 3] >> (r & 7) & 1)

    @property
    def dropped_bytes(self) -> int:
        """About the bytes that it takes to remember a dropped table."""
        return 256 + self.ranges // 8

    def _bits(self, ranges: NDArray[np.int64]) -> NDArray[np.uint8]:
        chosen = np.zeros(self.ranges, np.bool_)
        chosen[ranges] = True
        return np.packbits(chosen, bitorder="little")

    def _positions_of(self, table_id: int) -> NDArray[np.int64]:
        """The positions at which a table was dropped; 0 where not known, as they were acknowledged long ago."""
        known = self._dropped_at.get(table_id)
        if known is None:
            there = np.unpackbits(self.dropped[table_id], count=self.ranges, bitorder="little")
            return there.astype(np.int64) - 1
        return known

    def clear(self, table_id: int, r: int, bound: int | None = None) -> None:
        """Forgets a table's rows in a range, or those at places below a bound; increments from before hold the range as
        a whole."""
        table = self.tables.get(table_id)
        if table is None:  # it was dropped as this waited, and nobody has it any more
            return
        if bound is not None:
            table.drop_interval(r, 0, bound)
        else:
            table.drop_range(r)
        table.deletions.forget(r, int(self.cuts.newest[r]) + 1)

    def change_policies(self, table_id: int, ranges: NDArray[np.int64], spec: TableSpec) -> None:
        """Puts some ranges of a table under the policies of `spec`. Where counts fall at another rate from now on, a
        row's older version may count more than the newer one, which a sweep by count relies on not to be: the next
        increment holds such a range as a whole."""
        table = self.tables.get(table_id)
        if table is None or table.lifecycle is None:
            return
        for r in ranges.tolist():
            if half_life_of(table.lifecycle.spec_of(r).eviction) != half_life_of(spec.eviction):
                table.deletions.forget(r, int(self.cuts.newest[r]) + 1)
        table.lifecycle.set_policies(ranges, spec.admission, spec.eviction)

    def pass_cut(self, ranges: NDArray[np.int64], cut: int) -> None:
        """A cut passes in some ranges: every replica does this at the same position of their logs."""
        newest, base = self.cuts.newest[ranges], self.cuts.base[ranges]
        begun = ranges[(newest < cut) & (newest > 0) & (newest == base)].tolist()
        passing, restamped = self.cuts.passed(ranges, cut)
        for table in self.tables.values():
            for r in begun:  # whatever checkpoint this adds to, the range may not have come from that one
                table.deletions.forget(r, cut)
            table.pass_cut(passing, restamped)

    def begin_at(self, ranges: NDArray[np.int64], cut: int) -> None:
        """Some ranges hold what was restored from the checkpoint of a cut: go on from there, without stamps. Who has
        passed no cut since is told by its base."""
        self.cuts.set(ranges, cut, cut)
        for table in self.tables.values():
            table.pass_cut(ranges, ranges)
            for r in ranges.tolist():
                table.deletions.forget(r, cut)

    def load_cut(self, r: int, cut: int, base: int) -> None:
        """Range r, of which a part is about to arrive, has come so far where that was taken."""
        self.on_gap(np.array([r]))
        self._set_cuts(np.array([r], np.int64), cut, base)

    def _set_cuts(self, ranges: NDArray[np.int64], cut: int, base: int) -> None:
        self.cuts.set(ranges, cut, base)
        for table in self.tables.values():
            table.pass_cut(ranges, ranges[:0])

    def words(self, r: int) -> list[int]:
        """Numbers beside the rows on which replicas of range r must agree: time, cuts, deletions, and of tables that
        keep usage, keys that wait and policies. Of a table that was dropped there, some replicas know nothing more."""
        words = [int(self.times[r]), int(self.cuts.newest[r]), int(self.cuts.base[r])]
        for number in sorted(self.tables.keys() - self.dropped_in(r)):
            table = self.tables[number]
            noted = table.deletions.words(r)
            if any(noted):
                words += number, *noted
            if table.lifecycle is not None and (found := table.lifecycle.words(r)):
                words += number, *found
        return words

    def advance(self, ranges: NDArray[np.int64], seconds: int) -> None:
        """Sets the cluster time of some ranges; it never goes back."""
        before = self.times[ranges]
        self.times[ranges] = np.maximum(before, seconds)
        for table in self.tables.values():
            if table.lifecycle is not None:
                table.lifecycle.advance(ranges, before)

    def erase(self, ranges: NDArray[np.int64]) -> None:
        """Forgets everything about ranges that are not here any more."""
        self.on_gap(ranges)
        others = ~self._bits(ranges)
        for gone in self.dropped.values():
            gone &= others
        for positions in self._dropped_at.values():
            positions[ranges] = -1
        self._set_cuts(ranges, 0, 0)
        self.times[ranges] = 0
        for table in self.tables.values():
            for r in ranges.tolist():
                table.deletions.erase(r)
                table.drop_range(r)
            if table.lifecycle is not None:
                table.lifecycle.erase(ranges)

    def bury(self, acked: NDArray[np.int64]) -> list[int]:
        """Gives back what is left of tables that were dropped in every range held here, where all replicas are known to
        have that: their operations cannot come any more, nor go. Their ids. acked: up to which place, int64 [ranges],
        -1 for ranges that are not held."""

        def gone(positions: NDArray[np.int64]) -> bool:
            return bool(((acked < 0) | (positions >= 0) & (positions <= acked)).all())

        found = [table for table in self.tables.keys() - self.live.keys() if gone(self._positions_of(table))]
        for table in found:
            self.tables.pop(table).close()
            self._dropped_at.pop(table, None)
        return found

    def reclaim(self, rows: int) -> None:
        """Has tables with many dropped rows, or sparse indices, give memory back; moves about so many rows."""
        before = rows
        for table in self.tables.values():
            if table.lifecycle is not None and rows > 0:
                rows = table.shrink(rows)
        if rows < before:
            self._memory.trim()
        for number in sorted(self._memory.with_holes):
            if rows <= 0:
                break
            rows = self.tables[number].reclaim(rows)
            if not self.tables[number].reusable_bytes:
                self._memory.with_holes.discard(number)

    @property
    def rows(self) -> int:
        """Rows in all tables."""
        return sum(table.rows for table in self.tables.values())

    @property
    def nbytes(self) -> int:
        """Bytes mapped for all tables, and of sketches in ranges whose log has made them."""
        lifecycles = (table.lifecycle for table in self.tables.values())
        return self._memory.nbytes + sum(one.sketch_bytes for one in lifecycles if one is not None)

    @property
    def reusable_bytes(self) -> int:
        """Bytes of dropped rows of all tables, which their next rows take first."""
        return sum(self.tables[number].reusable_bytes for number in self._memory.with_holes)


def initial_rows(init: Init, keys: NDArray[np.int64], dim: int, dtype: str = "float32") -> NDArray[np.float32]:
    """What rows of a table with this initialiser read as before their first push: float32 [n, dim]."""
    keys = np.ascontiguousarray(keys, np.int64)
    out = np.empty((len(keys), dim), np.float32)
    Table(TableSpec("initial", dim, Assign(), init, dtype), 0, 2).gather(keys, out)
    return out


def count_bounded(tables: Mapping[int, Table], headed: NDArray[np.int64]) -> list[RowCount]:
    """Rows in the ranges headed here of tables with a bound on them, and keys that wait."""
    return [
        RowCount(number, waiting, most, (table.lifecycle.waiting if waiting else table).count_range(headed))
        for number, table in tables.items()
        if table.lifecycle is not None
        for waiting, most in sorted(table.lifecycle.bounds)
    ]
