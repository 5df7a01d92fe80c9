"""The bytes of a step stay the same, range by range, whatever view it is sent under."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.client.core.routing import Routes, cut_ranks, plan_push
from elasticps.client.push_batch import PackedPart, Packer, PushSource
from elasticps.client.writes import LentRows, Part, PushFrame, Write, runs_of
from elasticps.kernels.hashing import key_ranges, table_salt
from elasticps.wire.frames import HEADER_BYTES, read_push
from elasticps.wire.pool import Pool
from tests.client.views import view

RANGES = 16
SALT = table_salt(1)
BEFORE = Routes(view([[r % 3, (r + 1) % 3] for r in range(RANGES)]))
AFTER = Routes(view([[(r + 1) % 3] if r % 3 == 0 else [r % 3, 0] for r in range(RANGES)], epoch=2))

Rows = dict[int, dict[int, bytes]]


def content(cut: PushFrame) -> bytes:
    return b"".join(map(bytes, cut.buffers)) if cut.frame is None else bytes(cut.frame[HEADER_BYTES:])


def decode(cuts: list[PushFrame], table: int, routes: Routes) -> Rows:
    """range -> key -> gradient of one table, as a server would read it."""
    rows: Rows = {}
    for cut in cuts:
        body = np.frombuffer(content(cut), np.uint8)
        named, blocks = read_push(cut.ranges is None, cut.items, body)
        assert (named is None) == (cut.ranges is None)
        for block in blocks:
            home = np.empty(len(block.keys), np.int32)
            key_ranges(block.keys, table_salt(block.table), routes.shift, home)
            if named is not None:
                assert cut.ranges is not None
                assert named.tolist() == cut.ranges.tolist()
                assert set(home.tolist()) <= set(named.tolist())
            if block.table == table:
                for r, key, grad in zip(home.tolist(), block.keys.tolist(), block.grads, strict=True):
                    assert key not in rows.setdefault(r, {})
                    rows[r][key] = grad.tobytes()
    return rows


def everything(part: Part | PackedPart, routes: Routes, table: int = 1) -> Rows:
    rows: Rows = {}
    for server in routes.share_of:
        for r, mine in decode(list(part.whole(server, routes)), table, routes).items():
            rows.setdefault(r, {}).update(mine)
    return rows


def source(keys: np.ndarray, grads: np.ndarray, floats: int = -1, table: int = 1) -> PushSource:
    dim = 8 if grads.ndim == 1 else grads.shape[1]
    salt = table_salt(table)
    return PushSource(table, int(salt.view(np.int64)), dim, floats, keys, grads, np.array([0.5], np.float32))


def sparse(n: int, dim: int, keys: np.ndarray | None = None) -> tuple[PackedPart, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    keys = rng.integers(-50, 50, n) if keys is None else keys
    grads = rng.standard_normal((n, dim)).astype(np.float32)
    return Packer(Pool(1 << 20)).pack([source(keys, grads)], BEFORE), keys, grads


def summed(keys: np.ndarray, grads: np.ndarray, routes: Routes, table: int = 1) -> Rows:
    """range -> key -> sum of its gradients in their order; the slow and simple way."""
    rows: dict[int, dict[int, np.ndarray]] = {}
    home = np.empty(len(keys), np.int32)
    key_ranges(keys, table_salt(table), routes.shift, home)
    for r, key, grad in zip(home.tolist(), keys.tolist(), grads, strict=True):
        mine = rows.setdefault(r, {})
        mine[key] = mine[key] + grad if key in mine else grad.copy()
    return {r: {key: grad.tobytes() for key, grad in mine.items()} for r, mine in rows.items()}


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 5))
def test_a_range_has_the_same_rows_under_another_view(n: int, dim: int) -> None:
    part, keys, grads = sparse(n, dim)
    expected = summed(keys, grads, BEFORE)
    keys[:] = 0  # the caller may change its arrays at once
    grads[:] = np.nan
    assert everything(part, BEFORE) == expected
    assert everything(part, BEFORE) == expected  # sent again
    assert everything(part, AFTER) == expected


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 3, 700]), st.integers(0, 3)), max_size=6))
def test_all_tables_of_a_push_are_packed_in_one_call(tables: list[tuple[int, int, int]]) -> None:
    rng = np.random.default_rng(len(tables))
    expected, sources = [], []
    for i, (n, dim, values) in enumerate(tables):
        keys, grads = rng.integers(-9, 99, 40 * n), rng.standard_normal((40 * n, dim)).astype(np.float32)
        expected.append(summed(keys, grads, BEFORE, i + 1))
        sources.append(source(keys, grads, table=i + 1)._replace(step_values=np.arange(values, dtype=np.float32)))
    part = Packer(Pool(1 << 20)).pack(sources, BEFORE)
    for server in BEFORE.share_of:
        cuts = list(part.whole(server, BEFORE))
        share = BEFORE.share_of[server]
        sizes = np.zeros(share.stop - share.start, np.int64)
        for rows, (_, dim, _) in zip(expected, tables, strict=True):
            for i, r in enumerate(BEFORE.range_at[share.start : share.stop].tolist()):
                sizes[i] += len(rows.get(r, ())) * (8 + 4 * dim)
        assert len(cuts) == len(cut_ranks(sizes))
    part.complete()
    for i, rows in enumerate(expected):
        assert everything(part, BEFORE, i + 1) == everything(part, AFTER, i + 1) == rows


def test_heads_that_could_not_be_sent_to_lose_nothing() -> None:
    part, keys, grads = sparse(9000, 64, np.random.default_rng(0).permutation(9000))
    expected = summed(keys, grads, BEFORE)
    list(part.whole(1, BEFORE))  # only one head was there
    part.complete()
    grads[:] = np.nan
    assert everything(part, AFTER) == expected


def test_a_large_part_is_cut_into_frames_that_name_every_range_once() -> None:
    part, _, _ = sparse(4000, 256, np.random.default_rng(0).permutation(4000))
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
    part, _, _ = sparse(300, 2)
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
    copied = Packer(Pool(0)).pack([source(blocks, flat, size)], BEFORE)
    lent = Part([Write(1, LentRows(flat, dim, plan), plan.offsets, none)], BEFORE)
    rows = everything(copied, BEFORE)
    assert rows == everything(lent, BEFORE) == everything(lent, AFTER) == everything(copied, AFTER)
    together = {key: grad for mine in rows.values() for key, grad in mine.items()}
    whole = np.frombuffer(b"".join(together[key] for key in sorted(together)), np.float32)
    np.testing.assert_array_equal(whole[:size], flat)
    assert not whole[size:].any()


def test_a_part_knows_which_ranges_it_touches() -> None:
    part, keys, grads = sparse(1, 2)
    (home,) = summed(keys, grads, BEFORE)
    for server, share in BEFORE.share_of.items():
        ranges = BEFORE.range_at[share.start : share.stop]
        assert part.touches(ranges) == (home in ranges), server
    assert part.touches(np.arange(RANGES))
    lent = Part(part.writes(), BEFORE)
    for r in range(RANGES):
        assert lent.touches(np.array([r])) == (r == home)
    assert not Packer(Pool(0)).pack([], BEFORE).touches(np.arange(RANGES))


def test_a_part_that_was_left_half_copied_is_not_sent() -> None:
    packer = Packer(Pool(0))
    keys = np.arange(9000)
    half = packer.pack([source(keys, np.ones((9000, 64), np.float32))], BEFORE)
    packer.pack([], BEFORE)
    with pytest.raises(RuntimeError, match="half copied"):
        half.complete()


def test_runs_of_indices_are_found() -> None:
    assert runs_of(np.array([4, 5, 6, 9, 1, 2])) == [(4, 7), (9, 10), (1, 3)]
    assert runs_of(np.empty(0, np.int64)) == []
