"""Frames in which a reader reads a range: there and back, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.kernels.hashing import HASH_END
from elasticps.wire.frames import DIGESTS, Buffer, FrameError, Header, Kind, unpack_header
from elasticps.wire.range_parts import (
    ALL_TABLES,
    MAX_INTERVALS,
    RangePart,
    ReadCursor,
    ReadRange,
    TableCells,
    TableInterval,
    hashes_between,
)
from elasticps.wire.row_blocks import RowBlock

RANGES = 16
WIDTH = HASH_END // RANGES
NONE = np.empty(0, np.int64)


def there(buffers: Sequence[Buffer]) -> tuple[Header, np.ndarray]:
    data = b"".join(bytes(one) for one in buffers)
    return unpack_header(data), np.frombuffer(data[64:], np.uint8)


def block(table: int, rows: int = 3, words: int = 5) -> RowBlock:
    rng = np.random.default_rng(rows)
    return RowBlock(table, np.arange(rows), rng.random((rows, words), np.float32), NONE, NONE)


def cells(table: int, low: int, high: int, shift: int) -> TableCells:
    return TableCells(table, shift, np.arange(((high - low - 1) >> shift) + 1, dtype=np.uint64))


def request() -> ReadRange:
    """Of range 3, from the middle of table 5 to that of table 9, of which the reader has rows, as of table 7."""
    low, middle = 3 * WIDTH, 3 * WIDTH + WIDTH // 2
    found = cells(5, middle, low + WIDTH, 50), cells(7, low, low + WIDTH, 49), cells(9, low, middle + 7, 51)
    return ReadRange(8, 5, 3, 100, ReadCursor(5, middle), ReadCursor(9, middle + 7), found)


def answer() -> RangePart:
    """All rows of table 5, none of table 6, some of table 7, and some of the beginning of table 9."""
    question, (low, middle) = request(), (3 * WIDTH, 3 * WIDTH + WIDTH // 2)
    first = TableInterval(middle, low + WIDTH, block(5))
    some = TableInterval(low, low + WIDTH, block(7, 4, 1), 49, np.arange(len(question.cells[1].digests)) % 3 == 0)
    last = TableInterval(low, low + (5 << 51), block(9, 0), 51, np.zeros(5, np.bool_))
    return RangePart(8, 6, 3, question.start, ReadCursor(9, low + (5 << 51)), [first, some, last])


def same(a: Any, b: Any) -> bool:
    """Whether two values of tuples and arrays are equal."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_questions_and_answers_come_as_they_were_made() -> None:
    for question in (request(), request()._replace(cells=()), ReadRange(8, 5, 15, 100, ReadCursor(7))):
        assert same(ReadRange.of(*there(question.frame()), RANGES), question)
    assert len(there(ReadRange(8, 5, 15, 100, ReadCursor(7)).frame())[1]) == 0
    for part in (answer(), RangePart(8, 6, 0, ReadCursor(0), ALL_TABLES, [])):
        assert same(RangePart.of(*there(part.frame()), RANGES), part)


@given(st.integers(0, 4), st.integers(0, 40), st.integers(0, 4), st.integers(0, 40), st.integers(0, 3))
def test_an_interval_has_the_hashes_between_two_cursors(a: int, x: int, b: int, y: int, r: int) -> None:
    """As a plain list of all places of a range has them, in their order."""
    ranges, unit = 4, HASH_END // 32  # a range has 8 of these
    start, end = ReadCursor(a, min(x * unit, HASH_END)), ReadCursor(b, min(y * unit, HASH_END))
    every = [ReadCursor(table, (8 * r + i) * unit) for table in range(5) for i in range(8)]
    between = [one for one in every if start <= one < end]
    for table in range(5):
        low, high = hashes_between(table, r, ranges, start, end)
        expected = [one.hash for one in between if one.table == table]
        assert list(range(low, high, unit)) == expected


def refused(question: ReadRange, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        ReadRange.of(*there(question.frame()), RANGES)


def test_a_question_of_what_cannot_be_is_refused() -> None:
    good = request()
    refused(good._replace(range=RANGES), "range 16 of 16")
    refused(good._replace(rows=1 << 20), "1048576 rows")
    refused(good._replace(end=good.start), "of range 3 of 16, from")
    refused(good._replace(end=ReadCursor(1 << 31, 1)), "of range 3 of 16, from")
    refused(good._replace(start=ReadCursor(5, HASH_END + 1)), "of range 3 of 16, from")
    first, second, last = good.cells
    refused(good._replace(cells=(second, first, last)), "has cells of")
    refused(good._replace(cells=(first, first, last)), "has cells of")
    refused(good._replace(cells=(first, second._replace(table=10), last)), "has cells of")
    refused(good._replace(cells=(first._replace(table=4), second, last)), "has cells of")
    refused(good._replace(cells=(first, second._replace(shift=62))), "has cells of")
    refused(good._replace(cells=(first, second._replace(shift=-1))), "has cells of")
    refused(good._replace(cells=(first, second._replace(shift=48))), "do not fit")
    refused(good._replace(cells=(first, second._replace(shift=50))), "bytes are left")
    refused(good._replace(cells=(second._replace(shift=30),)), "cells of at most")  # before anything is allocated
    many = [TableCells(10 + i, 61, np.zeros(1, np.uint64)) for i in range(MAX_INTERVALS + 1)]
    refused(good._replace(end=ALL_TABLES, cells=tuple(many)), "announces 65")
    header, body = there(good.frame())
    with pytest.raises(FrameError, match="bytes are left"):
        ReadRange.of(header._replace(flags=0), body, RANGES)
    with pytest.raises(FrameError, match="do not fit"):
        ReadRange.of(header._replace(flags=DIGESTS), body[:16], RANGES)


def test_an_answer_of_what_cannot_be_is_refused() -> None:
    good = answer()
    first, some, last = good.intervals
    assert some.differing is not None
    wrong: list[tuple[RangePart, str]] = [
        (good._replace(range=RANGES), "range 16 of 16"),
        (good._replace(end=good.start), "of range 3 of 16, from"),
        (good._replace(start=ReadCursor(-1)), "of range 3 of 16, from"),
        (good._replace(intervals=[some, first]), "has rows of table 5"),
        (good._replace(intervals=[first, first]), "has rows of table 5"),
        (good._replace(intervals=[first._replace(block=block(4))]), "has rows of table 4"),
        (good._replace(intervals=[first._replace(block=block(10))]), "has rows of table 10"),
        (good._replace(intervals=[some._replace(shift=48)]), "cells of 2"),
        (good._replace(intervals=[some._replace(differing=some.differing[:-1])]), "cells of 2"),
        (good._replace(intervals=[some._replace(differing=np.zeros(1 << 15, np.bool_))]), "32768 cells of 2"),
        (good._replace(intervals=[TableInterval(0, 1, block(6, 0))] * (MAX_INTERVALS + 1)), "65 tables"),
        (good._replace(intervals=[some._replace(shift=63)]), "cells of 2"),
    ]
    for part, why in wrong:
        with pytest.raises(FrameError, match=why):
            RangePart.of(*there(part.frame()), RANGES)
    header, body = there(good._replace(intervals=[first, last]).frame())
    with pytest.raises(FrameError):
        RangePart.of(header._replace(items=1), body, RANGES)
    with pytest.raises(FrameError):
        RangePart.of(header._replace(items=3), body, RANGES)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_damaged_is_refused_or_read_within_its_bounds(seed: int) -> None:
    rng, refusals = np.random.default_rng(seed), 0
    for buffers in (request().frame(), answer().frame()):
        header, body = there(buffers)
        for _ in range(300):
            damaged = body.copy()
            for _ in range(int(rng.integers(0, 3))):
                at = int(rng.integers(len(damaged) // 8)) * 8
                damaged[at : at + 8].view(np.int64)[0] = int(
                    rng.choice([-1, 0, 1, RANGES, 1 << 20, 1 << 32, 1 << 62, int(rng.integers(1 << 62))])
                )
            damaged = damaged[: len(damaged) - 8 * int(rng.integers(0, 3))]
            changed = header._replace(
                items=int(rng.choice([header.items, 0, 1 << 31])), table=int(rng.choice([header.table, 1 << 31, 3])),
            )  # fmt: skip
            try:
                if header.kind == Kind.READ_RANGE:
                    ReadRange.of(changed, damaged, RANGES)
                else:
                    RangePart.of(changed, damaged, RANGES)
            except FrameError:
                refusals += 1
    assert refusals > 100
