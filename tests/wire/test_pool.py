"""Memory in use is never handed out again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.wire.pool import LARGEST_BYTES, Pool


def test_memory_is_reused_once_unreferenced() -> None:
    pool = Pool(10 << 20)
    first = pool.take(1000)
    address = first.ctypes.data
    assert pool.take(1000).ctypes.data != address
    del first
    assert pool.take(1000).ctypes.data == address


def test_a_slice_of_another_type_keeps_memory_in_use() -> None:
    pool = Pool(10 << 20)
    body = pool.take(1 << 20)
    address = body.ctypes.data
    view = body[64:128].view(np.float32).data.cast("B")
    del body
    assert pool.take(1 << 20).ctypes.data != address
    del view
    assert pool.take(1 << 20).ctypes.data == address


def test_memory_for_later_is_bounded() -> None:
    pool = Pool(1 << 20)
    taken = [pool.take(400_000) for _ in range(10)]
    assert all(len(t) == 400_000 for t in taken)
    assert sum(len(a) for a in pool._arrays) <= 1 << 20
    assert len(pool.take(LARGEST_BYTES + 1)) == LARGEST_BYTES + 1


@given(st.lists(st.tuples(st.integers(1, 600_000), st.integers(0, 5)), max_size=40))
@settings(deadline=None)
def test_no_two_users_share_memory(steps: list[tuple[int, int]]) -> None:
    pool, held = Pool(4 << 20), list[np.ndarray]()
    for size, drop in steps:
        body = pool.take(size)
        body[:] = len(held) % 251
        held.append(body)
        if drop == 0 and len(held) > 1:
            held.pop(0)
    for body in held:
        assert (body == body[0]).all()
        for other in held:
            assert other is body or not np.shares_memory(body, other)
