"""Files of tables that keep usage: what was put in comes out, older readers refuse them, others are as ever."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from elasticps.checkpoint import manifest
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.range_usage import RangeUsage, SegmentUsage, joined, together
from elasticps.checkpoint.rows import RowFile, RowReader, decode
from elasticps.errors import CheckpointError
from elasticps.model import policies, spec
from elasticps.model.spec import TableSpec
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep
from elasticps.store.layout import RowLayout
from tests.checkpoint.test_rows import OPTIMIZERS

NUMBERS = st.integers(0, (1 << 62) - 1)
PREDICATES = st.builds(
    Predicate, st.sampled_from([Measure.LAST_USE, Measure.COUNT, Measure.SCORE, Measure.NORM]), st.sampled_from(Reason),
    NUMBERS, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1), st.floats(0, 1),
)  # fmt: skip
SWEEPS = st.lists(st.builds(Sweep, NUMBERS, PREDICATES, NUMBERS, NUMBERS), max_size=3)


@st.composite
def usages(draw: st.DrawFn) -> RangeUsage:
    waiting, blocks = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    keys, words = (chance.integers(1, 1 << 40, waiting) for _ in range(2))
    sketch = chance.integers(0, 256, (blocks, 8 if blocks else 0)).astype(np.uint8)
    return RangeUsage(keys, words, sketch, draw(st.integers(0, (1 << 32) - 1)), draw(SWEEPS))


def whole_rows(of: TableSpec, n: int, seed: int) -> np.ndarray:
    """Rows with zeros where nothing is, as the store has them."""
    layout = RowLayout.of(of)
    rows = np.random.default_rng(seed).integers(0, 256, (n, layout.stride)).astype(np.uint8)
    rows[:, layout.weight_bytes : layout.slots_at] = 0
    rows[:, layout.slots_at + 4 * of.optimizer.slot_floats(of.dim) + 4 * of.usage_floats :] = 0
    return rows


@settings(max_examples=60)
@given(
    dim=st.integers(1, 5), optimizer=st.sampled_from(OPTIMIZERS), dtype=st.sampled_from(spec.DTYPES),
    usage=st.sampled_from([policies.COUNTS, policies.SCORES]), parts=st.lists(usages(), max_size=4),
    rows=st.integers(0, 4),
)  # fmt: skip
def test_rows_and_what_waits_for_one_survive_writing_and_reading(
    dim: int, optimizer: spec.ServerOptimizer, dtype: str, usage: str, parts: list[RangeUsage], rows: int
) -> None:
    of = TableSpec("t", dim, optimizer, dtype=dtype, usage=usage)
    file = RowFile(of)
    for r, part in enumerate(parts):
        keys = np.arange(rows * r)
        file.add(
            r, keys, whole_rows(of, len(keys), r), np.full(len(keys), r, np.int32), keys[:1], full=False, usage=part
        )
    encoded = file.encode()
    data = b"".join(encoded.parts)
    reader = RowReader("f", of, encoded.header, lambda spans, take: [data[a : a + n] for a, n in spans])
    for found in (decode(of, data), reader.read(reader.segments[::-1])[::-1]):
        assert [piece.segment for piece in found] == list(encoded.segments)
        for r, (piece, part) in enumerate(zip(found, parts, strict=True)):
            assert piece.rows.tobytes() == whole_rows(of, rows * r, r).tobytes()
            assert piece.usage is not None
            assert piece.usage.keys.tolist() == part.keys.tolist()
            assert piece.usage.words.tolist() == part.words.tolist()
            assert piece.usage.sketch.tobytes() == part.sketch.tobytes()
            assert (piece.usage.time, list(piece.usage.sweeps)) == (part.time, part.sweeps)


def test_other_readers_see_usage_as_columns_and_waiting_keys_as_tensors() -> None:
    of = TableSpec("t", 2, spec.Accumulate(), usage=policies.SCORES)
    row = np.zeros((1, RowLayout.of(of).stride), np.uint8)
    row[0, 8:12] = np.array([1_700_000_000], np.uint32).view(np.uint8)
    row[0, 12:20] = np.array([3.5, 0.25], np.float32).view(np.uint8)
    file = RowFile(of)
    usage = RangeUsage(np.array([5, 6]), np.array([7 << 16 | 1, 9 << 16 | 2]), np.ones((2, 4), np.uint8), 77)
    file.add(3, np.array([4]), row, np.zeros(1, np.int32), full=True, usage=usage)
    there = load(b"".join(bytes(part) for part in file.encode().parts))
    assert there["last_use"].dtype == np.uint32
    assert there["last_use"].tolist() == [[1_700_000_000]]
    assert (there["count"].tolist(), there["score"].tolist()) == ([[3.5]], [[0.25]])
    assert (there["waiting"].tolist(), there["waiting_words"].tolist()) == ([5, 6], [7 << 16 | 1, 9 << 16 | 2])
    assert there["sketch"].tolist() == [1] * 8


def plain_file(of: TableSpec) -> bytes:
    file = RowFile(of)
    for r in (1, 4):
        stride = RowLayout.of(of).stride
        rows = np.arange(5 * stride, dtype=np.uint64).astype(np.uint8).reshape(5, stride)
        rows[:, 6:8] = rows[:, RowLayout.of(of).slots_at + 4 * 7 :] = 0
        file.add(r, np.arange(5) * r, rows, np.arange(5, dtype=np.int32), np.array([9, 11]), full=r == 4)
    return b"".join(file.encode().parts)


def test_a_file_of_a_table_without_usage_is_what_it_was_to_the_byte() -> None:
    data = plain_file(TableSpec("t", 3, spec.Adam(0.1), dtype="bfloat16"))
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == "411707e2390a82745f824abdc79b834c"


def test_a_manifest_has_the_version_that_its_tables_need(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, keeping_counts = (TableSpec("t", 3, spec.SGD(0.1), usage=usage) for usage in ("", policies.COUNTS))
    without = Manifest("c@1", 1, 0, 4, 1.0, {"default/t": (7, plain)}, ())
    keeping = replace(without, tables={"default/t": (7, keeping_counts)})
    assert json.loads(without.encode())["version"] == 2
    assert json.loads(keeping.encode())["version"] == 3
    assert [Manifest.decode(each.encode()) for each in (without, keeping)] == [without, keeping]
    monkeypatch.setattr(manifest, "READ", (1, 2))  # as versions do that know no usage
    assert Manifest.decode(without.encode()) == without
    with pytest.raises(CheckpointError, match="written by a newer elasticps"):
        Manifest.decode(keeping.encode())


def test_files_with_and_without_usage_are_not_taken_for_each_other() -> None:
    plain, keeping_counts = (TableSpec("t", 3, spec.SGD(0.1), usage=usage) for usage in ("", policies.COUNTS))
    file = RowFile(keeping_counts)
    file.add(0, np.arange(2), whole_rows(keeping_counts, 2, 1), np.zeros(2, np.int32), full=True)
    with pytest.raises(CheckpointError, match="this version reads 1"):
        decode(plain, b"".join(file.encode().parts))
    file = RowFile(plain)
    file.add(0, np.arange(2), whole_rows(plain, 2, 1), np.zeros(2, np.int32), full=True)
    with pytest.raises(CheckpointError, match="written without the usage of rows, which table 't' keeps"):
        decode(keeping_counts, b"".join(file.encode().parts))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"usage":"[[0, 2,', '"usage":"[[1, 2,'),
        ('"usage":"[[0, 2,', '"usage":"[[0, 3,'),
        ('"usage":"[[0, 2,', '"usage":"[[0, 2.0,'),
        ('"usage":"[[0, 2, 0, 2, 4, 77', '"usage":"[[0, 2, 0, 4, 4, 77'),
        ('"usage":"[[0, 2, 0, 2, 4, 77', '"usage":"[[0, 2, 0, 2, 4, -7'),
        ("[9, 0, 100, 0, 0, 55, 0, 0, 0.0]", "[9, 0, 100, 4, 0, 55, 0, 0, 0.0]"),
        ("[9, 0, 100, 0, 0, 55, 0, 0, 0.0]", "[9, 0, 100, 0, 9, 55, 0, 0, 0.0]"),
        ("[9, 0, 100, 0, 0, 55, 0, 0, 0.0]", "[9, 0, 100, 0, 0, 55, 0, 0, 9.0]"),
        ("[9, 0, 100, 0, 0, 55, 0, 0, 0.0]", "[9, 0, 100, 0, 0, 55, 0, 0, null]"),
    ],
)
def test_usage_that_cannot_be_is_refused(old: str, new: str) -> None:
    of = TableSpec("t", 2, spec.SGD(0.1), usage=policies.COUNTS)
    file = RowFile(of)
    sweep = Sweep(9, Predicate(Measure.LAST_USE, Reason.IDLE, 55), 0, 100)
    usage = RangeUsage(np.array([5, 6]), np.array([1, 2]), np.ones((2, 4), np.uint8), 77, (sweep,))
    file.add(0, np.arange(2), whole_rows(of, 2, 1), np.zeros(2, np.int32), full=True, usage=usage)
    data = b"".join(file.encode().parts)
    assert old.encode() in data
    altered = data.replace(old.encode(), new.encode())
    altered = (len(altered) - len(data) + int.from_bytes(data[:8], "little")).to_bytes(8, "little") + altered[8:]
    with pytest.raises(CheckpointError, match="no file of table 't', or was altered"):
        decode(of, altered)


def test_sweeps_of_several_checkpoints_are_joined_without_those_that_later_ones_cover() -> None:
    first, second = (Sweep(cut, Predicate(Measure.LAST_USE, Reason.IDLE, 50 * cut)) for cut in (1, 2))
    norm = Sweep(1, Predicate(Measure.NORM, Reason.SMALL_NORM, 7))
    assert joined([first, norm], [second]) == [norm, second]
    assert SegmentUsage.of(SegmentUsage(0, 1, 0, 2, 4, 9, (norm,)).document()).sweeps == (norm,)


def test_parts_of_a_range_are_put_together() -> None:
    one = RangeUsage(np.array([1]), np.array([2]), np.empty((0, 0), np.uint8), 5)
    other = RangeUsage(np.array([3]), np.array([4]), np.ones((1, 2), np.uint8), 9)
    both = together([one, other])
    assert (both.keys.tolist(), both.words.tolist(), both.sketch.tolist(), both.time) == ([1, 3], [2, 4], [[1, 1]], 9)
