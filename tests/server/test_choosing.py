"""What a dry run counts, compared with the sweep that follows."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.capacities import allowances
from elasticps.kernels.hashing import HASH_END
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import Admission, Capacity, Eviction, IdleFor, MinCount, SmallNorm
from elasticps.model.spec import TableSpec
from elasticps.server.core.choosing import DryRun, choose, measure
from elasticps.server.core.sweeps import SLICE_ROWS, SweepPlan
from elasticps.server.roles.sweeper import _by_table, _Swept
from elasticps.store import Table, count_bounded
from elasticps.store.eviction import Reason

RANGES, DIM, NOW = 4, 2, 1_000
POLICIES: list[Eviction] = [
    IdleFor(40), IdleFor(10), SmallNorm(3.0), Capacity(20), Capacity(8, "most_used", 30), Capacity(30, "most_used", 30),
]  # fmt: skip


def grown(eviction: list[Eviction], most: int | None, seed: int, slabs: bool) -> Table:
    """A table to whose keys was pushed at several times; slabs: with ranges that are looked at in parts."""
    admission: Admission | None = MinCount(2, forget_after=60, most=most)
    spec = TableSpec("t", DIM, Accumulate(), usage="count", admission=admission, eviction=tuple(eviction))
    times, random = np.full(RANGES, NOW - 100, np.int64), np.random.default_rng(seed)
    table = Table(spec, 3, RANGES, times=times)
    assert table.lifecycle is not None
    table.lifecycle.begin(np.arange(RANGES), spec)
    keys = 30_000 if slabs else 80
    for clock in range(1, 11):
        times += 10
        some = np.unique(random.integers(0, keys, keys // 2))
        table.apply(some, random.random((len(some), DIM)).astype(np.float32), np.empty(0, np.float32), 7, clock)
    return table


def sweep(table: Table, dry_run: DryRun | None) -> Counter[Reason]:
    """What goes, as a server that heads all ranges finds it when a worker asks."""
    found, headed = Counter[Reason](), np.arange(RANGES)
    for bounds in (False, True):
        counts = [
            one._replace(
                rows=one.rows - sum(dry_run.gone[r, one.waiting] for r in range(RANGES)) if dry_run else one.rows
            )
            for one in count_bounded({3: table}, headed)
        ]
        allowed = allowances({0: (RANGES, counts)})[0] if bounds else []
        swept = _Swept(table, partial(dict, _by_table(allowed).get(3, {})), dry_run)
        for at, by, share in SweepPlan(HASH_END // RANGES).slices({3: swept}, headed, NOW, 0.0, True):
            by, going = choose(table, measure(table, at.ranges, at, by), at, by, share, dry_run)
            found[by.reason] += going
            for r in at.ranges if dry_run is None else ():
                table.evict(r, at.low, at.high, by)
    return +found


@given(
    eviction=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4), most=st.sampled_from([None, 5]),
    seed=st.integers(0, 9), slabs=st.booleans(),
)  # fmt: skip
def test_a_dry_run_counts_each_row_once_by_the_policy_that_then_takes_it(
    eviction: list[Eviction], most: int | None, seed: int, slabs: bool
) -> None:
    table, counted = grown(eviction, most, seed, slabs), DryRun()
    foreseen = sweep(table, counted)
    again = sweep(table, counted)  # it remembers; of each part of a range, half a row was rounded
    assert sum(again.values()) <= sum(1 + rows // SLICE_ROWS for rows in table.counts.tolist()) / 2 * len(eviction)
    assert sweep(table, None) == foreseen
