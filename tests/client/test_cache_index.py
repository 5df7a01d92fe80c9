"""The index of a cache beside a dictionary and a list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.client.core.cache_index import AS_OF, SLOTS_FETCHED_BY, CacheIndex, State


@dataclass
class Entry:
    """The twin's knowledge of a key."""

    as_of: int = -1
    fetched_by_batch: int = 0
    checked: bool = False
    slots: bool = False
    slots_fetched: int = 0
    used_at: int = -1
    loose: bool = False


class Twin:
    """Keys in the order of their use, the least recent first."""

    def __init__(self, rows: int, slots: bool) -> None:
        self.rows, self.has_slots, self.given_up = rows, slots, 0
        self.stored: dict[int, Entry] = {}

    def find(self, keys: list[int]) -> None:
        """Those that are there count as used before those that are not."""
        known = [key for key in keys if key in self.stored]
        for key in known:
            self.stored[key] = self.stored.pop(key)
        used = set(known)
        for key in (key for key in keys if key not in known):
            if len(self.stored) == self.rows:
                first = next(iter(self.stored))
                if first in used:
                    continue
                del self.stored[first]
                self.given_up += 1
            self.stored[key] = Entry()
            used.add(key)

    def judge(self, key: int, number: int, clock: int, staleness: int, loose: bool, take: bool) -> State:
        one = self.stored.get(key)
        if one is None:
            return State.NO_ENTRY
        if one.as_of >= 0 and staleness and clock - one.as_of <= staleness and (loose or not one.loose):
            return State.HIT
        if one.fetched_by_batch and not take:
            return State.COMING
        one.fetched_by_batch, one.checked = number, False
        return State.OLD if one.as_of >= 0 else State.ABSENT

    def often(self, key: int, clock: int, staleness: int) -> bool:
        one = self.stored.get(key)
        if one is None:
            return False
        before, one.used_at = one.used_at, clock
        return before >= 0 and clock - before <= max(1, staleness // 3)

    def pushed(self, key: int, applies: bool) -> bool:
        one = self.stored.get(key)
        if one is None:
            return False
        follows = applies and one.as_of >= 0 and (one.slots or not self.has_slots)
        if not follows:
            one.as_of, one.slots, one.slots_fetched, one.checked = -1, False, 0, False
        if not one.checked:
            one.fetched_by_batch = 0
        return follows


def state_of(index: CacheIndex, keys: list[int]) -> dict[int, tuple[int, int, int, int, int]]:
    """Of keys that have a place: as of, asked, checked, slots, slots asked."""
    where = index.look(np.array(keys, np.int64))
    return {
        key: tuple(index._fields[p, AS_OF : SLOTS_FETCHED_BY + 1].tolist())
        for key, p in zip(keys, where.tolist(), strict=True)
        if p >= 0
    }


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_a_cache_index_has_the_entries_of_a_dictionary(seed: int, rows: int, staleness: int, slots: bool) -> None:
    random = np.random.default_rng(seed)
    # Keys of one bucket of the hash table, and others.
    universe = np.array([0, 1, 2, 3, -1, -(2**63), 2**63 - 1, *random.integers(-(2**63), 2**63 - 1, 8)])
    index, twin = CacheIndex(rows, slots=slots), Twin(rows, slots)
    batches: dict[int, np.ndarray] = {}
    clock = number = 0
    for _ in range(40):
        keys = random.choice(universe, random.integers(1, 7), replace=False)
        names = keys.tolist()
        action, loose = random.integers(7), bool(random.random() < 0.3)
        some = random.random(len(keys)) < 0.5
        if action <= 1:
            number += 1
            take = bool(random.random() < 0.2)
            where, repeats = index.find(keys)
            twin.find(names)
            assert not repeats
            states, often, oldest = index.judge(where, number, clock, staleness, loose=loose, take=take)
            assert often.tolist() == [twin.often(key, clock, staleness) for key in names]
            reported = [twin.judge(key, number, clock, staleness, loose, take) for key in names]
            assert states.tolist() == reported
            ages = [clock - twin.stored[k].as_of for k, s in zip(names, reported, strict=True) if s is State.HIT]
            assert oldest == max(ages, default=0) <= staleness
            old = np.array([s is State.OLD for s in reported]) & some
            index.check(where[old])
            for key in keys[old].tolist():
                twin.stored[key].checked = True
            batches[number] = keys
        elif action == 2 and batches:
            n = int(random.choice(list(batches)))
            mine = batches[n]
            flags = random.random(len(mine)) < 0.5
            where = index.look(mine)
            if random.random() < 0.5:
                keep = index.arrived(where, n, clock, flags, loose=loose)
                for key, stored, has in zip(mine.tolist(), keep.tolist(), flags.tolist(), strict=True):
                    one = twin.stored.get(key)
                    assert stored == (one is not None and one.fetched_by_batch == n)
                    if one is not None and stored:
                        one.as_of, one.fetched_by_batch, one.checked = clock, 0, False
                        one.slots, one.slots_fetched = has, 0
                        one.loose = loose
            else:
                same = index.compared(where, n, clock, flags, loose=loose)
                for key, stored, equal in zip(mine.tolist(), same.tolist(), flags.tolist(), strict=True):
                    one = twin.stored.get(key)
                    fetched_by_batch = one is not None and one.fetched_by_batch == n
                    assert stored == (fetched_by_batch and equal)
                    if one is not None and fetched_by_batch:
                        one.checked = False
                        if equal:
                            one.as_of, one.fetched_by_batch, one.loose = clock, 0, loose
                        else:
                            one.as_of, one.slots, one.slots_fetched = -1, False, 0
        elif action == 3:
            clock += 1
            applies = bool(random.random() < 0.8)
            where = index.pushed(keys, applies=applies)
            assert (where >= 0).tolist() == [twin.pushed(key, applies) for key in names]
        elif action == 4:
            number += 1
            where = index.look(keys)
            for key, asks in zip(names, index.ask_slots(where, number).tolist(), strict=True):
                one = twin.stored.get(key)
                assert asks == (one is not None and one.as_of >= 0 and not one.slots and not one.slots_fetched)
                if one is not None and asks:
                    one.slots_fetched = number
            if random.random() < 0.5:
                for key, came in zip(names, index.slots_arrived(where, number).tolist(), strict=True):
                    one = twin.stored.get(key)
                    assert came == (one is not None and one.slots_fetched == number)
                    if one is not None and came:
                        one.slots, one.slots_fetched = True, 0
        elif action == 5 and batches:
            n = int(random.choice(list(batches)))
            index.abandon(index.look(batches[n]), n)
            for one in (twin.stored[key] for key in batches[n].tolist() if key in twin.stored):
                one.fetched_by_batch = 0 if one.fetched_by_batch == n else one.fetched_by_batch
                one.slots_fetched = 0 if one.slots_fetched == n else one.slots_fetched
        elif random.random() < 0.3:
            everything = bool(random.random() < 0.3)
            gone = list(twin.stored) if everything else [key for key in names if key in twin.stored]
            index.clear() if everything else index.drop(keys)
            for key in gone:
                twin.stored[key] = Entry(used_at=twin.stored[key].used_at, loose=twin.stored[key].loose)
        assert state_of(index, universe.tolist()) == {
            key: (one.as_of + 1, one.fetched_by_batch, int(one.checked), int(one.slots), one.slots_fetched)
            for key, one in twin.stored.items()
        }
        assert (index.used, index.given_up) == (len(twin.stored), twin.given_up)
        where = index.look(universe)
        known = [twin.stored[key].as_of >= 0 if key in twin.stored else False for key in universe.tolist()]
        assert index.known(where).tolist() == known
        for loose in (False, True):
            fresh = [
                k and clock - twin.stored[key].as_of <= staleness and (loose or not twin.stored[key].loose)
                for key, k in zip(universe.tolist(), known, strict=True)
            ]
            assert index.fresh(where, clock, staleness, loose=loose).tolist() == fresh


def test_repeated_keys_are_reported_and_have_one_entry() -> None:
    index = CacheIndex(4, slots=False)
    where, repeats = index.find(np.array([5, 6, 5]))
    assert repeats
    assert where[0] == where[2] != where[1]


def test_a_batch_never_evicts_its_own_keys() -> None:
    index = CacheIndex(2, slots=False)
    where, _ = index.find(np.arange(4))
    assert where.tolist() == [0, 1, -1, -1]
    assert sorted(index.find(np.array([3]))[0].tolist()) == [0]  # the next batch does
    assert index.look(np.arange(4)).tolist() == [-1, 1, -1, 0]


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_a_full_cache_holds_as_many_keys_as_rows(rows: int) -> None:
    index = CacheIndex(rows, slots=False)
    for first in range(0, 5 * rows, rows):
        where, _ = index.find(np.arange(first, first + rows))
        assert sorted(where.tolist()) == list(range(rows))
    assert (index.used, index.given_up) == (rows, 4 * rows)
