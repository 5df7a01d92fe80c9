"""Pulls see their worker's own sparse steps: what is said to servers, and when these take it for done."""

from __future__ import annotations

import numpy as np

from elasticps.client.core.read_after import read_clock
from elasticps.client.core.session import Frame, PushSession
from elasticps.server.core.own_steps import OwnSteps
from elasticps.wire.clocks import ReadAfter
from replication.chain import Member
from replication.effects import Status
from replication.progress import Clocks
from tests.client.sparse_story import Rows
from tests.replication.views import form

P = 4


def test_a_pull_sees_closed_steps_where_they_are_outstanding() -> None:
    members = [Member(name, 1) for name in "abcd"]
    session = PushSession(1, P, 4)
    view = form(members, P, 1)
    session.adopt(view)
    for member in members:
        session.connected(member)
    assert session.unread() == 0
    frames = [e for e in session.push(Rows(1, 0, {0}, 1)) if isinstance(e, Frame)]
    ticked = sorted(int(view.headed_by(view.index(frame.head))[0]) for frame in frames)
    unread = session.unread()
    assert not isinstance(unread, int)
    assert np.flatnonzero(unread).tolist() == ticked
    assert set(unread[ticked].tolist()) == {1 << 16}
    session.push(Rows(2, 0, {1}, 1), last=False)
    assert session.unread().tolist() == unread.tolist(), "an open step is not waited for"  # type: ignore[union-attr]
    assert read_clock(session.unread()) == 0
    session.push(Rows(2, 1, set(range(P)), 1))
    assert (session.unread(), read_clock(session.unread())) == (2, 2), "all ranges have to have the newest"
    for frame in frames:
        session.reply(frame.frame, Status.COMMITTED, 1, None, np.empty(0, np.int64))
    assert session.unread() == 2


def test_a_server_waits_only_for_ranges_that_it_holds_now() -> None:
    clocks = Clocks(P)
    own = OwnSteps(clocks, lambda: 0.0)
    own.serve(np.arange(P), np.arange(P))
    after = ReadAfter(np.array([1, 2]), np.array([5 << 16, 6 << 16]))
    assert not own.reached(1, after, False), "nothing is known of the worker"
    clocks.set(1, np.array([1]), 5 << 16)
    assert not own.reached(1, after, False)
    own.serve(np.array([0, 1]), np.array([0, 1]))  # range 2 moves away, and never gets here what it lacks
    assert own.reached(1, after, False)


def test_a_server_waits_no_longer_for_what_an_older_view_sent() -> None:
    """A range that went and came back from a checkpoint lacks steps that nobody sends again."""
    clocks = Clocks(P)
    own = OwnSteps(clocks, lambda: 0.0)
    own.serve(np.arange(P), np.arange(P), 3, 3)
    after = ReadAfter(np.array([1]), np.array([5 << 16]), 7)
    assert not own.reached(1, after, False)
    own.serve(np.array([0]), np.array([0]), 8, 8)
    own.serve(np.arange(P), np.arange(P), 9, 9)
    assert own.reached(1, after, False)
    assert not own.reached(1, after._replace(epoch=9), False)
    own.serve(np.arange(P), np.arange(P), 3, 9)
    assert not own.reached(1, after, False), "where ranges were read all the time the same pulls are answered still"
    assert own.reached(1, after, True)
