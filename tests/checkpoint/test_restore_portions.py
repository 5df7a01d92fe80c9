"""A server reads a checkpoint in portions: every range once, whole ranges in each portion."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents, Sizes, from_bits, portions, to_bits
from elasticps.checkpoint.storage import Storage
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, ranges_of, row, write

SGD = spec.SGD(0.1)
SPECS = {7: TableSpec("some", 3, spec.Adagrad(0.1)), 9: TableSpec("few", 1, SGD), 11: TableSpec("no", 1, SGD)}
KEYS = {7: range(300), 9: range(20), 11: range(0)}
SIZES = st.builds(Sizes, st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))


@pytest.fixture(scope="module")
def found() -> dict[int, Contents]:
    """The same rows in checkpoints of several numbers of ranges."""
    every = {}
    for ranges in (2, 8, 32):
        storage = Storage(f"memory://{uuid.uuid4()}")
        tables = {f"default/{of.name}": (id_, of) for id_, of in SPECS.items()}
        rows = {f"default/{of.name}": Change({k: row(of, k) for k in KEYS[id_]}) for id_, of in SPECS.items()}
        write(storage, 1, tables, rows, ranges=ranges)
        every[ranges] = Contents(storage, catalog.chain(storage))
    return every


@given(
    there=st.sampled_from((2, 8, 32)), ranges=st.sampled_from((2, 8, 32)),
    chosen=st.sets(st.integers(0, 31), min_size=1), sizes=SIZES, another=st.booleans(),
)  # fmt: skip
def test_each_portion_has_all_of_its_ranges_and_all_is_read_once(
    found: dict[int, Contents], there: int, ranges: int, chosen: set[int], sizes: Sizes, another: bool
) -> None:
    mine = np.array(sorted({r % ranges for r in chosen}))
    tables = [(7, 70 if another else 7), (9, 9), (11, 11)]
    cut = portions(found[there], mine, ranges, tables, sizes)
    assert np.concatenate([portion.ranges for portion in cut]).tolist() == mine.tolist()
    assert len(cut) == 1 or not another
    seen: set[tuple[int, int]] = set()
    for portion in cut:
        assert portion.left == len(portion.jobs)
        for old, new in tables:
            units = [job.unit for job in portion.jobs if job.table == new]
            assert all(job.scattered == (old != new) for job in portion.jobs if job.table == new)
            read = [r for unit in units for r in unit.ranges]
            assert not seen & {(new, r) for r in read}
            seen |= {(new, r) for r in read}
            assert len(set(read)) == len(read)
            keys = np.array(KEYS[old], np.int64)
            here = keys[np.isin(ranges_of(new, keys.tolist(), ranges), portion.ranges)]
            assert set(ranges_of(old, here.tolist(), there).tolist()) <= set(read)
            if not another:
                assert set(read) == set(np.unique(portion.ranges * there // ranges)) if there <= ranges else True
                assert all(len(unit.ranges) == 1 or unit.bytes <= sizes.unit for unit in units)


def test_portions_have_the_size_that_was_requested(found: dict[int, Contents]) -> None:
    contents, every = found[32], np.arange(32)
    nbytes = contents.sizes(7)[1]
    cut = portions(contents, every, 32, [(7, 7)], Sizes(500, 500, 2000))
    assert len(cut) > 3
    for portion in cut[:-1]:
        assert nbytes[portion.ranges].sum() >= 2000 > nbytes[portion.ranges[:-1]].sum()
    assert [len(portions(contents, every, 32, [(7, 7)], Sizes(500, 500, most))) for most in (1, 1 << 20)] == [32, 1]
    assert [(len(one.ranges), one.left) for one in portions(contents, every[:3], 32, [], Sizes(1, 1, 1))] == [(3, 0)]


@given(ranges=st.integers(1, 70), some=st.sets(st.integers(0, 69)), more=st.binary(max_size=3), cut=st.integers(0, 9))
def test_ranges_travel_as_bits(ranges: int, some: set[int], more: bytes, cut: int) -> None:
    some = {r for r in some if r < ranges}
    data = to_bits(some, ranges)
    assert len(data) == -(-ranges // 8)
    assert from_bits(data + more, ranges) == sorted(some)
    assert from_bits(data[:cut], ranges) == sorted(r for r in some if r < 8 * cut)
