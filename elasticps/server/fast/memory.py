"""Raw memory for kernels: loads and stores of every width, copies, and arrays over an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from elasticps.store.native import carray, intrinsic, kernel, pointer

_WORD = ir.IntType(64)


def _load(bits: int) -> Callable[..., Any]:
    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(at, align=1)
            return value if bits == 64 else builder.zext(value, _WORD)

        return types.int64(types.int64), generate

    loaded: Callable[..., Any] = load
    return loaded


def _store(bits: int) -> Callable[..., Any]:
    @intrinsic
    def store(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(value, at, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    stored: Callable[..., Any] = store
    return stored


# Frames and blocks are multiples of 8 bytes, but a chunk's start decides, so nothing is taken for aligned.
load8, load16, load32, load64 = _load(8), _load(16), _load(32), _load(64)
store16, store32, store64 = _store(16), _store(32), _store(64)

_three = types.int64(types.int64, types.int64, types.int64)
move: Any = types.ExternalFunction("memmove", _three)


@kernel
def words(address: int, n: int) -> NDArray[np.int64]:
    """int64 [n] at an address."""
    found: NDArray[np.int64] = carray(pointer(address), (n,), np.int64)
    return found


@kernel
def floats(address: int, n: int) -> NDArray[np.float32]:
    """float32 [n] at an address."""
    found: NDArray[np.float32] = carray(pointer(address), (n,), np.float32)
    return found


@kernel
def matrix(address: int, n: int, dim: int) -> NDArray[np.float32]:
    """float32 [n, dim] at an address."""
    found: NDArray[np.float32] = carray(pointer(address), (n, dim), np.float32)
    return found
