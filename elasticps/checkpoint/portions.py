"""What a server reads to bring back its ranges: portion by portion, so that what stops it costs one portion. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from elasticps.checkpoint.contents import Contents, Unit
from replication.chain import Ranges


class Sizes(NamedTuple):
    """In bytes: of a unit; of one of a table whose rows lie in all ranges; of a portion, at least, for each table."""

    unit: int
    wide: int
    portion: int


class Job(NamedTuple):
    """A unit to be read, of a table that has the id `table` here. scattered: its rows may lie in any range."""

    table: int
    unit: Unit
    scattered: bool


@dataclass
class Portion:
    """Ranges that have all when these jobs are done. left: how many are not."""

    ranges: Ranges
    jobs: Sequence[Job]
    left: int


def portions(
    contents: Contents, mine: Ranges, ranges: int, tables: Sequence[tuple[int, int]], sizes: Sizes
) -> list[Portion]:
    """All that some ranges (ascending) of a cluster with so many have in a checkpoint, each unit of it in one portion.
    tables: their ids there and here. A table with another id here has rows of each range in all of the checkpoint's:
    then it is one portion."""
    there = contents.manifest.ranges
    shared = min(there, ranges)  # intervals of hashes that are whole ranges on both sides
    scattered = any(old != new for old, new in tables)
    nbytes = sum((contents.sizes(old)[1].reshape(shared, -1).sum(axis=1) for old, _ in tables), np.zeros(shared, int))
    most = sizes.portion * max(1, len(tables))
    found = []
    at = np.asarray(mine) * shared // ranges
    intervals = np.unique(at)
    while len(intervals):
        before = np.cumsum(nbytes[intervals]) - nbytes[intervals]
        n = len(intervals) if scattered else max(1, int(np.searchsorted(before, most)))
        some, intervals = intervals[:n], intervals[n:]
        lying = (some[:, None] * (there // shared) + np.arange(there // shared)).ravel().tolist()
        jobs = []
        for old, new in tables:
            units = contents.units(old, lying, sizes.unit) if old == new else contents.units(old, None, sizes.wide)
            jobs += [Job(new, unit, old != new) for unit in units]
        found.append(Portion(np.asarray(mine)[np.isin(at, some)], jobs, len(jobs)))
    return found


def to_bits(some: Collection[int], ranges: int) -> bytes:
    """Some of so many ranges as bits, the lowest first."""
    flags = np.zeros(ranges, np.bool_)
    flags[list(some)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def from_bits(data: bytes, ranges: int) -> list[int]:
    """The inverse, ascending; what is missing at the end counts as zeros."""
    padded = np.zeros(-(-ranges // 8), np.uint8)  # numpy's own padding gives anything for no bytes at all
    given = np.frombuffer(data, np.uint8)[: len(padded)]
    padded[: len(given)] = given
    return np.flatnonzero(np.unpackbits(padded, count=ranges, bitorder="little")).tolist()
