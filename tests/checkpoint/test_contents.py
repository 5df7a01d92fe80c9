"""Chains of increments give the content at each cut, whatever happened in between."""

from __future__ import annotations

import struct
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.checkpoint import catalog, contents, maintenance, rows
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.manifest import FileEntry, Manifest, WorkerEntry
from elasticps.checkpoint.rows import checksum
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, ranges_of, row, write

OLD, NEW = TableSpec("old", 3, spec.Adagrad(0.1)), TableSpec("new", 2, spec.SGD(0.1), dtype="bfloat16")
TABLES = {"default/old": (7, OLD), "default/new": (9, NEW)}
RANGES = 4


def everything(found: Contents, table: int, ranges: Any = None) -> dict[int, bytes]:
    there: dict[int, bytes] = {}
    for unit in found.units(table, ranges):
        for piece in found.read(unit):
            assert set(ranges_of(table, piece.keys.tolist(), RANGES)) <= {piece.range}
            for key, data in zip(piece.keys.tolist(), piece.rows, strict=True):
                assert key not in there
                there[key] = data.tobytes()
    return there


PUT = st.tuples(st.just("put"), st.integers(0, 30), st.integers(0, 99))
DELETE = st.tuples(st.just("delete"), st.integers(0, 30), st.just(0))
CLEAR = st.tuples(st.just("clear"), st.integers(0, RANGES - 1), st.just(0))
STEPS = st.lists(st.lists(st.one_of(PUT, PUT, DELETE, CLEAR), max_size=12), min_size=1, max_size=5)


@settings(max_examples=60)
@given(steps=STEPS, late=st.integers(0, 4), small=st.booleans())
def test_a_chain_and_its_merge_both_give_the_content_at_the_cut(steps: list[Any], late: int, small: bool) -> None:
    storage = Storage(f"memory://{uuid.uuid4()}")
    state: dict[str, dict[int, bytes]] = {"default/old": {}, "default/new": {}}
    for cut, changes in enumerate(steps, 1):
        tables = {name: table for name, table in TABLES.items() if name == "default/old" or cut > late}
        written = {name: Change({}) for name in tables}
        for kind, number, seed in changes:
            for name, change in written.items():
                id_, of = tables[name]
                if kind == "put":
                    change.rows[number] = state[name][number] = row(of, seed)
                elif kind == "delete":  # it may come again, and then the file has both
                    state[name].pop(number, None)
                    change.rows.pop(number, None)
                    change.deleted.add(number)
                else:
                    gone = [key for key in state[name] if ranges_of(id_, [key], RANGES)[0] == number]
                    for key in gone:
                        del state[name][key]
                        change.rows.pop(key, None)
                    change.full.add(number)
        for name, change in written.items():  # a range that is written whole has all of its rows
            whole = [k for k in state[name] if ranges_of(tables[name][0], [k], RANGES)[0] in change.full]
            change.rows |= {key: state[name][key] for key in whole}
        write(storage, cut, tables, written, since=cut - 1, ranges=RANGES, time=float(cut))
    with mock.patch.object(contents, "UNIT_BYTES", 100 if small else 1 << 20):
        chain = catalog.chain(storage)
        assert [manifest.cut for manifest in chain] == list(range(1, len(steps) + 1))
        found = Contents(storage, chain)
        for name, (id_, _) in chain[-1].tables.items():
            assert everything(found, id_) == state[name]
            half = {k: data for k, data in state[name].items() if ranges_of(id_, [k], RANGES)[0] < 2}
            assert everything(found, id_, range(2)) == half
        assert [maintenance.verify(storage, manifest) for manifest in chain] == [[]] * len(chain)
        with mock.patch.object(maintenance, "FILE_BYTES", 200 if small else rows.FILE_BYTES):
            merged = maintenance.merge(storage, chain)
    assert merged.since == 0
    assert catalog.read(storage, merged.cut) == merged
    assert maintenance.verify(storage, merged) == []
    catalog.delete(storage, [manifest.cut for manifest in chain[:-1]])
    found = Contents(storage, catalog.chain(storage))
    assert {name: everything(found, id_) for name, (id_, _) in merged.tables.items()} == {
        name: state[name] for name in merged.tables
    }
    assert len(storage.files()) == 1 + len(merged.files)


def test_a_checkpoint_of_a_version_that_counted_no_updates_is_read_and_added_to() -> None:
    storage = Storage(f"memory://{uuid.uuid4()}")
    of = TableSpec("adam", 2, spec.Adam(0.1))
    tables = {"default/adam": (7, of)}
    counted = {key: row(of, key) for key in range(20)}
    old = [column for column in rows.columns(of) if column.name != "step"]
    workers = {"w0": WorkerEntry(70_000, "default", 41), "w1": WorkerEntry(70_001, "default", 900)}
    with mock.patch.object(rows, "columns", return_value=old):
        write(storage, 1, tables, {"default/adam": Change(counted)}, workers=workers, former={1 << 31 | 7: 5_000})
    path = "000001/manifest.json"
    written = bytes(storage.get(path))
    storage.put(path, written.replace(b'"version": 2', b'"version": 1'))
    newer = {key: row(of, 100 + key) for key in range(5)}
    write(storage, 2, tables, {"default/adam": Change(newer)}, since=1, workers=workers)
    chain = catalog.chain(storage)
    expected = {key: data[:8] + struct.pack("<f", 900) + data[12:] for key, data in counted.items()} | newer
    assert everything(Contents(storage, chain), 7) == expected
    assert [maintenance.verify(storage, manifest) for manifest in chain] == [[], []]
    maintenance.merge(storage, chain)
    assert everything(Contents(storage, catalog.chain(storage)), 7) == expected


@pytest.fixture
def storage() -> Storage:
    made = Storage(f"memory://{uuid.uuid4()}")
    for cut in (1, 2, 3):
        change = Change({key: row(OLD, 100 * cut + key) for key in range(50)}, deleted={100 + cut})
        write(made, cut, {"default/old": (7, OLD)}, {"default/old": change}, since=cut - 1, ranges=RANGES)
    return made


def test_a_chain_with_a_gap_is_refused(storage: Storage) -> None:
    storage.delete(["000002/manifest.json"])
    with pytest.raises(CheckpointError, match=r"3 adds to 2, which cannot be had: .* has no checkpoint 2; there are 1"):
        catalog.chain(storage)
    assert [manifest.cut for manifest in catalog.chain(storage, 1)] == [1]


def test_damage_is_found_and_named(storage: Storage) -> None:
    manifest = catalog.read(storage, 2)
    assert maintenance.verify(storage, manifest) == []
    first, second = (f"000002/{file.path}" for file in manifest.files)
    data = storage.get(first)
    storage.put(first, data[:-1])
    storage.delete([second])
    short, missing = maintenance.verify(storage, manifest)
    assert short == f"{first} has {len(data) - 1} bytes, not {len(data)}"
    assert missing == f"{second} is missing"
    altered = bytearray(data)
    altered[-9] ^= 1
    storage.put(first, altered)
    assert "altered" in maintenance.verify(storage, manifest)[0]
    altered = bytearray(data)
    altered[20] ^= 1
    storage.put(first, altered)
    assert "header has another sum" in maintenance.verify(storage, manifest)[0]
    with pytest.raises(CheckpointError, match="header has another sum"):
        everything(Contents(storage, catalog.chain(storage)), 7)


def test_a_range_that_is_missing_is_found() -> None:
    storage = Storage(f"memory://{uuid.uuid4()}")
    manifest = write(storage, 1, {"default/old": (7, OLD)}, {}, ranges=2)
    lacking = replace(manifest, cut=2, ranges=RANGES)
    for one in manifest.files:
        storage.put(f"000002/{one.path}", storage.get(f"000001/{one.path}"))
    assert "lacks range 2" in maintenance.verify(storage, lacking)[0]


@pytest.mark.parametrize("some", [1 << 45, 2.0])
def test_sizes_that_a_file_cannot_have_are_refused_before_reading(tmp_path: Path, some: float) -> None:
    """Though all sums are right: no memory is taken for it."""
    many: Any = some  # rows
    header = rows._header(rows._tensors(rows.columns(OLD), many, 0), [rows.Segment(0, 0, many, 0, 0, True, "")])
    entry = FileEntry("old-7/s0-1.000.safetensors", 7, len(header), len(header), int(some), checksum([header]), (0,))
    storage = Storage(tmp_path.as_uri())
    storage.put(f"000001/{entry.path}", header)
    manifest = Manifest("c@1", 1, 0, RANGES, 0.0, TABLES, (entry,))

    def read() -> None:
        reader = contents.reader_of(storage, manifest, entry, OLD)
        reader.read(reader.segments)

    with pytest.raises(CheckpointError):
        read()
