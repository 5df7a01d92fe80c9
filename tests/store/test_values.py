"""Initial values and 2-byte weights: the same on every machine, and as good as float32 can tell."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from elasticps.model import spec
from elasticps.store import initial_rows, values

KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 42], np.int64)


def test_initial_values_never_change() -> None:
    # Checkpoints leave out rows that were never pushed: these numbers are part of the format.
    normal = initial_rows(spec.Normal(std=0.01, seed=1), KEYS, 4)
    uniform = initial_rows(spec.Uniform(-1, 1, seed=2), KEYS, 4)
    assert normal[4].tolist() == [
        -0.016961876302957535,
        -0.007463057991117239,
        9.818241960601881e-05,
        0.0022579978685826063,
    ]
    assert uniform[1].tolist() == [0.6902076601982117, -0.892048180103302, -0.6989170908927917, -0.9733259081840515]


def test_a_value_depends_on_seed_key_and_place_alone() -> None:
    init = spec.Normal(seed=3)
    wide, narrow = initial_rows(init, KEYS, 40), initial_rows(init, KEYS[::-1].copy(), 7)
    np.testing.assert_array_equal(wide[::-1, :7], narrow)
    assert len(np.unique(wide)) == wide.size
    assert not np.isin(wide, initial_rows(spec.Normal(seed=4), KEYS, 40)).any()


def test_normals_are_normal() -> None:
    x = initial_rows(spec.Normal(mean=3, std=2, seed=5), np.arange(20_000), 16).astype(np.float64).ravel()
    z = np.sort((x - 3) / 2)
    expected = np.array([NormalDist().cdf(v) for v in z[::100]])
    distance = np.abs(expected - np.arange(0, len(z), 100) / len(z)).max()
    assert distance < 1.95 / math.sqrt(len(z)), "Kolmogorov-Smirnov at 0.1 %; the sample is fixed by its seed"


def test_uniforms_fill_their_interval() -> None:
    x = initial_rows(spec.Uniform(2, 6, seed=5), np.arange(20_000), 16).ravel()
    assert x.min() >= 2
    assert x.max() <= 6
    np.testing.assert_allclose(np.histogram(x, 16, (2, 6))[0], len(x) / 16, rtol=0.03)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (0.1, 0.3), (-0.3, -0.1), (1.0, 1.02), (0.0, 1e5)])
def test_uniforms_stay_below_their_end_when_they_are_rounded(low: float, high: float, dtype: str) -> None:
    x = initial_rows(spec.Uniform(low, high, seed=5), np.arange(30_000), 16, dtype).astype(np.float64)
    assert low <= x.min()
    assert x.max() < high
    assert np.isfinite(x).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_uniforms_without_a_number_between_their_ends(dtype: str) -> None:
    for low, high in ((0.5, 0.5), (1.00001, 1.00002)):
        x = initial_rows(spec.Uniform(low, high), np.arange(10), 4, dtype)
        assert set(x.ravel()) == {np.float32(np.round(low, 3))}


def test_numbers_of_two_bytes_have_neighbours() -> None:
    for name, kind in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        ordered = (
            torch.arange(0, 0x7C00 if name == "float16" else 0x7F80, dtype=torch.int16).view(kind).double().tolist()
        )
        both = [-x for x in reversed(ordered[1:])] + ordered
        for x, above in zip(both[::7], both[1::7], strict=False):
            assert values._next(x, name, 1) == above
            assert values._next(above, name, -1) == x
            assert values._nearest(x, name) == x


@pytest.mark.parametrize("exponent", range(2, 53))
def test_quantiles_agree_with_the_standard_library(exponent: int) -> None:
    q = 0.5 - 2.0**-exponent
    ours = values._central_quantile if q <= 0.425 else values._tail_quantile
    expected = NormalDist().inv_cdf(0.5 + q)
    assert ours(q) == pytest.approx(expected, rel=3e-7)
    assert ours(-q) == -ours(q)


def test_logarithms_need_no_libm() -> None:
    for x in (2.0**-53, 1e-9, 0.074, 0.5, 0.7071, 0.70711, 1.0, 1.4142, 1.41422, 3.0, 1e300):
        assert values.log(x) == pytest.approx(math.log(x), rel=1e-11, abs=1e-12)


def test_every_float16_is_read_and_written_as_numpy_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal([values.float16_value(int(b)) for b in bits], expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal([values.float16_of(x) for x in expected[finite]], bits[finite])


def test_float16_is_read_right_where_the_processor_takes_subnormal_numbers_for_zero() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    read = np.empty(len(bits), np.float32)
    torch.set_flush_denormal(True)
    try:
        values.unpack(bits.ctypes.data, read, spec.DTYPES.index("float16"))
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(read, expected)


def test_rounding_to_two_bytes_is_to_nearest_even() -> None:
    random = np.random.default_rng(1)
    x = random.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(0, 0x7C00, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    following = np.arange(1, 0x7C01, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + following[:-1]) / 2
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 2**-24, 2**-25, 1e-30], np.float32)
    x = np.concatenate((x, ties, -ties, np.nextafter(ties, np.float32(np.inf)), edges))
    number = ~np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(np.array([values.float16_of(v) for v in x])[number], expected[number])
    brain = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(np.array([values.bfloat16_of(v) for v in x])[number], brain[number])
    for v in x[~number]:
        assert np.isnan(values.float16_value(values.float16_of(v)))
        assert values.bfloat16_of(v) & 0x7FFF > 0x7F80
