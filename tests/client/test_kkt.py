"""The KKT filter leaves out what a twin of dictionaries leaves out; what it keeps is bounded as its docstring says."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import elasticps as eps
from elasticps.client import kkt_filter
from elasticps.client.filtering import PushFilter
from elasticps.client.kkt_filter import KKTScreen, Screened, screen_of
from elasticps.client.pull import ServerPull
from elasticps.client.pull_layouts import Query
from elasticps.errors import SpecError
from elasticps.kernels.hashing import table_salt
from elasticps.model.filters import Filter
from elasticps.model.spec import TableSpec
from elasticps.store import Table, register_optimizer
from elasticps.store.codec import Codec
from tests.client.outstanding import Outstanding

DIM, KEYS = 3, 20
L1, SLACK = 1.0, 0.25
Floats = NDArray[np.float32]
OPEN = Outstanding()


def pair(spec: TableSpec) -> tuple[PushFilter, KKTScreen]:
    screen = screen_of(spec, threading.Lock)
    assert screen is not None
    return PushFilter(spec, screen), screen


def spec_of(*filters: Filter, dim: int = DIM, l1: float = L1) -> TableSpec:
    return TableSpec("t", dim, eps.FTRL(0.5, l1=l1), push=filters)


FILTERS: list[list[Filter]] = [
    [eps.KKT(SLACK)], [eps.KKT(SLACK, feedback=False)], [eps.KKT(SLACK), eps.Int8()],
    [eps.KeyDeltas(), eps.KKT(SLACK, feedback=False), eps.Int8()], [eps.KKT(SLACK), eps.BFloat16()],
    [eps.KKT(SLACK), eps.Threshold(0.5)],
]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.sampled_from(FILTERS))
@settings(max_examples=40)
def test_the_filter_leaves_out_the_floats_that_a_twin_leaves_out(seed: int, filters: list[Filter]) -> None:
    random, (push, screen) = np.random.default_rng(seed), pair(spec_of(*filters))
    kkt = next(each for each in filters if isinstance(each, eps.KKT))
    codec = Codec(filters, DIM)
    zero: dict[int, NDArray[np.bool_]] = {}  # of keys that were pulled, and not sent since
    stored: dict[int, Floats] = {}
    floats = dropped = 0
    for _ in range(15):
        keys = random.choice(KEYS, random.integers(0, 12)).astype(np.int64)  # some of them twice
        rows = np.where(random.random((len(keys), DIM)) < 0.7, 0, 1).astype(np.float32)
        rows = rows[np.unique(keys, return_inverse=True)[1]] if len(keys) else rows
        screen.saw(keys, rows)
        zero |= {key: row == 0 for key, row in zip(keys.tolist(), rows, strict=True)}
        keys = random.choice(KEYS, random.integers(0, 12)).astype(np.int64)
        grads = random.normal(scale=0.6, size=(len(keys), DIM)).astype(np.float32)
        found, coded = push.encode(keys, grads)
        push.sent(OPEN)
        sent = dict(zip(found.tolist(), coded, strict=True))
        for key in np.unique(keys).tolist():
            total = np.zeros(DIM, np.float32)
            for grad in grads[keys == key]:
                total += grad
            total += stored.get(key, np.zeros(DIM, np.float32))
            small = zero.get(key, np.zeros(DIM, np.bool_)) & (abs(total) <= np.float32(L1 - SLACK))
            left = np.where(small, np.float32(0), total)
            floats += int(np.count_nonzero(total))
            dropped += int(np.count_nonzero(total) - np.count_nonzero(left))
            decoded = codec.decode(codec.encode(left[None]))[0]
            assert (key in sent) == decoded.any()
            if key in sent:
                assert sent[key].tobytes() == codec.encode(left[None])[0].tobytes()
            if left.any():
                zero.pop(key, None)
            stored[key] = (total - left) * kkt.feedback + (left - decoded) * codec.feedback
    assert screen.counts == Screened(floats, dropped)
    if kkt.feedback and len(filters) == 1:
        assert all((abs(rest) <= L1 - SLACK).all() for rest in stored.values())


def test_a_push_that_was_not_sent_leaves_out_nothing() -> None:
    push, screen = pair(spec_of(eps.KKT()))
    keys, small = np.arange(2), np.full((2, DIM), 0.5, np.float32)
    screen.saw(keys, np.zeros((2, DIM), np.float32))
    assert len(push.encode(keys, small)[0]) == 0  # refused: another table of the same push was wrong
    assert screen.counts == Screened(0, 0)
    assert len(push.encode(keys, small)[0]) == 0
    push.sent(OPEN)
    push.sent(OPEN)
    assert screen.counts == Screened(6, 6)
    found, coded = push.encode(keys, small)  # 0.5 + 0.5 is no more than 1
    push.sent(OPEN)
    assert len(found) == 0
    found, coded = push.encode(keys, np.full((2, DIM), 0.25, np.float32))
    assert (found == keys).all()
    assert (coded == 1.25).all()
    push.sent(OPEN)
    assert push.encode(keys, small)[0].tolist() == [0, 1]  # sent, and not pulled since
    push.sent(OPEN)
    screen.saw(keys, np.zeros((2, DIM), np.float32))
    grads = np.array([[0.1, np.nan, 0], [0, 0, 0.1]], np.float32)
    found, coded = push.encode(keys, grads)  # what is no number is for the server to refuse
    assert found.tolist() == [0]
    assert np.isnan(coded[0, 1])


def test_more_keys_than_there_is_room_for_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kkt_filter, "MEMORY_BYTES", 64 * (4 * DIM + 8))
    push, screen = pair(spec_of(eps.KKT(feedback=False)))
    keys = np.arange(1_000)
    screen.saw(keys, np.zeros((1_000, DIM), np.float32))
    found, coded = push.encode(keys, np.full((1_000, DIM), 0.5, np.float32))
    assert len(found) == 1_000 - 64
    assert (coded == 0.5).all()


def test_a_tensors_floats_are_left_out_one_by_one() -> None:
    spec = TableSpec.dense("w", (50, 500), eps.FTRL(0.5, l1=L1), push=[eps.KKT(feedback=False)])
    assert spec.blocks > 1
    assert spec.size % spec.dim
    random, (push, screen) = np.random.default_rng(1), pair(spec)
    values = np.where(random.random(spec.size) < 0.9, 0, 1).astype(np.float32)
    grad = random.normal(size=spec.size).astype(np.float32)
    screen.saw_tensor(values.reshape(50, 500))
    source = push.source(7, 0, np.arange(spec.blocks), grad, np.zeros(1, np.float32))
    push.sent(OPEN)
    left = np.where((values == 0) & (abs(grad) <= 1), 0, grad)
    assert (source.grads.reshape(-1)[: spec.size] == left).all()
    assert screen.counts == Screened(spec.size, int(np.count_nonzero(grad) - np.count_nonzero(left)))


def proximal(w: Any, s: Any, g: Any, v: Any, c: Any) -> None:
    """Proximal gradient: w = S(w - lr g, lr l1). c: l1."""
    for j in range(w.shape[0]):
        x = w[j] - v[0] * g[j]
        size = max(abs(x) - v[0] * c[0], np.float32(0))
        w[j] = size if x > 0 else -size


def test_a_proximal_optimizer_needs_none_of_the_floats_left_out() -> None:
    """As in the paper: the same weights at each step, from a part of the gradients."""
    register_optimizer("proximal", proximal)
    random, l1 = np.random.default_rng(2), 0.05
    x = np.where(random.random((300, 80)) < 0.2, random.normal(size=(300, 80)), 0)
    truth = np.where(random.random(80) < 0.1, random.normal(size=80) * 4, 0)
    y = x @ truth + 0.01 * random.normal(size=300)
    optimizer = eps.Custom("proximal", lr=0.5, constant_values=(l1,))
    filtered = TableSpec("t", 1, optimizer, push=[eps.KKT(l1=l1, feedback=False)])
    push, screen = pair(filtered)
    one, other, keys = Table(filtered, 3, 8), Table(TableSpec("t", 1, optimizer), 3, 8), np.arange(80)
    w, whole = np.zeros((80, 1), np.float32), np.zeros((80, 1), np.float32)
    for step in range(1, 200):
        one.gather(keys, w)
        other.gather(keys, whole)
        assert np.array_equal(w, whole)  # to the bit, but for the sign of zeros
        screen.saw(keys, w)
        grads = (x.T @ (x @ w[:, 0] - y) / 300).astype(np.float32)[:, None]
        found, coded = push.encode(keys, grads)
        push.sent(OPEN)
        one.apply(found, coded, optimizer.step_values(step))
        other.apply(keys, grads, optimizer.step_values(step))
    assert 0 < np.count_nonzero(w) < 30
    assert screen.counts.dropped > 0.5 * screen.counts.floats


def test_the_gradient_that_ftrl_lacks_is_bounded() -> None:
    """Of each worker no more than l1 - slack, as long as a weight is zero there."""
    spec = spec_of(eps.KKT(SLACK), dim=1)
    pairs, table, random = [pair(spec) for _ in range(3)], Table(spec, 3, 8), np.random.default_rng(4)
    keys, given_, values = np.arange(50), np.zeros((50, 1)), np.array([2.0], np.float32)
    w, slots = np.zeros((50, 1), np.float32), np.zeros((50, 2), np.float32)
    never = np.ones(50, np.bool_)  # these weights have been zero all the time, so z is the sum of their gradients
    drift = random.normal(scale=0.01, size=(50, 1))
    for _ in range(40):
        for push, screen in pairs:
            table.gather(keys, w)
            never &= w[:, 0] == 0
            screen.saw(keys, w)
            grads = (drift + random.normal(scale=0.1, size=(50, 1))).astype(np.float32)
            given_ += grads
            found, coded = push.encode(keys, grads)
            push.sent(OPEN)
            table.apply(found, coded, values)
    table.gather(keys, w)
    never &= w[:, 0] == 0
    table.read_slots(keys, slots)
    assert 5 < never.sum() < 45
    assert (abs(slots[never, 0] - given_[never, 0]) <= 3 * (L1 - SLACK) + 1e-5).all()
    assert sum(screen.counts.dropped for _, screen in pairs) > 2_000


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: eps.KKT(-0.1), "slack"),
        (lambda: eps.KKT(float("nan")), "slack"),
        (lambda: eps.KKT(2.0, l1=1.0), "slack must be at most l1, 1.0, got 2.0"),
        (lambda: eps.KKT(l1=-1.0), r"KKT\.l1"),
        (lambda: eps.KKT(feedback="yes"), "feedback must be True or False"),  # type: ignore[arg-type]
        (lambda: spec_of(eps.KKT(1.5)), "slack must be at most l1, 1.0, got 1.5"),
        (lambda: TableSpec("t", 1, eps.SGD(0.1), push=[eps.KKT()]), "KKT is for FTRL, and custom .* not for SGD"),
        (lambda: TableSpec("t", 1, eps.Custom("x", lr=0.1), push=[eps.KKT()]), "needs l1="),
        (lambda: spec_of(eps.Int8(), eps.KKT()), "has to come first"),
        (lambda: spec_of(eps.Threshold(1.0), eps.KKT()), "has to come first"),
        (lambda: spec_of(eps.KKT(), eps.KKT()), "has to come first"),
        (lambda: TableSpec("t", 1, eps.FTRL(0.5), pull=[eps.KKT()]), "for pushes only"),
    ],
)
def test_unusable_filters_are_refused(make: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make()


def test_the_filter_is_in_the_spec_and_servers_take_rows_unchanged() -> None:
    spec = spec_of(eps.KeysOnce(), eps.KKT(SLACK))
    assert TableSpec.from_json(spec.to_json()) == spec
    table = Table(spec, 3, 8)
    assert (table.push.code, table.push.words) == (0, DIM)


@pytest.mark.parametrize("again", [False, True])
def test_rows_pulled_before_a_push_are_not_taken_for_rows_after_it(again: bool) -> None:
    """Found in a review: they were zero when they were asked for, so the next gradient was left out. again: that result
    is asked for once more, behind the push."""
    push, screen = pair(spec_of(eps.KKT(feedback=False), dim=1))
    keys = np.arange(2)
    query = Query(1, table_salt(1), 1, "t")
    read = ServerPull(lambda read, timeout: None, query, keys, np.zeros((2, 1), np.float32))
    read.on_rows = screen.noting(keys)
    if again:
        read.result()
    found, _ = push.encode(keys, np.full((2, 1), 5, np.float32))
    push.sent(OPEN)
    assert found.tolist() == keys.tolist()
    read.result()
    found, _ = push.encode(keys, np.full((2, 1), 0.5, np.float32))
    assert found.tolist() == keys.tolist(), "they may be anything by now"


def test_rows_requested_very_long_ago_count_as_unknown() -> None:
    push, screen = pair(spec_of(eps.KKT(feedback=False), dim=1))
    keys, one = np.arange(2), np.array([7])
    saw = screen.noting(keys)
    for _ in range(kkt_filter.RECENT + 1):
        push.encode(one, np.full((1, 1), 5, np.float32))
        push.sent(OPEN)
    saw(np.zeros((2, 1), np.float32))
    found, _ = push.encode(keys, np.full((2, 1), 0.5, np.float32))
    assert found.tolist() == keys.tolist()


def test_pushes_of_other_keys_do_not_make_pulled_rows_unknown() -> None:
    push, screen = pair(spec_of(eps.KKT(feedback=False), dim=1))
    keys = np.arange(2)
    saw = screen.noting(keys)
    push.encode(np.array([1]), np.full((1, 1), 5, np.float32))
    push.sent(OPEN)
    saw(np.zeros((2, 1), np.float32))
    found, _ = push.encode(keys, np.full((2, 1), 0.5, np.float32))
    assert found.tolist() == [1]


def test_rows_that_are_loaded_are_sent_whole_until_they_are_pulled_again() -> None:
    push, screen = pair(spec_of(eps.KKT(SLACK)))
    keys, small = np.arange(4), np.full((4, DIM), 0.01, np.float32)
    screen.saw(keys, np.zeros((4, DIM), np.float32))
    before = screen.noting(keys)
    assert not len(push.encode(keys, small)[0])
    push.forget(keys[:2])
    assert push.encode(keys, small)[0].tolist() == [0, 1]
    before(np.zeros((4, DIM), np.float32))  # pulled before they were loaded
    assert push.encode(keys, small)[0].tolist() == [0, 1]
    push.forget(None)
    before(np.zeros((4, DIM), np.float32))
    assert push.encode(keys, small)[0].tolist() == [0, 1, 2, 3]
    screen.saw(keys, np.zeros((4, DIM), np.float32))
    assert not len(push.encode(keys, small)[0])
