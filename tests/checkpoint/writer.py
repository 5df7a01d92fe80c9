"""Writes checkpoints of a dictionary: what a cluster's would be, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint import catalog
from elasticps.checkpoint.manifest import FileEntry, Manifest, folder_of_table
from elasticps.checkpoint.rows import RowFile
from elasticps.checkpoint.storage import Storage
from elasticps.kernels import hashing
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout

Rows = dict[int, bytes]


def ranges_of(table: int, keys: Sequence[int], ranges: int) -> NDArray[np.int32]:
    out = np.empty(len(keys), np.int32)
    hashing.key_ranges(np.array(keys, np.int64), hashing.table_salt(table), hashing.range_shift(ranges), out)
    return out


@dataclass
class Change:
    """The part of a table in an increment: rows by key, keys deleted before, ranges written whole."""

    rows: Rows
    deleted: set[int] = field(default_factory=set)
    full: set[int] = field(default_factory=set)


def write(
    storage: Storage,
    cut: int,
    tables: Mapping[str, tuple[int, TableSpec]],
    changes: Mapping[str, Change],
    *,
    since: int = 0,
    ranges: int = 4,
    files: int = 2,
    cluster: str = "c@1",
    time: float = 0.0,
    **more: Any,
) -> Manifest:
    """Writes a checkpoint with `files` files for each table, and its manifest."""
    entries = []
    for name, (id_, spec) in tables.items():
        change = changes.get(name, Change({}))
        keys = sorted(change.rows)
        where, gone = ranges_of(id_, keys, ranges), ranges_of(id_, sorted(change.deleted), ranges)
        for number in range(files):
            file = RowFile(spec)
            for r in range(ranges):
                mine = [key for key, of in zip(keys, where, strict=True) if of == r][number::files]
                rows = np.frombuffer(b"".join(change.rows[key] for key in mine), np.uint8)
                deleted = [key for key, of in zip(sorted(change.deleted), gone, strict=True) if of == r][number::files]
                file.add(
                    r, np.array(mine, np.int64), rows.reshape(len(mine), RowLayout.of(spec).stride),
                    np.full(len(mine), cut - 1, np.int32), np.array(deleted, np.int64),
                    full=not since or r in change.full,
                )  # fmt: skip
            encoded = file.encode()
            entry = FileEntry.of(f"{folder_of_table(spec, id_)}/s{number}-1.000.safetensors", id_, encoded)
            storage.put(f"{cut:06d}/{entry.path}", encoded.parts)
            entries.append(entry)
    manifest = Manifest(cluster, cut, since, ranges, time, dict(tables), tuple(entries), **more)
    assert catalog.publish(storage, manifest)
    return manifest


def row(spec: TableSpec, seed: int) -> bytes:
    """A whole row with zeros where nothing is."""
    layout = RowLayout.of(spec)
    data = np.random.default_rng(seed).standard_normal(layout.stride // 4).astype(np.float32).view(np.uint8).copy()
    data[layout.weight_bytes : layout.slots_at] = 0
    data[layout.slots_at + 4 * spec.optimizer.slot_floats(spec.dim) :] = 0
    return data.tobytes()
