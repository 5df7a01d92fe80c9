"""Bugs in sparse ticks: `prev`, homes and their records, who is asked about a worker that is gone. For stories in which
workers push few keys at once, so that most steps tick some ranges only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import elasticps.client.core.session
import replication.step_records
from elasticps.client.core import data_shards
from elasticps.client.core.heads import Heads
from elasticps.client.core.session import PushSession
from elasticps.server.core.own_steps import OwnSteps
from elasticps.server.core.replica_codec import ReplicaCodec
from replication.admission import Admission
from replication.effects import ClocksReply
from replication.messages import Operation
from replication.progress import PART_BITS
from replication.step_records import StepRecord, StepRecords, home_range
from tests.sim.planting import leave_every_frame_to_python


def take_a_gap_for_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    judge = Admission._next_or_duplicate

    def mutant(self: Admission, push: Any, have: Any, after: int) -> Any:
        fresh, repeated = judge(self, push, have, after)
        return fresh, repeated | ((have < push.prev) & ~fresh)

    patch.setattr(Admission, "_next_or_duplicate", mutant)


def read_prev_at_the_resend(patch: pytest.MonkeyPatch) -> None:
    send = PushSession._send_some

    def mutant(self: PushSession, head: Any, step: Any, clock: int, part: int, *more: Any) -> None:
        step.ticks[part]._prev = self.progress
        send(self, head, step, clock, part, *more)

    patch.setattr(PushSession, "_send_some", mutant)


def forget_progress_with_the_view(patch: pytest.MonkeyPatch) -> None:
    adopt = PushSession.adopt

    def mutant(self: PushSession, view: Any) -> Any:
        for member, head in self._heads.by_member.items():
            if not np.array_equal(np.sort(head.order), np.sort(view.headed_by(view.index(member)))):
                head.last = 0
        return adopt(self, view)

    patch.setattr(PushSession, "adopt", mutant)


def tick_only_what_the_last_part_touches(patch: pytest.MonkeyPatch) -> None:
    ticked = PushSession._ticked_heads

    def mutant(self: PushSession, content: Any, step: Any, last: bool) -> Any:
        return ticked(self, content, step, False)

    patch.setattr(PushSession, "_ticked_heads", mutant)


def commit_where_home_has_it(patch: pytest.MonkeyPatch) -> None:
    push = PushSession.push

    def mutant(self: PushSession, content: Any, last: bool = True, also: int | None = None) -> Any:
        out = push(self, content, last, also)
        home, step = self._heads.of(self._home), next(reversed(self._steps.values()), None)
        if last and home is not None and step is not None and not step.everywhere:
            step.heads = {home: None}
        return out

    patch.setattr(PushSession, "push", mutant)


def let_a_step_end_without_its_home(patch: pytest.MonkeyPatch) -> None:
    push = PushSession.push

    def mutant(self: PushSession, *given: Any) -> Any:
        home, self._heads.home = self._heads.home, next(iter(self._heads.by_member.values()), None)
        try:
            return push(self, *given)
        finally:
            self._heads.home = home

    patch.setattr(PushSession, "push", mutant)


def claim_all_steps_before_as_committed(patch: pytest.MonkeyPatch) -> None:
    make = replication.step_records.record_of

    def mutant(clock: int, committed: int, ticked: Any) -> StepRecord:
        return make(clock, clock - 1, ticked)

    patch.setattr(elasticps.client.core.session, "record_of", mutant)


def withhold_records_of_steps_that_are_not_committed(patch: pytest.MonkeyPatch) -> None:
    tell = Admission._tell_clocks

    def mutant(self: Admission, ask: Any) -> None:
        tell(self, ask)
        reply = self._core.effects.pop()
        assert isinstance(reply, ClocksReply)
        newest = int(reply.committed.max(initial=0)) >> PART_BITS
        at_home = reply.committed[reply.ranges == home_range(ask.worker, self._core.ranges)]
        newest = int(at_home[0]) >> PART_BITS if len(at_home) else newest
        self._core.effects.append(reply._replace(records=[each for each in reply.records if each[1].clock <= newest]))

    patch.setattr(Admission, "_tell_clocks", mutant)


def lose_records_on_the_way_down_a_chain(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    decode = ReplicaCodec._decode_forward

    def mutant(self: ReplicaCodec, header: Any, body: Any) -> Any:
        message = decode(self, header, body)
        old = message.operation
        bare = Operation(old.kind, old.worker, old.after, old.payload, old.nbytes, old.refusal)
        return message._replace(operation=bare)

    patch.setattr(ReplicaCodec, "_decode_forward", mutant)


def move_a_home_without_its_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRecords, "column", lambda self, r: [])


def take_for_trained_what_home_has(patch: pytest.MonkeyPatch) -> None:
    def mutant(base: int, home: int, committed: Any, records: Iterable[StepRecord]) -> int:
        return max(base, int(committed[home]) >> PART_BITS)

    patch.setattr(elasticps.client.core.session, "last_whole_step", mutant)


def take_sparse_steps_for_dense(patch: pytest.MonkeyPatch) -> None:
    whole = replication.step_records.last_whole_step
    patch.setattr(
        elasticps.client.core.session,
        "last_whole_step",
        lambda base, home, committed, records: whole(base, home, committed, []),
    )


def believe_home_that_a_shard_is_trained(patch: pytest.MonkeyPatch) -> None:
    def mutant(clock: int, home: int, applied: Any, committed: Any, records: Any) -> bool:
        return bool(committed[home] >> PART_BITS >= clock)

    patch.setattr(data_shards, "step_is_whole", mutant)


def tell_nobody_who_trains_a_shard(patch: pytest.MonkeyPatch) -> None:
    push = PushSession.push

    def mutant(self: PushSession, content: Any, last: bool = True, also: int | None = None) -> Any:
        return push(self, content, last)

    patch.setattr(PushSession, "push", mutant)


def answer_pulls_before_named_steps_are_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnSteps, "reached", lambda self, worker, after, anywhere: True)


def name_only_the_newest_step_to_wait_for(patch: pytest.MonkeyPatch) -> None:
    unread = PushSession.unread

    def mutant(self: PushSession) -> Any:
        progress = unread(self)
        if isinstance(progress, int):
            return progress
        return np.where(progress == progress.max(), progress, 0)

    patch.setattr(PushSession, "unread", mutant)


def send_all_ranges_the_first_one_s_prev(patch: pytest.MonkeyPatch) -> None:
    groups = Heads.groups

    def mutant(self: Heads, head: Any) -> Any:
        some = groups(self, head)
        return [(head.order, some[0][1])] if len(some) > 1 else some

    patch.setattr(Heads, "groups", mutant)
