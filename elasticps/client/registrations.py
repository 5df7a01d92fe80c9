"""Tables in the coordination store: what is registered of each, and how many are registered at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.core.keys import number_of
from coordinator.core.records import read
from coordinator.core.store import VALUE_MAX, WRITES_MAX, Entry, Store
from coordinator.membership import new_numbers
from elasticps.errors import ConfigError, SpecError
from elasticps.model.spec import TableSpec
from elasticps.system.coordination import entries_of
from elasticps.wire.frames import portions


@dataclass(frozen=True)
class Registration:
    """A table as the registry has it. dropping: it is about to go; made: by this call, just now; created: the epoch of
    a view all heads of which have made it, 0 if nobody says so."""

    id: int
    spec: TableSpec
    creator: int  # worker id
    by: str  # its name
    ready: bool
    revision: int
    dropping: bool = False
    made: bool = False
    created: int = 0


def registry_value(table: Registration) -> bytes:
    document = {"id": table.id, "spec": table.spec.to_json(), "creator": table.creator, "by": table.by}
    document |= {"ready": table.ready} | ({"dropping": True} if table.dropping else {})
    document |= {"created": table.created} if table.created else {}
    return json.dumps(document).encode()


def registration_of(entry: Entry) -> Registration:
    fields = fields_of(entry, id=int, spec=str, creator=int, ready=bool)
    try:
        spec = TableSpec.from_json(fields["spec"])
    except SpecError as error:
        raise SpecError(f"{entry.key} cannot be read here: {error}") from None
    by, dropping = str(fields.get("by", "")), bool(fields.get("dropping", False))
    created = fields.get("created")
    epoch = created if type(created) is int else 0  # of an earlier version, or not ours
    if spec.name != entry.key.rpartition("/")[2]:
        raise ConfigError(f"{entry.key} has the spec of a table named {spec.name!r}: delete it")
    number, creator, ready = fields["id"], fields["creator"], fields["ready"]
    return Registration(number, spec, creator, by, ready, entry.revision, dropping, created=epoch)


def fields_of(entry: Entry, **kinds: type) -> dict[str, Any]:
    """An object in the store, with fields of these kinds. ConfigError if it is none."""
    try:
        return read(entry.key, entry.value, **kinds)
    except ValueError as error:
        raise ConfigError(f"in the coordination store, {error}: it was not written by us, delete it") from None


@dataclass(frozen=True)
class TableToRegister:
    """A table that is to be registered unless it is. ready: it needs no initial values."""

    spec: TableSpec
    ready: bool


class Registrar:
    """Registers tables in one store. What it writes has a revision, and that stands for a number that nobody else gets:
    the next table that is registered alone has it, in one request instead of five."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: tuple[int, Entry] | None = None  # a number for a table, and the config that it is counted from

    async def register_at_once(
        self, requests: Mapping[str, TableToRegister], worker: int, name: str
    ) -> dict[str, Registration]:
        """Registers one table by its key, if there is a number for it; worker, name: who makes it. Nothing is found if
        it exists, maybe, or the store is another one by now."""
        if len(requests) != 1 or self._next is None:
            return {}
        (number, config), self._next = self._next, None
        return await self._write(_new(requests, [number], worker, name), config)

    async def register(
        self, prefix: str, requests: Mapping[str, TableToRegister], worker: int, name: str
    ) -> dict[str, Registration]:
        """Registers tables by their keys, or finds them; worker, name: who makes what is new. In few requests, however
        many tables there are: others may do the same at the same time, and what one of them has made is found."""
        found: dict[str, Registration] = {}
        while True:
            missing = [key for key in requests if key not in found]
            for entry in await entries_of(self._store, missing, prefix):
                found[entry.key] = registration_of(entry)
            missing = [key for key in missing if key not in found]
            if not missing:
                return found
            numbers, config = await new_numbers(self._store, len(missing))
            found |= await self._write(_new({key: requests[key] for key in missing}, numbers, worker, name), config)

    async def _write(self, made: Mapping[str, Registration], config: Entry | None) -> dict[str, Registration]:
        """What was registered of them: not all, if somebody was faster, or numbers count otherwise now."""
        written: dict[str, Registration] = {}
        for several in in_portions(made):
            revision = await self._store.compare_and_set_all(several, unchanged=config)
            if revision is None:
                break
            written |= {key: replace(made[key], revision=revision) for key in several}
            if config is not None:
                self._next = number_of(config, revision), config
        return written


def _new(
    requests: Mapping[str, TableToRegister], numbers: Sequence[int], worker: int, name: str
) -> dict[str, Registration]:
    return {
        key: Registration(number, table.spec, worker, name, table.ready, 0, made=True)
        for (key, table), number in zip(requests.items(), numbers, strict=True)
    }


def in_portions(tables: Mapping[str, Registration]) -> Iterable[dict[str, tuple[bytes, int]]]:
    """What is to be written of tables, and instead of which revision, in as many portions as the store wants."""
    writes = [(key, registry_value(table), table.revision) for key, table in tables.items()]
    for some in portions(writes, WRITES_MAX, VALUE_MAX, lambda write: len(write[1])):
        yield {key: (value, revision) for key, value, revision in some}
