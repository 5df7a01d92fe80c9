"""The tables that are registered in the coordination store: for each id one spec, and the application that owns it.

So heads that create a table each for itself create the same one, whatever a worker asks for, and a worker of one
application cannot reach the tables of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.core import fields
from elasticps.errors import SpecError
from elasticps.model.spec import TableSpec
from elasticps.server.core.requests import RequestError
from elasticps.store import Store

log = fields.logger(__name__)

MOST_LOOKS = 127  # between two reads for a table that may belong to nobody


class RegisteredTable(NamedTuple):
    """A table in the registry. spec: None if this server cannot read it, as of a plug-in that is missing."""

    app: str
    spec: TableSpec | None


class RegisteredTables:
    """The registry as far as this server has read it.

    need: called to have all tables read; read_due: a read of all is due, since a request named an unknown id;
    need_keys: called to have single tables read; due_keys: their keys. A server that has never read the registry takes
    tables as they come, and a table that is not registered belongs to any application.
    """

    def __init__(self, store: Store, need: Callable[[], None], need_keys: Callable[[], None]) -> None:
        self.read_due = False
        self.due_keys: set[str] = set()
        self._store = store
        self._need, self._need_keys = need, need_keys
        self._entries: dict[int, RegisteredTable] | None = None
        self._unknown: frozenset[int] = frozenset()  # tables here whose application is not known
        self._doubted: set[int] = set()  # tables of which the log has entry that others are registered as their owners
        self._pause = self._left = 0  # looks until it is asked for again, and how many of them are left

    def follow(self, entries: Mapping[int, RegisteredTable]) -> None:
        """Takes the tables that are registered now, by id. The owner of a table never changes: where the registry says
        otherwise, somebody has written there what is not true, and the owner who is known here stays."""
        self._entries = {number: self._with_owner(number, entry) for number, entry in entries.items()}
        self.read_due = False
        self._store.belong({number: entry.app for number, entry in self._entries.items()})

    def _with_owner(self, number: int, entry: RegisteredTable) -> RegisteredTable:
        here = self._store.tables.get(number)
        before = None if self._entries is None else self._entries.get(number)
        owner = (here.app if here is not None else "") or (before.app if before is not None else "")
        if owner in ("", entry.app):
            return entry
        if number not in self._doubted:
            self._doubted.add(number)
            log.warning("a table keeps its owner", table=number, owner=owner, registered=entry.app)
        return before if before is not None and before.app == owner else RegisteredTable(owner, None)

    def learn(self, entries: Mapping[int, RegisteredTable]) -> None:
        """Takes some of the tables that are registered, which were read by their keys."""
        found = {number: self._with_owner(number, entry) for number, entry in entries.items()}
        self._entries = {} if self._entries is None else self._entries
        self._entries |= found
        self._store.belong({number: entry.app for number, entry in found.items()})

    def lacks(self, number: int, key: str) -> bool:
        """Whether a request has to wait until a table is read from the registry, by its key; has it read."""
        missing = self._entries is not None and (number not in self._entries or self._entries[number].spec is None)
        if missing:
            self.due_keys.add(key)
            self._need_keys()
        return missing

    def look_for_owners(self) -> None:
        """Has the registry read again, less and less often, while tables here have no known owner: another server made
        them, and a read may fail, or have begun before the table was registered."""
        if self._entries is None:
            return
        before, self._unknown = self._unknown, frozenset(self._store.unowned)
        if self._unknown - before:
            self._pause = self._left = 0
        if self._unknown and self._left == 0:
            self._pause = self._left = min(2 * self._pause + 1, MOST_LOOKS)
            self._read_again()
        elif self._unknown:
            self._left -= 1

    def _read_again(self) -> None:
        self.read_due = True
        self._need()

    def check(self, number: int, spec: TableSpec, app: str) -> None:
        """Raises SpecError if the table is registered with another spec, RequestError if for another application."""
        entry = None if self._entries is None else self._entries[number]
        if entry is None or entry.spec is None:
            return
        if entry.app != app:
            raise not_theirs(entry.spec, number, app)
        if difference := spec.difference(entry.spec):
            raise SpecError(f"table {entry.spec.name!r} (id {number}) is registered otherwise: {difference}")

    def permit(self, number: int, app: str) -> None:
        """Raises RequestError if the table belongs to another application: as it is registered, though it may not be
        made here yet, or as it was when it was made."""
        entry = None if self._entries is None else self._entries.get(number)
        here = self._store.live.get(number)
        known = entry if here is None or entry is not None else here
        if known is not None and known.app not in ("", app):
            raise not_theirs(known.spec, number, app)

    def owned(self, number: int) -> bool:
        """Whether the owner of a table is known; else has the registry read again. Until then the table cannot be
        dropped, for its id would be gone."""
        table = self._store.live.get(number)
        known = self._entries is None or number in self._entries or (table is not None and table.app != "")
        if not known:
            self._read_again()
        return known


def not_theirs(spec: TableSpec | None, number: int, app: str) -> RequestError:
    """Refusal of a request for a table of another application."""
    table = f"table {number}" if spec is None else f"table {spec.name!r} (id {number})"
    return RequestError("foreign", f"{table} does not belong to application {app!r}")
