"""The planner finds the same moves as a simple twin that compares everything with everything each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import balance, ring
from coordinator.core.balance import even_out, start_moves
from coordinator.core.draft import Draft
from coordinator.core.repair import Capacity, Limits
from coordinator.core.ring import Node, place
from replication.chain import Member
from tests.coordinator.plain_moves import PlainField, PlainRing

ZONES = st.sampled_from([("",), ("a", "b", "c"), ("a", "b", ""), tuple(f"z{i}" for i in range(20))])


def cluster(count: int, zones: Sequence[str], weights: Sequence[float]) -> dict[Member, Node]:
    return {Member(f"s{i}", 1): Node(f"s{i}", weights[i % len(weights)], zones[i % len(zones)]) for i in range(count)}


def skewed(count: int, ranges: int, replicas: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Chains of full length that load some servers more than others."""
    random = np.random.default_rng(seed)
    score = random.random((ranges, count)) * (1 + random.random(count))
    return np.argsort(-score, axis=1)[:, :replicas].astype(np.int32)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(3, 20),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 3),
    ZONES,
    st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=5),
    st.integers(0, 1 << 16),
)
def test_chains_without_data_are_evened_out_as_by_the_twin(
    count: int, ranges: int, replicas: int, zones: tuple[str, ...], weights: list[float], seed: int
) -> None:
    nodes = cluster(count, zones, weights)
    chains = skewed(count, ranges, replicas, seed) if seed % 2 else place(list(nodes.values()), ranges, replicas)
    found = even_out(chains, tuple(nodes), nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_Field", PlainField)
        assert np.array_equal(found, even_out(chains, tuple(nodes), nodes))


@settings(deadline=None, max_examples=100)
@given(
    st.integers(4, 16),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 3),
    ZONES,
    st.integers(0, 3),
    st.sampled_from([Limits(), Limits(3, 2), Limits(40, 1)]),
    st.integers(0, 1 << 16),
)
def test_moves_are_those_of_the_twin(
    count: int, ranges: int, replicas: int, zones: tuple[str, ...], drain: int, limits: Limits, seed: int
) -> None:
    nodes = cluster(count, zones, [1.0, 2.0])
    members = tuple(nodes)
    random = np.random.default_rng(seed)
    held = count - 1 if seed % 3 else count  # a newcomer holds nothing yet
    chains = skewed(max(held, replicas), ranges, replicas, seed)
    draining = set(members[:drain])
    sites = {m: node for m, node in nodes.items() if m not in draining}
    cut = {(members[i], members[j]) for i, j in random.integers(0, count, (seed % 4, 2)).tolist()}
    capacity = {members[-1]: Capacity(9, 4)} if seed % 5 == 0 else {}
    rows = random.random(ranges) < 0.7 if seed % 7 == 0 else None

    def moves() -> list[balance.Move]:
        draft = Draft.fresh(chains, members)
        early = start_moves(draft, sites, draining, Limits(4, 2), cut, even=False)  # fillings under way
        return early + start_moves(draft, sites, draining, limits, cut, capacity=capacity, rows=rows)

    found = moves()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_Field", PlainField)
        assert found == moves()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.integers(1, 4), ZONES, st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=1, max_size=5))
def test_ranges_are_placed_as_by_the_twin(
    count: int, replicas: int, zones: tuple[str, ...], weights: list[float]
) -> None:
    nodes = list(cluster(count, zones, weights).values())
    found = place(nodes, 64, replicas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_Ring", PlainRing)
        assert np.array_equal(found, place(nodes, 64, replicas))
