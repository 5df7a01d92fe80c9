"""Publishes rows into a folder: a base, and increments after it, each complete when its manifest has its name."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np

from elasticps.errors import ConfigError
from elasticps.publishing.core.batches import PublishBatch
from elasticps.publishing.core.increments import (
    DataFile,
    IncrementManifest,
    PublishedTable,
    TablePart,
    data_name,
    manifest_name,
    numbers,
    obsolete,
    unnamed,
)
from elasticps.publishing.core.layout import check_dtype, moment, words
from elasticps.publishing.folder import read_manifest
from elasticps.publishing.targets import PublishedSource, PublishError
from elasticps.system.temporary import naming, paths_with, replace_file

MOST_INCREMENTS = 100  # between two bases
LEAST_BASE_BYTES = 64 << 20  # increments may have so many bytes, however small their base is
LOCK = ".publisher"


class FolderTarget:
    """Rows in files of one folder. See `PublishTarget`; docs/reference/published.md has the format.

    A new base is written when increments have become many, or larger than their base: from a listing, as the first is.
    The base before it stays, with its increments, until the next one: for whoever is reading it.
    """

    def __init__(self, path: str, source: PublishedSource, dtype: str, pace_s: float) -> None:
        check_dtype(dtype)
        self.pace_s = pace_s
        self.most_increments = MOST_INCREMENTS
        self._folder = Path(path)
        self._source = source  # whose rows these are
        self._dtype = dtype  # of rows
        self._tables: dict[str, PublishedTable] = {}  # that are there after what was written last
        self._next = 1  # the number of the increment that is written
        self._files: list[DataFile] = []  # of it, so far
        self._bases: list[int] = []  # numbers of those that are there
        self._base_bytes = self._bytes = 0  # of the newest base, and of increments since
        self._since_base = 0  # increments
        self._lock: int | None = None  # the descriptor by which the folder is this process's

    def open(self) -> None:
        """See `PublishTarget`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = _lock(self._folder)
            for part in paths_with(self._folder, ""):
                part.unlink(missing_ok=True)
            names = os.listdir(self._folder)
            there = numbers(names)
            for name in unnamed(names, there):
                (self._folder / name).unlink(missing_ok=True)
            manifests = [read_manifest(self._folder, number) for number in there]
            for one in manifests[-1:]:
                self._source.check_share(one.share, str(self._folder))
            self._bases = [one.number for one in manifests if one.base]
        except OSError as error:
            raise PublishError(f"{self._folder} cannot be used: {error.strerror}") from error
        self._next = max(there, default=0) + 1
        self._files = []

    @property
    def wants_listing(self) -> bool:
        """Whether increments have become too many."""
        return self._since_base >= self.most_increments or self._bytes > max(self._base_bytes, LEAST_BASE_BYTES)

    def write(self, batch: PublishBatch) -> None:
        """See `PublishTarget`."""
        if batch.begins:
            self._files, self._tables = [], {}
        if not (batch.tables or batch.listing or batch.complete):
            return
        try:
            self._write_data(batch)
            if not batch.listing:
                self._finish(batch)
        except OSError as error:
            raise PublishError(f"{error.filename or self._folder} cannot be written: {error.strerror}") from error

    def _write_data(self, batch: PublishBatch) -> None:
        parts, arrays = [], {}
        for i, (name, table) in enumerate(batch.tables.items()):
            parts.append(TablePart(name, table.replaced, table.gone))
            if table.gone:
                self._tables.pop(name, None)
                continue
            spec = table.spec
            self._tables[name] = PublishedTable(self._dtype, spec.dim, spec.shape)
            arrays[f"{i}.deleted"] = table.deleted.astype("<i8", copy=False)
            arrays[f"{i}.keys"] = table.keys.astype("<i8", copy=False)
            arrays[f"{i}.rows"] = words(table.rows, self._dtype)
        if not parts:
            return
        content = BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        name = data_name(self._next, len(self._files))
        replace_file(self._folder / name, content.getvalue())
        self._files.append(DataFile(name, len(content.getvalue()), tuple(parts)))

    def _finish(self, batch: PublishBatch) -> None:
        """Gives the increment its manifest: from then on it is there."""
        files, number = tuple(self._files), self._next
        self._files = []
        manifest = IncrementManifest(
            number, batch.complete, self._source.cluster, self._source.application, moment(batch.as_of),
            dict(self._tables), files, self._source.share,
        )  # fmt: skip
        _sync(self._folder)  # data has its name before the manifest has
        replace_file(self._folder / manifest_name(number), manifest.to_json())
        _sync(self._folder)
        self._next = number + 1
        nbytes = sum(file.bytes for file in files)
        if not batch.complete:
            self._since_base += 1
            self._bytes += nbytes
            return
        self._base_bytes, self._bytes, self._since_base = nbytes, 0, 0
        self._bases = [*self._bases[-1:], number]
        for name in obsolete(os.listdir(self._folder), self._bases[0]):
            (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """See `PublishTarget`."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int:
    """Makes the folder this process's. Raises ConfigError if it is another's."""
    path = folder / LOCK
    with naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with suppress(OSError):
            os.close(descriptor)
        raise ConfigError(f"another process publishes into {folder}: give each its own folder") from None
    return descriptor


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
