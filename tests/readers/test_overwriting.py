"""Windows whose rows replace rows that are here, in compiled code, beside block after block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.model.optimizers import Adagrad
from elasticps.model.spec import Normal, TableSpec
from elasticps.readers.rows import ReaderTables
from elasticps.store.journal import Journal
from elasticps.wire.frames import FrameError, unpack_header
from elasticps.wire.row_blocks import LocatedBlocks, RowBlock
from elasticps.wire.windows import WindowFrame

RANGES, KEYS, UNKNOWN = 16, 40, 9
WIDTHS = {3: 1, 5: 8, 6: 33}
NONE = np.empty(0, np.int64)


def tables() -> ReaderTables:
    made = ReaderTables(RANGES, None)
    for number, dim in WIDTHS.items():
        made.add(number, TableSpec(f"t{number}", dim, Adagrad(lr=0.1), Normal(std=0.1)).to_json())
    return made


def located(blocks: list[RowBlock]) -> LocatedBlocks:
    """The blocks, as they come from a socket."""
    data = b"".join(bytes(part) for part in WindowFrame(1, 1, 1, False, blocks).frame())
    frame = WindowFrame.of(unpack_header(data), np.frombuffer(bytearray(data[64:]), np.uint8), RANGES)
    assert isinstance(frame.blocks, LocatedBlocks)
    return frame.blocks


def take(here: ReaderTables, blocks: list[RowBlock], journal: Journal) -> tuple[int, int]:
    """As a reader does; rows that were overwritten, and all that changed."""
    overwritten, left = here.overwrite(located(blocks), journal)
    changed = overwritten
    for block in left:
        if block.table in here.by_id:
            change = here.by_id[block.table].apply(block, None)
            changed += len(change.keys) + len(change.deleted)
            for keys in (change.keys, change.deleted):
                journal.note(block.table, change.spec.dim, keys)
    return overwritten, changed


@given(st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_a_window_leaves_what_its_blocks_do_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    here, twin, journal, plain = tables(), tables(), Journal(1 << 12), Journal(1 << 12)
    shuffled = random.permutation([*WIDTHS, UNKNOWN])
    for _ in range(8):
        blocks = list[RowBlock]()
        for number in shuffled[random.random(len(shuffled)) < 0.7].tolist():
            named = random.choice(KEYS, random.integers(0, KEYS), replace=False)
            gone = named[: random.choice([0, 0, len(named) // 3])]
            keys = named[len(gone) :]
            cleared = random.integers(0, RANGES, random.choice([0, 0, 0, 1]))
            rows = random.standard_normal((len(keys), WIDTHS.get(number, 2))).astype(np.float32)
            blocks.append(RowBlock(number, keys, rows, gone, cleared))
        overwritten, changed = take(here, blocks, journal)
        expected = 0
        for block in blocks:
            if block.table != UNKNOWN:
                change = twin.by_id[block.table].apply(block, None)
                expected += len(change.keys) + len(change.deleted)
                for keys in (change.keys, change.deleted):
                    plain.note(block.table, change.spec.dim, keys)
        assert 0 <= overwritten <= changed == expected
        for number in WIDTHS:
            a, b = here.by_id[number], twin.by_id[number]
            assert a.rows == b.rows
            np.testing.assert_array_equal(a.pull(np.arange(KEYS)), b.pull(np.arange(KEYS)))
    noted = [
        sorted((table, *keys.tolist()) for table, keys in one.entries(0, one.end) if len(keys))
        for one in (journal, plain)
    ]
    assert noted[0] == noted[1]
    for one in (here, twin):
        one.close()


def test_rows_that_are_here_are_overwritten_at_once() -> None:
    here, journal = tables(), Journal(1 << 12)
    rows = np.ones((KEYS, 8), np.float32)
    block = RowBlock(5, np.arange(KEYS), rows, NONE, NONE)
    assert take(here, [block], journal) == (0, KEYS)
    assert take(here, [block._replace(rows=2 * rows)], journal) == (KEYS, KEYS)
    np.testing.assert_array_equal(here.by_id[5].pull(np.arange(KEYS)), 2 * rows)
    here.drop(5)
    assert take(here, [block], journal) == (0, 0)
    here.close()


def test_rows_of_another_width_are_refused() -> None:
    here, journal = tables(), Journal(1 << 12)
    here.by_id[5].apply(RowBlock(5, np.arange(3), np.ones((3, 8), np.float32), NONE, NONE), None)
    with pytest.raises(FrameError, match="rows of 7 words"):
        take(here, [RowBlock(5, np.arange(3), np.ones((3, 7), np.float32), NONE, NONE)], journal)
    np.testing.assert_array_equal(here.by_id[5].pull(np.arange(3)), np.ones((3, 8), np.float32))
    here.close()
