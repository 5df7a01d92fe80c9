"""Frames of readers: there and back, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from elasticps.wire.frames import Buffer, FrameError, Header, Kind, unpack_header
from elasticps.wire.row_blocks import RowBlock
from elasticps.wire.windows import (
    Progresses,
    Subscribe,
    Subscribed,
    WindowFrame,
    window_ack,
)
from replication.step_records import record_of

RANGES = 16


def there(buffers: Sequence[Buffer]) -> tuple[Header, np.ndarray]:
    data = b"".join(bytes(one) for one in buffers)
    return unpack_header(data), np.frombuffer(data[64:], np.uint8)


def block(rows: int = 3, words: int = 5) -> RowBlock:
    rng = np.random.default_rng(rows)
    return RowBlock(7, np.arange(rows), rng.random((rows, words), np.float32), np.array([9, 8]), np.array([1]))


def same(a: RowBlock, b: RowBlock) -> bool:
    pairs: Any = zip(a[1:], b[1:], strict=True)
    return a.table == b.table and all(np.array_equal(x, y) for x, y in pairs)


def test_subscriptions_come_as_they_were_sent() -> None:
    one = Subscribe(
        3, 5, np.array([2, 4]), np.array([-1, 77]), np.array([0, 3]), ("a", "b"), "int8", 20, 1000
    )  # fmt: skip
    header, body = there(one.frame())
    found = Subscribe.of(header, body, RANGES)
    assert found[:2] + found[5:] == one[:2] + one[5:]
    assert all((a == b).all() for a, b in zip(found[2:5], one[2:5], strict=True))
    answer = Subscribed(3, 5, np.array([4]), np.array([2]))
    got = Subscribed.of(*there(answer.frame()), RANGES)
    assert got[:2] == (3, 5)
    assert got.continued.tolist() == [4]
    assert got.unknown.tolist() == [2]


@pytest.mark.parametrize("rows", [0, 1, 3, 4])
def test_windows_come_as_they_were_made(rows: int) -> None:
    record = record_of(5, 3, np.arange(RANGES) % 2 == 0)
    runs = Progresses(np.array([[1, 0, 15, 640]]))
    one = WindowFrame(
        5, 9, 123456, True, [block(rows), block(2)], np.array([3, 4]), np.array([70, 80]), runs, [(1, record)],
        [(7, '{"name": "x"}')], [6],
    )  # fmt: skip
    found = WindowFrame.of(*there(one.frame()), RANGES)
    assert found[:4] == one[:4]
    assert all(same(a, b) for a, b in zip(found.blocks, one.blocks, strict=True))
    assert (found.ranges.tolist(), found.positions.tolist()) == ([3, 4], [70, 80])
    assert found.progress.runs.tolist() == runs.runs.tolist()
    assert (found.records, found.tables, found.dropped) == ([(1, record)], one.tables, [6])
    part = WindowFrame(5, 10, 1, False, [block(rows)])
    got = WindowFrame.of(*there(part.frame()), RANGES)
    assert not got.complete
    assert all(same(a, b) for a, b in zip(got.blocks, part.blocks, strict=True))


def test_an_acknowledgement_names_a_window() -> None:
    assert unpack_header(window_ack(12)).clock == 12


@pytest.mark.parametrize("seed", range(20))
def test_what_is_damaged_is_refused_or_read_within_its_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = WindowFrame(5, 9, 1, True, [block(4)], np.array([3]), np.array([70]), tables=[(7, "{}")])
    frames = [whole.frame(), Subscribe(1, 5, np.array([2]), np.array([1]), np.array([0]), None, "", 5).frame()]
    for buffers in frames:
        header, body = there(buffers)
        for _ in range(200):
            damaged = body.copy()
            for _ in range(int(rng.integers(1, 4))):
                damaged[rng.integers(len(damaged))] = rng.integers(256)
            damaged = damaged[: len(damaged) - 8 * int(rng.integers(0, 3))]
            changed = header._replace(items=int(rng.choice([header.items, 0, 1 << 31])))
            try:
                if header.kind == Kind.WINDOW:
                    WindowFrame.of(changed, damaged, RANGES)
                else:
                    Subscribe.of(changed, damaged, RANGES)
            except FrameError:
                pass


def test_runs_join_ranges_that_follow_each_other() -> None:
    ranges = np.array([0, 1, 2, 5, 6])
    before, now = np.zeros((2, 5), np.int64), np.array([[4, 4, 4, 4, 4], [0, 3, 3, 0, 8]])
    found = Progresses.between(np.array([1, 2]), ranges, before, now).runs.tolist()
    assert found == [[1, 0, 2, 4], [1, 5, 6, 4], [2, 1, 2, 3], [2, 6, 6, 8]]


def outcome(read: Any, header: Header, body: np.ndarray) -> Any:
    """A window in plain values, or that there is none."""
    try:
        found = read(header, body, RANGES)
    except FrameError:
        return None
    blocks = [(one.table, *(each.tobytes() for each in one[1:]), one.rows.shape) for one in found.blocks]
    state = [found.ranges.tolist(), found.positions.tolist(), found.progress.runs.tolist(), list(found.records)]
    return found[:4], blocks, state, list(found.tables), list(found.dropped)


@pytest.mark.parametrize("seed", range(30))
def test_a_window_is_located_as_it_is_parsed(seed: int) -> None:
    """The compiled loop finds the parts that the parser finds, and refuses what that refuses."""
    rng = np.random.default_rng(seed)
    complete = bool(rng.random() < 0.7)
    named = np.flatnonzero(rng.random(RANGES) < 0.4)
    first = rng.integers(0, RANGES, int(rng.integers(0, 5)))
    runs = np.stack([first, first, np.minimum(first + 2, RANGES - 1), first * 64], axis=1)
    records = [(1, record_of(5, 3, np.arange(RANGES) % 2 == 0))] if rng.random() < 0.2 else []
    blocks = [block(int(rng.integers(0, 5)), int(rng.integers(1, 6))) for _ in range(rng.integers(0, 3))]
    one = WindowFrame(5, 9, 1, complete, blocks, named, named + 7, Progresses(runs), records)
    header, body = there((one if complete else WindowFrame(5, 9, 1, False, blocks)).frame())
    assert outcome(WindowFrame.of, header, body) == outcome(WindowFrame.parse, header, body) is not None
    for _ in range(300):
        damaged = body.copy()
        for _ in range(int(rng.integers(0, 3)) if len(body) else 0):
            at = int(rng.integers(len(damaged) // 8)) * 8
            damaged[at : at + 8].view(np.int64)[0] = int(rng.choice([-1, 0, 1, RANGES, 1 << 20, 1 << 32, 1 << 62]))
        damaged = damaged[: max(0, len(damaged) - int(rng.choice([0, 0, 0, 4, 8, 16])))]
        changed = header._replace(items=int(rng.choice([len(blocks), len(blocks), 0, 1, 3])))
        assert outcome(WindowFrame.of, changed, damaged) == outcome(WindowFrame.parse, changed, damaged)
