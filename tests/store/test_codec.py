"""Filters beside a simple twin: encoding, decoding and allowed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.errors import SpecError
from elasticps.model.filters import GROUP, BFloat16, Filter, Float16, Int8, RandomK, Threshold, TopK
from elasticps.model.spec import SGD, TableSpec
from elasticps.store.codec import BFLOAT16, FLOAT16, INT8, NONE, Codec, decode_rows

Floats = NDArray[np.float32]
WRONG: Any = "wrong"

anything = st.floats(width=32) | st.sampled_from([0.0, -0.0, 65504.0, 65519.0, 65520.0, 3.4e38, 1e-45, math.inf])
usual = st.floats(-100, 100, width=32)


def rows_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[Floats]:
    """Some rows, long ones too, repeated from a few numbers."""

    def build(drawn: tuple[list[float], int, int]) -> Floats:
        few, n, dim = drawn
        return np.resize(np.array(few, np.float32), (n, dim))

    return st.tuples(
        st.lists(values, min_size=1, max_size=40), st.integers(0, 5), st.sampled_from([1, 2, 3, 7, 16, 255, 257, 600])
    ).map(build)


def through(filters: list[Filter], rows: Floats) -> Floats:
    codec = Codec(filters, rows.shape[1])
    coded = codec.encode(rows)
    assert coded.shape == (len(rows), codec.words)
    assert coded.dtype == np.float32
    return codec.decode(coded)


def same(one: Floats, other: Floats) -> bool:
    """Equal to the bit, where they are numbers."""
    nan = np.isnan(one)
    return bool((nan == np.isnan(other)).all() and (one.view(np.uint32) == other.view(np.uint32))[~nan].all())


def bfloat16_twin(x: float) -> float:
    """The nearest number with 8 bits, by trying both."""
    if math.isnan(x) or math.isinf(x):
        return x
    low = np.array([x], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    below, above = (float((low + step).view(np.float32)[0]) for step in (np.uint32(0), np.uint32(0x10000)))
    if not math.isfinite(above) or abs(x - below) < abs(above - x):
        return below
    if abs(x - below) > abs(above - x):
        return above
    return below if int(low[0]) >> 16 & 1 == 0 else above


@given(rows_of(anything))
def test_bfloat16_rounds_to_the_nearest(rows: Floats) -> None:
    expected = np.array([[bfloat16_twin(float(x)) for x in row] for row in rows], np.float32).reshape(rows.shape)
    assert same(through([BFloat16()], rows), expected)


@given(rows_of(anything))
def test_float16_is_numpys_and_stops_at_its_largest(rows: Floats) -> None:
    limited = np.where(np.isfinite(rows), np.clip(rows, -65504, 65504), rows).astype(np.float32)
    assert same(through([Float16()], rows), limited.astype(np.float16).astype(np.float32))


@given(rows_of(usual | st.sampled_from([1e-45, 1e-38, 3e38])))
def test_int8_is_within_half_a_step_of_the_groups_largest(rows: Floats) -> None:
    found = through([Int8()], rows)
    for row, got in zip(rows.astype(np.float64), found.astype(np.float64), strict=True):
        for at in range(0, len(row), GROUP):
            group, step = row[at : at + GROUP], np.abs(row[at : at + GROUP]).max() / 127
            assert np.abs(group - got[at : at + GROUP]).max() <= 0.5001 * step + 2e-43  # float32's smallest steps
            if step > 1e-37:
                assert np.abs(got[at : at + GROUP]).max() == pytest.approx(127 * step, rel=1e-6)


@given(st.integers(0, 1 << 30), st.integers(0, 5), st.sampled_from([1, 3, 16, 64, 255, 256, 257, 600]))
def test_int8_is_each_number_times_its_groups_scale_whatever_the_words_are(seed: int, n: int, dim: int) -> None:
    coded = np.random.default_rng(seed).integers(0, 1 << 32, (n, Int8().words(dim)), np.uint32)
    groups = -(-dim // GROUP)
    scales = coded[:, :groups].view(np.float32).repeat(GROUP, axis=1)[:, :dim]
    numbers = np.ascontiguousarray(coded[:, groups:]).view(np.int8)[:, :dim]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(np.float32) * scales
    assert same(Codec([Int8()], dim).decode(coded.view(np.float32)), expected)


@given(rows_of(usual), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_int8_preserves_that_a_group_is_not_finite(rows: Floats, wrong: float) -> None:
    if not rows.size:
        return
    rows = rows.copy()
    rows[0, -1] = wrong
    found = through([Int8()], rows)
    last = (rows.shape[1] - 1) // GROUP * GROUP
    assert np.isnan(found[0, last:]).all()
    assert np.isfinite(found[1:]).all()
    assert np.isfinite(found[0, :last]).all()


@given(rows_of(usual), st.sampled_from([[BFloat16()], [Float16()], [Int8()]]))
def test_encoding_twice_equals_encoding_once(rows: Floats, filters: list[Filter]) -> None:
    once = through(filters, rows)
    assert np.allclose(through(filters, once), once, rtol=1e-6, atol=0)


@given(rows_of(usual), st.sampled_from([0.01, 0.3, 1.0]), st.sampled_from([[], [Int8()], [BFloat16()]]))
def test_top_k_keeps_the_largest_floats_of_each_row_for_later_filters(
    rows: Floats, fraction: float, more: list[Filter]
) -> None:
    found, k = through([TopK(fraction), *more], rows), max(1, math.ceil(fraction * rows.shape[1]))
    for row, got in zip(rows, found, strict=True):
        large = sorted(np.abs(row).tolist(), reverse=True)
        chosen = np.flatnonzero(got)
        assert len(chosen) <= k
        if not more:
            assert (got[chosen] == row[chosen]).all()
            assert sorted(np.abs(got).tolist(), reverse=True)[:k] == large[:k]
        else:
            assert np.abs(got[chosen] - row[chosen]).max(initial=0) <= large[0] / 200


@pytest.mark.parametrize("dim", [1, 10, 777])
def test_random_k_draws_each_float_as_often_and_the_sum_is_right_on_average(dim: int) -> None:
    rows = np.random.default_rng(2).uniform(1, 2, (4000, dim)).astype(np.float32)
    found, k = through([RandomK(0.1, seed=5)], rows), max(1, math.ceil(0.1 * dim))
    chosen = found != 0
    assert (found[chosen] == rows[chosen]).all()
    assert (chosen.sum(axis=1) == k).all()
    assert np.abs(chosen.mean(axis=0) * dim / k - 1).max() < 0.5
    assert (through([RandomK(0.1, seed=5)], rows) == found).all()
    scaled = through([RandomK(0.1, feedback=False)], rows)
    assert scaled.mean() == pytest.approx(rows.mean(), rel=0.02)
    if dim > 1:
        assert (through([RandomK(0.1, seed=6)], rows) != found).any()


@given(rows_of(usual), st.sampled_from([0.0, 1.0, 50.0]))
def test_a_threshold_leaves_out_smaller_floats(rows: Floats, value: float) -> None:
    assert same(through([Threshold(value)], rows), np.where(np.abs(rows) >= value, rows, np.float32(0)))


@pytest.mark.parametrize("filters", [[TopK(0.2)], [RandomK(0.2)], [Threshold(2), TopK(0.2), BFloat16()]])
def test_sparse_filters_preserve_that_a_row_is_not_finite(filters: list[Filter]) -> None:
    found = through(filters, np.array([[1, np.nan, 3, 4, 5], [1, 2, 3, -np.inf, 5], [1, 2, 3, 4, 5]], np.float32))
    assert np.isfinite(found).all(axis=1).tolist() == [False, False, True]


LISTS = [[TopK(0.3)], [TopK(0.6), Int8()], [RandomK(0.4)], [RandomK(0.4), Float16()], [Threshold(1), TopK(0.5), Int8()]]


@given(st.binary(min_size=8 * 4, max_size=8 * 4), st.sampled_from([*LISTS, [Int8()], [Threshold(1)], [TopK(1)]]))
def test_any_bytes_can_be_decoded_and_compiled_code_agrees(sent: bytes, filters: Any) -> None:
    dim = 8 if Threshold(1) in filters[:1] else 5
    codec = Codec(filters, dim)
    assert codec.words <= 8
    coded = np.frombuffer(sent, np.float32)[: 8 // codec.words * codec.words].reshape(-1, codec.words).copy()
    found, compiled = codec.decode(coded), np.full((len(coded), dim), np.float32(7))
    decode_rows(codec.code, coded.ctypes.data, len(coded), dim, compiled.ctypes.data, codec.words)
    assert found.shape == (len(coded), dim)
    assert same(found, compiled)


@given(rows_of(usual), st.sampled_from([[BFloat16()], [Float16()], [Int8()], *LISTS]))
def test_rows_are_coded_each_by_itself(rows: Floats, filters: list[Filter]) -> None:
    codec = Codec(filters, rows.shape[1])
    whole = codec.encode(rows)
    for i in range(len(rows)):
        assert codec.encode(rows[i : i + 1]).tobytes() == whole[i : i + 1].tobytes()
    assert same(codec.decode(whole[::-1]), codec.decode(whole)[::-1])  # slices of what was received, too


def test_without_filters_nothing_is_copied() -> None:
    rows = np.ones((3, 4), np.float32)
    codec = Codec((), 4)
    assert codec.encode(rows) is rows
    assert codec.decode(rows) is rows
    assert (codec.words, codec.code) == (4, NONE)


@pytest.mark.parametrize(
    ("filters", "dim", "words", "code"),
    [
        ([BFloat16()], 5, 3, BFLOAT16),
        ([Float16()], 4, 2, FLOAT16),
        ([Int8()], 257, 2 + 65, INT8),
        ([TopK(0.01)], 500, 3 + 5, None),
        ([TopK(0.01), Int8()], 500, 3 + 1 + 2, None),
        ([RandomK(0.01), Int8()], 500, 1 + 1 + 2, None),
        ([Threshold(0.1), TopK(0.01)], 500, 3 + 5, None),
        ([TopK(0.07)], 100, 4 + 7, None),
    ],
)
def test_a_codec_knows_the_size_of_an_encoded_row(
    filters: list[Filter], dim: int, words: int, code: int | None
) -> None:
    codec = Codec(filters, dim)
    assert codec.words == words
    assert codec.code > INT8 if code is None else codec.code == code


# --- in a table's spec ------------------------------------------------------------------------------------------------


def test_filters_are_part_of_the_spec() -> None:
    spec = TableSpec("t", 4, SGD(0.1), push=[Int8()], pull=[BFloat16()])
    again = TableSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    assert (again.push, again.pull) == ((Int8(),), (BFloat16(),))
    other = TableSpec("t", 4, SGD(0.1), push=[Int8(feedback=False)], pull=[BFloat16()])
    assert "push is" in spec.difference(other)


def test_a_spec_without_filters_has_the_old_format() -> None:
    text = TableSpec("t", 4, SGD(0.1)).to_json()
    assert "push" not in text
    assert "pull" not in text
    assert TableSpec.from_json(text) == TableSpec("t", 4, SGD(0.1))


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ([Int8(), BFloat16()], "leaves nothing for BFloat16"),
        ([WRONG], "list of filters"),
        (WRONG, "list of filters"),
        (3, "list of filters"),
        ([Int8] * 1, "list of filters"),
    ],
)
def test_impossible_sequences_of_filters_are_refused(filters: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        TableSpec("t", 4, SGD(0.1), push=filters)
    with pytest.raises(SpecError, match=words):
        TableSpec("t", 4, SGD(0.1), pull=filters)


def test_filters_for_gradients_are_refused_for_pulls() -> None:
    with pytest.raises(SpecError, match=r"pull: TopK.* is for pushes"):
        TableSpec("t", 4, SGD(0.1), pull=[TopK(0.1)])
    with pytest.raises(SpecError, match="leaves nothing for TopK"):
        TableSpec("t", 4, SGD(0.1), push=[Int8(), TopK(0.1)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Int8(feedback=WRONG), "feedback must be True or False"),
        (lambda: BFloat16(feedback=WRONG), "feedback must be True or False"),
        (lambda: Float16(feedback=WRONG), "feedback must be True or False"),
        (lambda: TopK(0.5, feedback=WRONG), "feedback must be True or False"),
        (lambda: Threshold(0.5, feedback=WRONG), "feedback must be True or False"),
        (lambda: TopK(0), "above 0 and at most 1"),
        (lambda: RandomK(1.5), "above 0 and at most 1"),
        (lambda: RandomK(0.5, seed=-1), "RandomK.seed must be from 0"),
        (lambda: TopK(math.nan), "TopK.fraction"),
        (lambda: Threshold(-1), "Threshold.value"),
        (lambda: TopK(WRONG), "must be a number"),
    ],
)
def test_arguments_of_filters_are_checked(make: Callable[[], Filter], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()


def test_a_filter_that_is_not_known_here_is_refused_by_name() -> None:
    text = TableSpec("t", 4, SGD(0.1), push=[Int8()]).to_json()
    with pytest.raises(SpecError, match="unknown filter kind 'int3'"):
        TableSpec.from_json(text.replace('"int8"', '"int3"'))
    with pytest.raises(SpecError, match="lists"):
        TableSpec.from_json(text.replace('[{"kind":"int8","feedback":true}]', '"int8"'))
