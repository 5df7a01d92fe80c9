"""Bugs in the protocol: the chain, views, sessions, who may read. Each is of a kind that a careful person could have
written, in code that Python runs; usual frames are left to Python where they would not come there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import coordinator.leader
from coordinator.core.handover import find_handover
from coordinator.core.planner import Health, Members, Plan, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, View
from coordinator.membership import request_drain
from elasticps.client.core.session import PushSession, resume
from elasticps.client.push_batch import PackedPart
from elasticps.server.core.own_steps import OwnSteps
from elasticps.server.core.reads import AnswerGate
from elasticps.server.fast.recent_log import RecentLog
from elasticps.server.process import draining, lifecycle
from elasticps.server.roles.handshake import HelloHandler
from elasticps.server.roles.pulls import PullHandler
from elasticps.wire.frames import Header
from replication.admission import Admission
from replication.chain import Chains, Member, Role
from replication.core import Core
from replication.effects import Apply, CaughtUp
from replication.messages import OperationKind
from replication.neighbours import Neighbours
from replication.progress import Clocks
from replication.replica import Replica
from replication.snapshot_transfer import SnapshotTransfer
from replication.view_change import ViewChange
from tests.sim.planting import leave_every_frame_to_python


def skip_the_duplicate_check(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def mutant(self: Admission, push: Any, have: Any, after: int) -> Any:
        return np.ones(have.shape, dtype=np.bool_), np.zeros(have.shape, dtype=np.bool_)

    patch.setattr(Admission, "_next_or_duplicate", mutant)


def acknowledge_a_duplicate_before_the_tail_has_it(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(Admission, "_unsafe_repeat", lambda self, ranges, seqs: np.zeros(ranges.shape, dtype=np.bool_))


def acknowledge_before_the_tail(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    recode = Core.recode

    def mutant(self: Core) -> None:
        recode(self)
        self.code &= ~np.where(self.neighbours.tail, 0, 1)
        self._plans.clear()

    patch.setattr(Core, "recode", mutant)


def report_level_before_acknowledgements_wait(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    wait = SnapshotTransfer._wait_for_joiner

    def mutant(self: SnapshotTransfer, r: int, seq: int) -> None:
        wait(self, r, seq)
        core = self._core
        core.waiting[r] = False
        core.recode()
        core.commit(int(core.neighbours.down[r]), np.array([r]), core.seq[[r]])

    patch.setattr(SnapshotTransfer, "_wait_for_joiner", mutant)


def report_level_before_the_joiner_has_what_was_acknowledged(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    report = SnapshotTransfer._report_level

    def mutant(self: SnapshotTransfer, ranges: Any) -> None:
        core = self._core
        joined = core.joined
        core.joined = np.maximum(joined, core.seq)
        report(self, ranges)
        core.joined = joined

    patch.setattr(SnapshotTransfer, "_report_level", mutant)


def forget_to_resync_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    up = Replica.peer_up

    def mutant(self: Replica, peer: Member) -> Any:
        core = self.core
        before = core.synced.copy()
        out = up(self, peer)
        core.synced |= before & (core.neighbours.down == core.neighbours.slot(peer)) & (core.role == 2)
        core.recode()
        return [e for e in out if type(getattr(e, "message", None)).__name__ != "Resync" or not before.any()]

    patch.setattr(Replica, "peer_up", mutant)
    patch.setattr(Replica, "peer_down", lambda self, peer: [])


def forget_to_resync_after_a_view(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    change = ViewChange.change_roles

    def mutant(self: ViewChange, view: Chains, changed: Any) -> None:
        core = self._core
        synced = core.synced.copy()
        down = core.neighbours.down.copy()
        change(self, view, changed)
        core.synced |= synced & (core.neighbours.down == down)
        core.recode()

    patch.setattr(ViewChange, "change_roles", mutant)


def promote_a_half_filled_replica(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: Any, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        level = {} if view is None else {r: int(view.since[r]) for r in range(view.ranges)}
        return plan(view, members, config, dataclasses.replace(health, level=level), limits)

    patch.setattr(coordinator.leader, "plan", mutant)


def accept_an_old_neighbour(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def heard(self: Neighbours, slot: int, epoch: int, ranges: Any, neighbour: Any) -> Any:
        return np.ones(ranges.shape, dtype=np.bool_)

    patch.setattr(Neighbours, "heard", heard)


def accept_words_from_before_the_chain_changed(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(Neighbours, "heard", lambda self, slot, epoch, ranges, neighbour: neighbour[ranges] == slot)


def resume_a_worker_from_uncommitted_clocks(patch: pytest.MonkeyPatch) -> None:
    def mutant(applied: Any, committed: Any, home: int, records: Any, base: int = 0) -> Any:
        return resume(applied, applied, home, records, base)

    patch.setattr("elasticps.client.core.join.resume", mutant)


def free_steps_that_are_applied_but_not_committed(patch: pytest.MonkeyPatch) -> None:
    clocks = PushSession.clocks

    def mutant(self: PushSession, ask: int, status: Any, epoch: int, ranges: Any, applied: Any, committed: Any) -> Any:
        return clocks(self, ask, status, epoch, ranges, applied, applied)

    patch.setattr(PushSession, "clocks", mutant)


def give_up_the_last_replica_under_a_living_lease(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: Any, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        if view is None:
            return plan(view, members, config, health, limits)
        alive = [i for i, server in enumerate(view.servers) if server.member not in health.gone]
        for r in range(view.ranges):
            if alive and all(m in health.gone for m in view.as_chains.members_of(r)):
                chains, joining, since = view.chains.copy(), view.joining.copy(), view.since.copy()
                chains[r], joining[r], since[r] = -1, -1, view.epoch + 1
                chains[r, 0] = alive[0]
                made = dataclasses.replace(view, epoch=view.epoch + 1, chains=chains, joining=joining, since=since)
                return Plan(made, "somebody has to serve it")
        return plan(view, members, config, health, limits)

    patch.setattr(coordinator.leader, "plan", mutant)


def send_what_the_caller_s_arrays_hold_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedPart, "complete", lambda self: None)


def accept_a_step_beyond_the_next(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def mutant(self: Admission, push: Any, have: Any, after: int) -> Any:
        return have <= push.prev, have > push.prev

    patch.setattr(Admission, "_next_or_duplicate", mutant)


def accept_pushes_of_old_epochs(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    admit = Admission._admit

    def mutant(self: Admission, push: Any) -> None:
        push.epoch = self._core.epoch
        admit(self, push)

    patch.setattr(Admission, "_admit", mutant)


def apply_outside_the_intervals_received(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    perform = Core.perform

    def mutant(self: Core, frame: Any, ranges: Any, seqs: Any, before: Any) -> None:
        perform(self, frame, ranges, seqs, before)
        self.effects[:] = [e._replace(inside=None) if isinstance(e, Apply) else e for e in self.effects]

    patch.setattr(Core, "perform", mutant)


def leave_the_vector_clocks_out_of_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(Clocks, "set_column", lambda self, r, workers, progress: None)


def forget_what_followers_know_of_clocks(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    forward = Replica._forward

    def mutant(self: Replica, slot: int, message: Any) -> None:
        worker = message.operation.worker
        before = self.clocks.of(worker, message.ranges)
        forward(self, slot, message)
        self.clocks.set(worker, message.ranges, before)

    patch.setattr(Replica, "_forward", mutant)


def write_views_without_comparing(patch: pytest.MonkeyPatch) -> None:
    async def put(self: Any, tracker: Any, key: str, value: Any, timeout_s: float = 0.0) -> bool:
        revision = await self._store.put(key, value.encode())
        revisions = {**tracker.state.revisions, key: revision}
        tracker.state = dataclasses.replace(tracker.state, revisions=revisions)
        return True

    patch.setattr(coordinator.leader._Term, "_put", put)


def drop_the_log_of_a_middle_replica(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    forward = Replica._forward

    def mutant(self: Replica, slot: int, message: Any) -> None:
        forward(self, slot, message)
        for queue in list(self.log._queues.values()):
            unanswered = [e for e in queue if e.frame.token is not None]
            for entry in queue:
                if entry.frame.token is None:
                    self.log.done(entry.frame)
            queue.clear()
            queue.extend(unanswered)

    patch.setattr(Replica, "_forward", mutant)


def drop_a_level_joiner_over_a_lost_link(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    unlink = Replica._unlink

    def mutant(self: Replica, slot: int) -> None:
        unlink(self, slot)
        self.core.waiting &= self.core.neighbours.down != slot
        self.core.recode()
        self._commit_all()  # type: ignore[attr-defined]

    def commit_all(self: Replica) -> None:
        tails = np.flatnonzero(self.core.neighbours.tail & ~self.waiting)
        self.acked[tails] = self.seq[tails]

    patch.setattr(Replica, "_commit_all", commit_all, raising=False)
    patch.setattr(Replica, "_unlink", mutant)


def fence_nobody_and_share_clocks(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    of, put = Clocks.of, Clocks.set
    patch.setattr(Clocks, "of", lambda self, worker, ranges: of(self, 0, ranges))
    patch.setattr(Clocks, "set", lambda self, worker, ranges, progress: put(self, 0, ranges, progress))


def answer_a_pull_before_its_worker_s_pushes_are_applied(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(OwnSteps, "waits", lambda self, read: False)


def show_at_a_tail_what_its_level_joiner_lacks(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(AnswerGate, "guarded", lambda self: False)


def read_at_heads_what_may_not_last(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(View, "tails", property(lambda self: self.heads))
    patch.setattr(AnswerGate, "guarded", lambda self: False)


def let_a_stale_tail_answer_for_a_view_it_has_not_seen(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    pull = PullHandler._pull

    def mutant(self: PullHandler, connection: Any, header: Header, body: Any) -> None:
        epoch = min(header.epoch, self._serving.epoch)
        pull(self, connection, header._replace(epoch=epoch, clock=0), body)

    patch.setattr(PullHandler, "_pull", mutant)


def leave_out_parts_that_have_rows_for_a_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedPart, "heads", lambda self, epoch: [])


def keep_only_pushes_for_a_new_successor(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    waiting_for = RecentLog.waiting_for

    def mutant(self: RecentLog, number: int) -> Iterator[Any]:
        return (e for e in waiting_for(self, number) if e.frame.operation.kind == OperationKind.PUSH)

    patch.setattr(RecentLog, "waiting_for", mutant)


def keep_no_log_for_a_joiner_that_counts(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    wait = SnapshotTransfer._wait_for_joiner

    def mutant(self: SnapshotTransfer, r: int, seq: int) -> None:
        wait(self, r, seq)
        for queue in self._core.log._queues.values():
            for entry in [e for e in queue if self._core.neighbours.tail[e.ranges].all()]:
                queue.remove(entry)
                self._core.log.done(entry.frame)

    patch.setattr(SnapshotTransfer, "joiner_resync", _without_log(SnapshotTransfer.joiner_resync))
    patch.setattr(SnapshotTransfer, "_wait_for_joiner", mutant)


def _without_log(resync: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: SnapshotTransfer, slot: int, r: int, seq: int) -> None:
        self._core.log._queues.pop(slot, None)
        resync(self, slot, r, seq)

    return mutant


def fence_nobody(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(Replica, "adopt_roster", lambda self, version, workers: [])
    patch.setattr(HelloHandler, "follow", lambda self: None)  # which cuts off older incarnations


def let_every_replica_report_the_joiner_level(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def levels(self: Replica) -> list[CaughtUp]:
        view = self.view
        if view is None:
            return []
        mine = np.flatnonzero((self.role == Role.FULL) & (view.joining >= 0) & (self.acked == self.seq))
        return [CaughtUp(r, int(view.since[r]), view.members[view.joining[r]]) for r in mine.tolist()]

    patch.setattr(Replica, "levels", levels)


def tell_only_one_leader_who_is_level(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def levels(self: Replica) -> list[CaughtUp]:
        reported = self.__dict__.setdefault("reported_levels", set())
        fresh = [level for level in all_levels(self) if level not in reported]
        reported.update(fresh)
        return fresh

    all_levels = Replica.levels
    patch.setattr(Replica, "levels", levels)


def give_ranges_to_servers_that_drain(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: Any, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        lately = sorted(members.draining)[1:]  # only the first is remembered
        return plan(view, dataclasses.replace(members, draining=members.draining - {*lately}), config, health, limits)

    patch.setattr(coordinator.leader, "plan", mutant)


def end_on_the_request_to_drain(patch: pytest.MonkeyPatch) -> None:
    async def drain(store: Any, server: Any, stop: Any, timeout_s: float) -> str:
        await request_drain(store, server.me.name)
        return "SIGTERM"

    patch.setattr(lifecycle, "drain", drain)


def count_copies_at_servers_that_drain(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: Any, member: Any, staying: Any) -> Any:
        return find_handover(view, member, {other.member for other in view.servers})

    patch.setattr(draining, "find_handover", mutant)


def move_more_than_must(patch: pytest.MonkeyPatch) -> None:
    def mutant(view: Any, members: Members, config: ClusterConfig, health: Health, limits: Limits) -> Plan | None:
        decision = plan(view, members, config, health, limits)
        if view is None or decision is None or decision.view is None or view.epoch % 4 == 0:
            return decision
        r, to = view.epoch % view.ranges, view.epoch % len(view.servers)
        target, full = view.servers[to].member, view.as_chains.members_of(r)
        if view.joining[r] >= 0 or len(full) < view.replicas or target in {*full, *health.gone, *members.draining}:
            return decision
        joining, since = view.joining.copy(), view.since.copy()
        joining[r], since[r] = to, view.epoch + 1
        made = dataclasses.replace(view, epoch=view.epoch + 1, joining=joining, since=since, reason="it is better")
        return Plan(made, made.reason)

    patch.setattr(coordinator.leader, "plan", mutant)
