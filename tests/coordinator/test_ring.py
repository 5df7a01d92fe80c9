"""Placement of ranges on the ring: bounded, distinct, stable."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.ring import SLACK, SPREAD, Node, place

NODES = st.lists(
    st.builds(
        Node,
        name=st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True),
        weight=st.floats(0.1, 8),
        zone=st.sampled_from(["", "a", "b", "c"]),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda node: node.name,
)


def equal(count: int) -> list[Node]:
    return [Node(f"s{i}") for i in range(count)]


@settings(max_examples=60)
@given(NODES, st.sampled_from([2, 16, 64, 256]), st.integers(1, 4))
def test_chains_are_full_distinct_and_in_as_many_zones_as_can_be(nodes: list[Node], ranges: int, replicas: int) -> None:
    chains = place(nodes, ranges, replicas)
    length = min(replicas, len(nodes))
    assert chains.shape == (ranges, replicas)
    assert chains.dtype == np.int32
    zones = len({node.zone for node in nodes if node.zone}) + sum(not node.zone for node in nodes)
    for chain in chains.tolist():
        assert chain[length:] == [-1] * (replicas - length)
        members = chain[:length]
        assert len(set(members)) == length
        assert min(members) >= 0
        in_zones = {nodes[i].zone or f"its own {i}" for i in members}
        assert len(in_zones) == min(length, zones)


@settings(max_examples=60)
@given(NODES, st.sampled_from([16, 256]))
def test_no_server_heads_more_ranges_than_its_bound(nodes: list[Node], ranges: int) -> None:
    total = math.fsum(node.weight for node in nodes)
    headed = Counter(place(nodes, ranges, 1)[:, 0].tolist())
    for i, node in enumerate(nodes):
        share = ranges * node.weight / total
        assert headed[i] <= max(math.floor(SLACK * share), math.ceil(share))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12, 16, 25, 32])
def test_equal_servers_head_and_hold_about_as_many_ranges(count: int) -> None:
    for replicas in (1, 2, 3):
        chains = place(equal(count), 256, replicas)
        headed = np.bincount(chains[:, 0], minlength=count)
        held = np.bincount(chains[chains >= 0], minlength=count)
        assert headed.max() / headed.mean() <= 1.25
        assert held.max() / held.mean() <= 1.25


def test_weight_is_a_share() -> None:
    nodes = [Node("a", 1.0), Node("b", 2.0), Node("c", 1.0)]
    headed = np.bincount(place(nodes, 1024, 1)[:, 0])
    assert headed[1] == pytest.approx(512, rel=0.2)


@settings(max_examples=40)
@given(NODES)
def test_the_order_of_servers_does_not_matter(nodes: list[Node]) -> None:
    shuffled = sorted(nodes, key=lambda node: hashlib.sha256(node.name.encode()).digest())
    one, other = place(nodes, 64, 2), place(shuffled, 64, 2)
    for r in range(64):
        assert [nodes[i].name for i in one[r] if i >= 0] == [shuffled[i].name for i in other[r] if i >= 0]


def test_every_process_computes_the_same_placement() -> None:
    program = "from coordinator.core.ring import *; print(place([Node(f's{i}') for i in range(5)], 64, 2).tolist())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {str(place(equal(5), 64, 2).tolist())}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 10, 16])
def test_few_ranges_move_when_a_server_comes_or_goes(count: int) -> None:
    before, after = place(equal(count), 256, 2), place(equal(count + 1), 256, 2)
    ideal = 256 / (count + 1)
    heads_moved = int((before[:, 0] != after[:, 0]).sum())
    assert heads_moved <= 1.6 * ideal + 4
    between_old = int(((before[:, 0] != after[:, 0]) & (after[:, 0] != count)).sum())
    assert between_old <= 0.05 * 256
    length = min(2, count)
    copies = sum(len(set(new) - set(old)) for new, old in zip(after.tolist(), before[:, :length].tolist(), strict=True))
    assert copies <= 2.5 * 2 * ideal + 4


def test_a_server_hands_on_to_few_others() -> None:
    chains = place(equal(20), 256, 3)
    for pair in ((0, 1), (1, 2)):
        heads, nexts = chains[:, pair[0]], chains[:, pair[1]]
        counts = [len(set(nexts[heads == i].tolist())) for i in range(20)]
        assert sum(count <= SPREAD + 1 for count in counts) >= 18


def test_no_servers_give_empty_chains_and_duplicate_names_are_refused() -> None:
    assert place([], 4, 2).tolist() == [[-1, -1]] * 4
    with pytest.raises(ValueError, match="twice"):
        place([Node("a"), Node("a")], 4, 1)
