"""The map from ranges to descriptors against a dict; what tables cost by their ranges; and that ranges that come again
begin with nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elasticps.model import spec
from elasticps.model.policies import Capacity, MinCount
from elasticps.store import Store, Table
from elasticps.store.native import kernel
from elasticps.store.range_map import RangeMap, place_of

BLANK = 7, 0, -3
WIDTH = 1 + len(BLANK)
AT, LAST = 2, 3  # fields of the header


@kernel
def look_up(header: np.ndarray, words: np.ndarray, ranges: np.ndarray, out: np.ndarray) -> None:
    for i in range(ranges.shape[0]):
        out[i] = place_of(words, header[LAST], WIDTH, ranges[i])


class MapMachine(RuleBasedStateMachine):
    """The twin is a dict of the words of ranges that differ from blank ones."""

    @initialize(bits=st.integers(1, 7))
    def create(self, bits: int) -> None:
        self.ranges = 1 << bits
        self.header = np.zeros(4, np.int64)
        self.map = RangeMap(self.ranges, BLANK, self.header, AT)
        self.twin: dict[int, list[int]] = {}

    def _twin(self, r: int) -> list[int]:
        return self.twin.get(r, [*BLANK])

    @rule(r=st.integers(0, 127), word=st.integers(1, len(BLANK)), value=st.integers(-5, 5))
    def set_word(self, r: int, word: int, value: int) -> None:
        self.map.set(r % self.ranges, word, value)
        self.twin.setdefault(r % self.ranges, [*BLANK])[word - 1] = value

    @rule(ranges=st.sets(st.integers(0, 127), max_size=20), word=st.integers(1, len(BLANK)), value=st.integers(-5, 5))
    def write(self, ranges: set[int], word: int, value: int) -> None:
        some = np.array([*{r % self.ranges for r in ranges}], np.int64)
        self.map.write(some, word, value + np.arange(len(some)))
        for i, r in enumerate(some.tolist()):
            self.twin.setdefault(r, [*BLANK])[word - 1] = value + i

    @rule(step=st.sampled_from([1, 2, 8]), count=st.integers(1, 40))
    def set_in_a_row(self, step: int, count: int) -> None:
        for r in range(0, step * count, step):
            self.set_word(r, 1, r)

    @rule(r=st.integers(0, 127))
    def add(self, r: int) -> None:
        at = self.map.add(r % self.ranges)
        assert self.map.words.ravel()[at : at + WIDTH].tolist() == [r % self.ranges, *self._twin(r % self.ranges)]

    @rule(r=st.integers(0, 127))
    def drop(self, r: int) -> None:
        self.map.drop(r % self.ranges)
        self.twin.pop(r % self.ranges, None)

    @rule(keep=st.integers(0, 3))
    def drop_most(self, keep: int) -> None:
        for r in sorted(self.twin)[keep:]:
            self.drop(r)

    @rule()
    def clear(self) -> None:
        self.map.clear()
        self.twin.clear()

    @invariant()
    def agrees(self) -> None:
        every = np.arange(self.ranges)
        found = np.empty(self.ranges, np.int64)
        words = self.map.words.reshape(-1)
        last = len(self.map.words) - 1 if len(self.map.words) < self.ranges else -1
        assert (words.ctypes.data, last) == tuple(self.header[[AT, LAST]].tolist())
        look_up(self.header, words, every, found)
        for word in range(1, WIDTH):
            expected = [self._twin(r)[word - 1] for r in every.tolist()]
            assert words[found + word].tolist() == expected
            assert self.map.read(every, word).tolist() == expected
            assert self.map.everywhere(word).tolist() == expected
            assert [self.map.get(r, word) for r in every[::7].tolist()] == expected[::7]
        filled = [r for r, words in sorted(self.twin.items()) if words != [*BLANK]]
        assert self.map.there.tolist() == filled

    @invariant()
    def takes_little(self) -> None:
        """At most a place for each range."""
        assert len(self.map.words) <= self.ranges
        if not self.twin:
            assert len(self.map.words) <= 16


MapMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestMap = MapMachine.TestCase


def test_places_follow_the_ranges_that_are_there() -> None:
    made = RangeMap(16384, BLANK)
    for r in range(0, 16384, 496):  # the 34 that a server holds of a thousand
        made.set(r, 1, r)
    assert len(made.words) == 128
    assert made.nbytes == 128 * 8 * WIDTH
    for r in range(0, 16384, 496):
        made.drop(r)
    assert len(made.words) <= 2


def test_a_write_reaches_descriptors_that_were_blank() -> None:
    made = RangeMap(64, BLANK)
    made.add(0)
    made.write(np.arange(3), 1, np.arange(3))
    assert made.there.tolist() == [0, 1, 2]
    assert made.read(np.arange(4), 1).tolist() == [0, 1, 2, BLANK[0]]


@pytest.mark.parametrize("r", [-1, 64, 1 << 40])
def test_what_is_no_range_is_refused_and_not_searched_for(r: int) -> None:
    made = RangeMap(64, BLANK)
    for each in range(64):  # no place is free
        made.set(each, 1, 1)
    every = np.array([3, r])
    with pytest.raises(IndexError, match="64 ranges"):
        made.get(r, 1)
    with pytest.raises(IndexError, match="64 ranges"):
        made.set(r, 1, 2)
    with pytest.raises(IndexError, match="64 ranges"):
        made.drop(r)
    with pytest.raises(IndexError, match="64 ranges"):
        made.read(every, 1)
    with pytest.raises(IndexError, match="64 ranges"):
        made.write(every, 1, 2)
    assert made.everywhere(1).tolist() == [1] * 64


# --- tables -----------------------------------------------------------------------------------------------------------

PLAIN = spec.TableSpec("t", 2, spec.Accumulate())
GROWING = spec.TableSpec("g", 2, spec.Accumulate(), admission=MinCount(2), eviction=(Capacity(100),))
NOTHING = np.empty(0, np.float32)


def array_bytes(table: Table) -> int:
    """Bytes of all arrays that belong to a table alone."""
    seen: set[int] = set()
    shared = {id(table._cuts), id(table._memory), id(table.spec), id(table._cuts.stamps)}
    if table.lifecycle is not None:
        shared.add(id(table.lifecycle.times))

    def count(thing: object) -> int:
        if id(thing) in seen or id(thing) in shared:
            return 0
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            return thing.nbytes if thing.base is None else count(thing.base)
        if isinstance(thing, dict):
            return sum(map(count, thing.values()))
        if isinstance(thing, list | tuple):
            return sum(map(count, thing))
        if type(thing).__module__.startswith("elasticps.store"):
            return sum(map(count, vars(thing).values()))
        return 0

    return count(vars(table))


@pytest.mark.parametrize("described", [PLAIN, GROWING], ids=["plain", "growing"])
def test_an_empty_table_takes_less_than_8_kb_whatever_the_ranges(described: spec.TableSpec) -> None:
    sizes = {}
    for ranges in (64, 1024, 16384):
        store, every = Store(ranges), np.arange(ranges)
        table = store.create(described, 3)
        if table.lifecycle is not None:
            table.lifecycle.begin(every, described)
        store.pass_cut(every, 7)
        sizes[ranges] = array_bytes(table)
    bits = 2048 - 8 if described.usage else 0  # one for each range, of policies that its log has said
    assert sizes[16384] == sizes[64] + bits <= 8 << 10


def test_a_thousand_empty_tables_take_the_same_whatever_the_ranges() -> None:
    found = []
    for ranges in (64, 16384):
        store = Store(ranges)
        for number in range(1000):
            store.create(PLAIN, number)
        found.append(sum(map(array_bytes, store.tables.values())))
    assert found[0] == found[1] <= 8_192_000


def test_a_table_that_had_rows_everywhere_is_small_again_without_them() -> None:
    store, keys = Store(1024), np.arange(20_000)
    for number, described in enumerate((PLAIN, GROWING)):
        table = store.create(described, number)
        before = array_bytes(table), table.descriptor_bytes
        for _ in range(2):
            table.apply(keys, np.ones((len(keys), 2), np.float32), NOTHING)
        assert table.rows == len(keys)
        assert table.descriptor_bytes > 40 * 1000
        store.erase(np.arange(1024))
        assert table.rows == 0
        table._rows = table._rows[:64].copy()  # addresses of the largest batch
        assert (array_bytes(table), table.descriptor_bytes) <= (before[0] + 500, before[1] + 500)


def test_a_range_that_comes_again_has_nothing_of_before() -> None:
    """Neither counters nor stamps, policies or rows that were kept aside."""
    ranges, keys = 64, np.arange(3000)
    store, every, ones = Store(ranges), np.arange(ranges), np.ones((len(keys), 2), np.float32)
    table = store.create(GROWING, 3)
    life = table.lifecycle
    assert life is not None
    life.begin(every, GROWING)
    store.advance(every, 100)
    store.pass_cut(every, 5)
    for _ in range(2):
        table.apply(keys, ones, NOTHING, 1, 1)
    life.set_policies(every[:10], None, ())
    assert int(life.admitted.sum()) == 3000
    gone = every[::2]
    store.erase(gone)
    assert life.admitted[gone].tolist() == [0] * len(gone)
    assert life.decided.tolist() == every[1::2].tolist()
    assert [life.words(r) for r in gone.tolist()] == [[]] * len(gone)
    assert table.counts[gone].tolist() == [0] * len(gone)
    assert store.words(0) == [0, 0, 0]
    # It comes again with pushes of before, and is like a store that never knew more.
    fresh = Store(ranges)
    twin = fresh.create(GROWING, 3)
    assert twin.lifecycle is not None
    for held, of in ((store, life), (fresh, twin.lifecycle)):
        of.begin(gone, GROWING)
        held.advance(gone, 7)
        held.load_cut(4, 2, 1)
    mine = keys[np.isin(table.ranges_of(keys), gone)]
    for one in (table, twin):
        for _ in range(2):
            one.apply(mine, ones[: len(mine)], NOTHING, 1, 1)
    for r in gone.tolist():
        assert store.words(r) == fresh.words(r)
        assert table.digest_range(r) == twin.digest_range(r)
        for one in (table, twin):
            found, words = one.list_words(r, 0, 1 << 62)
            assert (words >> 48 == (1 if r == 4 else 0)).all()
            assert len(found) == one.count_range(r) > 0
    assert life.counts(gone) == twin.lifecycle.counts(gone)
