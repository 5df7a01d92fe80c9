"""Values of new rows as a function of (seed, key), and weights in 2 bytes. Kernels inline what is here.

Only IEEE add, multiply, divide, square root and integer operations: every CPU computes the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import mix64
from elasticps.model.spec import DTYPES, Init, Uniform
from elasticps.store.native import (
    H_CONSTANTS,
    H_DIM,
    H_DTYPE,
    H_INIT,
    H_INIT_VALUES,
    H_SEED,
    H_SLOT_FLOATS,
    H_SLOTS_AT,
    H_STRIDE,
    carray,
    copy,
    float32_bits,
    float32_from_bits,
    float32_from_half,
    float64_bits,
    float64_from_bits,
    inlined,
    kernel,
    pointer,
    store64,
)

_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)
INIT_KINDS = ("constant", "uniform", "normal")
_UNIFORM, _NORMAL = INIT_KINDS.index("uniform"), INIT_KINDS.index("normal")
_FLOAT16 = DTYPES.index("float16")

_GOLDEN, _S12 = np.uint64(0x9E3779B97F4A7C15), np.uint64(12)
_UNIT = 2.0**-52
_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951


@kernel
def log(x: float) -> float:
    """Natural logarithm of a normal positive float64 to about 1e-12, without libm.

    x = m·2^e with m in [√½, √2), and ln m = 2·atanh(s) for s = (m - 1) / (m + 1), by its series.
    """
    bits = float64_bits(x)
    exponent = float((bits >> 52) - 1023)
    m = float64_from_bits((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000)
    if m > _SQRT2:
        m *= 0.5
        exponent += 1.0
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return exponent * _LN2 + 2.0 * s * series


# The standard normal's quantile to about 7 figures: PPND7 of Wichura's AS 241 (Applied Statistics 37, 1988).


@inlined
def _central_quantile(q: float) -> float:
    """Quantile of q + ½ for |q| <= 0.425."""
    r = 0.180625 - q * q
    top = ((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179
    return q * top / (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0)


@kernel
def _tail_quantile(q: float) -> float:
    """Quantile of q + ½ for 0.425 < |q| < ½."""
    r = math.sqrt(-log(0.5 - abs(q)))
    if r <= 5.0:
        r -= 1.6
        top = ((1.7023821103e-1 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
        z = top / ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0)
    else:
        r -= 5.0
        top = ((1.7337203997e-2 * r + 4.2868294337e-1) * r + 3.0812263860) * r + 6.6579051150
        z = top / ((1.2258202635e-2 * r + 2.4197894225e-1) * r + 1.0)
    return -z if q < 0.0 else z


@inlined
def _unit(state: np.uint64, j: int) -> float:
    """Element j's uniform number of (0, 1), a multiple of 2^-53 that is neither 0 nor 1."""
    return (np.float64(mix64(state + np.uint64(j + 1) * _GOLDEN) >> _S12) + 0.5) * _UNIT


@kernel
def float16_of(x: np.float32) -> int:
    """Bits of the float16 nearest to x, ties to even. Source: F. Giesen, float_to_half_fast3_rtne (public domain)."""
    bits = float32_bits(x)
    sign = (bits >> 16) & 0x8000
    bits &= 0x7FFFFFFF
    if bits >= 0x47800000:  # too large, infinite or NaN
        return sign | (0x7E00 if bits > 0x7F800000 else 0x7C00)
    if bits < 0x38800000:  # the float addition rounds to float16's subnormals
        return sign | (float32_bits(float32_from_bits(bits) + np.float32(0.5)) - 0x3F000000)
    return sign | ((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13)


@kernel
def float16_value(bits: int | np.int64) -> np.float32:
    """The value of float16 bits, exactly."""
    return float32_from_half(bits)


@kernel
def bfloat16_of(x: np.float32) -> int:
    """Bits of the bfloat16 nearest to x, ties to even."""
    bits = float32_bits(x)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@inlined
def canonical(address: int, count: int) -> None:
    """Gives every float32 there that is not a number the same bits. CPUs differ in the sign and payload of those that
    they make, and in whose payload they hand on; replicas must not. As integers: to a compiler every NaN is the same.
    """
    bits = carray(pointer(address), (count,), np.uint32)
    for j in range(count):
        if bits[j] & _MAGNITUDE > _INFINITY:
            bits[j] = _NAN


@kernel
def all_finite(address: int, count: int) -> bool:
    """Whether so many float32 are neither infinite nor no numbers."""
    bits = carray(pointer(address), (count,), np.uint32)
    most = np.uint32(0)
    for j in range(count):
        most = max(most, bits[j] & _MAGNITUDE)
    return bool(most < _INFINITY)


@kernel
def pack(w: NDArray[np.float32], address: int, dtype: int) -> None:
    """Stores float32 weights in 2 bytes each, rounded to nearest even."""
    packed = carray(pointer(address), (w.shape[0],), np.uint16)
    if dtype == _FLOAT16:
        for j in range(w.shape[0]):
            packed[j] = np.uint16(float16_of(w[j]))
    else:
        for j in range(w.shape[0]):
            packed[j] = np.uint16(bfloat16_of(w[j]))


@kernel
def unpack(address: int, w: NDArray[np.float32], dtype: int) -> None:
    """Reads weights of 2 bytes each as float32."""
    packed = carray(pointer(address), (w.shape[0],), np.uint16)
    if dtype == _FLOAT16:
        for j in range(w.shape[0]):
            w[j] = float16_value(np.int64(packed[j]))
    else:
        for j in range(w.shape[0]):
            w[j] = float32_from_bits(np.int64(packed[j]) << 16)


def init_values(init: Init, dtype: str) -> NDArray[np.float64]:
    """What `initial_weights` needs: the initialiser's two numbers, and for Uniform the least and the most that the
    table's type has in [low, high): what is between them stays there when it is rounded."""
    a, b = init.parameters()
    least, most = _nearest(a, dtype), _nearest(b, dtype)
    if isinstance(init, Uniform) and a < b:
        least = least if least >= a else _next(least, dtype, 1)
        most = most if most < b else _next(most, dtype, -1)
        if least > most:  # the type has nothing there
            least = most = _nearest(a, dtype)
    return np.array((a, b, least, most), np.float64)


def _nearest(x: float, dtype: str) -> float:
    if dtype == "bfloat16":
        return _of_bfloat16(int(bfloat16_of(np.float32(x))))
    with np.errstate(over="ignore"):
        return float(np.dtype(dtype).type(x))


def _next(x: float, dtype: str, direction: int) -> float:
    """The next number of the type, above or below."""
    if dtype != "bfloat16":
        kind = np.dtype(dtype).type
        return float(np.nextafter(kind(x), kind(direction * math.inf)))
    bits = int(np.float32(x).view(np.uint32)) >> 16  # sign and magnitude
    place = -(bits & 0x7FFF) if bits & 0x8000 else bits
    place += direction
    return _of_bfloat16(-place | 0x8000 if place < 0 else place)


def _of_bfloat16(bits: int) -> float:
    return float(np.uint32(bits << 16).view(np.float32))


@kernel
def initial_weights(h: NDArray[np.int64], key: int, w: NDArray[np.float32]) -> None:
    """f(seed, key) in float32, not yet rounded to the table's dtype: element j depends on (seed, key, j) alone."""
    kind = h[H_INIT]
    values = carray(pointer(h[H_INIT_VALUES]), (4,), np.float64)
    a, b = values[0], values[1]
    state = mix64(np.uint64(key) ^ np.uint64(h[H_SEED]))
    if kind == _NORMAL:  # two loops, so that the first has no branch and is taken several elements at a time
        for j in range(w.shape[0]):
            w[j] = np.float32(a + b * _central_quantile(_unit(state, j) - 0.5))
        for j in range(w.shape[0]):
            q = _unit(state, j) - 0.5
            if abs(q) > 0.425:
                w[j] = np.float32(a + b * _tail_quantile(q))
    elif kind == _UNIFORM:
        least, most = np.float32(values[2]), np.float32(values[3])
        for j in range(w.shape[0]):
            w[j] = min(max(np.float32(a + (b - a) * _unit(state, j)), least), most)
    else:
        w[:] = np.float32(a)


@kernel
def absent_weights(h: NDArray[np.int64], key: int, w: NDArray[np.float32]) -> None:
    """What a row never pushed reads as: f(seed, key) rounded to the table's dtype."""
    initial_weights(h, key, w)
    dtype = h[H_DTYPE]
    if dtype == _FLOAT16:
        for j in range(w.shape[0]):
            w[j] = float16_value(float16_of(w[j]))
    elif dtype != 0:
        for j in range(w.shape[0]):
            w[j] = float32_from_bits(bfloat16_of(w[j]) << 16)


@kernel
def write_weights(h: NDArray[np.int64], row: int, w: NDArray[np.float32]) -> None:
    """Stores float32 weights in a row."""
    if h[H_DTYPE] == 0:
        copy(row, w.ctypes.data, 4 * w.shape[0])
    else:
        pack(w, row, h[H_DTYPE])


@kernel
def blank_row(h: NDArray[np.int64], row: int) -> None:
    """Gives a row's slots their first value and its padding zeros; the weights are the caller's."""
    weights = h[H_DIM] * (4 if h[H_DTYPE] == 0 else 2)
    for at in range(weights & -8, h[H_STRIDE], 8):
        store64(row + at, 0)
    slots = carray(pointer(row + h[H_SLOTS_AT]), (h[H_SLOT_FLOATS],), np.float32)
    slots[:] = carray(pointer(h[H_CONSTANTS]), (1,), np.float32)[0]
