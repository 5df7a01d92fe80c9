"""Estimates of how many servers are needed, by their memory."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.core.sizing import MemoryEstimate, estimate, measure, rows_mark
from coordinator.core.view import View
from tests.client.views import view

MIB = 1 << 20
TWO = view([[0, 1], [1, 0]])  # two ranges, two replicas each, on two servers


def status(rows_mib: int, limit_mib: int = 1000, base_mib: int = 100) -> dict[str, Any]:
    rows = rows_mib * MIB
    return {"bytes": rows, "memory_used": rows + base_mib * MIB, "memory_limit": limit_mib * MIB}


def memory(statuses: list[dict[str, Any]], of: View, servers: int) -> MemoryEstimate | None:
    return estimate(measure(statuses, of), servers)


def test_without_memory_limits_no_estimate_is_made() -> None:
    assert memory([status(10, 0), status(10, 0)], TWO, 2) is None
    assert memory([], TWO, 2) is None


def test_the_memory_that_each_server_would_use_is_estimated() -> None:
    found = memory([status(600), status(600)], TWO, 4)
    assert found is not None
    assert (found.each, found.mark, found.limit) == (400 * MIB, rows_mark(1000 * MIB, 4, 2), 1000 * MIB)
    assert found.servers == 2  # 700 of 800 MiB, and nobody to be filled
    fewer = memory([status(600), status(600)], TWO, 1)
    assert fewer is not None
    assert fewer.each == 700 * MIB  # one replica of each range


@pytest.mark.parametrize(("rows", "servers"), [(800, 4), (1300, 5), (2000, 7)])
def test_the_number_of_servers_needed_is_estimated(rows: int, servers: int) -> None:
    found = memory([status(rows), status(rows)], TWO, 2)
    assert found is not None
    assert found.servers == servers
    enough = memory([status(rows), status(rows)], TWO, servers)
    assert enough is not None
    assert enough.each < enough.mark


def test_one_more_server_may_be_too_few_because_of_room_for_repairs() -> None:
    """780 of 800 MiB with two; with three 653, of which 600 may be rows; with four 590 of 675."""
    servers = [status(380, base_mib=400), status(380, base_mib=400)]
    needed = {}
    for expected in (1, 2, 3, 4, 8):
        found = memory(servers, TWO, expected)
        assert found is not None
        needed[expected] = found.servers
    assert needed == {1: 2, 2: 2, 3: 4, 4: 4, 8: 4}


def test_the_smallest_server_counts_and_none_may_be_enough() -> None:
    found = memory([status(600), status(600, 50)], TWO, 8)
    assert found is not None
    assert found.limit == 50 * MIB
    assert found.servers == 0


def test_missing_replicas_are_counted_as_if_restored() -> None:
    found = memory([status(600)], view([[0, -1], [0, -1]]), 2)
    assert found is not None
    assert found.each == 700 * MIB
