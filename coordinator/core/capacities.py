"""Divides the capacities of tables among the servers that head their ranges, by how many rows each has. Pure.

A leader does it ten times a second from the reports of all servers, a worker for a sweep that it asks for, a server
that heads all ranges for itself. While a table as a whole is not above its capacity, no server forgets a row for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

SLACK = 0.01  # a table is cut once it is so much above its capacity, to so much below it


class RowCount(NamedTuple):
    """A number of rows, or of keys that wait for one, of a table that has a bound on them: at a server, or how many it
    may keep. capacity: the bound of the whole table."""

    table: int
    waiting: bool
    capacity: int
    rows: int


def divide(most: int, rows: Sequence[int], ranges: Sequence[int]) -> list[int]:
    """How many of its `rows` each server keeps, so that all together keep `most` of more. ranges: that each heads.

    Servers above a level, the same for each of their ranges, are cut to that level, and others keep all: so servers
    may cut at different times, and what one has cut changes no other's part.
    """
    keeps, left, left_ranges = list(rows), most, sum(ranges)
    full = set(range(len(rows)))
    for i in sorted(full, key=lambda i: rows[i] / max(ranges[i], 1)):
        if rows[i] * left_ranges > left * ranges[i]:
            break
        full.discard(i)
        left, left_ranges = left - rows[i], left_ranges - ranges[i]
    before = 0
    for i in sorted(full):  # whole numbers, and `left` in sum
        keeps[i] = (before + ranges[i]) * left // left_ranges - before * left // left_ranges
        before += ranges[i]
    return keeps


def allowances(counts: Mapping[T, tuple[int, Sequence[RowCount]]]) -> dict[T, list[RowCount]]:
    """How much servers that have too much may keep of tables that are above their capacity. counts: of all servers, the
    ranges that each heads, and its rows there."""
    found: dict[T, list[RowCount]] = {server: [] for server in counts}
    by_bound: dict[tuple[int, bool, int], dict[T, int]] = {}
    for server, (_, here) in counts.items():
        for table, waiting, capacity, rows in here:
            by_bound.setdefault((table, waiting, capacity), {})[server] = rows
    for bound, rows_of in by_bound.items():
        capacity = bound[2]
        slack = int(SLACK * capacity)  # none of a small table: one row more or less is much of it
        if sum(rows_of.values()) > capacity + slack:
            there = sorted(counts, key=str)
            had, ranges = [rows_of.get(server, 0) for server in there], [counts[server][0] for server in there]
            for server, rows, keeps in zip(there, had, divide(capacity - slack, had, ranges), strict=True):
                if keeps < rows:  # who is below the level may have grown since it was counted, and keeps that too
                    found[server].append(RowCount(*bound, keeps))
    return found
