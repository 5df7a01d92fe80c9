"""Adam's bias corrections: 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) for an update t, the same bits on any CPU.

A power is made of IEEE multiplications in a fixed order, in float64: no library's `pow`. A kernel looks the first
`MOST` updates up in a table behind the optimizer's constants, since squaring costs more than a whole short row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elasticps.model.optimizers import Adam, ServerOptimizer
from elasticps.store.native import inlined, kernel

FIRST = 8  # of the constants: where the table begins, two floats for each update
MOST = 1 << 14  # updates in a table; with torch's betas all later ones are corrected by 1
LAST_COUNT = np.float32(1 << 24)  # float32 counts no further; a later update is corrected as this one
_BITS = 25
_ONE = np.float32(1)

Floats = NDArray[np.float32]


@kernel
def _power(base: np.float64, t: np.int64) -> np.float64:
    result = np.float64(1.0)
    while t > 0:
        if t & 1:
            result *= base
        base *= base
        t >>= 1
    return result


@kernel
def _computed(c: Floats, t: np.int64) -> tuple[np.float32, np.float32]:
    """The corrections of update t that the table lacks."""
    beta1, beta2 = np.float64(c[0]) + np.float64(c[6]), np.float64(c[2]) + np.float64(c[7])
    return np.float32(1.0 / (1.0 - _power(beta1, t))), np.float32(1.0 / np.sqrt(1.0 - _power(beta2, t)))


@inlined
def corrections(c: Floats, t: np.float32) -> tuple[np.float32, np.float32]:
    """Both corrections of update t, which is at least 1; c: the optimizer's constants and the table."""
    updates = (c.shape[0] - FIRST) // 2
    if t <= updates:
        at = FIRST - 2 + 2 * np.int64(t)
        return c[at], c[at + 1]
    if c[c.shape[0] - 2] == _ONE and c[c.shape[0] - 1] == _ONE:  # so are all later ones
        return _ONE, _ONE
    return _computed(c, np.int64(min(t, LAST_COUNT)))


@inlined
def next_update(count: np.float32) -> np.float32:
    """The number of a row's next update, at least 1 whatever was loaded as its count."""
    t = count + _ONE
    return t if t >= _ONE else _ONE


def constants_of(optimizer: ServerOptimizer) -> Floats:
    """What a kernel gets of an optimizer: the slots' first value, its constants, and for Adam the table."""
    betas = optimizer.betas if isinstance(optimizer, Adam) else None
    return _constants((optimizer.slot_fill, *optimizer.constants()), betas)


@lru_cache(maxsize=256)  # a model's tensors share a table: it has up to 128 KiB
def _constants(values: tuple[float, ...], betas: tuple[float, float] | None) -> Floats:
    found = np.array(values, np.float32)
    if betas is not None:
        found = np.concatenate([found, _table(*betas).ravel()])
    found.flags.writeable = False
    return found


def _table(beta1: float, beta2: float) -> Floats:
    """Corrections of the updates 1, 2, … up to where both are 1, or MOST: float32 [n, 2]."""
    updates = np.arange(1, MOST + 1)
    first, second = 1.0 / (1.0 - _powers(beta1, updates)), 1.0 / np.sqrt(1.0 - _powers(beta2, updates))
    table = np.stack([first, second], axis=1).astype(np.float32)
    ones = (table == _ONE).all(axis=1)
    return table[: int(ones.argmax()) + 1] if ones.any() else table


def _powers(base: float, exponents: NDArray[np.int64]) -> NDArray[np.float64]:
    """`_power` of each."""
    result, square = np.ones(len(exponents)), np.float64(base)
    for bit in range(_BITS):
        result = np.where(exponents >> bit & 1, result * square, result)
        square *= square
    return result
