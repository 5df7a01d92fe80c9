"""The session's stories: what it sends when, and what it believes."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.client.core.session import (
    RESEND_BYTES,
    Ask,
    Committed,
    Effect,
    Fenced,
    Frame,
    NeedView,
    PushSession,
    resume,
)
from replication.chain import Chains, Member, Ranges
from replication.effects import Status
from replication.progress import MAX_PARTS
from replication.step_records import home_range, record_of
from tests.replication.views import form, plan_failover

P = 4
A, B, C = (Member(name, 1) for name in "abc")
NONE = np.empty(0, dtype=np.int64)
HOME = home_range(1, P)


def _connected(window: int = 3) -> tuple[PushSession, Chains]:
    view = form([A, B], P, 2)
    session = PushSession(1, P, window)
    assert session.adopt(view) == []
    assert session.connected(A) + session.connected(B) == []
    return session, view


class Rows:
    """A part that has rows in some ranges."""

    def __init__(self, *having: int, nbytes: int = RESEND_BYTES) -> None:
        self.having = having
        self.nbytes = nbytes

    def touches(self, ranges: Ranges) -> bool:
        return bool(np.isin(ranges, self.having).any())

    def heads(self, epoch: int) -> None:
        return None


def _content() -> Rows:
    return Rows(*range(P))


def _committed(session: PushSession, view: Chains, frame: Frame) -> list[object]:
    ranges = view.headed_by(view.index(frame.head))
    return list(session.reply(frame.frame, Status.COMMITTED, view.epoch, ranges, NONE))


def _frames(effects: list[object]) -> list[tuple[Member, int, int, bool]]:
    return [(e.head, e.clock, e.part, e.content is None) for e in effects if isinstance(e, Frame)]


def test_a_step_is_committed_when_every_head_has_said_so() -> None:
    session, view = _connected()
    first, second = session.push(_content())
    assert isinstance(first, Frame)
    assert isinstance(second, Frame)
    assert (first.head, second.head) == (A, B)
    assert _committed(session, view, first) == []
    assert _committed(session, view, second) == [Committed(1)]
    assert (session.committed, session.outstanding) == (1, 0)


def test_the_window_is_full_until_a_step_commits() -> None:
    session, _ = _connected(window=1)
    session.push(_content(), last=False)
    session.push(_content(), last=True)
    assert not session.room
    with pytest.raises(RuntimeError, match="outstanding"):
        session.push(_content())


def _parts(effects: list[Effect]) -> list[tuple[Member, int, int, bool]]:
    return [(e.head, e.prev, e.part, e.last) for e in effects if isinstance(e, Frame)]


def test_a_part_goes_to_heads_that_it_has_rows_for_and_the_last_one_wherever_any_went() -> None:
    session, view = _connected()
    of_a, of_b = (int(view.headed_by(view.index(m))[0]) for m in (A, B))
    assert _parts(session.push(Rows(of_a), last=False)) == [(A, 0, 0, False)]
    assert _parts(session.push(Rows(), last=False)) == []
    assert _parts(session.push(Rows(of_b), last=False)) == [(B, 0, 2, False)]
    assert _parts(session.push(Rows(), last=True)) == [(A, 1, 3, True), (B, 3, 3, True)]
    assert HOME in view.headed_by(view.index(A))
    assert _parts(session.push(Rows(), last=True)) == [(A, 1 << 16, 0, True)], "only home"
    assert _parts(session.push(Rows(of_b), last=True)) == [(B, 1 << 16, 0, True), (A, 2 << 16, 0, True)]


def test_home_gets_a_record_of_a_step_that_does_not_tick_all_ranges() -> None:
    session, view = _connected()
    of_a, of_b = (view.headed_by(view.index(m)) for m in (A, B))
    (sparse,) = session.push(Rows(int(of_a[0])))
    assert isinstance(sparse, Frame)
    assert sparse.record is not None
    assert sorted(sparse.record.ranges.tolist()) == sorted(of_a.tolist())
    assert _committed(session, view, sparse) == [Committed(1)]
    dense = session.push(Rows(int(of_a[0]), int(of_b[0])))
    assert [(e.head, e.record) for e in dense if isinstance(e, Frame)] == [(A, None), (B, None)]


def test_a_step_that_ticks_all_ranges_has_no_record_left_of_a_last_part_that_an_exception_stopped() -> None:
    class Stopped(list[object]):
        def append(self, part: object) -> None:
            raise KeyboardInterrupt

    session, _ = _connected()
    session.push(Rows(), last=False)
    step = session._steps[1]
    parts, step.parts = step.parts, Stopped(step.parts)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        session.push(Rows())
    step.parts = parts
    frames = session.push(_content())
    assert [(e.head, e.record) for e in frames if isinstance(e, Frame)] == [(A, None), (B, None)]


def test_after_a_reconnect_parts_are_sent_one_by_one_and_follow_what_they_followed() -> None:
    session, view = _connected()
    order = view.headed_by(view.index(A))
    session.push(Rows(int(order[1])), last=False)
    session.push(Rows(int(order[0])), last=False)
    session.disconnected(A)
    (ask,) = session.connected(A)
    assert isinstance(ask, Ask)
    none = np.zeros(len(order), np.int64)
    assert _parts(session.clocks(ask.ask, Status.COMMITTED, 1, order, none, none)) == [
        (A, 0, 0, False),
        (A, 1, 1, False),
    ]
    assert _parts(session.push(Rows(), last=True)) == [(A, 2, 2, True)]


def test_a_head_reports_with_one_flag_that_all_its_ranges_are_committed() -> None:
    session, _ = _connected()
    first, second = session.push(_content())
    assert isinstance(first, Frame)
    assert isinstance(second, Frame)
    assert session.owing() == {A: 1, B: 1}
    assert session.reply(first.frame, Status.COMMITTED, 1, None, NONE) == []
    assert session.owing() == {B: 1}
    assert session.reply(second.frame, Status.COMMITTED, 1, None, NONE) == [Committed(1)]


def test_a_step_that_a_lost_head_had_committed_stays_committed() -> None:
    session, view = _connected()
    first, _ = session.push(_content())
    assert isinstance(first, Frame)
    session.reply(first.frame, Status.COMMITTED, 1, None, NONE)
    decision = plan_failover(view, {A}, {})
    assert decision is not None
    session.disconnected(A)
    (ask,) = session.adopt(decision.chains)
    assert isinstance(ask, Ask)
    ranges = decision.chains.headed_by(decision.chains.index(B))
    applied = np.full(P, 1 << 16, dtype=np.int64)
    effects = session.clocks(ask.ask, Status.COMMITTED, 2, ranges, applied, np.zeros(P, np.int64))
    (again,) = effects
    assert isinstance(again, Frame)
    assert again.content is None
    assert again.ranges is not None
    assert sorted(again.ranges.tolist()) == sorted(view.headed_by(view.index(B)).tolist())
    assert session.reply(again.frame, Status.COMMITTED, 2, None, NONE) == [Committed(1)]


def test_a_worker_starts_above_its_base_and_only_once() -> None:
    session, _ = _connected()
    session.start_at(7)
    session.push(_content())
    assert (session.clock, session.committed) == (8, 7)
    with pytest.raises(RuntimeError, match="begun"):
        session.start_at(9)


def test_a_step_takes_its_last_part_in_time() -> None:
    session, _ = _connected()
    for _ in range(MAX_PARTS - 1):
        session.push(_content(), last=False)
    with pytest.raises(RuntimeError, match=f"at most {MAX_PARTS} parts"):
        session.push(_content(), last=False)
    session.push(_content())
    assert (session.clock, session.open) == (1, False)


def test_a_new_head_is_asked_first_and_then_gets_missing_steps_in_clock_order() -> None:
    session, view = _connected()
    for _ in range(3):
        session.push(_content())
    decision = plan_failover(view, {A}, {})
    assert decision is not None
    session.disconnected(A)
    (ask,) = session.adopt(decision.chains)
    assert isinstance(ask, Ask)
    assert (ask.head, ask.epoch) == (B, 2)
    assert session.adopt(view) == []
    ranges = decision.chains.headed_by(decision.chains.index(B))
    applied = np.full(P, 2 << 16, dtype=np.int64)
    committed = np.full(P, 1 << 16, dtype=np.int64)
    effects = session.clocks(ask.ask, Status.COMMITTED, 2, ranges, applied, committed)
    assert [e for e in effects if isinstance(e, Committed)] == [Committed(1)]
    assert _frames(list(effects)) == [(B, 2, 0, True), (B, 3, 0, False)]
    assert session.clocks(ask.ask, Status.COMMITTED, 2, ranges, applied, applied) == []


def test_a_new_head_is_sent_a_few_missing_steps_at_once() -> None:
    session, view = _connected()
    first, _ = session.push(Rows(*range(P), nbytes=1))
    assert isinstance(first, Frame)
    assert _committed(session, view, first) == []
    session.push(Rows(*range(P), nbytes=1), last=False)
    decision = plan_failover(view, {A}, {})
    assert decision is not None
    session.disconnected(A)
    effects = session.adopt(decision.chains)
    assert _frames(list(effects)) == [(B, 1, 0, False), (B, 2, 0, False)]
    step, part = (e for e in effects if isinstance(e, Frame))
    assert step.ranges is not None
    assert sorted(step.ranges.tolist()) == sorted(view.headed_by(view.index(B)).tolist()), "A had committed the others"
    assert part.ranges is None
    (last,) = session.push(Rows(nbytes=1))
    assert isinstance(last, Frame)
    assert (last.clock, last.prev, last.part) == (2, (1 << 16) + 1, 1)
    assert session.reply(step.frame, Status.COMMITTED, 2, None, NONE) == [Committed(1)]
    assert session.reply(last.frame, Status.COMMITTED, 2, None, NONE) == [Committed(2)]


def test_a_head_that_has_forgotten_a_committed_step_is_not_sent_it_again() -> None:
    session, view = _connected()
    first, second = session.push(_content())
    assert isinstance(first, Frame)
    assert isinstance(second, Frame)
    assert _committed(session, view, second) == []
    session.disconnected(A)
    (ask,) = session.connected(A)
    assert isinstance(ask, Ask)
    ranges = view.headed_by(view.index(A))
    forgotten, committed = np.zeros(len(ranges), np.int64), np.full(len(ranges), 1 << 16, np.int64)
    effects = session.clocks(ask.ask, Status.COMMITTED, 1, ranges, forgotten, committed)
    assert effects == [Committed(1)]
    assert session.outstanding == 0


def test_replies_to_forgotten_frames_are_not_heard() -> None:
    session, view = _connected()
    frame = session.push(_content())[0]
    assert isinstance(frame, Frame)
    session.disconnected(A)
    assert _committed(session, view, frame) == []
    assert session.outstanding == 1


def test_a_stale_view_is_fetched_and_a_gap_is_asked_about() -> None:
    session, _ = _connected()
    first, second = session.push(_content())
    assert isinstance(first, Frame)
    assert isinstance(second, Frame)
    assert session.reply(first.frame, Status.STALE_VIEW, 7, NONE, NONE) == [NeedView(7)]
    (ask,) = session.reply(second.frame, Status.GAP, 1, NONE, NONE)
    assert isinstance(ask, Ask)
    assert ask.head == B


def test_a_fenced_worker_is_told_to_stop() -> None:
    session, _ = _connected()
    frame = session.push(_content())[0]
    assert isinstance(frame, Frame)
    assert session.reply(frame.frame, Status.FENCED, 1, NONE, NONE) == [Fenced()]


def test_ranges_that_moved_send_the_worker_for_the_view() -> None:
    session, view = _connected()
    frame = session.push(_content())[0]
    assert isinstance(frame, Frame)
    ranges = view.headed_by(view.index(A))
    assert session.reply(frame.frame, Status.COMMITTED, 2, ranges[1:], ranges[:1]) == [NeedView(2)]
    assert session.outstanding == 1


def test_a_successor_starts_above_all_sent_steps_and_repeats_uncommitted_steps() -> None:
    applied = np.array([5 << 16, (5 << 16) | 2], dtype=np.int64)
    committed = np.array([4 << 16, (3 << 16) | 1], dtype=np.int64)
    assert resume(applied, committed, 0, []) == (6, 3)


def test_a_successor_repeats_from_the_first_step_that_a_range_lacks_which_its_record_names() -> None:
    records = [record_of(clock, 3, np.isin(np.arange(P), ranges)) for clock, ranges in ((4, [0, 2]), (5, [2, 3]))]
    applied = np.array([4, 1, 5, 5]) << 16
    assert resume(applied, np.array([4, 1, 5, 5]) << 16, HOME, records) == (5, 5)
    assert resume(applied, np.array([4, 1, 5, 2]) << 16, HOME, records) == (5, 4)
    assert resume(applied, np.array([3, 1, 5, 5]) << 16, HOME, records) == (5, 3)
    assert resume(applied, np.array([4, 1, 4, 5]) << 16, HOME, records) == (5, 4)
    assert resume(applied, np.array([0, 0, 0, 0]) << 16, HOME, records[:0], base=7) == (7, 7)


def test_a_step_whose_last_answer_was_cut_short_is_committed_when_the_session_begins_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its ranges were noted, and then nobody was asked about it any more: it stayed outstanding for ever."""
    session, view = _connected()
    first, second = (e for e in session.push(_content()) if isinstance(e, Frame))
    assert _committed(session, view, first) == []
    with monkeypatch.context() as patch:
        patch.setattr(session, "_commit", lambda *_: pytest.fail("a signal handler raises"))
        with pytest.raises(pytest.fail.Exception):
            _committed(session, view, second)
    assert session.recover(view) == []
    assert (session.outstanding, session.committed) == (0, 1)
    assert [e for m in (A, B) for e in session.connected(m)] == []
