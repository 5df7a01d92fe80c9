"""A store with one table that keeps usage, its checkpoints, and their content as dictionaries."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.manifest import FileEntry, Manifest, folder_of_table
from elasticps.checkpoint.range_usage import RangeUsage, together
from elasticps.checkpoint.storage import Storage
from elasticps.kernels.hashing import HASH_END
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import CutMark
from elasticps.server.core.scan import Finished, Scan
from elasticps.store import Store
from elasticps.store.eviction import Predicate
from elasticps.store.retained import Allowance

TABLE, NAME = 3, "default/t"
WORKER = 70_000
NOW = 1_000_000  # cluster time at first, in seconds


class Content(NamedTuple):
    """What a table has: whole rows by key, usage included; waiting keys with their words; and by range its sketch and
    its time."""

    rows: dict[int, bytes]
    waiting: dict[int, int]
    sketches: dict[int, bytes]
    times: dict[int, int]


def content_of(store: Store) -> Content:
    """What the table has now."""
    table = store.tables[TABLE]
    assert table.lifecycle is not None
    found = Content({}, {}, {}, dict(enumerate(store.times.tolist())))
    for r in range(store.ranges):
        keys, rows = table.dump_range(r)
        found.rows.update(zip(keys.tolist(), (row.tobytes() for row in rows), strict=True))
        waiting = table.lifecycle.waiting
        found.waiting.update(zip(*(each.tolist() for each in waiting.list_interval(r, 0, HASH_END)), strict=True))
        found.sketches[r] = waiting.read_blocks(r, 0, HASH_END).tobytes()
    return found


def read(contents: Contents) -> Content:
    """What a chain of checkpoints has."""
    found = Content({}, {}, {}, dict(enumerate(contents.times([TABLE]).tolist())))
    usages: dict[int, list[RangeUsage]] = {r: [] for r in range(contents.manifest.ranges)}
    for unit in contents.units(TABLE):
        for piece in contents.read(unit):
            for key, row in zip(piece.keys.tolist(), piece.rows, strict=True):
                assert key not in found.rows, "a row comes once"
                found.rows[key] = row.tobytes()
            if piece.usage is not None:
                usages[piece.range].append(piece.usage)
    for r, parts in usages.items():
        usage = together(parts)
        assert not found.waiting.keys() & set(usage.keys.tolist())
        found.waiting.update(zip(usage.keys.tolist(), usage.words.tolist(), strict=True))
        found.sketches[r] = usage.sketch.tobytes()
    return found


def put(storage: Storage, cut: int, finished: Finished, described: TableSpec) -> FileEntry:
    """Writes a file of a scan."""
    encoded = finished.file.encode()
    entry = FileEntry.of(f"{folder_of_table(described, TABLE)}/s-1.{finished.number:03d}.safetensors", TABLE, encoded)
    storage.put(f"{cut:06d}/{entry.path}", tuple(memoryview(bytes(part)) for part in encoded.parts))
    return entry


class Cluster:
    """A store with one table, whose checkpoints are written at once."""

    def __init__(self, described: TableSpec, ranges: int = 4, url: str = "") -> None:
        self.described, self.store, self.every = described, Store(ranges), np.arange(ranges)
        self.table = self.store.create(described, TABLE)
        assert self.table.lifecycle is not None
        self.table.lifecycle.begin(np.arange(ranges), described)
        self.storage = Storage(url or f"memory://{uuid.uuid4()}")
        self.advance(NOW)

    def advance(self, now: int) -> None:
        """Time goes on."""
        self.store.advance(self.every, now)

    def push(self, keys: NDArray[np.int64], grads: NDArray[np.floating[Any]]) -> None:
        """A push of rows [n, dim], or with scores [n, dim + 1]."""
        self.table.apply(keys, grads.astype(np.float32), np.empty(0, np.float32), WORKER, 1 << 16)

    def evict(self, by: Predicate, low: int = 0, high: int = HASH_END) -> int:
        """A sweep of all ranges; returns how many rows went."""
        return sum(self.table.evict(r, low, high, by) for r in self.every.tolist())

    def pass_cut(self, cut: int) -> None:
        """A cut whose checkpoint is given up."""
        self.store.pass_cut(self.every, cut)

    def checkpoint(self, cut: int, since: int) -> Manifest:
        """Takes and publishes one."""
        self.pass_cut(cut)
        scan = Scan(self.store, CutMark(cut, since, "s", 1, ""), Allowance(1 << 30, lambda: None, lambda: None))
        scan.add(self.every)
        files = [put(self.storage, cut, each, self.described) for each in scan.run() if each is not None]
        tables = {NAME: (TABLE, self.described)}
        manifest = Manifest("c@1", cut, since, self.store.ranges, 1.0, tables, tuple(files))
        assert catalog.publish(self.storage, manifest)
        return manifest

    def read(self) -> Content:
        """What the chain of the newest checkpoint has."""
        return read(Contents(self.storage, catalog.chain(self.storage)))

    def measure(self, r: int, by: Predicate) -> dict[int, int]:
        """Ranks of the range's rows, by key."""
        assert self.table.lifecycle is not None
        keys, _, ranks = self.table.lifecycle.measure(self.table, r, 0, HASH_END, by)
        return dict(zip(keys.tolist(), ranks.tolist(), strict=True))
