"""Routing kernels beside a dumb twin that uses dictionaries."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coordinator.core.view import ServerInfo, View
from elasticps.client.core.routing import Routes, cut_ranks, place_rows, plan_pull, plan_push, take_sum
from elasticps.kernels.hashing import key_ranges, table_salt

RANGES = 16
SALT = table_salt(3)


def view(owners: list[int], servers: int = 3) -> View:
    return chained(np.array(owners, np.int32).reshape(RANGES, 1), servers)


def chained(chains: np.ndarray, servers: int = 3) -> View:
    ranges, replicas = chains.shape
    infos = tuple(ServerInfo(f"s{i}", 1, f"127.0.0.1:{1000 + i}") for i in range(servers))
    return View(cluster="c", epoch=1, ranges=ranges, replicas=replicas, servers=infos, chains=chains,
                joining=np.full(ranges, -1, np.int32), since=np.ones(ranges, np.int64), reason="test")  # fmt: skip


owners = st.lists(st.integers(0, 2), min_size=RANGES, max_size=RANGES)
keys = hnp.arrays(
    np.int64, st.integers(0, 60), elements=st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))
)


@settings(deadline=None)
@given(owners, keys)
def test_a_push_is_ordered_by_head_and_range_with_each_key_once(owner: list[int], array: np.ndarray) -> None:
    routes = Routes(view(owner))
    plan = plan_push(array, SALT, routes)
    distinct = list(dict.fromkeys(array.tolist()))
    assert sorted(array[plan.order].tolist()) == sorted(distinct)
    home = np.empty(len(array), np.int32)
    key_ranges(array, SALT, routes.shift, home)
    for share in routes.shares:
        for rank in range(share.start, share.stop):
            block = plan.order[plan.offsets[rank] : plan.offsets[rank + 1]]
            assert set(home[block].tolist()) <= {int(routes.range_at[rank])}
            assert owner[routes.range_at[rank]] == share.server
    assert plan.offsets[-1] == len(plan.order)


@settings(deadline=None)
@given(owners, keys, st.integers(1, 5))
def test_gradients_of_a_key_are_summed_in_order(owner: list[int], array: np.ndarray, dim: int) -> None:
    grads = np.random.default_rng(0).standard_normal((len(array), dim)).astype(np.float32)
    plan = plan_push(array, SALT, Routes(view(owner)))
    out = np.empty((len(plan.order), dim), np.float32)
    take_sum(grads, plan.order, plan.following, out)
    sums: dict[int, np.ndarray] = {}
    for key, grad in zip(array.tolist(), grads, strict=True):
        sums[key] = sums[key] + grad if key in sums else grad
    for key, total in zip(array[plan.order].tolist(), out, strict=True):
        np.testing.assert_array_equal(total, sums[key])


@settings(deadline=None)
@given(owners, keys)
def test_a_pull_comes_back_in_the_order_of_its_keys(owner: list[int], array: np.ndarray) -> None:
    routes = Routes(view(owner))
    out = np.full((len(array), 1), -1, np.float32)
    for server, mine in plan_pull(array, SALT, routes, routes.tails):
        home = np.empty(len(mine), np.int32)
        key_ranges(array[mine], SALT, routes.shift, home)
        assert all(owner[r] == server for r in home)
        place_rows(mine.astype(np.float32).reshape(-1, 1), mine, out)
    assert out[:, 0].tolist() == list(range(len(array)))


def test_shares_cover_every_range_once() -> None:
    routes = Routes(view([0, 1, 2, 0] * 4))
    assert sorted(routes.range_at.tolist()) == list(range(RANGES))
    assert [(s.server, s.stop - s.start) for s in routes.shares] == [(0, 8), (1, 4), (2, 4)]
    assert routes.tails.only == -1
    assert Routes(view([1] * RANGES)).tails.only == 1


def test_ranges_without_a_server_have_no_share_and_no_reader() -> None:
    routes = Routes(view([0, -1] * 8))
    assert [(s.server, s.stop - s.start) for s in routes.shares] == [(0, 8)]
    array = np.arange(100)
    groups = dict(plan_pull(array, SALT, routes, routes.tails))
    assert sorted(groups) == [-1, 0]
    home = np.empty(len(groups[-1]), np.int32)
    key_ranges(array[groups[-1]], SALT, routes.shift, home)
    assert {r % 2 for r in home.tolist()} == {1}


def test_reads_of_any_replica_are_spread_evenly_and_stay_in_the_chain() -> None:
    chains = np.array([[0, 1, 2], [1, 2, -1]] * 128, np.int32)
    routes = Routes(chained(chains))
    for worker in (1, 2, 3):
        of = routes.replicas(worker).of
        assert all(of[r] in chains[r] and of[r] >= 0 for r in range(256))
        assert np.bincount(of[::2], minlength=3).min() > 25
        assert np.bincount(of[1::2], minlength=3)[1:].min() > 45
    assert (routes.replicas(1).of != routes.replicas(2).of).mean() > 0.9


def test_heads_are_compared_by_incarnation_not_by_index() -> None:
    before = Routes(view([1, 2] * 8))
    assert before.same_heads(Routes(view([1, 2] * 8)))
    assert not before.same_heads(Routes(view([2, 1] * 8)))
    after = view([0, 1] * 8, servers=2)
    moved = dataclasses.replace(after, servers=(ServerInfo("s1", 1, "h:1"), ServerInfo("s2", 1, "h:2")))
    assert before.same_heads(Routes(moved))
    again = dataclasses.replace(after, servers=(ServerInfo("s1", 2, "h:1"), ServerInfo("s2", 1, "h:2")))
    assert not before.same_heads(Routes(again))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.integers(1, 200))
def test_cuts_cover_all_ranks_and_stay_near_the_limit(sizes: list[int], limit: int) -> None:
    cuts = cut_ranks(np.array(sizes, np.int64), limit)
    assert [i for a, b in cuts for i in range(a, b)] == list(range(len(sizes)))
    for a, b in cuts:
        assert b - a == 1 or sum(sizes[a:b]) <= limit + limit // 2
