"""Bugs in tables that admit keys and forget rows, each of a kind that a careful person could have written."""

from __future__ import annotations

import builtins
import time
from typing import Any

import numpy as np
import pytest

from elasticps.server.core import clocks
from elasticps.server.core.operations import TimeMark
from elasticps.server.roles.executor import Executor
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.server.roles.sweeper import OPERATION_BYTES, Sweeper
from elasticps.store import Store, Table, usage
from elasticps.store.layout import RowLayout
from elasticps.store.lifecycle import Lifecycle
from elasticps.store.native import H_ADMITS
from elasticps.store.waiting import Waiting
from replication.messages import OperationKind
from tests.sim.planting import leave_every_frame_to_python


def stamp_by_each_replica_s_own_clock(patch: pytest.MonkeyPatch) -> None:
    advance = Store.advance
    patch.setattr(Store, "advance", lambda self, ranges, _: advance(self, ranges, int(time.time())))


def let_time_go_back_after_a_failover(patch: pytest.MonkeyPatch) -> None:
    def stamp(self: Any) -> None:
        now, headed = int(max(self._leaders.clocks().own, 1.0)), self._serving.headed
        if len(headed):
            self._executor.log(self._serving.epoch, OperationKind.TIME, headed, TimeMark(now), OPERATION_BYTES)

    def mutant(self: Store, ranges: Any, seconds: int) -> None:
        self.times[ranges] = np.minimum(self.times[ranges], seconds)
        advance(self, ranges, seconds)

    advance = Store.advance
    patch.setattr(Sweeper, "stamp", stamp)
    patch.setattr(Store, "advance", mutant)


def sweep_by_the_later_of_two_clocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clocks, "min", builtins.max, raising=False)


def log_the_later_of_two_clocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clocks.Clocks, "logged", property(lambda self: max(self.own, self.leader)))


def _lose_words_in_a_move(patch: pytest.MonkeyPatch, first: int) -> None:
    """Zeros the words of rows' usage from `first` on."""
    dump = Table.dump_stamped

    def mutant(self: Table, r: int, low: int, high: int) -> Any:
        keys, rows, stamps = dump(self, r, low, high)
        if self.lifecycle is not None:
            rows = rows.copy()
            rows[:, RowLayout.of(self.spec).usage_at + 4 * first :] = 0
        return keys, rows, stamps

    patch.setattr(Table, "dump_stamped", mutant)


def lose_counts_in_a_move(patch: pytest.MonkeyPatch) -> None:
    _lose_words_in_a_move(patch, 1)


def lose_scores_in_a_move(patch: pytest.MonkeyPatch) -> None:
    _lose_words_in_a_move(patch, 2)


def leave_candidates_out_of_a_piece(patch: pytest.MonkeyPatch) -> None:
    rows_of = SnapshotSender._table_rows

    def mutant(self: Any, *given: Any) -> Any:
        found = rows_of(self, *given)
        if found.waiting is None:
            return found
        return found._replace(waiting=found.waiting._replace(keys=found.keys[:0], words=found.keys[:0]))

    patch.setattr(SnapshotSender, "_table_rows", mutant)


def move_a_range_without_its_policies(patch: pytest.MonkeyPatch) -> None:
    rows_of = SnapshotSender._table_rows

    def mutant(self: Any, number: int, table: Table, *given: Any) -> Any:
        return rows_of(self, number, table, *given)._replace(spec=table.spec.to_json())

    patch.setattr(SnapshotSender, "_table_rows", mutant)


def sweep_twice_at_followers_with_other_numbers(patch: pytest.MonkeyPatch) -> None:
    evict = Executor._evict

    def mutant(self: Any, effect: Any, swept: Any, ranges: Any) -> None:
        ranges = list(ranges)
        evict(self, effect, swept, ranges)
        followed = [r for r in ranges if self.replica.core.neighbours.up[r] >= 0]
        later = swept.predicate._replace(below=swept.predicate.below + 1)
        evict(self, effect, swept._replace(predicate=later), followed)

    patch.setattr(Executor, "_evict", mutant)


def keep_candidates_when_a_table_is_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waiting, "drop_range", lambda self, r: None)


def keep_candidates_whose_rows_are_deleted(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Table, keys: Any) -> int:
        remove, self.lifecycle = self.lifecycle, None
        try:
            return forget(self, keys)
        finally:
            self.lifecycle = remove

    forget = Table.delete
    patch.setattr(Table, "delete", delete)


def give_every_key_a_row(patch: pytest.MonkeyPatch) -> None:
    set_ = Lifecycle._set

    def mutant(self: Any, *given: Any) -> None:
        set_(self, *given)
        self._header[H_ADMITS] = False

    patch.setattr(Lifecycle, "_set", mutant)


def decide_by_chance_at_each_replica(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    apply = Lifecycle.apply

    def mutant(self: Any, table: Any, keys: Any, grads: Any, values: Any, worker: int, clock: int) -> int:
        return apply(self, table, keys, grads, values, worker, clock + int(self.admitted.sum()) % 2)

    patch.setattr(Lifecycle, "apply", mutant)


def count_loads_as_pushes(patch: pytest.MonkeyPatch) -> None:
    def loaded(self: Any, keys: Any, rows: Any) -> None:
        usage.begin(self._header, keys, rows, np.ones(len(keys), np.float32))
        self.waiting.remove(keys)

    patch.setattr(Lifecycle, "loaded", loaded)
