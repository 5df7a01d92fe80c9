"""Manifests of a folder of increments, and which of them are to be read. Pure.

docs/reference/published.md describes the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from elasticps.errors import InputError
from elasticps.publishing.core.layout import DTYPES, VERSION

MAX_MANIFEST_BYTES = 16 << 20
_MANIFEST = re.compile(r"manifest-(\d{10})\.json\Z")
_DATA = re.compile(r"data-(\d{10})-(\d{5})\.npz\Z")


class TablePart(NamedTuple):
    """Changes of one table in a data file: arrays `<i>.deleted`, `<i>.keys`, `<i>.rows`, i being its place there.

    replaced: whatever is there of the table goes first; gone: the table was dropped."""

    table: str
    replaced: bool
    gone: bool


class DataFile(NamedTuple):
    """A data file of an increment."""

    name: str
    bytes: int
    parts: tuple[TablePart, ...]


class PublishedTable(NamedTuple):
    """The description of a table: type and width of its rows; shape: of a tensor, whose rows are its blocks."""

    dtype: str
    dim: int
    shape: tuple[int, ...] | None


class IncrementManifest(NamedTuple):
    """An increment. base: it has all rows, and what came before counts no more; tables: those that are there after it;
    as_of: time_s, epoch, and steps by worker; share: of the keys, as 2/8, "": all."""

    number: int
    base: bool
    cluster: str
    application: str
    as_of: Mapping[str, Any]
    tables: Mapping[str, PublishedTable]
    files: tuple[DataFile, ...]
    share: str = ""

    def to_json(self) -> bytes:
        """As it is written."""
        tables = {name: table._asdict() for name, table in self.tables.items()}
        files = [{**file._asdict(), "parts": [part._asdict() for part in file.parts]} for file in self.files]
        return json.dumps({"version": VERSION} | self._asdict() | {"tables": tables, "files": files}).encode()


def parse_manifest(data: bytes, where: str) -> IncrementManifest:
    """The inverse. InputError names `where` for what is none: anybody may have written there."""
    try:
        found = json.loads(data)
        if found["version"] != VERSION:
            raise InputError(f"{where} is of version {found['version']}, and this elasticps reads version {VERSION}")
        tables = {str(name): _table(one) for name, one in found["tables"].items()}
        files = tuple(_file(one) for one in found["files"])
        number, base = _whole(found["number"]), bool(found["base"])
        as_of = dict(found["as_of"])
        return IncrementManifest(
            number, base, str(found["cluster"]), str(found["application"]), as_of, tables, files,
            str(found.get("share", "")),
        )  # fmt: skip
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{where} is no manifest of published rows: {error!r}") from None


def _table(found: Mapping[str, Any]) -> PublishedTable:
    dtype, shape = found["dtype"], found["shape"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}")
    return PublishedTable(dtype, _whole(found["dim"]), None if shape is None else tuple(map(_whole, shape)))


def _file(found: Mapping[str, Any]) -> DataFile:
    parts = tuple(TablePart(str(p["table"]), bool(p["replaced"]), bool(p["gone"])) for p in found["parts"])
    if not _DATA.match(found["name"]):
        raise ValueError(f"a data file called {found['name']!r}")
    return DataFile(found["name"], _whole(found["bytes"]), parts)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number")
    return value


def manifest_name(number: int) -> str:
    """The name of an increment's manifest."""
    return f"manifest-{number:010}.json"


def data_name(number: int, place: int) -> str:
    """The name of a data file."""
    return f"data-{number:010}-{place:05}.npz"


def numbers(names: Iterable[str]) -> list[int]:
    """The increments whose manifests are among these files, ascending."""
    return sorted(int(found[1]) for name in names if (found := _MANIFEST.match(name)))


def obsolete(names: Sequence[str], oldest: int) -> list[str]:
    """Files of increments before `oldest`, in the order in which they are to be deleted: an increment's manifest before
    its data."""
    found = [(_MANIFEST.match(name) or _DATA.match(name), name) for name in names]
    return sorted((name for match, name in found if match and int(match[1]) < oldest), key=lambda name: name[0] == "d")


def unnamed(names: Sequence[str], manifests: Iterable[int]) -> list[str]:
    """Data files of increments that have no manifest: whoever wrote them died before."""
    known = set(manifests)
    return [name for name in names if (match := _DATA.match(name)) and int(match[1]) not in known]
