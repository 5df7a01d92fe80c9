"""The processes that a fault hits, and when it is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.live.targets import Situation, choose, group, unsafe, whole
from tests.chaos.scenes import action_of, scene_of, view_of

FOUR = view_of([["s0", "s1"], ["s1", "s2"], ["s0", "s3"], ["s3", "s2"]])
LONE = view_of([["s0", "s1"], ["s1"], ["s0", "s2"], ["s2", "s0"]], joining=["", "s2", "", ""])
ROLES = {"coordinator": ["c0", "c1"], "worker": ["w0"], "etcd": ["e0", "e1"]}


@pytest.mark.parametrize(
    ("word", "chosen"),
    [("s2", "s2"), ("head-of:hottest", "s0"), ("tail", "s2"), ("head-of:1", "s1"), ("tail-of:2", "s3"),
     ("leader", "c1"), ("standby", "c0"), ("worker", "w0"), ("etcd", "e0"), ("random", "s0"), ("c0", "c0")],
)  # fmt: skip
def test_each_target_word_means_certain_processes(word: str, chosen: str) -> None:
    scene = replace(scene_of(FOUR, **ROLES), leader="c1")
    assert choose(action_of("pause", word, for_=1), scene).name == chosen


def test_a_target_can_be_the_head_of_the_hottest_range() -> None:
    scene = replace(scene_of(FOUR), heat=np.array([1.0, 1.0, 1.0, 5.0]))
    assert choose(action_of("kill", "head-of:hottest"), scene).name == "s3"
    assert choose(action_of("kill", "tail"), scene).name == "s2"


def test_the_joining_target_is_the_server_being_filled() -> None:
    assert choose(action_of("pause", "joining", for_=1), scene_of(LONE)).name == "s2"
    assert "none now" in choose(action_of("pause", "joining", for_=1), scene_of(FOUR)).why


def test_the_draw_chooses_among_equals() -> None:
    names = [choose(action_of("kill", "random", draw), scene_of(FOUR)).name for draw in (0.0, 0.3, 0.6, 0.99)]
    assert names == ["s0", "s1", "s2", "s3"]


def test_the_only_full_replica_is_left_alone() -> None:
    assert "only full replica of 1 ranges" in choose(action_of("kill", "s1"), scene_of(LONE)).why
    assert choose(action_of("kill", "random", 0.4), scene_of(LONE)).name == "s2"  # not s1, whose turn it is
    assert choose(action_of("hog", "", processes=1), scene_of(LONE)).name == ""


def test_a_server_that_is_down_does_not_count_as_a_replica() -> None:
    assert unsafe("s1", scene_of(FOUR, "s2"))
    assert not unsafe("s3", scene_of(FOUR, "s1"))


def test_no_server_is_hit_while_a_range_has_no_live_replica() -> None:
    """One that was left out by mistake may have the last copy: s0 was paused and left out as s1 was killed, and killed
    before a leader could take it back (seed 125)."""
    view = view_of([["s1"], ["s2", "s3"]], joining=["s0", ""])
    why = "1 ranges have no full replica that lives: one that was left out may have all that there is"
    assert [unsafe(name, scene_of(view, "s1")) for name in ("s0", "s2", "s9")] == [why] * 3
    assert choose(action_of("kill", "joining"), scene_of(view)).name == "s0"


def test_a_newer_incarnation_of_a_dead_server_counts_as_alive() -> None:
    scene = Situation(FOUR, {"server": ["s0", "s1", "s2", "s3"]}, frozenset({("s2", 7)}))
    assert not unsafe("s1", scene)


def test_a_fault_waits_for_a_server_to_be_in_the_view() -> None:
    scene = scene_of(FOUR)
    assert unsafe("s9", replace(scene, running={"server": ["s9"]})) == "s9 is in no view yet"
    assert unsafe("s0", replace(scene, view=None)) == "there is no view yet"


def test_coordinators_and_workers_are_never_unsafe() -> None:
    assert choose(action_of("kill", "leader"), replace(scene_of(None, **ROLES), leader="c0")).name == "c0"


SERVERS = st.sampled_from(["s0", "s1", "s2", "s3"])


@given(
    st.lists(st.lists(SERVERS, min_size=1, max_size=2, unique=True), min_size=4, max_size=4),
    st.sets(SERVERS),
    st.floats(0, 1, exclude_max=True),
)
def test_no_kill_takes_the_last_replica_of_a_range(chains: list[list[str]], down: set[str], draw: float) -> None:
    scene = scene_of(view_of(chains), *down)
    name = choose(action_of("kill", "random", draw), scene).name
    if name:
        for chain in chains:
            assert name not in chain or set(chain) - down - {name}


def test_groups_of_peers_leave_the_target_out() -> None:
    scene = scene_of(FOUR, **ROLES)
    assert group("others", "s1", scene) == ["s0", "s2", "s3"]
    assert group("etcd", "s1", scene) == ["e0", "e1"]
    assert group("everyone", "s0", scene) == ["c0", "c1", "e0", "e1", "s1", "s2", "s3", "w0"]
    assert group("w0", "s0", scene) == ["w0"]


@pytest.mark.parametrize(
    ("view", "servers", "why"),
    [(FOUR, ["s0", "s1", "s2", "s3"], ""), (FOUR, ["s0", "s1", "s2"], "s3 hold ranges but do not run"),
     (FOUR, ["s0", "s1", "s2", "s3", "s4"], "s4 not in the view"),
     (LONE, ["s0", "s1", "s2"], "1 ranges have fewer than 2 replicas"),
     (view_of([["s0"], ["s0"]]), ["s0"], ""),
     (view_of([["s0", "s1"], ["s0", "s1"]], ["s2", ""]), ["s0", "s1", "s2"], "1 ranges are being filled")],
)  # fmt: skip
def test_missing_replicas_are_named(view: object, servers: list[str], why: str) -> None:
    assert whole(view, servers) == why  # type: ignore[arg-type]
