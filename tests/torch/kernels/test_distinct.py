"""Distinct ids, beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.torch.kernels.distinct import distinct

# Few values, so that they repeat, and those whose hashes may be special.
IDS = st.one_of(
    st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**32, 2**32 + 1]), st.integers(-(2**63), 2**63 - 1)
)


@given(st.lists(IDS, max_size=60), st.one_of(st.none(), IDS))
def test_every_id_is_found_at_its_position(some: list[int], padding: int | None) -> None:
    ids = np.array(some, np.int64)
    keys, positions, padded = distinct(ids, padding)
    assert keys.tolist() == list(dict.fromkeys(each for each in some if each != padding))
    assert padded == (padding in some)
    assert positions.dtype == np.int64
    for each, at in zip(some, positions.tolist(), strict=True):
        assert at == (len(keys) if each == padding else keys.tolist().index(each))


@pytest.mark.parametrize("step", [1, 2**32, -(2**40)])
def test_many_ids_at_regular_distances_are_found(step: int) -> None:
    ids = np.repeat(np.arange(5000, dtype=np.int64) * step, 2)
    keys, positions, _ = distinct(ids, None)
    assert np.array_equal(keys[positions], ids)
    assert len(keys) == 5000
