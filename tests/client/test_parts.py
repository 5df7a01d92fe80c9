"""What a step carries stays the same bytes, range by range, whatever view it is sent under."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.client.routing import Routes, plan_push
from elasticps.client.writes import Cut, DenseRows, LentRows, Part, SparseRows, Write, runs_of
from elasticps.hashing import key_ranges, table_salt
from elasticps.wire.frames import ALL_RANGES, Header, Kind, read_push
from elasticps.wire.pool import Pool
from tests.client.views import view

RANGES = 16
SALT = table_salt(3)
BEFORE = Routes(view([[r % 3, (r + 1) % 3] for r in range(RANGES)]))
AFTER = Routes(view([[(r + 1) % 3] if r % 3 == 0 else [r % 3, 0] for r in range(RANGES)], epoch=2))

Rows = dict[int, dict[int, bytes]]


def decode(cuts: list[Cut], table: int, routes: Routes) -> Rows:
    """range -> key -> gradient of one table, as a server would read it."""
    rows: Rows = {}
    for cut in cuts:
        body = np.frombuffer(b"".join(bytes(b) for b in cut.buffers), np.uint8)
        flags = ALL_RANGES if cut.ranges is None else 0
        named, blocks = read_push(Header(Kind.PUSH, flags, len(body), items=cut.items), body)
        assert (named is None) == (cut.ranges is None)
        for block in blocks:
            home = np.empty(len(block.keys), np.int32)
            key_ranges(block.keys, SALT, routes.shift, home)
            if named is not None:
                assert cut.ranges is not None
                assert named.tolist() == cut.ranges.tolist()
                assert set(home.tolist()) <= set(named.tolist())
            if block.table == table:
                for r, key, grad in zip(home.tolist(), block.keys.tolist(), block.grads, strict=True):
                    assert key not in rows.setdefault(r, {})
                    rows[r][key] = grad.tobytes()
    return rows


def everything(part: Part, routes: Routes, table: int = 1) -> Rows:
    rows: Rows = {}
    for server in routes.share_of:
        for r, mine in decode(list(part.whole(server, routes)), table, routes).items():
            rows.setdefault(r, {}).update(mine)
    return rows


def sparse(n: int, dim: int, keys: np.ndarray | None = None) -> tuple[Write, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    keys = rng.integers(-50, 50, n) if keys is None else keys
    grads = rng.standard_normal((n, dim)).astype(np.float32)
    plan = plan_push(keys, SALT, BEFORE)
    write = Write(1, SparseRows(keys, grads, plan, Pool(1 << 20)), plan.offsets, np.array([0.5], np.float32))
    return write, keys, grads


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 5))
def test_a_range_has_the_same_rows_under_another_view(n: int, dim: int) -> None:
    write, keys, grads = sparse(n, dim)
    part = Part([write], BEFORE)
    sent = everything(part, BEFORE)
    part.complete()
    keys[:] = 0  # the caller may change its arrays at once
    grads[:] = np.nan
    assert everything(part, BEFORE) == sent
    assert everything(part, AFTER) == sent


def test_heads_that_could_not_be_sent_to_lose_nothing() -> None:
    write, _, grads = sparse(500, 3)
    twin, _, _ = sparse(500, 3)
    part = Part([write], BEFORE)
    list(part.whole(1, BEFORE))  # only one head was there
    part.complete()
    grads[:] = np.nan
    assert everything(part, AFTER) == everything(Part([twin], BEFORE), BEFORE)


def test_a_large_part_is_cut_into_frames_that_name_every_range_once() -> None:
    write, _, _ = sparse(4000, 256, np.random.default_rng(0).permutation(4000))
    part = Part([write], BEFORE)
    for routes in (BEFORE, AFTER):
        named: list[int] = []
        for server in routes.share_of:
            cuts = list(part.whole(server, routes))
            assert len(cuts) > 1
            for cut in cuts:
                assert cut.ranges is not None
                named += cut.ranges.tolist()
        assert sorted(named) == list(range(RANGES))
    assert sum(len(rows) for rows in everything(part, AFTER).values()) == 4000


def test_some_ranges_can_be_sent_alone() -> None:
    write, _, _ = sparse(300, 2)
    part = Part([write], BEFORE)
    all_rows = everything(part, BEFORE)
    share = AFTER.share_of[1]
    ranges = AFTER.range_at[share.start : share.stop][::2]
    (cut,) = part.named(ranges)
    assert cut.ranges is not None
    assert decode([cut], 1, AFTER) == {r: rows for r, rows in all_rows.items() if r in ranges.tolist()}
    (empty,) = part.named(ranges[:0])
    assert (empty.items, len(empty.buffers)) == (0, 1)


@pytest.mark.parametrize("size", [0, 1, 7, 50, 64])
def test_copied_and_lent_tensors_are_sent_alike(size: int) -> None:
    dim = 8
    flat = np.arange(size, dtype=np.float32)
    blocks = np.arange(-(-size // dim))
    plan = plan_push(blocks, SALT, BEFORE)
    none = np.empty(0, np.float32)
    copied = Part([Write(1, DenseRows(flat, dim, plan, Pool(0)), plan.offsets, none)], BEFORE)
    lent = Part([Write(1, LentRows(flat, dim, plan), plan.offsets, none)], BEFORE)
    rows = everything(copied, BEFORE)
    assert rows == everything(lent, BEFORE) == everything(lent, AFTER) == everything(copied, AFTER)
    together = {key: grad for mine in rows.values() for key, grad in mine.items()}
    whole = np.frombuffer(b"".join(together[key] for key in sorted(together)), np.float32)
    np.testing.assert_array_equal(whole[:size], flat)
    assert not whole[size:].any()


def test_a_part_knows_which_ranges_it_touches() -> None:
    write, keys, _ = sparse(3, 2)
    part = Part([write], BEFORE)
    home = np.empty(3, np.int32)
    key_ranges(keys, SALT, BEFORE.shift, home)
    for r in range(RANGES):
        assert part.touches(np.array([r])) == (r in home)
    assert not Part([], BEFORE).touches(np.arange(RANGES))


def test_runs() -> None:
    assert runs_of(np.array([4, 5, 6, 9, 1, 2])) == [(4, 7), (9, 10), (1, 3)]
    assert runs_of(np.empty(0, np.int64)) == []
