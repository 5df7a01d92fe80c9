"""Chains: places, orders, and which view may follow which."""

from __future__ import annotations

import numpy as np
import pytest

from replication.chain import Chains, CopyState, Member, Role, place, unsafe_transition

A, B, C, D = (Member(name, 1) for name in "abcd")


def view(epoch: int, *ranges: str, since: list[int] | None = None) -> Chains:
    """ "ab+c" is the chain a, b with c joining; "a-b": b is kept and stood behind, "a^b": it stood before."""
    chains = np.full((len(ranges), 3), -1, dtype=np.int32)
    joining = np.full(len(ranges), -1, dtype=np.int32)
    copy_state = np.zeros(len(ranges), dtype=np.int32)
    for r, text in enumerate(ranges):
        copy_state[r] = ("-" in text) * CopyState.SUCCESSOR or ("^" in text) * CopyState.PREDECESSOR
        full, _, joiner = text.replace("-", "+").replace("^", "+").partition("+")
        chains[r, : len(full)] = ["abcd".index(c) for c in full]
        if joiner:
            joining[r] = "abcd".index(joiner)
    changed = np.array(since or [epoch] * len(ranges), dtype=np.int64)
    return Chains(epoch, (A, B, C, D), chains, joining, changed, copy_state)


def test_a_member_finds_its_neighbours_and_the_joiner_is_the_tails_successor() -> None:
    v = view(1, "abc", "ba", "ab+d", "b")
    at_b = place(v, B)
    assert at_b.role.tolist() == [Role.FULL] * 4
    assert at_b.head.tolist() == [False, True, False, True]
    assert at_b.tail.tolist() == [False, False, True, True]
    assert at_b.up.tolist() == [0, -1, 0, -1]
    assert at_b.down.tolist() == [2, 0, 3, -1]
    at_d = place(v, D)
    assert at_d.role.tolist() == [Role.OUT, Role.OUT, Role.JOINING, Role.OUT]
    assert at_d.up.tolist() == [-1, -1, 1, -1]
    stranger = place(v, Member("a", 2))
    assert not stranger.role.any()
    assert (stranger.up == -1).all()
    assert (stranger.down == -1).all()


def test_a_place_is_what_each_range_alone_says() -> None:
    """Compared with a look at one range after the other, in random views."""
    chance = np.random.default_rng(3)
    for _ in range(50):
        chains, joining = np.full((40, 3), -1, np.int32), np.full(40, -1, np.int32)
        for r in range(40):
            some = chance.permutation(4)[: chance.integers(0, 5)]
            full = some[: min(len(some), chance.integers(0, 4))]
            chains[r, : len(full)] = full
            if len(some) > len(full):
                joining[r] = some[len(full)]
        v = Chains(1, (A, B, C, D), chains, joining, np.ones(40, np.int64))
        for index, member in enumerate(v.members):
            found = place(v, member)
            for r in range(40):
                order = [i for i in chains[r].tolist() if i >= 0]
                members = [*order, joining[r]] if joining[r] >= 0 else order
                at = members.index(index) if index in members else -1
                role = Role.OUT if at < 0 else Role.FULL if at < len(order) else Role.JOINING
                assert found.role[r] == role
                assert found.head[r] == (at == 0 and role == Role.FULL)
                assert found.tail[r] == (0 <= at == len(order) - 1)
                assert found.up[r] == (members[at - 1] if at > 0 else -1)
                assert found.down[r] == (members[at + 1] if 0 <= at < len(members) - 1 else -1)


def test_a_head_orders_its_ranges_by_chain_so_that_each_successor_has_a_slice() -> None:
    v = view(1, "ac", "ab", "ba", "ac", "ab", "a")
    assert v.headed_by(0).tolist() == [5, 1, 4, 0, 3]
    assert v.headed_by(v.index(D)).tolist() == []
    assert {i: ranges.tolist() for i, ranges in v.headed.items()} == {0: [5, 1, 4, 0, 3], 1: [2]}


def test_the_ranges_of_all_heads_at_once_are_those_of_each() -> None:
    random = np.random.default_rng(3)
    members = tuple(Member(f"s{i}", 1) for i in range(40))
    chains = np.array([random.choice(40, 3, replace=False) for _ in range(500)], np.int32)
    chains[random.random(500) < 0.2, 2] = -1
    chains[random.random(500) < 0.1] = -1
    v = Chains(1, members, chains, np.full(500, -1, np.int32), np.ones(500, np.int64))
    expected = {i: ranges for i in range(40) if len(ranges := v.headed_by(i))}
    found = v.headed
    assert list(found) == list(expected)
    assert all((found[i] == ranges).all() for i, ranges in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "level", "fault"),
    [
        ("abc", "bc", {}, ""),
        ("abc", "c", {}, ""),
        ("ab", "ab+c", {}, ""),
        ("ab+c", "ab+d", {}, ""),
        ("ab+c", "ab", {}, ""),
        ("ab+c", "abc", {0: 1}, ""),
        ("ab+c", "bc", {0: 1}, ""),
        ("a+c", "c", {0: 1}, ""),
        ("ab+c", "b+c", {}, ""),
        ("ab+c", "abc", {}, "not reported level"),
        ("ab+c", "abc", {0: 0}, "not reported level"),
        ("ab", "abc", {}, "cannot become"),
        ("ab", "ba", {}, "cannot become"),
        ("ab", "c", {}, "cannot become"),
        ("ab+c", "cb", {0: 1}, "cannot become"),
        ("ab", "", {}, "last full replica"),
        ("", "ab", {}, ""),
        ("ab", "a-b", {}, ""),
        ("abc", "b-c", {}, ""),
        ("abc", "b^a", {}, ""),
        ("ab", "a^b", {}, "stood elsewhere"),
        ("ab", "b-a", {}, "stood elsewhere"),
        ("ab", "a-c", {}, "was not one of"),
        ("a+b", "a-b", {}, "was not one of"),
        ("abc", "ab-c", {}, "was not one of"),
        ("ab+c", "c-b", {0: 1}, "stood elsewhere"),
        ("ab+c", "c^b", {0: 1}, ""),
        ("ab+c", "c^b", {}, "not reported level"),
        ("a+b", "b^a", {0: 1}, ""),
        ("a+b", "b^b", {0: 1}, "joining and full"),
        ("a-b", "b^a", {}, "was not one of"),
        ("a^b", "b^a", {}, "was not one of"),
        ("a-b", "ab", {}, ""),
        ("a-b", "b", {}, ""),
        ("a-b", "a", {}, ""),
        ("a^b", "b", {}, ""),
        ("a^b", "a+b", {}, ""),
        ("a^b", "ab", {}, "may have what that one lacks"),
        ("a^b", "ab", {0: 1}, "may have what that one lacks"),
        ("a-b", "b-a", {}, "was not one of"),
    ],
)
def test_only_lawful_chains_may_follow_each_other(before: str, after: str, level: dict[int, int], fault: str) -> None:
    text = unsafe_transition(view(1, before), view(2, after), level)
    assert (fault in text) if fault else text == ""


def test_since_changes_exactly_when_the_chain_does() -> None:
    assert "since moved" in unsafe_transition(view(1, "ab"), view(2, "ab"), {})
    assert "since says" in unsafe_transition(view(1, "ab"), view(2, "b", since=[1]), {})
    assert "epoch" in unsafe_transition(view(1, "ab"), view(3, "ab", since=[1]), {})
