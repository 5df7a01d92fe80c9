"""Bugs in rounds and shards, each of a kind that a careful person could have written."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import elasticps.client.core.data_shards
from elasticps.client.barrier import Barrier
from elasticps.client.core import fan_out
from elasticps.client.core.data_shards import ShardClaims
from elasticps.client.core.fan_out import FanOut, PastSteps
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import BarrierGroup, RangeRounds, Rounds, RoundShare
from elasticps.server.core.data_shards import UNUSED, Claim, ShardDispenser, ShardLedger, ShardSet, Used
from elasticps.server.roles.executor import Executor
from tests.sim.planting import leave_every_frame_to_python


def decide_again_after_the_head_of_the_home_range_moved(patch: pytest.MonkeyPatch) -> None:
    def load(self: Rounds, r: int, piece: RangeRounds) -> None:
        groups = {app: dataclasses.replace(of, decided=max(0, of.decided - 1)) for app, of in piece.groups.items()}
        load_all(self, r, piece._replace(groups=groups))

    load_all = Rounds.load
    patch.setattr(Rounds, "load", load)


def wait_for_workers_that_died(patch: pytest.MonkeyPatch) -> None:
    decide = BarrierCoordinator._decide

    def mutant(self: Any, app: str) -> None:
        state = self._rounds.groups.get(app)
        ready = self._waiting.get(app, {})
        if state is not None and all(w in ready for w, above in state.members.items() if above <= state.decided):
            decide(self, app)

    patch.setattr(BarrierCoordinator, "_decide", mutant)


def go_on_without_those_who_are_late(patch: pytest.MonkeyPatch) -> None:
    decide = BarrierCoordinator._decide

    def mutant(self: Any, app: str) -> None:
        state, ready = self._rounds.groups.get(app), self._waiting.get(app, {})
        if state is not None and len(ready) > 1:
            for worker in [w for w in state.members if w not in ready]:
                state.members[worker] = state.decided + 1
        decide(self, app)

    patch.setattr(BarrierCoordinator, "_decide", mutant)


def apply_a_share_at_once(patch: pytest.MonkeyPatch) -> None:
    keep = Rounds.keep

    def mutant(self: Rounds, app: str, clock: int, worker: int, ranges: Any, blocks: Any) -> None:
        keep(self, app, clock, worker, ranges, blocks)
        for share in self._retained.get((app, clock), []):
            share.live[:] = share.live & (self.closed(app) + 1 == clock) & (worker % 2 == 0)

    patch.setattr(Rounds, "keep", mutant)


def close_a_round_twice(patch: pytest.MonkeyPatch) -> None:
    close = Rounds.close

    def mutant(self: Rounds, app: str, clock: int, workers: Any, total: int, ranges: Any, tables: Any) -> Any:
        retained = copy.deepcopy(self._retained)
        before = self.closed(app).copy()
        blocks = close(self, app, clock, workers, total, ranges, tables)
        self._retained = retained
        if (before[ranges] == clock).all():
            self.closed(app)[ranges] = clock - 1
            blocks = close(self, app, clock, workers, total, ranges, tables)
        return blocks

    patch.setattr(Rounds, "close", mutant)


def average_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    close = Rounds.close

    def mutant(self: Rounds, app: str, clock: int, workers: Any, total: int, ranges: Any, tables: Any) -> Any:
        shares = [s for s in self._retained.get((app, clock), []) if s.worker in workers]
        names = list(dict.fromkeys(s.worker for s in shares))
        self._retained[app, clock] = [RoundShare(names.index(s.worker), s.live, s.blocks) for s in shares]
        blocks = close(self, app, clock, range(len(names)), total, ranges, tables)
        left = self._retained.pop((app, clock), [])
        if left:
            self._retained[app, clock] = [RoundShare(names[s.worker], s.live, s.blocks) for s in left]
        return blocks

    patch.setattr(Rounds, "close", mutant)


def average_over_those_who_have_the_key_s_range(patch: pytest.MonkeyPatch) -> None:
    import elasticps.server.core.barrier_state as module

    average = module._average
    patch.setattr(module, "_average", lambda shares, count: average(shares, sum(map(bool, shares)) or 1))


def average_all_that_is_kept(patch: pytest.MonkeyPatch) -> None:
    close = Rounds.close

    def mutant(self: Rounds, app: str, clock: int, workers: Any, total: int, ranges: Any, tables: Any) -> Any:
        everybody = sorted({*workers, *(s.worker for s in self._retained.get((app, clock), ()))})
        return close(self, app, clock, everybody, len(everybody), ranges, tables)

    patch.setattr(Rounds, "close", mutant)


def drop_the_first_part_of_a_share(patch: pytest.MonkeyPatch) -> None:
    keep = Rounds.keep

    def mutant(self: Rounds, app: str, clock: int, worker: int, ranges: Any, blocks: Any) -> None:
        self._retained[app, clock] = [
            s for s in self._retained.get((app, clock), []) if s.worker != worker or not s.live[ranges].any()
        ]
        keep(self, app, clock, worker, ranges, blocks)

    patch.setattr(Rounds, "keep", mutant)


def fill_a_joiner_without_the_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "load", lambda self, r, piece: None)


def fill_a_joiner_without_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    load = Rounds.load
    patch.setattr(Rounds, "load", lambda self, r, piece: load(self, r, piece._replace(retained=[])))


def fill_a_joiner_of_the_home_range_without_its_state(patch: pytest.MonkeyPatch) -> None:
    load = Rounds.load
    patch.setattr(Rounds, "load", lambda self, r, piece: load(self, r, piece._replace(groups={})))


def ignore_that_a_worker_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "leave", lambda self, app, worker: None)


def count_a_worker_from_the_round_under_way(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Rounds, app: str, roster: int, workers: Iterable[int], *, bounded: bool = False) -> None:
        group = self.groups.setdefault(app, BarrierGroup())
        group.members |= {worker: max(0, group.decided - 1) for worker in workers if worker not in group.members}

    patch.setattr(Rounds, "enter", mutant)


def forget_the_last_round_of_a_predecessor(patch: pytest.MonkeyPatch) -> None:
    decide = Rounds.decide

    def mutant(self: Rounds, app: str, clock: int, workers: Iterable[int]) -> None:
        decide(self, app, clock, workers)
        group = self.groups[app]
        group.last = {w: c for w, c in group.last.items() if w in group.workers}

    patch.setattr(Rounds, "decide", mutant)


def count_answers_of_different_views_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FanOut, "overtaken", lambda self, routes: False)
    begin = FanOut.begin

    def mutant(self: FanOut, routes: Any, requests: Any) -> Any:
        had = list(self.answers)
        calls = begin(self, routes, requests)
        self.answers += had
        return calls[len(had) :] if len(calls) > len(had) else calls

    patch.setattr(FanOut, "begin", mutant)


def settle_a_step_that_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    settle = Barrier.settle
    patch.setattr(Barrier, "settle", lambda self, wait, *rest: settle(self, lambda: None, *rest))


def mark_a_shard_done_when_it_is_used(patch: pytest.MonkeyPatch) -> None:
    settle = ShardSet.settle
    patch.setattr(ShardSet, "settle", lambda self, worker, committed: settle(self, worker, 1 << 40))


def give_back_a_shard_whose_step_is_committed(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShardSet, workers: Iterable[int]) -> None:
        for worker in workers:
            for shard in self.doing.pop(worker, {}):
                self.returned[shard] = UNUSED

    patch.setattr(ShardSet, "lose", mutant)


def keep_the_shards_of_workers_that_died(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardSet, "lose", lambda self, workers: None)


def lose_the_shards_of_workers_that_died(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShardSet, workers: Iterable[int]) -> None:
        for worker in workers:
            self.done += len(self.doing.pop(worker, {}))

    patch.setattr(ShardSet, "lose", mutant)


def take_for_lost_who_only_waits(patch: pytest.MonkeyPatch) -> None:
    take = ShardLedger.take

    def mutant(self: ShardLedger, step: Claim) -> None:
        found = self.find(step.app, step.name)
        if found is not None and found.upcoming == found.spec.total and not found.returned:
            step = step._replace(lost=tuple(sorted(set(found.doing) - {step.worker})))
        take(self, step)

    patch.setattr(ShardLedger, "take", mutant)


def fill_a_joiner_without_the_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardLedger, "load", lambda self, piece, more: None)


def forget_which_step_used_a_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardLedger, "note", lambda self, mark, worker, clock: None)


def note_only_at_the_head_which_step_used_a_shard(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    apply = Executor._apply_rows

    def mutant(self: Executor, effect: Any, content: Any) -> None:
        note = self.shards.note
        if not (self.replica.core.neighbours.up[effect.ranges] < 0).all():
            self.shards.note = lambda *_: None  # type: ignore[method-assign]
        apply(self, effect, content)
        self.shards.note = note  # type: ignore[method-assign]

    patch.setattr(Executor, "_apply_rows", mutant)


def take_what_is_applied_for_committed(patch: pytest.MonkeyPatch) -> None:
    def mutant(worker: int, timeout_s: float) -> Any:
        steps = yield from fan_out.steps_of(worker, timeout_s)
        return steps._replace(committed=steps.applied)

    patch.setattr(elasticps.client.core.data_shards, "steps_of", mutant)


def believe_one_head_that_a_step_is_committed(patch: pytest.MonkeyPatch) -> None:
    def mutant(worker: int, timeout_s: float) -> Any:
        steps = yield from fan_out.steps_of(worker, timeout_s)
        applied, committed = (np.full_like(progress, progress.max()) for progress in (steps.applied, steps.committed))
        return PastSteps(steps.home, applied, committed, steps.records)

    patch.setattr(elasticps.client.core.data_shards, "steps_of", mutant)


def train_again_whatever_a_lost_worker_had(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShardClaims, worker: int, clock: int, last: int) -> Any:
        yield from ()
        return False

    patch.setattr(ShardClaims, "_was_trained", mutant)


def take_a_share_that_arrived_for_a_round_that_was_made(patch: pytest.MonkeyPatch) -> None:
    was = ShardClaims._was_trained

    def mutant(self: ShardClaims, worker: int, clock: int, last: int) -> Any:
        rounds, self._rounds = self._rounds, False
        done = yield from was(self, worker, clock, last)
        self._rounds = rounds
        return done

    patch.setattr(ShardClaims, "_was_trained", mutant)


def end_when_nothing_is_left_to_hand_out(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Any, found: ShardSet, claim: Claim) -> Any:
        document_ = document(self, found, claim)
        left = found.returned or found.upcoming < found.spec.total
        return document_ if left else document_ | {"done": found.spec.total}

    document = ShardDispenser._document
    patch.setattr(ShardDispenser, "_document", mutant)


def hand_out_to_the_next_without_taking_from_the_last(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShardSet, worker: int, shards: Iterable[int]) -> None:
        for shard in shards:
            doing = self.doing.get(worker, {}).get(shard)
            if doing is not None and not doing.clock:
                self.returned[shard] = Used(0, 0)

    patch.setattr(ShardSet, "give_back", mutant)
