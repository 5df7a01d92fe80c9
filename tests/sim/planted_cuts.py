"""Bugs in consistent cuts, each of a kind that a careful person could have written."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

import elasticps.checkpoint.cuts as checkpoint_cuts
import replication.admission
from elasticps.checkpoint.core.cut_proof import Verdict, prove_cut
from elasticps.checkpoint.cuts import CutTaker
from elasticps.client.core.hold import Hold
from elasticps.server.core.cut import CutHold
from elasticps.server.roles.cuts import CutHandler
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.store import Store
from elasticps.store.cuts import PassedCuts as Passed
from replication.effects import Send
from replication.messages import Forward, OperationKind


def hold_before_the_last_step_is_committed(patch: pytest.MonkeyPatch) -> None:
    answers = Hold.answers
    patch.setattr(Hold, "answers", lambda self, written, now: answers(self, written._replace(settled=True), now))


def push_on_while_held(patch: pytest.MonkeyPatch) -> None:
    holds = Hold.holds
    patch.setattr(Hold, "holds", lambda self, clock, now: holds(self, clock, now) and clock % 3 > 0)


def go_on_at_the_release_of_an_older_cut(patch: pytest.MonkeyPatch) -> None:
    hear = Hold.hear

    def mutant(self: Hold, server: Any, header: Any, now: float) -> None:
        hear(self, server, header, now)
        if header.cut % 2 == 0 and len(self._reports) > 1:
            self.cut = 0

    patch.setattr(Hold, "hear", mutant)


def log_a_cut_again_where_it_was_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    passed = Passed.passed

    def mutant(self: Passed, ranges: Any, cut: int) -> Any:
        before = self.newest[0]
        found = passed(self, ranges, cut)
        self.newest[0] = before
        return found

    patch.setattr(Passed, "passed", mutant)


def forget_the_cut_of_a_range_that_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "load_cut", lambda self, r, cut, base: None)


def note_what_was_let_in_behind_the_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replication.admission, "_LOOK", ())


def forward_a_cut_out_of_order(patch: pytest.MonkeyPatch) -> None:
    send = ReplicaLinks.send

    def mutant(self: Any, effect: Send) -> None:
        late = getattr(self, "late", None)
        message = effect.message
        if late is None and isinstance(message, Forward) and message.operation.kind == OperationKind.CUT:
            self.late = effect
            return
        send(self, effect)
        if late is not None:
            self.late = None
            send(self, late)

    patch.setattr(ReplicaLinks, "send", mutant)


def tell_nobody_who_comes_later(patch: pytest.MonkeyPatch) -> None:
    greet = CutHandler.greet

    def mutant(self: Any, connection: Any) -> None:
        if connection.base >= 0:  # it has joined before
            greet(self, connection)

    patch.setattr(CutHandler, "greet", mutant)


def log_where_workers_have_gone_on(patch: pytest.MonkeyPatch) -> None:
    log = CutTaker._log

    async def mutant(self: Any, number: int, *rest: Any) -> Any:
        servers = list(self._servers.values())
        await asyncio.gather(*(self._quietly(server.release(number)) for server in servers[:1]))
        return await log(self, number, *rest)

    patch.setattr(CutTaker, "_log", mutant)


def wait_for_no_workers(patch: pytest.MonkeyPatch) -> None:
    roster = CutTaker._roster

    async def mutant(self: Any) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return (await roster(self))[: 0 if self.times % 2 else None]

    patch.setattr(CutTaker, "_roster", mutant)


def judge_but_one_range(patch: pytest.MonkeyPatch) -> None:
    push_on_while_held(patch)
    patch.setattr(checkpoint_cuts, "prove_cut", lambda taken, present, reported: prove_cut(taken[:1], present, {}))


def take_a_worker_that_was_left_out_for_whole(patch: pytest.MonkeyPatch) -> None:
    def mutant(*given: Any) -> Verdict:
        found = prove_cut(*given)
        whole = {worker: max(progress.values()) >> 16 for worker, progress in found.left_out.items()}
        return dataclasses.replace(found, clocks={**found.clocks, **whole}, left_out={})

    patch.setattr(checkpoint_cuts, "prove_cut", mutant)


def take_an_open_round_for_a_closed_one(patch: pytest.MonkeyPatch) -> None:
    hear = CutHold.hear
    patch.setattr(CutHold, "hear", lambda self, app, header, now: hear(self, app, header._replace(open=False), now))


def tell_nobody_that_a_round_has_begun(patch: pytest.MonkeyPatch) -> None:
    hear = CutHold.hear

    def mutant(self: CutHold, *given: Any) -> bool:
        hear(self, *given)
        return False

    patch.setattr(CutHold, "hear", mutant)
