"""Increments of tables that grow and forget: rows that went stay gone, what a sweep costs, and planted mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticps.checkpoint import catalog, contents, create, maintenance
from elasticps.checkpoint.rows import Piece, RowReader
from elasticps.kernels.hashing import HASH_END
from elasticps.model import policies, spec
from elasticps.server.core.scan import Scan
from elasticps.store.cuts import Deletions
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep
from elasticps.store.layout import RowLayout
from elasticps.store.swept import RowUsage
from tests.checkpoint.growing import NOW, TABLE, Cluster, content_of
from tests.store.test_twin import floats

DIM = 3
COUNTED = spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), admission=policies.MinCount(2))
PLAIN = spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), usage=policies.COUNTS)


def test_rows_that_shrank_before_a_cut_that_was_given_up_and_went_by_their_norm_stay_gone() -> None:
    """Their older version is large, and the newest cut is not the one that the increment adds to."""
    cluster, keys = Cluster(PLAIN), np.arange(40, dtype=np.int64)
    cluster.push(keys, np.full((40, DIM), 10.0))
    cluster.checkpoint(1, 0)
    cluster.push(keys[:8], np.full((8, DIM), -10.0))
    cluster.pass_cut(2)
    cluster.evict(Predicate(Measure.NORM, Reason.SMALL_NORM, 1))
    assert cluster.table.rows == 32
    cluster.checkpoint(3, 1)
    assert cluster.read() == content_of(cluster.store)


def test_rows_whose_score_was_rounded_down_as_they_were_used_stay_gone() -> None:
    """A push without a score rounds it once more: the older version of a row may count more than the newer one."""
    half_life = 600.0
    eviction = policies.Capacity(1 << 20, keep="score", half_life=half_life)
    cluster = Cluster(spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), eviction=(eviction,)))
    keys = np.arange(4_000, dtype=np.int64)
    cluster.push(keys, np.abs(floats(7, len(keys), DIM + 1)))
    cluster.advance(NOW + 400)
    now = Predicate(Measure.SCORE, Reason.CAPACITY, 0, 0, NOW + 1_111, 1 / half_life)
    older = [cluster.measure(r, now) for r in range(4)]
    cluster.checkpoint(1, 0)
    cluster.push(keys, np.zeros((len(keys), DIM + 1)))
    for r in range(4):
        newer = cluster.measure(r, now)
        smaller = [key for key, rank in newer.items() if rank < older[r][key]]
        assert smaller
        cluster.table.evict(r, 0, HASH_END, now._replace(below=newer[smaller[0]] + 1))
    cluster.checkpoint(2, 1)
    assert cluster.read() == content_of(cluster.store)


def test_a_row_that_is_used_while_the_sweep_waits_stays() -> None:
    """Its count has fallen, that of its older version had not yet, at the time at which the sweep compares."""
    half_life = 600.0
    eviction = policies.Capacity(1 << 20, keep="most_used", half_life=half_life)
    cluster = Cluster(spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), eviction=(eviction,)))
    keys = np.arange(40, dtype=np.int64)
    for _ in range(10):
        cluster.push(keys, np.ones((40, DIM)))
    cluster.checkpoint(1, 0)
    planned = Predicate(Measure.COUNT, Reason.CAPACITY, int(np.float32(8).view(np.uint32)), 0, NOW, 1 / half_life)
    cluster.advance(NOW + 1_000)
    cluster.push(keys[:8], np.ones((8, DIM)))
    assert cluster.evict(planned) == 0
    cluster.checkpoint(2, 1)
    assert cluster.read() == content_of(cluster.store)


def idle(before: int) -> Predicate:
    """Chooses rows that were used last before a time."""
    return Predicate(Measure.LAST_USE, Reason.IDLE, before)


def story() -> None:
    """Rows come, wait, go by a sweep, and some come back; then a chain of three checkpoints has what there is."""
    cluster, keys = Cluster(COUNTED), np.arange(120, dtype=np.int64)
    for _ in range(2):
        cluster.push(keys[:80], np.ones((80, DIM)))
    cluster.push(keys[80:], np.ones((40, DIM)))
    cluster.checkpoint(1, 0)
    cluster.advance(NOW + 100)
    cluster.push(keys[:30], np.ones((30, DIM)))
    assert cluster.evict(idle(NOW + 50), 0, HASH_END // 2)  # of half of the ranges
    cluster.push(keys[60:90], np.ones((30, DIM)))
    cluster.checkpoint(2, 1)
    assert cluster.read() == content_of(cluster.store)
    cluster.advance(NOW + 200)
    cluster.push(keys[50:70], np.ones((20, DIM)))
    assert cluster.evict(idle(NOW + 150))
    for _ in range(2):
        cluster.push(keys[:9], np.full((9, DIM), 5.0))
    assert cluster.evict(Predicate(Measure.COUNT, Reason.CAPACITY, int(np.float32(4).view(np.uint32))))
    for _ in range(2):
        cluster.push(keys[100:110], np.full((10, DIM), 5.0))
    cluster.checkpoint(3, 2)
    expected = content_of(cluster.store)
    assert expected.waiting
    assert cluster.read() == expected
    maintenance.merge(cluster.storage, catalog.chain(cluster.storage))
    assert cluster.read() == expected


def test_a_chain_has_rows_that_came_back_and_none_that_went() -> None:
    story()


def without_predicate(patch: pytest.MonkeyPatch) -> None:
    usages = Scan._usages

    def mutant(*arguments: Any) -> Any:
        return {r: usage._replace(sweeps=()) for r, usage in usages(*arguments).items()}

    patch.setattr(Scan, "_usages", mutant)


def applied_to_its_own_rows(patch: pytest.MonkeyPatch) -> None:
    visible = contents._visible

    def mutant(piece: Piece, hidden: Any, gone: Any, usage: Any) -> Any:
        assert piece.usage is not None
        own = RowUsage(COUNTED, TABLE).swept(piece.keys, piece.rows, piece.usage.sweeps)
        return visible(piece, hidden, own if gone is None else own | gone, usage)

    patch.setattr(contents, "_visible", mutant)


def not_applied_to_the_oldest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contents, "joined", lambda older, newer: list(older))


def usage_left_out(patch: pytest.MonkeyPatch) -> None:
    piece_of = RowReader._piece

    def mutant(*arguments: Any) -> Piece:
        piece = piece_of(*arguments)
        piece.rows[:, RowLayout.of(COUNTED).usage_at :] = 0
        return piece

    patch.setattr(RowReader, "_piece", mutant)


def waiting_keys_of_all_checkpoints(patch: pytest.MonkeyPatch) -> None:
    visible = contents._visible
    patch.setattr(contents, "_visible", lambda piece, hidden, gone, usage: visible(piece, hidden, gone, piece.usage))


PLANTED = [
    without_predicate, applied_to_its_own_rows, not_applied_to_the_oldest, usage_left_out,
    waiting_keys_of_all_checkpoints,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        story()


def changed_half_life() -> None:
    """Under the longer half-life an older version of a row counts more than the newer one did."""
    short, long = (policies.Capacity(1 << 20, "most_used", half_life) for half_life in (60.0, 1e6))
    described = spec.TableSpec("t", DIM, spec.Accumulate(), spec.Zeros(), eviction=(short,))
    cluster, keys = Cluster(described), np.arange(40, dtype=np.int64)
    for _ in range(20):
        cluster.push(keys, np.ones((40, DIM)))
    cluster.checkpoint(1, 0)
    cluster.advance(NOW + 6_000)
    cluster.push(keys[:10], np.ones((10, DIM)))
    cluster.store.change_policies(TABLE, cluster.every, described.with_policies(None, (long,)))
    bound = int(np.float32(10).view(np.uint32))
    assert cluster.evict(Predicate(Measure.COUNT, Reason.CAPACITY, bound, 0, NOW + 6_000, 1e-6)) == 10
    cluster.checkpoint(2, 1)
    assert cluster.read() == content_of(cluster.store)


def test_the_increment_after_another_half_life_holds_its_ranges_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_half_life()
    monkeypatch.setattr(Deletions, "forget", lambda *_: None)
    with pytest.raises(AssertionError):
        changed_half_life()


def test_policies_that_leave_the_half_life_leave_increments_as_they_are() -> None:
    cluster = Cluster(COUNTED)
    cluster.store.pass_cut(cluster.every, 1)
    changed = COUNTED.with_policies(policies.MinCount(9), (policies.IdleFor("1d"),))
    cluster.store.change_policies(TABLE, cluster.every, changed)
    assert cluster.table.deletions.floors(cluster.every).tolist() == [0] * 4


def test_a_sweep_of_a_third_of_the_rows_adds_a_twentieth_to_an_increment_at_most() -> None:
    described = spec.TableSpec("t", 16, spec.Accumulate(), spec.Zeros(), usage=policies.COUNTS)
    keys, sizes = np.arange(20_000, dtype=np.int64), []
    for swept in (False, True):
        cluster = Cluster(described)
        for some in (keys[:6_000], keys[6_000:]):
            cluster.push(some, floats(3, len(some), 16))
            cluster.advance(NOW + 1_000)
        cluster.checkpoint(1, 0)
        assert not swept or cluster.evict(idle(NOW + 500)) == 6_000
        cluster.push(keys[6_000:10_000], floats(4, 4_000, 16))
        sizes.append(cluster.checkpoint(2, 1).nbytes)
        assert cluster.read() == content_of(cluster.store)
    assert sizes[1] <= 1.05 * sizes[0]
    assert sizes[0] < 4_000 * 200  # the increment has the rows that changed, no more


def test_a_replica_that_is_filled_has_the_sweeps_of_the_other_one_as_they_are() -> None:
    """Two with the same numbers lie side by side, as one between them was covered later: joined they would be one."""
    tail, joiner = Deletions(2), Deletions(2)
    by, norm = idle(5), Predicate(Measure.NORM, Reason.SMALL_NORM, 1)
    for sweep in (Sweep(1, by, 0, 10), Sweep(1, norm, 0, 50), Sweep(1, by, 10, 20), Sweep(2, norm, 0, 90)):
        tail.sweep(0, sweep)
    assert len(tail.sweeps(0)) == 3
    joiner.load_sweeps(0, tail.sweeps(0))
    assert joiner.words(0) == tail.words(0)
    for each in (tail, joiner):
        each.sweep(0, Sweep(2, by, 0, 20))
    assert joiner.words(0) == tail.words(0)
    assert len(joiner.sweeps(0)) == 2


@pytest.mark.parametrize("swept", [False, True])
def test_a_checkpoint_of_nothing_but_a_sweep_is_one(swept: bool) -> None:
    """Else a schedule would take the one before for the newest state, for as long as nobody trains."""
    cluster, keys = Cluster(COUNTED), np.arange(40, dtype=np.int64)
    for _ in range(2):
        cluster.push(keys, np.ones((40, DIM)))
    before = cluster.checkpoint(1, 0)
    if swept:
        cluster.evict(idle(NOW + 1))
    assert create._unchanged(cluster.storage, cluster.checkpoint(2, 1)) == (None if swept else before)
