"""The failure detector: reports, silence and refusals in, lost servers out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.health import (
    LATE_S,
    OVERDUE_S,
    SILENCE_S,
    STALE_S,
    SUSPECTED_S,
    TICK_S,
    TOGETHER_S,
    UNREACHABLE_S,
    UNREGISTERED_S,
    Detector,
    Report,
)
from coordinator.core.planner import Members, plan
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import Member
from replication.effects import CaughtUp

A, B, C, D = (Member(name, 1) for name in "abcd")
FINE = Report(epoch=1)


class Story:
    """A detector with a clock that is moved on, ticking on its way."""

    def __init__(self, *members: Member, now: float = 100.0) -> None:
        self.now = now
        self.detector = Detector()
        self.members = dict.fromkeys(members, True)
        self.detector.watch(self.members, now)
        self.detector.tick(now)
        for member in members:
            self.detector.connected(member, now)
            assert self.detector.heard(member, FINE, now)

    def run(self, seconds: float, *speaking: Member) -> None:
        """Time passes with reports from some."""
        until = self.now + seconds
        while self.now + TICK_S <= until:
            self.now += TICK_S
            for member in speaking:
                self.detector.heard(member, FINE, self.now)
            self.detector.tick(self.now)

    def unregister(self, *members: Member) -> None:
        self.members.update(dict.fromkeys(members, False))
        self.detector.watch(self.members, self.now)

    def ill(self) -> bool:
        return self.detector.ill

    @property
    def gone(self) -> set[Member]:
        return set(self.detector.gone)

    def why(self, member: Member) -> str:
        return self.detector.gone[member].why


def test_a_server_that_reports_is_healthy() -> None:
    story = Story(A, B)
    story.run(10, A, B)
    assert not story.gone
    assert not story.detector.health(None).pending


def test_a_refused_reconnection_is_death_at_once() -> None:
    story = Story(A, B)
    assert not story.detector.lost(A, story.now)
    assert not story.gone
    assert story.detector.refused(A, "connection refused", story.now)
    assert story.why(A) == "connection lost, then connection refused"
    assert story.detector.gone[A].at == story.now
    assert not story.detector.refused(A, "connection refused", story.now + 0.3), "it is no news any more"


def test_silence_is_no_proof_until_the_connection_is_refused_too() -> None:
    story = Story(A, B)
    story.run(2 * SILENCE_S, B)
    assert story.detector.health(None).silent == {A}
    at = story.detector.gone[A].at
    assert story.detector.refused(A, "connection refused", story.now)
    assert story.detector.health(None).silent == frozenset()
    assert story.detector.gone[A].at == at


def test_the_planner_is_woken_once_for_a_server_that_has_served_alone() -> None:
    story = Story(A, B)
    assert story.detector.heard(A, Report(3, alone=2), story.now)
    assert not story.detector.heard(A, Report(3, alone=2), story.now)
    assert story.detector.health(None).alone == {A: 2}


def test_a_server_that_served_alone_reports_it_again_after_a_reconnect() -> None:
    """It may have died: then the copy that is kept beside it is the last (seed 3113482)."""
    story = Story(A, B)
    assert story.detector.heard(A, Report(3, alone=2), story.now)
    story.detector.lost(A, story.now)
    assert story.detector.health(None).alone == {}
    story.detector.connected(A, story.now)
    assert story.detector.heard(A, Report(3, alone=2), story.now)
    assert story.detector.health(None).alone == {A: 2}


def test_a_server_that_has_been_silent_for_long_is_not_waited_for() -> None:
    story = Story(A, B)
    story.run(SILENCE_S + OVERDUE_S, B)
    assert story.detector.health(None).silent == {A}
    assert story.detector.health(None).overdue == frozenset()
    assert not story.detector.tick(story.now)
    story.run(4 * TICK_S, B)
    assert story.detector.health(None).overdue == {A}
    assert story.detector.heard(A, FINE, story.now)
    assert story.detector.health(None).overdue == frozenset()


def test_a_late_copy_that_cannot_catch_up_wakes_the_planner_once_and_only_for_its_present_fill() -> None:
    story = Story(A, B)
    config = ClusterConfig(ranges=2, replicas=2, id="x")
    decision = plan(None, Members("x", tuple(ServerInfo(m.name, 1, "h:1") for m in (A, B))), config)
    assert decision is not None
    assert decision.view is not None
    spent = Report(1, spent=((0, 1), (1, 0), (7, 9)))
    assert story.detector.heard(A, spent, story.now)
    assert not story.detector.heard(A, spent, story.now)
    assert story.detector.health(decision.view).spent == {0: 1}


def test_suspicions_from_a_time_of_silence_cut_no_connections() -> None:
    story = Story(A, B, C)
    story.run(2.0, B, C)
    assert story.gone == {A}
    story.detector.heard(A, Report(1, suspects={B: 2.0}), story.now)
    story.detector.heard(C, Report(1, suspects={A: 2.0}), story.now)
    assert story.detector.health(None).cut == frozenset()
    story.run(SUSPECTED_S + TICK_S, A, B, C)
    assert story.detector.heard(C, Report(1, suspects={A: 3.0}), story.now), "that is of now"
    assert story.detector.health(None).cut == {(A, C)}


def test_a_first_connection_that_is_refused_is_death_too() -> None:
    detector = Detector()
    detector.watch({A: True}, 0.0)
    assert detector.health(None).pending == {A}
    assert not detector.heard(B, FINE, 0.005), "nobody asked"
    assert detector.refused(A, "connection refused", 0.01)
    assert detector.gone[A].why == "connection refused"


def test_a_reset_alone_proves_nothing() -> None:
    story = Story(A, B)
    story.run(1, A, B)
    story.detector.lost(A, story.now)
    story.detector.connected(A, story.now + 0.002)
    story.run(1, A, B)
    assert not story.gone


def test_a_silent_server_is_a_suspect_until_it_reports_again() -> None:
    story = Story(A, B, C)
    story.run(SILENCE_S - TICK_S, B, C)
    assert not story.gone
    story.run(2 * TICK_S, B, C)
    assert story.gone == {A}
    assert story.why(A).startswith("silent for 0.7")
    assert story.detector.heard(A, FINE, story.now)
    assert not story.gone


def test_a_server_that_connects_but_does_not_report_stays_a_suspect() -> None:
    story = Story(A, B)
    story.run(1, B)
    assert story.gone == {A}
    story.detector.lost(A, story.now)
    story.detector.connected(A, story.now)
    story.run(0.2, B)
    assert story.gone == {A}


def test_a_connection_that_is_never_made_is_silence() -> None:
    story = Story(A, B)
    story.members[C] = True
    story.detector.watch(story.members, story.now)
    story.run(SILENCE_S + 2 * TICK_S, A, B)
    assert story.gone == {C}


def test_servers_that_fall_silent_while_most_report_are_suspects() -> None:
    story = Story(A, B, C, D)
    story.run(1, C, D)
    assert story.gone == {A, B}
    assert not story.ill()


@pytest.mark.parametrize("count", [3, 4, 10])
def test_if_most_servers_fall_silent_together_the_leader_is_at_fault(count: int) -> None:
    beside, *others = (Member(f"s{i}", 1) for i in range(count))
    story = Story(beside, *others)
    story.run(1, beside, *others)
    story.run(TOGETHER_S / 2, beside, *others[:1])
    story.run(30, beside)
    assert story.ill()
    assert not story.gone, "they renew their leases"
    story.run(1, beside, *others[1:])
    assert not story.ill()
    assert story.gone == {others[0]}, "the ears are in order again"
    story.run(1, beside, *others)
    assert not story.gone


def test_silent_servers_without_leases_are_gone_even_if_they_are_most() -> None:
    story = Story(A, B, C)
    story.run(2, C)
    assert story.ill()
    story.unregister(A)
    story.run(TICK_S, C)
    assert story.gone == {A}
    story.unregister(B)
    story.run(TICK_S, C)
    assert story.gone == {A, B}
    assert not story.ill()


def test_if_all_servers_fall_silent_together_the_leader_is_at_fault() -> None:
    story = Story(A, B, C)
    story.run(1, A, B, C)
    story.run(TOGETHER_S / 2, B, C)
    story.run(30)
    assert story.ill()
    assert not story.gone
    story.detector.refused(B, "connection refused", story.now)
    assert story.gone == {B}, "a refusal is heard well enough"
    story.run(1, A)
    assert not story.ill()
    assert story.gone == {B, C}, "the ears are in order: who is still silent is a suspect"


def test_silences_that_begin_apart_are_the_servers_own() -> None:
    story = Story(A, B)
    story.run(TOGETHER_S + 2 * TICK_S, B)
    story.run(SILENCE_S + TICK_S)
    assert story.gone >= {A}


def test_a_server_that_was_gone_before_is_no_witness() -> None:
    story = Story(A, B, C)
    story.run(5, A, B)
    assert story.gone == {C}
    story.run(5)
    assert story.ill()
    assert story.gone == {C}


def test_a_leader_that_was_suspended_starts_to_listen_afresh() -> None:
    story = Story(A, B)
    story.now += 60.0
    story.detector.heard(B, FINE, story.now)  # what waited in the socket may be read before the tick
    story.detector.tick(story.now)
    assert not story.gone
    story.run(SILENCE_S - TICK_S, B)
    assert not story.gone
    story.run(3 * TICK_S, B)
    assert story.gone == {A}


def test_a_small_delay_of_the_leader_changes_nothing() -> None:
    story = Story(A, B)
    story.run(SILENCE_S, B)
    story.now += TICK_S + LATE_S / 2
    story.detector.heard(B, FINE, story.now)
    story.detector.tick(story.now)
    assert story.gone == {A}


def test_a_lease_that_ran_out_proves_nothing_while_the_server_is_heard() -> None:
    story = Story(A, B)
    story.unregister(A, B)
    story.run(60, A, B)
    assert not story.gone
    story.detector.lost(A, story.now)
    story.detector.connected(A, story.now)
    story.run(1, A, B)
    assert not story.gone


def test_without_key_and_connection_a_server_is_gone() -> None:
    story = Story(A, B)
    story.unregister(A)
    story.detector.lost(A, story.now)
    story.run(UNREGISTERED_S + 2 * TICK_S, B)
    assert story.gone == {A}
    assert story.why(A) == "not registered and not heard"


def test_leases_decide_if_no_server_reports() -> None:
    story = Story(A, B)
    story.run(5)
    assert not story.gone
    story.unregister(A)
    story.run(TICK_S)
    assert story.gone == {A}


def test_a_server_that_is_no_longer_watched_is_forgotten() -> None:
    story = Story(A, B)
    story.detector.refused(A, "connection refused", story.now)
    story.detector.watch({B: True}, story.now)
    assert not story.gone
    assert not story.detector.heard(A, FINE, story.now)
    assert not story.detector.refused(A, "connection refused", story.now)


def test_peers_that_cannot_reach_each_other_count_as_cut_off_for_a_while() -> None:
    story = Story(A, B, C)
    assert not story.detector.heard(A, Report(1, suspects={B: SUSPECTED_S / 2}), story.now)
    assert story.detector.heard(A, Report(1, suspects={B: SUSPECTED_S * 1.5}), story.now)
    assert not story.detector.heard(B, Report(1, suspects={A: SUSPECTED_S * 1.5}), story.now), "the same pair"
    assert story.detector.health(None).cut == {(A, B)}
    assert not story.gone
    story.run(UNREACHABLE_S - 1, A, B, C)
    assert story.detector.health(None).cut
    story.run(2, A, B, C)
    assert not story.detector.health(None).cut


def test_suspicions_of_gone_or_unknown_servers_cut_no_connections() -> None:
    story = Story(A, B)
    story.detector.refused(B, "connection refused", story.now)
    report = Report(1, suspects={B: 5.0, C: 5.0, A: 5.0})
    assert not story.detector.heard(A, report, story.now)
    assert not story.detector.health(None).cut


def test_suspicions_of_servers_not_heard_lately_cut_no_connections() -> None:
    story = Story(A, B)
    story.run(0.4, A)  # B is frozen, and not silent for long enough to say so
    assert not story.detector.heard(A, Report(1, suspects={B: SUSPECTED_S * 1.5}), story.now)
    assert not story.detector.health(None).cut


def filling() -> View:
    """Range by range, a holds what b is being filled with."""
    config = ClusterConfig(ranges=2, replicas=2)
    infos = tuple(ServerInfo(name, 1, "h:1") for name in "ab")
    first = plan(None, Members("demo", infos[:1]), config)
    assert first is not None
    second = plan(first.view, Members("demo", infos), config)
    assert second is not None
    assert second.view is not None
    return second.view


def test_level_reports_count_for_the_filling_they_name() -> None:
    story, view = Story(A, B), filling()
    since = int(view.since[0])
    assert story.detector.heard(A, Report(2, levels=(CaughtUp(0, since, B),)), story.now)
    assert not story.detector.heard(A, Report(2, levels=(CaughtUp(0, since, B),)), story.now)
    assert story.detector.health(view).level == {0: since}
    story.detector.refused(A, "connection refused", story.now)
    assert story.detector.health(view).level == {0: since}, "b has everything, whoever said so"
    assert story.detector.health(None).level == {}


def test_level_reports_of_other_fillings_are_not_believed() -> None:
    story, view = Story(A, B), filling()
    since = int(view.since[0])
    reports = (CaughtUp(0, since, C), CaughtUp(1, since - 1, B), CaughtUp(77, since, B))
    story.detector.heard(A, Report(2, levels=reports), story.now)
    assert story.detector.health(view).level == {}
    # A report may come before the view that it speaks of: it is kept until that is known.
    story.detector.heard(A, Report(3, levels=(CaughtUp(1, since + 1, B),)), story.now)
    assert story.detector.health(view).level == {}


EVENTS = st.lists(st.tuples(st.sampled_from(["hear", "lose", "connect", "mute", "late"]), st.sampled_from([A, B, C])))


@given(EVENTS)
def test_a_server_that_is_never_refused_and_reports_at_the_end_is_healthy(events: Sequence[tuple[str, Member]]) -> None:
    story = Story(A, B, C)
    for what, member in events:
        if what == "hear":
            story.run(0.2, member)
        elif what == "lose":
            story.detector.lost(member, story.now)
            story.run(0.2, *({A, B, C} - {member}))
        elif what == "connect":
            story.detector.connected(member, story.now)
        elif what == "late":
            story.now += 5.0
            story.detector.tick(story.now)
        else:
            story.run(0.4, *({A, B, C} - {member}))
        for gone in story.detector.gone.values():
            assert gone.why.startswith("silent"), "nothing else was to be learned"
            assert gone.at <= story.now
    story.run(1, A, B, C)
    assert not story.gone
    assert not story.ill()


@pytest.mark.parametrize("ticked", [False, True], ids=["read before the tick", "read after it"])
def test_reports_that_waited_while_the_leader_was_stopped_cut_no_connections(ticked: bool) -> None:
    story = Story(A, B, C)
    story.run(1.0, A, B, C)
    story.now += 6.0  # B's last report has waited; then it died, and A says since when
    if ticked:
        story.detector.tick(story.now)
    story.detector.heard(B, FINE, story.now)
    assert not story.detector.heard(A, Report(1, suspects={B: SUSPECTED_S * 3}), story.now)
    story.run(STALE_S - TICK_S, A, C)
    story.detector.heard(A, Report(1, suspects={B: SUSPECTED_S * 3}), story.now)
    assert not story.detector.health(None).cut
    story.run(SILENCE_S, A, C)
    assert story.gone == {B}
