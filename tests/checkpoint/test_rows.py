"""Rows survive writing and reading, and readers of torch and numpy see the same values."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from elasticps.checkpoint.rows import RowFile, RowReader, columns, decode
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout

OPTIMIZERS = [spec.SGD(0.1), spec.Adagrad(0.1), spec.RowAdagrad(0.1), spec.Adam(0.1), spec.FTRL(0.1)]


def some_rows(of: TableSpec, keys: list[int], seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Whole rows with zeros where nothing is: as the store has them."""
    layout = RowLayout.of(of)
    rows = np.random.default_rng(seed).integers(0, 256, (len(keys), layout.stride)).astype(np.uint8)
    rows[:, layout.weight_bytes : layout.slots_at] = 0
    rows[:, layout.slots_at + 4 * of.optimizer.slot_floats(of.dim) :] = 0
    return rows


SPECS = st.builds(
    lambda dim, optimizer, dtype: TableSpec("t", dim, optimizer, dtype=dtype),
    st.integers(1, 9),
    st.sampled_from(OPTIMIZERS),
    st.sampled_from(spec.DTYPES),
)
ADDED = st.tuples(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.lists(st.integers(-9, 9), max_size=3), st.booleans()
)


@given(of=SPECS, added=st.dictionaries(st.integers(0, 255), ADDED, max_size=5), pieces=st.integers(1, 3))
def test_rows_survive_writing_and_reading(of: TableSpec, added: dict[int, Any], pieces: int) -> None:
    file = RowFile(of)
    for r, (keys, deleted, full) in sorted(added.items()):
        rows = some_rows(of, keys, r)
        for at in range(pieces):
            some, stamps = np.array(keys, np.int64)[at::pieces], np.arange(len(keys), dtype=np.int32)[at::pieces]
            file.add(r, some, rows[at::pieces], stamps, np.array(deleted[at::pieces], np.int64), full=full)
    encoded = file.encode()
    data = b"".join(encoded.parts)
    assert encoded.nbytes == len(data)
    assert encoded.rows == file.rows == sum(len(keys) for keys, *_ in added.values())
    for whole in (True, False):
        pieces_read = decode(of, data)
        if not whole:
            reader = RowReader("f", of, encoded.header, lambda spans, take: [data[a : a + n] for a, n in spans])
            pieces_read = reader.read(reader.segments[::-1], lambda size: np.full(size, 7, np.uint8))[::-1]
        assert [piece.segment for piece in pieces_read] == list(encoded.segments)
        assert [piece.segment.range for piece in pieces_read] == sorted(added)
        for piece in pieces_read:
            keys, deleted, full = added[piece.segment.range]
            order = [i for at in range(pieces) for i in range(at, len(keys), pieces)]
            assert piece.segment.full == full
            assert piece.keys.tolist() == [keys[i] for i in order]
            assert piece.stamps.tolist() == order
            assert piece.rows.tobytes() == some_rows(of, keys, piece.segment.range)[order].tobytes()
            assert piece.deleted.tolist() == [key for at in range(pieces) for key in deleted[at::pieces]]


def test_other_readers_see_the_same_numbers(tmp_path: Any) -> None:
    of = TableSpec("t", 3, spec.Adam(0.1))
    keys = np.array([5, -1], np.int64)
    rows = np.zeros((2, RowLayout.of(of).stride), np.uint8)
    rows[:, :40] = np.arange(20, dtype=np.float32).reshape(2, 10).view(np.uint8)
    file = RowFile(of)
    file.add(4, keys, rows, np.array([7, 8], np.uint32).view(np.int32), np.array([11], np.int64), full=False)
    encoded = file.encode()
    there = load(b"".join(encoded.parts))
    assert set(there) == {"keys", "weight", *of.optimizer.slot_shapes(3), "stamps", "deleted"}
    assert there["keys"].tolist() == [5, -1]
    assert there["deleted"].tolist() == [11]
    assert there["weight"].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert there["step"].tolist() == [[3], [13]]
    assert there["exp_avg_sq"].tolist() == [[7, 8, 9], [17, 18, 19]]
    assert there["stamps"].tolist() == [7, 8]
    (tmp_path / "f").write_bytes(b"".join(encoded.parts))
    with safe_open(tmp_path / "f", "numpy") as opened:
        assert json.loads(opened.metadata()["ranges"])[0][:6] == [4, 0, 2, 0, 1, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_a_version_that_counted_no_updates_gets_the_workers_clock(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    of = TableSpec("t", 3, spec.Adam(0.1), dtype=dtype)
    layout = RowLayout.of(of)
    rows = some_rows(of, list(range(4)), 1)
    slots = rows[:, layout.slots_at : layout.slots_at + 28].copy().view(np.float32)
    slots[1, 4:] = 0  # never trained
    rows[:, layout.slots_at : layout.slots_at + 28] = slots.view(np.uint8)
    old = [column for column in columns(of) if column.name != "step"]
    with monkeypatch.context() as patched:
        patched.setattr("elasticps.checkpoint.rows.columns", lambda spec: old)
        file = RowFile(of)
        file.add(2, np.arange(4), rows, np.zeros(4, np.int32), full=True)
        encoded = file.encode()
    assert b"step" not in encoded.header
    data = b"".join(encoded.parts)
    reader = RowReader("f", of, encoded.header, lambda spans, take: [data[a : a + n] for a, n in spans], 700)
    (piece,) = reader.read(reader.segments, lambda size: np.full(size, 7, np.uint8))
    slots[:, 0] = [700, 0, 700, 700]
    rows[:, layout.slots_at : layout.slots_at + 28] = slots.view(np.uint8)
    assert piece.rows.tobytes() == rows.tobytes()


@settings(max_examples=30)
@given(at=st.integers(0, 10_000), to=st.integers(1, 255))
def test_a_byte_that_was_altered_is_found(at: int, to: int) -> None:
    of = TableSpec("t", 4, spec.Adagrad(0.1))
    file = RowFile(of)
    for r in (0, 3):
        file.add(r, np.arange(9), some_rows(of, list(range(9)), r), np.zeros(9, np.int32), np.arange(2), full=False)
    encoded = file.encode()
    data = bytearray(b"".join(encoded.parts))
    at = len(encoded.header) + at % (len(data) - len(encoded.header))
    data[at] ^= to
    with pytest.raises(CheckpointError, match="altered"):
        decode(of, bytes(data))


def test_a_file_of_another_kind_is_refused() -> None:
    of = TableSpec("t", 4, spec.Adagrad(0.1))
    file = RowFile(of)
    file.add(0, np.arange(9), some_rows(of, list(range(9)), 0), np.zeros(9, np.int32), full=True)
    data = b"".join(file.encode().parts)
    for wrong in (b"", b"{}", data[:50], data[: len(data) - 1], b"\xff" * 100, data.replace(b'"keys"', b'"yeks"')):
        with pytest.raises(CheckpointError):
            decode(of, wrong)
    with pytest.raises(CheckpointError, match="this version reads"):
        decode(of, data.replace(b'"elasticps":"1"', b'"elasticps":"2"'))
    for other in (
        TableSpec("t", 5, spec.Adagrad(0.1)),
        TableSpec("t", 4, spec.SGD(0.1)),
        TableSpec("t", 4, spec.Adagrad(0.1), dtype="float16"),
    ):
        with pytest.raises(CheckpointError):
            decode(other, data)
    assert len(columns(of)) == 2
