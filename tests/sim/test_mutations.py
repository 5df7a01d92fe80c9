"""The simulator finds every planted bug, and soon: a check that nothing can fail checks nothing.

Each mutation is something that a careful person could have written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import chaos.control
import chaos.workers
from chaos.contents import Content
from chaos.control import Store
from chaos.frames import PullFrame
from chaos.operators import Operator, Task
from chaos.readers import Reader
from chaos.reads import Reads
from chaos.simulator import run
from coordinator.planner import Health, Members, Plan, plan
from coordinator.repair import Limits
from coordinator.view import ClusterConfig, View
from elasticps.client.protocol.session import Session, resume
from elasticps.server.protocol.bounded_delay import BoundedDelay
from replication.chain import Chains, Member, Role
from replication.core import Core
from replication.effects import CaughtUp
from replication.log import Log
from replication.messages import OperationKind
from replication.progress import Clocks
from replication.replica import Replica
from replication.snapshot_transfer import SnapshotTransfer
from tests.sim.planted import PLANTED
from tests.sim.stories import FIRST

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutation(NamedTuple):
    """A bug and how to plant it."""

    name: str
    plant: Patch


def _skip_the_duplicate_check(patch: pytest.MonkeyPatch) -> None:
    def judge(self: Replica, push: Any, have: Any, expected: int, after: int) -> Any:
        return np.ones(have.shape, dtype=np.bool_), np.zeros(have.shape, dtype=np.bool_)

    patch.setattr(Replica, "_judge", judge)


def _acknowledge_a_duplicate_before_the_tail_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "_unsafe_repeat", lambda self, ranges, seqs: np.zeros(ranges.shape, dtype=np.bool_))


def _acknowledge_before_the_tail(patch: pytest.MonkeyPatch) -> None:
    recode = Core._recode

    def mutant(self: Core) -> None:
        recode(self)
        self._code &= ~np.where(self._tail, 0, 1)
        self._treatments.clear()

    patch.setattr(Core, "_recode", mutant)


def _report_level_before_acknowledgements_wait(patch: pytest.MonkeyPatch) -> None:
    wait = SnapshotTransfer._wait_for_joiner

    def mutant(self: SnapshotTransfer, r: int, seq: int, out: Any) -> None:
        wait(self, r, seq, out)
        self.waiting[r] = False
        self._recode()
        self._commit(int(self._down[r]), np.array([r]), self.seq[[r]], out)

    patch.setattr(SnapshotTransfer, "_wait_for_joiner", mutant)


def _report_level_before_the_joiner_has_what_was_acknowledged(patch: pytest.MonkeyPatch) -> None:
    report = SnapshotTransfer._report_level

    def mutant(self: SnapshotTransfer, ranges: Any, out: Any) -> None:
        joined = self._joined
        self._joined = np.maximum(joined, self.seq)
        report(self, ranges, out)
        self._joined = joined

    patch.setattr(SnapshotTransfer, "_report_level", mutant)


def _forget_to_resync_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    up = Replica.peer_up

    def mutant(self: Replica, peer: Member) -> Any:
        before = self._synced.copy()
        out = up(self, peer)
        self._synced |= before & (self._down == self._slot(peer)) & (self.role == 2)
        self._recode()
        return [e for e in out if type(getattr(e, "message", None)).__name__ != "Resync" or not before.any()]

    patch.setattr(Replica, "peer_up", mutant)
    patch.setattr(Replica, "peer_down", lambda self, peer: [])


def _forget_to_resync_after_a_view(patch: pytest.MonkeyPatch) -> None:
    change = Replica._change_roles

    def mutant(self: Replica, view: Chains, changed: Any, out: Any) -> None:
        synced = self._synced.copy()
        down = self._down.copy()
        change(self, view, changed, out)
        self._synced |= synced & (self._down == down)
        self._recode()

    patch.setattr(Replica, "_change_roles", mutant)


def _promote_a_half_filled_replica(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: View, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        level = {r: int(view.since[r]) for r in range(view.ranges)}
        return plan(view, members, config, dataclasses.replace(health, level=level), limits)

    patch.setattr(chaos.control, "plan", mutant)


def _accept_an_old_neighbour(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Core, slot: int, epoch: int, ranges: Any, neighbour: Any) -> Any:
        return np.ones(ranges.shape, dtype=np.bool_)

    patch.setattr(Core, "_heard", heard)


def _accept_words_from_before_the_chain_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "_heard", lambda self, slot, epoch, ranges, neighbour: neighbour[ranges] == slot)


def _resume_a_worker_from_uncommitted_clocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chaos.workers, "resume", lambda applied, committed: resume(applied, applied))


def _free_steps_that_are_applied_but_not_committed(patch: pytest.MonkeyPatch) -> None:
    clocks = Session.clocks

    def mutant(self: Session, ask: int, status: Any, epoch: int, ranges: Any, applied: Any, committed: Any) -> Any:
        return clocks(self, ask, status, epoch, ranges, applied, applied)

    patch.setattr(Session, "clocks", mutant)


def _give_up_the_last_replica_under_a_living_lease(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: View, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        alive = [i for i, server in enumerate(view.servers) if server.member not in health.gone]
        for r in range(view.ranges):
            if alive and all(m in health.gone for m in view.as_chains.members_of(r)):
                chains, joining, since = view.chains.copy(), view.joining.copy(), view.since.copy()
                chains[r], joining[r], since[r] = -1, -1, view.epoch + 1
                chains[r, 0] = alive[0]
                made = dataclasses.replace(view, epoch=view.epoch + 1, chains=chains, joining=joining, since=since)
                return Plan(made, "somebody has to serve it")
        return plan(view, members, config, health, limits)

    patch.setattr(chaos.control, "plan", mutant)


def _change_a_pushed_array_after_the_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Content, "private_copy", lambda self: self)


def _accept_a_step_beyond_the_next(patch: pytest.MonkeyPatch) -> None:
    def judge(self: Replica, push: Any, have: Any, expected: int, after: int) -> Any:
        return have <= expected, have > expected

    patch.setattr(Replica, "_judge", judge)


def _accept_pushes_of_old_epochs(patch: pytest.MonkeyPatch) -> None:
    admit = Replica._admit

    def mutant(self: Replica, push: Any, out: Any) -> None:
        push.epoch = self.epoch
        admit(self, push, out)

    patch.setattr(Replica, "_admit", mutant)


def _apply_outside_the_intervals_received(patch: pytest.MonkeyPatch) -> None:
    perform = Core._perform

    def mutant(self: Core, frame: Any, ranges: Any, seqs: Any, before: Any, out: Any) -> None:
        perform(self, frame, ranges, seqs, before, out)
        out[:] = [e._replace(inside=None) if hasattr(e, "inside") else e for e in out]

    patch.setattr(Core, "_perform", mutant)


def _leave_the_vector_clocks_out_of_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clocks, "set_column", lambda self, r, workers, progress: None)


def _forget_what_followers_know_of_clocks(patch: pytest.MonkeyPatch) -> None:
    forward = Replica._forward

    def mutant(self: Replica, slot: int, message: Any, out: Any) -> None:
        worker = message.operation.worker
        before = self.clocks.row(worker)[message.ranges]
        forward(self, slot, message, out)
        self.clocks.row(worker)[message.ranges] = before

    patch.setattr(Replica, "_forward", mutant)


def _write_views_without_comparing(patch: pytest.MonkeyPatch) -> None:
    def write(self: Store, view: View, expect: int, term: int) -> bool | None:
        if not self.up:
            return None
        old, self.view = self.view, view
        self.world.publish(old, view)
        return True

    patch.setattr(Store, "compare_and_set", write)


def _drop_the_log_of_a_middle_replica(patch: pytest.MonkeyPatch) -> None:
    forward = Replica._forward

    def mutant(self: Replica, slot: int, message: Any, out: Any) -> None:
        forward(self, slot, message, out)
        for lane in list(self.log._lanes.values()):
            kept = [e for e in lane if e.frame.token is not None]
            for entry in lane:
                if entry.frame.token is None:
                    self.log.done(entry.frame)
            lane.clear()
            lane.extend(kept)

    patch.setattr(Replica, "_forward", mutant)


def _drop_a_level_joiner_over_a_lost_link(patch: pytest.MonkeyPatch) -> None:
    unlink = Replica._unlink

    def mutant(self: Replica, slot: int) -> None:
        unlink(self, slot)
        self.waiting &= self._down != slot
        self._recode()
        self._commit_all()  # type: ignore[attr-defined]

    def commit_all(self: Replica) -> None:
        tails = np.flatnonzero(self._tail & ~self.waiting)
        self.acked[tails] = self.seq[tails]

    patch.setattr(Replica, "_commit_all", commit_all, raising=False)
    patch.setattr(Replica, "_unlink", mutant)


def _fence_nobody_and_share_clocks(patch: pytest.MonkeyPatch) -> None:
    row = Clocks.row
    patch.setattr(Clocks, "row", lambda self, worker: row(self, 0))


def _answer_a_pull_before_its_worker_s_pushes_are_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedDelay, "behind", lambda self, read: [])


def _show_at_a_tail_what_its_level_joiner_lacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "acknowledged", lambda self, shown: True)


def _read_at_heads_what_may_not_last(patch: pytest.MonkeyPatch) -> None:
    def tails(view: View) -> Any:
        return view.heads

    patch.setattr(View, "tails", property(tails))
    patch.setattr(Reader, "_reader", lambda self, view, pull, r, only: view.members[int(view.heads[r])])
    patch.setattr(Reads, "acknowledged", lambda self, shown: True)


def _let_a_stale_tail_answer_for_a_view_it_has_not_seen(patch: pytest.MonkeyPatch) -> None:
    pull = Reads.pull

    def mutant(self: Reads, link: Any, frame: PullFrame) -> None:
        pull(self, link, frame._replace(epoch=min(frame.epoch, self.server.replica.epoch), clock=0))

    patch.setattr(Reads, "pull", mutant)


def _answer_pulls_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "_serves", lambda self, header: True)


def _count_a_frame_of_several_parts_as_its_first(patch: pytest.MonkeyPatch) -> None:
    admit = Replica._admit_step

    def mutant(self: Replica, push: Any, ranges: Any, out: Any) -> None:
        if not push.last:
            push.part = push.first
        admit(self, push, ranges, out)

    patch.setattr(Replica, "_admit_step", mutant)


def _leave_out_parts_that_have_rows_for_a_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Content, "touches", lambda self, ranges: False)


def _keep_only_pushes_for_a_new_successor(patch: pytest.MonkeyPatch) -> None:
    lane = Log.lane

    def mutant(self: Log, number: int) -> Iterator[Any]:
        return (e for e in lane(self, number) if e.frame.operation.kind == OperationKind.PUSH)

    patch.setattr(Log, "lane", mutant)


def _count_heads_of_different_views_together(patch: pytest.MonkeyPatch) -> None:
    restart = Operator._restart

    def mutant(self: Operator, task: Task) -> None:
        done = set(task.done)
        restart(self, task)
        task.done |= done & set(self._heads)
        task.asked = {f: m for f, m in task.asked.items() if m not in task.done}
        self._end(task)

    patch.setattr(Operator, "_restart", mutant)


def _keep_no_log_for_a_joiner_that_counts(patch: pytest.MonkeyPatch) -> None:
    wait = SnapshotTransfer._wait_for_joiner

    def mutant(self: SnapshotTransfer, r: int, seq: int, out: Any) -> None:
        wait(self, r, seq, out)
        for lane in self.log._lanes.values():
            for entry in [e for e in lane if self._tail[e.ranges].all()]:
                lane.remove(entry)
                self.log.done(entry.frame)

    patch.setattr(SnapshotTransfer, "_joiner_resync", _without_log(SnapshotTransfer._joiner_resync))
    patch.setattr(SnapshotTransfer, "_wait_for_joiner", mutant)


def _without_log(resync: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: SnapshotTransfer, slot: int, r: int, seq: int, out: Any) -> None:
        self.log._lanes.pop(slot, None)
        resync(self, slot, r, seq, out)

    return mutant


def _fence_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "adopt_roster", lambda self, version, workers: [])


def _let_every_replica_report_the_joiner_level(patch: pytest.MonkeyPatch) -> None:
    def levels(self: Replica) -> list[CaughtUp]:
        view = self.view
        if view is None:
            return []
        mine = np.flatnonzero((self.role == Role.FULL) & (view.joining >= 0) & (self.acked == self.seq))
        return [CaughtUp(r, int(view.since[r]), view.members[view.joining[r]]) for r in mine.tolist()]

    patch.setattr(Replica, "levels", levels)


def _tell_only_one_leader_who_is_level(patch: pytest.MonkeyPatch) -> None:
    def levels(self: Replica) -> list[CaughtUp]:
        told = self.__dict__.setdefault("told", set())
        fresh = [level for level in all_levels(self) if level not in told]
        told.update(fresh)
        return fresh

    all_levels = Replica.levels
    patch.setattr(Replica, "levels", levels)


def _give_ranges_to_servers_that_drain(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: View, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        lately = sorted(members.draining)[1:]  # only the first is remembered
        return plan(view, dataclasses.replace(members, draining=members.draining - {*lately}), config, health, limits)

    patch.setattr(chaos.control, "plan", mutant)


def _end_on_the_request_to_drain(patch: pytest.MonkeyPatch) -> None:
    drain = Store.drain

    def mutant(self: Store, member: Member) -> None:
        drain(self, member)
        self.world.left_out(self.world.servers[member.name])

    patch.setattr(Store, "drain", mutant)


def _move_more_than_must(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: View, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        decision = plan(view, members, config, health, limits)
        if decision is None or decision.view is None or view.epoch % 2:
            return decision
        return chaos_move(view, view.epoch, members.draining, health) or decision

    def chaos_move(view: View, number: int, draining: Any, health: Health) -> Plan | None:
        moved = chaos.control.move(view, number % view.ranges, number % len(view.servers), health, draining)
        return None if moved is None else Plan(moved, moved.reason)

    patch.setattr(chaos.control, "plan", mutant)


def _take_a_bounded_delay_one_step_too_long(patch: pytest.MonkeyPatch) -> None:
    behind = BoundedDelay.behind

    def mutant(self: BoundedDelay, read: Any) -> list[str]:
        header = read.header
        return behind(self, read._replace(header=header._replace(bound=header.bound + 1 if header.bound else 0)))

    patch.setattr(BoundedDelay, "behind", mutant)


def _count_only_workers_that_have_pushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedDelay, "join", lambda self, worker, base: self._paused.discard(worker))


def _wait_for_workers_that_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedDelay, "pause", lambda self, worker: None)


def _wait_for_workers_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    follow = BoundedDelay.follow
    patch.setattr(BoundedDelay, "follow", lambda self, workers: follow(self, {**self._workers, **workers}))


MUTATIONS: Sequence[Mutation] = [
    Mutation(plant.__name__[1:], plant)
    for plant in (
        _skip_the_duplicate_check,
        _acknowledge_a_duplicate_before_the_tail_has_it,
        _acknowledge_before_the_tail,
        _report_level_before_acknowledgements_wait,
        _report_level_before_the_joiner_has_what_was_acknowledged,
        _forget_to_resync_after_a_reconnect,
        _forget_to_resync_after_a_view,
        _promote_a_half_filled_replica,
        _accept_an_old_neighbour,
        _accept_words_from_before_the_chain_changed,
        _resume_a_worker_from_uncommitted_clocks,
        _free_steps_that_are_applied_but_not_committed,
        _give_up_the_last_replica_under_a_living_lease,
        _change_a_pushed_array_after_the_call,
        _accept_a_step_beyond_the_next,
        _accept_pushes_of_old_epochs,
        _apply_outside_the_intervals_received,
        _leave_the_vector_clocks_out_of_a_snapshot,
        _forget_what_followers_know_of_clocks,
        _write_views_without_comparing,
        _drop_the_log_of_a_middle_replica,
        _drop_a_level_joiner_over_a_lost_link,
        _fence_nobody_and_share_clocks,
        _answer_a_pull_before_its_worker_s_pushes_are_applied,
        _show_at_a_tail_what_its_level_joiner_lacks,
        _read_at_heads_what_may_not_last,
        _let_a_stale_tail_answer_for_a_view_it_has_not_seen,
        _answer_pulls_of_any_epoch,
        _count_a_frame_of_several_parts_as_its_first,
        _leave_out_parts_that_have_rows_for_a_head,
        _keep_only_pushes_for_a_new_successor,
        _count_heads_of_different_views_together,
        _keep_no_log_for_a_joiner_that_counts,
        _fence_nobody,
        _let_every_replica_report_the_joiner_level,
        _tell_only_one_leader_who_is_level,
        _give_ranges_to_servers_that_drain,
        _end_on_the_request_to_drain,
        _move_more_than_must,
        _take_a_bounded_delay_one_step_too_long,
        _count_only_workers_that_have_pushed,
        _wait_for_workers_that_pause,
        _wait_for_workers_that_are_gone,
        *PLANTED,
    )
]


SEEDS = 1000


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_simulator_finds(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.plant(monkeypatch)
    first = FIRST.get(mutation.name, 0)
    seeds = (*range(first, SEEDS), *range(first))
    found = next((result for seed in seeds if not (result := run(seed)).ok), None)
    assert found is not None, f"{mutation.name} survived {SEEDS} seeds"
    assert f"elasticps sim --protocol --seed {found.seed}" in str(found)
