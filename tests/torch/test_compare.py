"""`differ` against numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticps.torch.weights import differ

FLOATS = (0.0, -0.0, 1.5, float("inf"), float("nan"))


@given(st.lists(st.lists(st.sampled_from(FLOATS), max_size=40), min_size=1, max_size=4), st.data())
def test_pairs_differ_if_any_bit_does(arrays: list[list[float]], data: st.DataObject) -> None:
    ones = [np.array(each, np.float32) for each in arrays]
    others = [each.copy() for each in ones]
    which = data.draw(st.integers(0, len(ones) - 1))
    if len(others[which]) and data.draw(st.booleans()):
        others[which][data.draw(st.integers(0, len(others[which]) - 1))] = data.draw(st.sampled_from(FLOATS))
    pairs = [(one.ctypes.data, other.ctypes.data, one.size) for one, other in zip(ones, others, strict=True)]
    expected = any(one.tobytes() != other.tobytes() for one, other in zip(ones, others, strict=True))
    assert differ(np.array(pairs, np.int64)) == expected
