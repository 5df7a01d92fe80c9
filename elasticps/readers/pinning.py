"""Rows of a checkpoint, as a reader shows them that is pinned to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.manifest import Manifest, cut_of, folder_of
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, InputError, UnknownTable
from elasticps.exchange.checkpoint import weights
from elasticps.model.key_share import share_of
from elasticps.readers.rows import ReaderTable
from elasticps.readers.values import AsOf
from elasticps.wire.row_blocks import RowBlock
from replication.progress import ERASER

if TYPE_CHECKING:
    from elasticps.model.spec import TableSpec
    from elasticps.readers.values import ReaderSpec

_NONE = np.empty(0, np.int64)


class CheckpointName(NamedTuple):
    """A place of checkpoints, and which one there; None: the newest."""

    url: str
    cut: int | None

    def __str__(self) -> str:
        return self.url if self.cut is None else f"{self.url}/{folder_of(self.cut)}"


def parse_name(text: str) -> CheckpointName:
    """Of `URL` or `URL/000042`."""
    url, _, last = text.rstrip("/").rpartition("/")
    cut = cut_of(last)
    return CheckpointName(text, None) if cut is None or not url else CheckpointName(url, cut)


def before(name: CheckpointName, shown: CheckpointName | None) -> CheckpointName:
    """The checkpoint that a roll back goes to: the one that is named; else the newest there that is older than what is
    shown. Raises CheckpointError if there is none."""
    if name.cut is not None:
        return name
    storage = Storage(name.url)
    newest = None if shown is None or Storage(shown.url).url != storage.url else shown.cut
    for cut in reversed(catalog.cuts_of(storage)):
        if (newest is None or cut < newest) and _readable(storage, cut):
            return CheckpointName(name.url, cut)
    raise CheckpointError(f"{storage.url} has no checkpoint{f' before {newest}' if newest else ''} to roll back to")


def _readable(storage: Storage, cut: int) -> bool:
    try:
        catalog.read(storage, cut)
    except CheckpointError:
        return False
    return True


class CheckpointRows:
    """The rows of a reader's tables in one checkpoint, in local memory. Not thread-safe.

    name: of the checkpoint, with its number; as_of: the state of training that it has.
    """

    def __init__(self, name: CheckpointName, spec: ReaderSpec) -> None:
        """Reads them all. Raises CheckpointError, UnknownTable for a table that the reader follows and the checkpoint
        lacks."""
        storage = Storage(name.url)
        try:
            contents = Contents(storage, catalog.chain(storage, name.cut))
        except CheckpointError as error:
            place, _, last = name.url.rstrip("/").rpartition("/")
            if name.cut is not None or not (last.isascii() and last.isdecimal() and 0 < len(last) < 6):
                raise
            raise CheckpointError(f"{error}; a checkpoint has six digits: {place}/{folder_of(int(last))}?") from None
        manifest = contents.manifest
        self.name = CheckpointName(name.url, manifest.cut)
        self.as_of = _as_of(manifest)
        self.tables: dict[str, ReaderTable] = {}
        prefix = f"{spec.application}/"
        there = {each.removeprefix(prefix): one for each, one in manifest.tables.items() if each.startswith(prefix)}
        chosen = there.keys() if spec.tables is None else spec.tables
        try:
            for each in chosen:
                if each not in there:
                    raise UnknownTable(
                        f"checkpoint {self.name} has no table {each!r} of application {spec.application!r}"
                    )
                number, described = there[each]
                table = self.tables[each] = ReaderTable(described, number, manifest.ranges, spec.dtype, spec.share)
                for unit in contents.units(number):
                    for rows in contents.read(unit):
                        keys, found = np.ascontiguousarray(rows.keys), weights(described, rows.rows)
                        if not table.share.whole:
                            mine = share_of(keys, table.share.of) == table.share.number
                            keys, found = keys[mine], found[mine]
                        values = table.codec.encode(np.ascontiguousarray(found))
                        table.apply(RowBlock(number, keys, values, _NONE, _NONE), None)
        except BaseException:
            self.close()
            raise

    def pull(self, keys: Mapping[str, object]) -> dict[str, NDArray[np.float32]]:
        """As `Reader.pull`."""
        found = {}
        for name, named in keys.items():
            table = self._table(name)
            found[name] = table.pull_whole() if named is None else table.pull(table.owned_keys(named))
        return found

    def table_like(self, spec: TableSpec) -> ReaderTable:
        """The table of this name. UnknownTable if there is none, InputError if its rows are of another length."""
        table = self._table(spec.name)
        if table.spec.dim != spec.dim:
            text = f"checkpoint {self.name}, which is shown, has rows of {table.spec.dim} numbers in table "
            text += f"{spec.name!r}, and training has {spec.dim}: ask by gRPC, or have the reader follow"
            raise InputError(text)
        return table

    def _table(self, name: str) -> ReaderTable:
        if name not in self.tables:
            raise UnknownTable(f"checkpoint {self.name}, which is shown, has no table {name!r}")
        return self.tables[name]

    @property
    def rows(self) -> int:
        """Rows that are here."""
        return sum(table.rows for table in self.tables.values())

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(table.nbytes for table in self.tables.values())

    def close(self) -> None:
        """Gives the memory back."""
        for table in self.tables.values():
            table.close()
        self.tables = {}


def _as_of(manifest: Manifest) -> AsOf:
    clocks = {
        entry.id: np.full(manifest.ranges, entry.clock, np.int64) for entry in manifest.workers.values()
    } | {
        worker: np.full(manifest.ranges, clock, np.int64)
        for worker, clock in manifest.former.items() if worker < ERASER
    }  # fmt: skip
    return AsOf(manifest.time, 0, np.full(manifest.ranges, -1, np.int64), clocks, held=True)
