"""Reads a folder of increments, which `elasticps publish --to file:///…` writes."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.client.inputs import checked_keys
from elasticps.errors import InputError, UnknownTable
from elasticps.publishing.core.batches import Change, latest
from elasticps.publishing.core.increments import (
    MAX_MANIFEST_BYTES,
    DataFile,
    IncrementManifest,
    PublishedTable,
    manifest_name,
    numbers,
    parse_manifest,
)
from elasticps.publishing.core.layout import floats

_TRIES = 5  # the publisher removes files that a newer base has made needless: then that base is read


class PublishedRows:
    """Rows of one table as they were published. keys: int64 [n], ascending; rows: [n, dim], in the table's type, of
    which bfloat16 is its 16 bits."""

    def __init__(self, table: PublishedTable) -> None:
        self.dtype, self.dim, self.shape = table
        self.keys = np.empty(0, np.int64)
        self.rows: NDArray[Any] = np.empty((0, self.dim), {"float32": "<f4", "float16": "<f2"}.get(self.dtype, "<u2"))

    def change(self, changes: Sequence[Change]) -> None:
        """Takes changes, in their order."""
        for _, keys, rows in changes:
            if rows.shape != (len(keys), self.dim) or rows.dtype != self.rows.dtype:
                raise InputError(f"rows of shape {rows.shape} and type {rows.dtype}, not {self.dim} × {self.dtype}")
        before = (self.keys[:0], self.keys, self.rows)
        keys, positions, rows = latest([before, *changes])
        there = positions >= 0
        self.keys = keys[there]
        self.rows = rows[positions[there]] if len(self.keys) else self.rows[:0]

    def pull(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of these keys, float32 [n, dim]; zeros where there is none."""
        found = np.zeros((len(keys), self.dim), np.float32)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            there = self.keys[at] == keys
            found[there] = floats(self.rows[at[there]], self.dtype)
        return found

    def tensor(self) -> NDArray[np.float32]:
        """All of a tensor, in its shape. Raises InputError for a table."""
        if self.shape is None:
            raise InputError("it is a table: pull keys of it")
        size = math.prod(self.shape)
        blocks = self.pull(np.arange(-(-size // self.dim), dtype=np.int64))
        return blocks.reshape(-1)[:size].reshape(self.shape)


class PublishedFolder:
    """Tables in a folder of increments. Made by `read_increments`; not thread-safe.

    number: of the newest increment that was read; as_of: what that says: time_s, epoch, and steps by worker.
    """

    def __init__(self, folder: Path) -> None:
        self.number = 0
        self.as_of: Mapping[str, Any] = {}
        self.tables: dict[str, PublishedRows] = {}
        self._folder = folder

    def refresh(self) -> int:
        """Reads what has been written since; returns how many increments. Raises InputError if there is no base, or
        what is there is damaged."""
        for _ in range(_TRIES):
            try:
                return self._refresh()
            except FileNotFoundError:
                if not self._folder.is_dir():
                    raise InputError(f"{self._folder} is no folder: nothing has published there") from None
        raise InputError(f"{self._folder}: files go away faster than they can be read")

    def _refresh(self) -> int:
        there = numbers(os.listdir(self._folder))
        steps = [number for number in there if number > self.number]
        if not self.number or (steps and steps[0] != self.number + 1):
            steps = self._from_base(there)
        read = 0
        for number in steps:
            if read and number != self.number + 1:
                break
            self._apply(read_manifest(self._folder, number))
            read += 1
        return read

    def _from_base(self, there: list[int]) -> list[int]:
        for i in range(len(there) - 1, -1, -1):
            if read_manifest(self._folder, there[i]).base:
                return there[i:]
        raise InputError(f"{self._folder} has no rows yet: nothing has published into it, or not all of a base")

    def _apply(self, manifest: IncrementManifest) -> None:
        data = [(file, _read(self._folder / file.name, file)) for file in manifest.files]  # all, before any counts
        tables = {} if manifest.base else dict(self.tables)
        changes: dict[str, list[Change]] = {}
        for file, arrays in data:
            for i, part in enumerate(file.parts):
                if part.replaced or part.gone:
                    tables.pop(part.table, None)
                    changes.pop(part.table, None)
                if not part.gone:
                    found = arrays[f"{i}.deleted"], arrays[f"{i}.keys"], arrays[f"{i}.rows"]
                    changes.setdefault(part.table, []).append(found)
        self.tables = {name: tables.get(name) or PublishedRows(table) for name, table in manifest.tables.items()}
        for name, some in changes.items():
            self.tables[name].change(some)
        self.number, self.as_of = manifest.number, manifest.as_of

    def pull(self, keys: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.float32]]:
        """Rows of several tables, {table: keys int64 [n]}: of each float32 [n, dim]; zeros for keys without a row.
        Raises UnknownTable, InputError for keys that are no integers."""
        if strangers := keys.keys() - self.tables.keys():
            raise UnknownTable(f"{self._folder} has no table {min(strangers)!r}")
        return {name: self.tables[name].pull(checked_keys(name, each)) for name, each in keys.items()}


def read_increments(folder: str | os.PathLike[str]) -> PublishedFolder:
    """Reads the tables in a folder that `elasticps publish` writes; `refresh` of what is returned goes on from there.
    Raises InputError if nothing whole is there."""
    found = PublishedFolder(Path(folder))
    try:
        found.refresh()
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None
    return found


def read_manifest(folder: Path, number: int) -> IncrementManifest:
    """A manifest. Raises InputError, FileNotFoundError."""
    path = folder / manifest_name(number)
    with path.open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    manifest = parse_manifest(data, str(path))
    if manifest.number != number:
        raise InputError(f"{path} says that it is increment {manifest.number}")
    return manifest


def _read(path: Path, file: DataFile) -> dict[str, NDArray[Any]]:
    if path.stat().st_size != file.bytes:
        raise InputError(f"{path} has {path.stat().st_size} bytes, and its manifest says {file.bytes}")
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is damaged: {error}") from None
