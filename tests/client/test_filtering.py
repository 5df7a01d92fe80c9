"""Gradients that filters drop are retained, within bounds, and pushed with the next gradient of their key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.client import filtering
from elasticps.client.filtering import Feedback, PushFilter, RowMemory
from elasticps.model.filters import BFloat16, Filter, Float16, Int8, RandomK, Threshold, TopK
from elasticps.model.spec import SGD, TableSpec
from elasticps.store.codec import Codec
from tests.client.outstanding import Outstanding

DIM = 3
OPEN = Outstanding()
KEYS_OF_10 = st.lists(st.integers(0, 9), max_size=6, unique=True)
Floats = NDArray[np.float32]


def spec(filters: list[Filter], dim: int = DIM) -> TableSpec:
    return TableSpec("t", dim, SGD(0.1), push=filters)


def rows(random: np.random.Generator, n: int) -> Floats:
    return random.normal(size=(n, DIM)).astype(np.float32)


FILTERS: list[list[Filter]] = [
    [Int8()], [BFloat16(feedback=True)], [Float16(feedback=True)], [TopK(0.3), Int8()], [RandomK(0.3)],
]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.sampled_from(FILTERS))
@settings(max_examples=30)
def test_sent_and_retained_gradients_add_up_to_the_given_ones(seed: int, filters: list[Filter]) -> None:
    """A twin: a dictionary, and the codec alone. The sums of what was given and of what was sent differ by it."""
    random, push, codec = np.random.default_rng(seed), PushFilter(spec(filters)), Codec(filters, DIM)
    stored: dict[int, Floats] = {}
    given_, sent = np.zeros((20, DIM)), np.zeros((20, DIM))
    for _ in range(12):
        keys = random.choice(20, random.integers(1, 12)).astype(np.int64)  # some of them twice
        grads = rows(random, len(keys))
        found, coded = push.encode(keys, grads)
        push.sent(OPEN)
        assert len(np.unique(found)) == len(found)
        for key, words in zip(found.tolist(), coded, strict=True):
            total = np.zeros(DIM, np.float32)
            for grad in grads[keys == key]:
                total += grad
            total += stored.get(key, np.zeros(DIM, np.float32))
            assert words.tobytes() == codec.encode(total[None])[0].tobytes()
            decoded = codec.decode(words[None])[0]
            stored[key] = total - decoded
            sent[key] += decoded
        np.add.at(given_, keys, grads)
    left = np.array([stored.get(key, np.zeros(DIM)) for key in range(20)])
    assert np.allclose(given_, sent + left, atol=1e-4)
    assert push.feedback == Feedback(len(stored), 0)


def test_a_push_that_was_not_sent_drops_nothing() -> None:
    push, keys = PushFilter(spec([Int8()])), np.arange(4)
    grads = rows(np.random.default_rng(1), 4)
    _, first = push.encode(keys, grads)
    _, again = push.encode(keys, grads)  # the first was refused
    assert first.tobytes() == again.tobytes()
    push.sent(OPEN)
    push.sent(OPEN)
    _, later = push.encode(keys, grads)
    assert later.tobytes() != again.tobytes()


def test_rows_below_a_threshold_are_retained_until_they_exceed_it() -> None:
    push, keys = PushFilter(spec([Threshold(1.0)])), np.arange(2)
    sums = np.zeros((2, DIM), np.float32)
    sent = []
    for _ in range(8):
        found, coded = push.encode(keys, np.array([[0.25, 0.5, 0], [0, 0, 0.125]], np.float32))
        push.sent(OPEN)
        sums[found] += push.codec.decode(coded)
        sent.append(found.tolist())
    assert sent == [[], [0], [], [0], [], [0], [], [0, 1]]
    assert sums.tolist() == [[2, 4, 0], [0, 0, 1]]
    push = PushFilter(spec([Threshold(1.0, feedback=False)]))
    found, coded = push.encode(keys, np.array([[0.5, 0.5, 0.5], [0.5, 2, -3]], np.float32))
    assert found.tolist() == [1]
    assert push.codec.decode(coded).tolist() == [[0, 2, -3]]


def test_without_feedback_nothing_is_retained() -> None:
    push, keys = PushFilter(spec([Int8(feedback=False)])), np.arange(4)
    grads = rows(np.random.default_rng(1), 4)
    for _ in range(2):
        found, coded = push.encode(keys, grads)
        push.sent(OPEN)
        assert found is keys
        assert coded.tobytes() == Codec([Int8()], DIM).encode(grads).tobytes()
    assert push.feedback == Feedback(0, 0)


def test_a_gradient_that_is_not_finite_is_sent_once_and_not_retained() -> None:
    push, keys = PushFilter(spec([Int8()])), np.arange(2)
    grads = np.array([[1, np.nan, 2], [1, 2, 3]], np.float32)
    _, coded = push.encode(keys, grads)
    push.sent(OPEN)
    assert np.isnan(push.codec.decode(coded)[0]).all()
    _, coded = push.encode(keys, np.ones((2, DIM), np.float32))
    assert np.isfinite(push.codec.decode(coded)).all()


def test_a_gradient_that_is_not_finite_leaves_retained_gradients_alone() -> None:
    push, keys = PushFilter(spec([Threshold(10.0)])), np.arange(3)
    push.encode(keys, np.full((3, DIM), 9, np.float32))
    push.sent(OPEN)
    for bad in ([np.nan, 0, 0], [0, np.inf, 0]):
        found, _ = push.encode(keys[:1], np.array([bad], np.float32))
        assert found.tolist() == [0]
        push.sent(OPEN)
    found, coded = push.encode(keys, np.full((3, DIM), 1, np.float32))
    assert found.tolist() == [0, 1, 2]
    assert (push.codec.decode(coded) == 10).all()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([*FILTERS, [Threshold(1.0)], [TopK(0.3)]]),
    st.lists(st.tuples(st.sampled_from(["push", "push", "end", "forget"]), KEYS_OF_10), max_size=16),
)
@settings(max_examples=40)
def test_refused_rows_get_back_the_gradients_retained_before(
    seed: int, filters: list[Filter], story: list[tuple[str, list[int]]]
) -> None:
    """What was pushed and not refused is what has arrived and what is kept. Steps end late, in order."""
    random, push = np.random.default_rng(seed), PushFilter(spec(filters), table=7)
    left = np.zeros((10, DIM))  # pushed, and not arrived
    under_way: list[tuple[Outstanding, NDArray[np.int64], Floats]] = []
    for what, some in [*story, *[("end", list[int]())] * 16]:
        keys = np.array(some, np.int64)
        if what == "end" and under_way:
            step, found, dropped = under_way.pop(0)
            refused = np.isin(found, keys)
            left[found[refused]] -= dropped[refused]
            step.end(found[refused].tolist())
        elif what == "push" and some:
            grads, step = rows(random, len(keys)), Outstanding()
            found, coded = push.encode(keys, grads)
            push.sent(step)
            arrives = push.codec.decode(coded)
            left[keys] += grads
            left[found] -= arrives
            where = [some.index(key) for key in found.tolist()]
            under_way.append((step, found, grads[where] - arrives))
        elif what == "forget":
            push.forget(keys)
            left[keys] = 0
            for _, found, dropped in under_way:
                dropped[np.isin(found, keys)] = 0
    push.forget(np.empty(0, np.int64))
    assert push._residual is not None
    stored = push._residual.add(np.arange(10), np.zeros((10, DIM), np.float32))
    assert np.allclose(left, stored, atol=1e-3)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([*FILTERS, [Threshold(1.0)], [TopK(0.3)]]),
    st.lists(
        st.tuples(st.lists(st.tuples(KEYS_OF_10, KEYS_OF_10), min_size=1, max_size=4), KEYS_OF_10, st.integers(0, 2)),
        max_size=8,
    ),
)
@settings(max_examples=60)
def test_a_row_refused_in_one_part_of_a_step_does_not_affect_other_parts(
    seed: int, filters: list[Filter], story: list[tuple[list[tuple[list[int], list[int]]], list[int], int]]
) -> None:
    """Of a finite table: what is not finite is refused, and for some new rows servers lack memory in every part. What
    was pushed and not refused is what has arrived and what is kept. Steps end late, in order."""
    random = np.random.default_rng(seed)
    push = PushFilter(replace(spec(filters), finite=True), table=7)
    left = np.zeros((10, DIM))  # pushed, and not arrived
    under_way: list[tuple[Outstanding, list[int], list[int]]] = []
    for parts, full, open_steps in story:
        step, refused, lacking = Outstanding(), set[int](), set[int]()
        for some, bad in parts:
            keys = np.array(some, np.int64)
            grads = rows(random, len(keys))
            spoilt = np.isin(keys, bad)
            grads[spoilt, 0] = np.nan
            found, coded = push.encode(keys, grads)
            push.sent(step)
            arrives = push.codec.decode(coded)
            finite = np.isfinite(arrives).all(axis=1)
            assert set(found[~finite].tolist()) == set(keys[spoilt].tolist())
            lost = np.isin(found, full)
            refused.update(found[~finite].tolist())
            lacking.update(found[finite & lost].tolist())
            for key, grad in zip(some, grads, strict=True):
                if key not in bad and not (key in full and key in found):
                    left[key] += grad
            left[found[finite & ~lost]] -= arrives[finite & ~lost]
        under_way.append((step, sorted(refused), sorted(lacking)))
        while len(under_way) > open_steps:
            ended, *which = under_way.pop(0)
            ended.end(*which)
    for ended, *which in under_way:
        ended.end(*which)
    push.forget(np.empty(0, np.int64))
    assert push._residual is not None
    stored = push._residual.add(np.arange(10), np.zeros((10, DIM), np.float32))
    assert np.allclose(left, stored, atol=1e-3)


def test_forgotten_gradients_are_not_put_back() -> None:
    push, keys, step = PushFilter(spec([Threshold(10.0)]), table=7), np.arange(4), Outstanding()
    push.encode(keys, np.full((4, DIM), 9, np.float32))
    push.sent(OPEN)
    found, _ = push.encode(keys, np.full((4, DIM), 2, np.float32))
    assert found.tolist() == [0, 1, 2, 3]
    push.sent(step)
    push.forget(keys[:2])  # loaded, while the step is under way
    step.end([0, 2])
    found, coded = push.encode(keys, np.full((4, DIM), 1, np.float32))
    assert found.tolist() == [2], "it has what the first push had left, and row 0 has not"
    assert (push.codec.decode(coded) == 10).all()
    push.sent(OPEN)
    push.forget(None)
    assert push.feedback == Feedback(0, 0)


def test_a_tensor_keeps_each_of_its_floats() -> None:
    filters, shape = [Int8()], (100, 400)
    one = TableSpec.dense("w", shape, SGD(0.1), push=filters)
    push, codec, random = PushFilter(one), Codec(filters, one.dim), np.random.default_rng(3)
    blocks, stored = np.arange(one.blocks), np.zeros((one.blocks, one.dim), np.float32)
    assert one.blocks * one.dim > one.size > one.dim  # several blocks, the last one padded
    for _ in range(3):
        grad = random.normal(size=one.size).astype(np.float32)
        source = push.source(7, 0, blocks, grad, np.zeros(1, np.float32))
        push.sent(OPEN)
        whole = stored.copy()
        whole.reshape(-1)[: one.size] += grad
        assert source.grads.tobytes() == codec.encode(whole).tobytes()
        assert (source.dim, source.floats) == (codec.words, -1)
        stored = whole - codec.decode(codec.encode(whole))
    assert push.feedback == Feedback(one.blocks, 0)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=300))
@settings(max_examples=50)
def test_retained_rows_are_bounded_and_evicted_rows_are_counted(keys: list[int]) -> None:
    stored, last = RowMemory(64, 1), dict[int, float]()
    for number, key in enumerate(keys, start=1):
        stored.keep(np.array([key]), np.full((1, 1), number, np.float32))
        last[key] = number
        assert stored.add(np.array([key]), np.zeros((1, 1), np.float32))[0, 0] == number
    assert stored.rows <= 64
    every = np.array(sorted(last))
    found = stored.add(every, np.zeros((len(every), 1), np.float32))[:, 0]
    there = found != 0
    assert found[there].tolist() == [last[key] for key in every[there].tolist()]  # never another key's
    assert there.sum() == stored.rows
    assert (stored.lost > 0) or there.all()
    assert len(last) - stored.rows <= stored.lost


def test_retained_rows_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "MEMORY_BYTES", 100 * (4 * DIM + 8))
    push, random = PushFilter(spec([Int8()])), np.random.default_rng(5)
    push.encode(np.arange(1000), rows(random, 1000))
    push.sent(OPEN)
    assert push.feedback.rows == 64  # a power of two
    assert push.feedback.lost == 1000 - 64
