"""The journal of changed keys beside a twin that keeps them all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elasticps as eps
from elasticps.model.key_share import ALL_KEYS, KeyShare, share_of
from elasticps.store import Store
from elasticps.store.codec import Codec
from elasticps.store.journal import ENTRY_BYTES, Journal, followed_tables
from elasticps.wire.frames import Header, Kind
from elasticps.wire.row_blocks import RowBlock
from elasticps.wire.windows import WindowFrame

RANGES, DIM = 8, 7
PLAIN = Codec([], DIM)
NONE = np.empty(0, np.int64)


def store_with(journal: Journal, dtype: str = "float32") -> Store:
    store = Store(RANGES)
    store.keep_journal(journal)
    for number in (1, 2):
        spec = eps.TableSpec(f"t{number}", DIM, eps.Adagrad(lr=0.1), eps.Normal(std=1.0, seed=number), dtype)
        store.create(spec, number)
    return store


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.tuples(st.sampled_from("pdc"), st.integers(1, 2)), max_size=30))
def test_what_changed_is_read_as_it_is_now(seed: int, steps: list[tuple[str, int]]) -> None:
    rng, journal = np.random.default_rng(seed), Journal(64)
    store = store_with(journal)
    included = rng.integers(0, 2, RANGES)
    start, changed, cleared = 0, dict[int, set[int]](), dict[int, set[int]]()
    for what, number in steps:
        table = store.tables[number]
        keys = rng.integers(0, 50, rng.integers(0, 20))
        if what == "p":
            table.apply(keys, rng.random((len(keys), DIM), np.float32), np.zeros(1, np.float32))
            store.note_changed(number, keys)
        elif what == "d":
            keys = np.unique(keys[~table.missing(keys)])
            table.delete(keys)  # the table notes that by itself
        else:
            ranges = np.unique(rng.integers(0, RANGES, 2))
            for r in ranges.tolist():
                store.clear(number, r)
            journal.note_cleared(number, ranges)
            cleared.setdefault(number, set()).update(ranges.tolist())
            keys = keys[:0]
        changed.setdefault(number, set()).update(keys.tolist())
        if rng.random() < 0.3 or journal.oldest > start:
            if journal.oldest <= start:
                check(store, journal, start, included, changed, cleared)
            start, changed, cleared = journal.end, {}, {}
    if journal.oldest <= start:
        check(store, journal, start, included, changed, cleared)


def check(
    store: Store, journal: Journal, start: int, included: np.ndarray, changed: dict[int, set[int]],
    cleared: dict[int, set[int]],
) -> None:  # fmt: skip
    end = journal.limit(start, 1 << 20, 1 << 40)
    assert end == journal.end
    found = {block.table: block for block in read(store, journal, start, end, included)}
    assert len(found) == len(read(store, journal, start, end, included))
    for number, table in store.tables.items():
        block = found.pop(number, RowBlock(number, NONE, np.empty((0, DIM), np.float32), NONE, NONE))
        named = np.array(sorted(changed.get(number, ())), np.int64)
        named = named[included[table.ranges_of(named)] != 0]
        there = ~table.missing(named)
        assert sorted(block.keys.tolist()) == named[there].tolist()
        assert sorted(block.gone.tolist()) == named[~there].tolist()
        rows = np.empty((len(block.keys), DIM), np.float32)
        table.gather(block.keys, rows)
        assert (block.rows == rows).all()
        assert block.cleared.tolist() == [r for r in sorted(cleared.get(number, ())) if included[r]]
    assert not found


def read(
    store: Store, journal: Journal, start: int, end: int, included: np.ndarray, codec: Codec = PLAIN,
    share: KeyShare = ALL_KEYS,
) -> list[RowBlock]:  # fmt: skip
    """What the journal writes of all tables, as a reader takes it."""
    tables = followed_tables((number, table.header, codec, share) for number, table in store.tables.items())
    count, written = journal.read(start, end, tables, included)
    header, body = Header(Kind.WINDOW, items=count), np.frombuffer(bytes(written), np.uint8)
    found = WindowFrame.of(header, body, RANGES)
    assert found.frame()[1] == written  # as plain code writes it
    return list(found.blocks)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("filters", [[], [eps.Float16()], [eps.BFloat16()], [eps.Int8()]])
def test_rows_are_encoded_as_the_codec_does(dtype: str, filters: list[eps.Float16]) -> None:
    journal, keys = Journal(1 << 10), np.arange(40)
    store = store_with(journal, dtype)
    table = store.tables[1]
    table.put(keys, np.random.default_rng(1).random((len(keys), DIM), np.float32))
    journal.note(1, DIM, keys)
    codec = Codec(filters, DIM)
    (found,) = read(store, journal, 0, journal.end, np.ones(RANGES, np.int64), codec)
    rows = np.empty((len(keys), DIM), np.float32)
    table.gather(found.keys, rows)
    assert found.rows.tobytes() == codec.encode(rows).tobytes()


def test_shares_and_parts_of_what_changed_add_up_to_all_of_it() -> None:
    """Read in several parts, of which some are larger than the one before, and by the readers of three shares."""
    rng, journal, every = np.random.default_rng(3), Journal(1 << 17), np.ones(RANGES, np.int64)
    store, named = store_with(journal), {1: set[int](), 2: set[int]()}
    for count in (3, 1, 5000, 20, 9000, 2):
        for number in (1, 2):
            keys = rng.integers(0, 20_000, count)
            store.tables[number].put(keys[: count // 2], rng.random((count // 2, DIM), np.float32))
            journal.note(number, DIM, keys)
            named[number].update(keys.tolist())
    start, ends = 0, list[int]()
    there: dict[int, set[int]] = {1: set(), 2: set()}
    gone: dict[int, set[int]] = {1: set(), 2: set()}
    while start < journal.end:
        ends.append(end := journal.limit(start, 4000, 1 << 40))
        for ordinal in range(1, 4):
            for block in read(store, journal, start, end, every, share=KeyShare(ordinal, 3)):
                rows = np.empty((len(block.keys), DIM), np.float32)
                store.tables[block.table].gather(block.keys, rows)
                assert (block.rows == rows).all()
                assert set(share_of(np.concatenate([block.keys, block.gone]), 3).tolist()) == {ordinal}
                there[block.table].update(block.keys.tolist())
                gone[block.table].update(block.gone.tolist())
        start = end
    assert len(ends) > 3
    for number, table in store.tables.items():
        keys = np.array(sorted(named[number]), np.int64)
        missing = table.missing(keys)
        assert (sorted(there[number]), sorted(gone[number])) == (keys[~missing].tolist(), keys[missing].tolist())


def test_what_does_not_fit_is_lost_with_all_before() -> None:
    journal = Journal(16)
    journal.note(1, DIM, np.arange(3))
    assert journal.oldest == 0
    journal.note(1, DIM, np.arange(100))
    assert journal.oldest == journal.end
    start = journal.end
    journal.note(2, DIM, np.arange(5))
    assert [(number, keys.tolist()) for number, keys in journal.entries(start, journal.end)] == [(2, [0, 1, 2, 3, 4])]
    journal.note(1, DIM, np.arange(12))
    assert journal.oldest > start


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_frame_has_about_so_many_keys_and_bytes_of_rows_however_many_were_noted_at_once(data: st.DataObject) -> None:
    journal, noted = Journal(1 << 14), list[tuple[int, int, int]]()  # table, floats of its rows, key
    for width in data.draw(st.lists(st.sampled_from([1, 8, 5000, 65536]), min_size=1, max_size=8)):
        table, n = 1 + width % 7, data.draw(st.integers(1, 300))
        keys = np.arange(n) + len(noted)
        noted += [(table, width, key) for key in keys.tolist()]
        journal.note(table, width, keys)
    most, most_bytes = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 1 << 24))
    at, next_key = 0, 0
    while at < journal.end:
        end = journal.limit(at, most, most_bytes)
        assert end > at
        entries = list(journal.entries(at, end))
        frame = noted[next_key : next_key + sum(len(keys) for _, keys in entries)]
        assert [(table, key) for table, keys in entries for key in keys.tolist()] == [(t, key) for t, _, key in frame]
        last = len(entries[-1][1])
        assert len(frame) - last < most
        assert sum(4 * width for _, width, _ in frame[: len(frame) - last]) < most_bytes
        assert last == 1 or sum(4 * width for _, width, _ in frame[len(frame) - last :]) <= ENTRY_BYTES
        at, next_key = end, next_key + len(frame)
    assert next_key == len(noted)
