"""Writes too large for the wire are refused before they are sent."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from elasticps.client.core.routing import PushPlan
from elasticps.client.writes import LentRows, Write, check_size
from elasticps.errors import InputError
from elasticps.wire.frames import MAX_BLOCKS, MAX_BODY_BYTES

DIM = 16_384
NONE = np.empty(0, np.int64)


def write(rows_by_rank: list[int]) -> Write:
    offsets = np.concatenate([[0], np.cumsum(rows_by_rank)]).astype(np.int64)
    plan = PushPlan(np.arange(offsets[-1]), NONE, offsets)
    return Write(1, LentRows(np.empty(0, np.float32), DIM, plan), offsets, np.empty(0, np.float32))


def test_a_large_push_that_is_spread_over_ranges_is_accepted() -> None:
    check_size([write([400, 400, 400, 400])])


def test_a_range_that_no_frame_can_hold_is_refused() -> None:
    rows = MAX_BODY_BYTES // 2 // (4 * DIM) + 1
    with pytest.raises(InputError, match="more ranges"):
        check_size([write([0, rows])])
    with pytest.raises(InputError, match="more ranges"):
        check_size([write([0, rows // 2 + 1]), write([0, rows // 2 + 1])])


def test_too_many_tables_are_refused() -> None:
    with pytest.raises(InputError, match="tables"):
        check_size([write([0])] * (MAX_BLOCKS + 1))


def test_kernels_for_a_failover_are_compiled_before_the_first_one() -> None:
    """Or the first failover on a machine waits for a compiler for some 400 ms."""
    code = (
        "from elasticps.client.warm import warm; from elasticps.kernels.hashing import key_ranges; warm(); "
        "assert key_ranges.signatures"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
