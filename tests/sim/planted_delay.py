"""Bugs in bounded delay: what workers report, what the head of a group range counts, and when a pull may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticps.client.delay import WorkerDelay
from elasticps.client.join import Joining
from elasticps.client.pull import ServerPull
from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.application_clocks import ApplicationClocks
from elasticps.server.core.delay_coordinator import DelayCoordinator
from elasticps.server.roles.participation import ParticipationHandler


def wait_for_one_step_less(patch: pytest.MonkeyPatch) -> None:
    start = WorkerDelay.start

    def mutant(self: WorkerDelay, bound: int, pulls: Sequence[ServerPull], wait_ms: int) -> None:
        start(self, bound + 1, pulls, wait_ms)

    patch.setattr(WorkerDelay, "start", mutant)


def forget_workers_that_have_joined(patch: pytest.MonkeyPatch) -> None:
    report = ApplicationClocks.report

    def mutant(self: ApplicationClocks, worker: int, clock: int, released: int, epoch: int) -> None:
        if clock:
            self._set(worker, clock)
        report(self, worker, clock, released, epoch)

    patch.setattr(ApplicationClocks, "report", mutant)
    patch.setattr(ApplicationClocks, "join", lambda self, worker, base: None)


def report_steps_that_are_not_committed(patch: pytest.MonkeyPatch) -> None:
    begin = WorkerDelay.__init__

    def mutant(self: WorkerDelay, app: str, session: Any, *more: Any) -> None:
        begin(self, app, session, *more)
        self.committed = lambda: session.clock

    patch.setattr(WorkerDelay, "__init__", mutant)


def begin_where_the_fastest_worker_is(patch: pytest.MonkeyPatch) -> None:
    begin = ApplicationClocks.__init__

    def mutant(self: ApplicationClocks, workers: Any) -> None:
        begin(self, ())

    def report(self: ApplicationClocks, worker: int, clock: int, released: int, epoch: int) -> None:
        take(self, worker, clock, max(clock, released), epoch)

    take = ApplicationClocks.report
    patch.setattr(ApplicationClocks, "__init__", mutant)
    patch.setattr(ApplicationClocks, "report", report)


def wait_for_workers_that_pause(patch: pytest.MonkeyPatch) -> None:
    note = ParticipationHandler._note

    def mutant(self: ParticipationHandler, connection: Any, base: int | None) -> None:
        if base is not None or connection.worker not in self._active.bases:
            note(self, connection, base)

    patch.setattr(ParticipationHandler, "_note", mutant)


def wait_for_workers_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ApplicationClocks, "leave", lambda self, worker: None)


def leave_out_workers_without_a_connection(patch: pytest.MonkeyPatch) -> None:
    forget = DelayCoordinator.forget

    def mutant(self: DelayCoordinator, connection: Any) -> None:
        state = self._apps.get(connection.app)
        if state is not None and state.clocks is not None:
            state.clocks.leave(connection.worker)
        forget(self, connection)

    patch.setattr(DelayCoordinator, "forget", mutant)


def start_below_what_is_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joining, "_join", lambda self, clock: self._take_part(clock) or 0)
    patch.setattr(ActiveWorkers, "lowest_at_homes", lambda self, app, headed, but: None)


def ask_nobody_twice(patch: pytest.MonkeyPatch) -> None:
    report = ApplicationClocks.report

    def mutant(self: ApplicationClocks, worker: int, clock: int, released: int, epoch: int) -> None:
        owes = worker in self._owing
        report(self, worker, clock, released, epoch)
        if owes:
            self._owing.add(worker)

    patch.setattr(ApplicationClocks, "report", mutant)


def ask_nobody_who_connects_again(patch: pytest.MonkeyPatch) -> None:
    join = ApplicationClocks.join

    def mutant(self: ApplicationClocks, worker: int, base: int) -> None:
        owes = worker in self._owing
        join(self, worker, base)
        if owes:
            self._owing.add(worker)
            self._unasked.discard(worker)

    patch.setattr(ApplicationClocks, "join", mutant)


def release_without_a_proof(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: DelayCoordinator, app: str, state: Any, clocks: ApplicationClocks, minimum: int) -> None:
        clocks.released = max(clocks.released, minimum)
        for number in list(state.joining):
            self._release(state, clocks, number)
        self._answer(state, clocks)

    patch.setattr(DelayCoordinator, "_prove", mutant)


def begin_with_an_older_roster(patch: pytest.MonkeyPatch) -> None:
    begin = DelayCoordinator._begin

    def mutant(self: DelayCoordinator, app: str, state: Any) -> None:
        knows, self._group.knows_the_lost = self._group.knows_the_lost, lambda app: True  # type: ignore[method-assign]
        begin(self, app, state)
        self._group.knows_the_lost = knows  # type: ignore[method-assign]

    patch.setattr(DelayCoordinator, "_begin", mutant)


def pull_under_an_older_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerDelay, "_open", lambda self, floor: floor <= self._released)
