"""Bugs in how the head of a group range has rounds closed, each of a kind that a careful person could have written.

Workers push few keys: most heads have no share of most workers.
"""

from __future__ import annotations

from typing import Any

import pytest

from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.round_announcements import DecidedRound, RoundAnnouncements
from elasticps.wire.frames import Kind
from elasticps.wire.rounds import LastWorkers


def announce_a_decision_before_it_is_committed(patch: pytest.MonkeyPatch) -> None:
    log = BarrierCoordinator._log

    def mutant(self: Any, ticket: Any, round: DecidedRound) -> None:
        done = getattr(ticket, "_done", lambda: None)
        if hasattr(ticket, "_failed"):
            ticket._done = ticket._failed = lambda *_: None
        log(self, ticket, round)
        done()

    patch.setattr(BarrierCoordinator, "_log", mutant)


def answer_workers_before_all_heads_have_closed_their_round(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Any, member: Any, request: int) -> None:
        one = self._by_request.get(request)
        if one is not None and member in one.owing:
            one.owing.clear()  # the others have been told, too
            self._drop(one.round.app)
            self._done(one.round)

    patch.setattr(RoundAnnouncements, "closed", mutant)


def take_what_an_earlier_head_decided_for_closed(patch: pytest.MonkeyPatch) -> None:
    when_closed = BarrierCoordinator._when_closed

    def mutant(self: Any, round: DecidedRound, tickets: Any) -> None:
        if any(ticket.kind != Kind.BARRIER_ARRIVE or ticket._made is not None for ticket in tickets):
            self._everywhere[round.app] = max(round.clock, self._everywhere.get(round.app, 0))
        when_closed(self, round, tickets)

    patch.setattr(BarrierCoordinator, "_when_closed", mutant)
    patch.setattr(BarrierCoordinator, "_announce_again", lambda self, app: self._everywhere.update({app: 1 << 40}))


def announce_nothing_again_under_a_new_view(patch: pytest.MonkeyPatch) -> None:
    adopt = RoundAnnouncements.adopt

    def mutant(self: Any, view: Any) -> None:
        announced, self._announced = self._announced, {}
        adopt(self, view)
        self._announced = announced

    patch.setattr(RoundAnnouncements, "adopt", mutant)


def believe_that_a_new_connection_knows_the_last_workers(patch: pytest.MonkeyPatch) -> None:
    connected = RoundAnnouncements.connected
    known: dict[tuple[int, Any], LastWorkers] = {}

    def mutant(self: Any, member: Any) -> None:
        connected(self, member)
        self._known[member] = known.setdefault((id(self), member), self._known[member])

    patch.setattr(RoundAnnouncements, "connected", mutant)


def average_over_those_who_pushed_to_this_server(patch: pytest.MonkeyPatch) -> None:
    close = Rounds.close

    def mutant(self: Rounds, app: str, clock: int, workers: Any, total: int, ranges: Any, tables: Any) -> Any:
        return close(self, app, clock, workers, len(workers) or 1, ranges, tables)

    patch.setattr(Rounds, "close", mutant)
