"""Sums of ranks against a dict, and a plain loop in the order of the ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.torch.group.layout import (
    ABSENT,
    GradientSize,
    Layout,
    copy_range,
    fits,
    layout,
    region,
    room_for,
    tensors_of,
)
from elasticps.torch.kernels.merge import PIECE, added, merged, share

Floats = NDArray[np.float32]
Rank = tuple[NDArray[np.int64], Floats]
KEYS = st.lists(st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=12)


def rows(keys: list[int], dim: int, seed: int) -> Rank:
    """Numbers whose sums depend on the order."""
    numbers = np.random.default_rng(seed)
    values = numbers.normal(size=(len(keys), dim)) * 10.0 ** numbers.integers(-6, 7, (len(keys), dim))
    return np.array(keys, np.int64), values.astype(np.float32)


def by_dict(ranks: list[Rank], dim: int) -> dict[int, Floats]:
    total: dict[int, Floats] = {}
    for keys, gradients in ranks:
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            total[key] = total.get(key, np.zeros(dim, np.float32)) + gradient
    return total


@given(st.lists(KEYS, min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
@example([[]], 1, 1, 0)
@example([[1, 1], [1], [], [1]], 3, 2, 1)
def test_rows_are_summed_by_key_in_the_order_of_the_ranks(
    lists: list[list[int]], parts: int, dim: int, seed: int
) -> None:
    ranks = [rows(keys, dim, seed + number) for number, keys in enumerate(lists)]
    total = sum(map(len, lists))
    summed: dict[int, Floats] = {}
    for part in range(parts):
        keys, out = np.full(total, -99, np.int64), np.full((total, dim), np.nan, np.float32)
        count = merged(ranks, part, parts, keys, out)
        some = dict(zip(keys[:count].tolist(), out[:count], strict=True))
        assert len(some) == count
        assert not some.keys() & summed.keys(), "a key is in one part only"
        summed |= some
    expected = by_dict(ranks, dim)
    assert summed.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(summed[key].view(np.int32), row.view(np.int32))


@pytest.mark.parametrize("mean", [False, True])
def test_floats_are_summed_in_the_order_of_the_ranks(mean: bool) -> None:
    ranks = [rows([0], PIECE + 5, seed)[1][0] for seed in range(3)]
    out = np.full(PIECE + 5, np.nan, np.float32)
    added(ranks, out, mean)
    expected = (ranks[0] + ranks[1]) + ranks[2]
    np.testing.assert_array_equal(out, expected / np.float32(3) if mean else expected)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_cover_everything_and_are_as_equal_as_possible(total: int, parts: int) -> None:
    bounds = [share(total, part, parts) for part in range(parts)]
    assert [i for low, high in bounds for i in range(low, high)] == list(range(total))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1


TENSOR, TABLE = (st.integers(1, 40), st.just(0)), (st.just(0), st.integers(1, 5))
TARGETS = st.lists(st.builds(GradientSize, *TENSOR) | st.builds(GradientSize, *TABLE), max_size=6)


@given(TARGETS, st.integers(1, 4), st.integers(1, 50), st.data())
def test_parts_of_the_layout_do_not_overlap(
    targets: list[GradientSize], size: int, chunk: int, data: st.DataObject
) -> None:
    counts = st.lists(st.integers(ABSENT, 6), min_size=len(targets), max_size=len(targets))
    given_ = [np.array(data.draw(counts), np.int64) for _ in range(size)]
    room = room_for(targets, given_, chunk)
    plan = layout(targets, given_, chunk, room)
    assert fits(plan, room, plan.nbytes)
    assert room == 0 or not fits(plan, room, plan.nbytes - 1)
    taken = sorted(spans(plan))
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert all(start % 64 == 0 for start, _ in taken)
    assert not taken or taken[-1][1] <= plan.nbytes
    here = [number for number in range(len(targets)) if any(each[number] != ABSENT for each in given_)]
    assert list(plan.tensors) == [number for number in here if targets[number].floats]
    assert list(plan.sums) == [number for number in here if targets[number].dim]
    for number, sums in plan.sums.items():
        mine = [max(0, int(each[number])) for each in given_]
        found = [each.tables[number].n if number in each.tables else 0 for each in plan.regions]
        assert found == mine
        assert [place.n for place in sums] == [sum(mine)] * size
    for rank, (has, own) in enumerate(zip(given_, plan.regions, strict=True)):
        if tensors_of(targets, has) == plan.tensors:  # it needs no other rank to know where its own begins
            assert region(targets, has, plan.chunk, rank * room) == own


def test_a_layout_that_does_not_fit_is_recognised() -> None:
    targets, few, many = [GradientSize(0, 4)], np.array([2]), np.array([900])
    room = room_for(targets, [few, few], 8)
    nbytes = layout(targets, [few, few], 8, room).nbytes
    assert not fits(layout(targets, [few, many], 8, room), room, 1 << 20)
    assert not fits(layout(targets, [many, few], 8, room), room, 1 << 20)
    assert not fits(layout(targets, [few, few], 8, room), room, nbytes - 64)


def spans(plan: Layout) -> list[tuple[int, int]]:
    found = [(at, at + 4 * plan.chunk) for each in plan.regions for at in each.slots]
    found.append((plan.result, plan.result + 4 * plan.floats))
    spans = [place for each in plan.regions for place in each.tables.values()]
    for place in (*spans, *(place for sums in plan.sums.values() for place in sums)):
        found += [(place.keys, place.keys + 8 * place.n), (place.rows, place.rows + 4 * place.n * place.dim)]
    return [(start, end) for start, end in found if end > start]


@given(st.lists(st.integers(1, 20), max_size=5), st.integers(1, 30), st.data())
def test_chunks_are_the_tensors_one_after_another(sizes: list[int], chunk: int, data: st.DataObject) -> None:
    plan = layout([GradientSize(size, 0) for size in sizes], [np.zeros(len(sizes), np.int64)], chunk, 0)
    values = [
        np.random.default_rng(size).normal(size=size).astype(np.float32) if data.draw(st.booleans()) else None
        for size in sizes
    ]
    out = np.full(sum(sizes), np.nan, np.float32)
    for start, stop in plan.chunks():
        copy_range(values, sizes, start, stop, out[start:stop])
    whole = [np.zeros(n, np.float32) if v is None else v for n, v in zip(sizes, values, strict=True)]
    np.testing.assert_array_equal(out, np.concatenate(whole) if whole else out)
