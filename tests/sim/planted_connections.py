"""Bugs in which connections a worker has: opened too late, closed too early, and what nobody tells it then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticps.client.connections import PeerConnections
from elasticps.client.core.hold import Hold
from elasticps.client.core.routing import Routes
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.participation import Participation
from elasticps.client.pushes import PushesInFlight
from elasticps.server.core.cut import CutHold
from elasticps.server.core.serving import Serving
from replication.chain import Member


def close_links_with_steps_outstanding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_needed", lambda self: set())


def connect_to_no_head_that_a_step_goes_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushesInFlight, "_reach", lambda self: None)


def stay_with_the_head_that_a_home_had(patch: pytest.MonkeyPatch) -> None:
    begin = PeerConnections.__init__

    def mutant(self: PeerConnections, *arguments: Any) -> None:
        begin(self, *arguments)
        standing, first = self._standing_of, list[Sequence[Member]]()

        def as_at_first(routes: Routes) -> Sequence[Member]:
            first.append(standing(routes))
            return [member for member in first[0] if member in routes.index_of]

        self._standing_of = as_at_first

    patch.setattr(PeerConnections, "__init__", mutant)


def tell_workers_of_a_view_only_where_ranges_come(patch: pytest.MonkeyPatch) -> None:
    concerns = Serving.concerns_workers

    def mutant(self: Serving) -> bool:
        had = [set(ranges.tolist()) for ranges in self._had]
        now = [set(self.headed.tolist()), set(self.tailed.tolist())]
        return concerns(self) and not all(after <= before for after, before in zip(now, had, strict=True))

    patch.setattr(Serving, "concerns_workers", mutant)


def tell_a_server_that_is_connected_later_nothing(patch: pytest.MonkeyPatch) -> None:
    joins = Participation.tell

    def mutant(self: Participation, member: Member) -> None:
        if member in self._connections.standing:
            joins(self, member)

    patch.setattr(Participation, "tell", mutant)


def believe_a_server_that_has_not_heard_of_an_open_round(patch: pytest.MonkeyPatch) -> None:
    answers = Hold.answers

    def mutant(self: Hold, written: Any, now: float) -> Any:
        rounds, self._rounds = self._rounds, 0
        try:
            return answers(self, written, now)
        finally:
            self._rounds = rounds

    patch.setattr(Hold, "answers", mutant)


def tell_nobody_who_comes_later_of_the_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CutHold, "released", property(lambda self: 0))


def fence_a_predecessor_only_where_ranges_are_headed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Routes, "holding", property(lambda self: self.heads))
