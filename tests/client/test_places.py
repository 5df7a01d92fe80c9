"""The places of a cache against a dictionary and a list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.client.core.places import AS_OF, SLOTS_ASKED, Places, State


@dataclass
class Kept:
    """What the twin knows of a key."""

    as_of: int = -1
    asked: int = 0
    checked: bool = False
    slots: bool = False
    slots_asked: int = 0
    wanted: int = -1
    loose: bool = False


class Twin:
    """Keys in the order of their use, the least recent first."""

    def __init__(self, rows: int, slots: bool) -> None:
        self.rows, self.has_slots, self.given_up = rows, slots, 0
        self.kept: dict[int, Kept] = {}

    def find(self, keys: list[int]) -> None:
        """Those that are there count as used before those that are not."""
        known = [key for key in keys if key in self.kept]
        for key in known:
            self.kept[key] = self.kept.pop(key)
        used = set(known)
        for key in (key for key in keys if key not in known):
            if len(self.kept) == self.rows:
                first = next(iter(self.kept))
                if first in used:
                    continue
                del self.kept[first]
                self.given_up += 1
            self.kept[key] = Kept()
            used.add(key)

    def judge(self, key: int, number: int, clock: int, staleness: int, loose: bool, take: bool) -> State:
        one = self.kept.get(key)
        if one is None:
            return State.NO_PLACE
        if one.as_of >= 0 and staleness and clock - one.as_of <= staleness and (loose or not one.loose):
            return State.HIT
        if one.asked and not take:
            return State.COMING
        one.asked, one.checked = number, False
        return State.OLD if one.as_of >= 0 else State.ABSENT

    def often(self, key: int, clock: int, staleness: int) -> bool:
        one = self.kept.get(key)
        if one is None:
            return False
        before, one.wanted = one.wanted, clock
        return before >= 0 and clock - before <= max(1, staleness // 3)

    def pushed(self, key: int, applies: bool) -> bool:
        one = self.kept.get(key)
        if one is None:
            return False
        follows = applies and one.as_of >= 0 and (one.slots or not self.has_slots)
        if not follows:
            one.as_of, one.slots, one.slots_asked, one.checked = -1, False, 0, False
        if not one.checked:
            one.asked = 0
        return follows


def state_of(places: Places, keys: list[int]) -> dict[int, tuple[int, int, int, int, int]]:
    """Of keys that have a place: as of, asked, checked, slots, slots asked."""
    where = places.look(np.array(keys, np.int64))
    return {
        key: tuple(places._fields[p, AS_OF : SLOTS_ASKED + 1].tolist())
        for key, p in zip(keys, where.tolist(), strict=True)
        if p >= 0
    }


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_places_are_those_of_a_dictionary(seed: int, rows: int, staleness: int, slots: bool) -> None:
    random = np.random.default_rng(seed)
    # Keys of one bucket of the hash table, and others.
    universe = np.array([0, 1, 2, 3, -1, -(2**63), 2**63 - 1, *random.integers(-(2**63), 2**63 - 1, 8)])
    places, twin = Places(rows, slots=slots), Twin(rows, slots)
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
            where, repeats = places.find(keys)
            twin.find(names)
            assert not repeats
            states, often, oldest = places.judge(where, number, clock, staleness, loose=loose, take=take)
            assert often.tolist() == [twin.often(key, clock, staleness) for key in names]
            said = [twin.judge(key, number, clock, staleness, loose, take) for key in names]
            assert states.tolist() == said
            ages = [clock - twin.kept[k].as_of for k, s in zip(names, said, strict=True) if s is State.HIT]
            assert oldest == max(ages, default=0) <= staleness
            old = np.array([s is State.OLD for s in said]) & some
            places.check(where[old])
            for key in keys[old].tolist():
                twin.kept[key].checked = True
            batches[number] = keys
        elif action == 2 and batches:
            n = int(random.choice(list(batches)))
            mine = batches[n]
            flags = random.random(len(mine)) < 0.5
            where = places.look(mine)
            if random.random() < 0.5:
                keep = places.arrived(where, n, clock, flags, loose=loose)
                for key, kept, has in zip(mine.tolist(), keep.tolist(), flags.tolist(), strict=True):
                    one = twin.kept.get(key)
                    assert kept == (one is not None and one.asked == n)
                    if one is not None and kept:
                        one.as_of, one.asked, one.checked, one.slots, one.slots_asked = clock, 0, False, has, 0
                        one.loose = loose
            else:
                same = places.compared(where, n, clock, flags, loose=loose)
                for key, kept, equal in zip(mine.tolist(), same.tolist(), flags.tolist(), strict=True):
                    one = twin.kept.get(key)
                    asked = one is not None and one.asked == n
                    assert kept == (asked and equal)
                    if one is not None and asked:
                        one.checked = False
                        if equal:
                            one.as_of, one.asked, one.loose = clock, 0, loose
                        else:
                            one.as_of, one.slots, one.slots_asked = -1, False, 0
        elif action == 3:
            clock += 1
            applies = bool(random.random() < 0.8)
            where = places.pushed(keys, applies=applies)
            assert (where >= 0).tolist() == [twin.pushed(key, applies) for key in names]
        elif action == 4:
            number += 1
            where = places.look(keys)
            for key, asks in zip(names, places.ask_slots(where, number).tolist(), strict=True):
                one = twin.kept.get(key)
                assert asks == (one is not None and one.as_of >= 0 and not one.slots and not one.slots_asked)
                if one is not None and asks:
                    one.slots_asked = number
            if random.random() < 0.5:
                for key, came in zip(names, places.slots_arrived(where, number).tolist(), strict=True):
                    one = twin.kept.get(key)
                    assert came == (one is not None and one.slots_asked == number)
                    if one is not None and came:
                        one.slots, one.slots_asked = True, 0
        elif action == 5 and batches:
            n = int(random.choice(list(batches)))
            places.abandon(places.look(batches[n]), n)
            for one in (twin.kept[key] for key in batches[n].tolist() if key in twin.kept):
                one.asked = 0 if one.asked == n else one.asked
                one.slots_asked = 0 if one.slots_asked == n else one.slots_asked
        elif random.random() < 0.3:
            everything = bool(random.random() < 0.3)
            gone = list(twin.kept) if everything else [key for key in names if key in twin.kept]
            places.clear() if everything else places.drop(keys)
            for key in gone:
                twin.kept[key] = Kept(wanted=twin.kept[key].wanted, loose=twin.kept[key].loose)
        assert state_of(places, universe.tolist()) == {
            key: (one.as_of + 1, one.asked, int(one.checked), int(one.slots), one.slots_asked)
            for key, one in twin.kept.items()
        }
        assert (places.used, places.given_up) == (len(twin.kept), twin.given_up)
        where = places.look(universe)
        known = [twin.kept[key].as_of >= 0 if key in twin.kept else False for key in universe.tolist()]
        assert places.known(where).tolist() == known
        for loose in (False, True):
            young = [
                k and clock - twin.kept[key].as_of <= staleness and (loose or not twin.kept[key].loose)
                for key, k in zip(universe.tolist(), known, strict=True)
            ]
            assert places.young(where, clock, staleness, loose=loose).tolist() == young


def test_keys_that_repeat_are_told_and_have_one_place() -> None:
    places = Places(4, slots=False)
    where, repeats = places.find(np.array([5, 6, 5]))
    assert repeats
    assert where[0] == where[2] != where[1]


def test_a_batch_takes_no_place_from_its_own_keys() -> None:
    places = Places(2, slots=False)
    where, _ = places.find(np.arange(4))
    assert where.tolist() == [0, 1, -1, -1]
    assert sorted(places.find(np.array([3]))[0].tolist()) == [0]  # the next batch does
    assert places.look(np.arange(4)).tolist() == [-1, 1, -1, 0]


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_as_many_keys_as_rows_have_a_place(rows: int) -> None:
    places = Places(rows, slots=False)
    for first in range(0, 5 * rows, rows):
        where, _ = places.find(np.arange(first, first + rows))
        assert sorted(where.tolist()) == list(range(rows))
    assert (places.used, places.given_up) == (rows, 4 * rows)
