"""Times of operations in `elasticps bench checkpoint`."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint import _Work


@pytest.mark.parametrize(
    ("span", "longest"),
    [((0, 0.5), 1), ((0, 1.5), 3), ((3.9, 4.1), 3), ((4.0, 4.2), 0.5), ((4.6, 9), 0), ((-2, 0), 0)],
)
def test_operations_count_that_overlap_a_time(span: tuple[float, float], longest: float) -> None:
    work = _Work()
    work.took_s, work.ended_s = [1, 3, 0.5, 7], [1, 4, 4.5]  # the last one has just been noted in half
    assert work.longest_s(span) == longest
