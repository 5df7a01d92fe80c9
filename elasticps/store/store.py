"""The tables of one server."""

from __future__ import annotations

from elasticps.errors import SpecError, UnknownTable
from elasticps.spec import TableSpec
from elasticps.store.memory import Memory
from elasticps.store.table import Table


class Store:
    """Tables by id, in shared memory chunks. Every table is cut into the same ranges."""

    def __init__(self, ranges: int) -> None:
        self.ranges = ranges
        self.tables: dict[int, Table] = {}
        self._memory = Memory()

    def create(self, spec: TableSpec, table_id: int) -> Table:
        """The table, made now or before. Raises SpecError if the one that exists differs, saying in what."""
        table = self.tables.get(table_id)
        if table is None:
            table = self.tables[table_id] = Table(spec, table_id, self.ranges, self._memory)
        elif difference := spec.difference(table.spec):
            raise SpecError(f"table {table.spec.name!r} (id {table_id}) exists with another spec: {difference}")
        return table

    def drop(self, table_id: int) -> None:
        """Forgets a table and gives its memory back. Raises UnknownTable."""
        table = self.tables.pop(table_id, None)
        if table is None:
            raise UnknownTable(f"there is no table with id {table_id}")
        table.close()

    def tidy(self, rows: int) -> None:
        """Has tables with many dropped rows give memory back: handles about so many rows."""
        for table in self.tables.values():
            if rows <= 0:
                break
            rows = table.tidy(rows)

    @property
    def rows(self) -> int:
        """Rows in all tables."""
        return sum(table.rows for table in self.tables.values())

    @property
    def nbytes(self) -> int:
        """Bytes mapped for all tables."""
        return self._memory.nbytes

    @property
    def reusable_bytes(self) -> int:
        """Bytes of dropped rows of all tables, which their next rows take first."""
        return sum(table.reusable_bytes for table in self.tables.values())
