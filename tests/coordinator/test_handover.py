"""The ranges that draining servers still have to hand over."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.core.handover import find_handover
from coordinator.core.view import ServerInfo, View
from replication.chain import CopyState, Member

NAMES = ("s0", "s1", "s2", "s3")


def view_of(chains: list[list[int]], joining: list[int], copy_state: list[int]) -> View:
    servers = tuple(ServerInfo(name, 1, "h:1") for name in NAMES)
    padded = np.array([[*chain, -1, -1][:2] for chain in chains], np.int32)
    since = np.ones(len(chains), np.int64)
    return View(
        "c",
        1,
        len(chains),
        2,
        servers,
        padded,
        np.array(joining, np.int32),
        since,
        "",
        copy_state=np.array(copy_state, np.int32),
    )


VIEW = view_of(
    [[2, 3], [3, 0], [1, 2], [3]],
    [-1, 2, -1, 2],
    [CopyState.NONE, CopyState.NONE, CopyState.NONE, CopyState.SUCCESSOR],
)


def members(*names: str) -> set[Member]:
    return {Member(name, 1) for name in names}


@pytest.mark.parametrize(
    ("leaver", "staying", "held", "last", "holders", "others"),
    [
        ("s3", ("s0", "s1"), [0, 1, 3], [0, 3], ["s0"], ["s2"]),  # s2 drains: what it has is no copy that stays
        ("s2", ("s0", "s1"), [0, 2, 3], [0, 3], ["s1"], ["s3"]),  # it keeps a copy of range 3 for s3, left alone
        ("s3", ("s0", "s1", "s2"), [0, 1, 3], [3], ["s0", "s2"], ["s2"]),  # a copy that is kept may be given up
        ("s0", ("s1", "s2", "s3"), [1], [], ["s3"], []),
        ("s0", ("s0", "s1", "s2"), [1], [1], [], ["s3"]),  # s3 is registered no more; nor is a server its own successor
        ("s9", ("s0", "s1", "s2", "s3"), [], [], [], []),
    ],
)
def test_only_a_server_that_stays_has_a_copy_to_count_on(
    leaver: str, staying: tuple[str, ...], held: list[int], last: list[int], holders: list[str], others: list[str]
) -> None:
    found = find_handover(VIEW, Member(leaver, 1), members(*staying))
    assert found.held.tolist() == held
    assert found.last.tolist() == last
    assert [member.name for member in found.holders] == holders
    assert [member.name for member in found.others] == others
    assert found.stay == len(members(*staying) - members(leaver))


def test_the_text_of_a_handover_counts_ranges_and_names_servers_that_do_not_count() -> None:
    both = find_handover(VIEW, Member("s3", 1), members("s0", "s1"))
    assert str(both) == (
        "3 ranges left, 2 of which have no copy at a server that stays (s2 has copies, but drains or does not answer)"
    )
    assert str(find_handover(VIEW, Member("s0", 1), members("s1", "s3"))).endswith("have a copy at a server that stays")
    assert str(find_handover(VIEW, Member("s3", 1), set())) == (
        "3 ranges left, and no server stays that could take them"
    )
