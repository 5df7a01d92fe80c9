"""A client learns of newer views from servers and from the store; which of them it believes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coordinator.core.differences import ViewDifference
from coordinator.core.view import View
from elasticps.client.core.new_views import ASK_FIRST_S, NewViews, ViewHints
from elasticps.wire.frames import HEADER_BYTES, FrameError, Header, Kind, difference_frame, unpack_header, view_frame
from tests.client.fake_cluster import KEYS, Cluster, Eventually, chains
from tests.client.fakes import FakeServer


def test_the_view_comes_from_the_store_if_no_server_is_left(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    new = FakeServer("c")
    cluster.servers.append(new)
    new.view = chains([new.info], [[0]], epoch=2)
    new.applied = new.committed = 1 << 16
    cluster.a.kill()
    cluster.b.kill()
    step = ps.push({})
    cluster.control.view = new.view
    step.result()
    assert cluster.control.checked >= 1
    assert ps.view.epoch == 2


def test_a_compromised_server_cannot_make_itself_head(
    cluster: Cluster, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """With certificates. What it spoke of was believed, and every view that the leader wrote was older from then on."""
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    ps.push({}).result()
    cluster.a.say(view_frame(chains([cluster.a.info], [[0]], epoch=1 << 62)))
    eventually(lambda: "speaks of a view" in caplog.text)
    for epoch in range(2, 50):
        cluster.a.say(view_frame(chains([cluster.a.info], [[0]], epoch=epoch)))
    ps.push({}).result()
    assert (ps.view.epoch, cluster.control.checked) == (1, 1)
    cluster.control.view = cluster.after
    cluster.b.tell(cluster.after)
    eventually(lambda: ps.view.epoch == 2)
    assert ps.view == cluster.after


def test_a_view_reported_during_a_read_of_the_store_is_checked_with_the_store(
    cluster: Cluster, eventually: Eventually
) -> None:
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    readers: list[Callable[[View | None], None]] = []
    ps._dispatcher.new_views.read_store = readers.append
    cluster.b.tell(cluster.after)
    eventually(lambda: len(readers) == 1)
    newest = chains([cluster.b.info], [[0]], epoch=3)
    cluster.b.tell(newest)
    eventually(lambda: ps._dispatcher.new_views._hints.pending is not None)
    assert len(readers) == 1
    readers[0](cluster.after)
    assert ps.view.epoch == 2
    eventually(lambda: len(readers) == 2)
    readers[1](newest)
    assert ps.view.epoch == 3
    assert not ps._dispatcher.new_views._hints._deaf_until_s


def test_a_view_that_several_servers_report_is_read_once(cluster: Cluster) -> None:
    """All of them do so when there is one, and in the midst of a failover the store has enough to do."""
    a, b = (server.info.member for server in (cluster.a, cluster.b))
    hints = ViewHints()
    assert hints.hear(1.0, a, cluster.after)
    hints.ask()
    hints.hear(1.0, b, cluster.after)
    assert hints.judge(1.0, 1, cluster.after) == (cluster.after, None)
    assert hints.pending is None
    hints.hear(1.0, b, cluster.after)
    hints.ask()
    newest = chains([cluster.b.info], [[0]], epoch=3)
    hints.hear(1.0, b, newest)
    assert hints.judge(1.0, 1, cluster.after) == (cluster.after, None)
    assert hints.pending is not None, "the store was read before there was that one"


@pytest.mark.parametrize("stored", [None, "other"])
def test_servers_are_believed_while_the_store_does_not_answer(
    cluster: Cluster, eventually: Eventually, stored: str | None
) -> None:
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    found = None if stored is None else replace(cluster.before, cluster=stored)
    ps._dispatcher.new_views.read_store = lambda on_view: threading.Thread(target=on_view, args=(found,)).start()
    cluster.b.tell(cluster.after)
    eventually(lambda: ps.view.epoch == 2)


def test_servers_are_asked_for_a_view_with_heads_for_headless_ranges(cluster: Cluster, eventually: Eventually) -> None:
    """They begin anew, and nobody may have told a worker that was not connected just then."""
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.resume()
    cluster.b.value = 4.0
    cluster.b.tell(chains([cluster.b.info], [[-1], [-1]], epoch=2))
    eventually(lambda: ps.view.epoch == 2)
    read = table.pull_async(KEYS)
    cluster.b.view = chains([cluster.b.info], [[0]], epoch=3)
    assert set(read.result().ravel().tolist()) == {4.0}


def test_of_servers_that_speak_of_a_newer_view_the_first_is_asked_and_a_later_one_if_that_does_not_help(
    cluster: Cluster,
) -> None:
    views = NewViews("fake", cluster.before.ranges, lambda came: None, lambda view: None, authenticated=False)
    none = np.empty(0, np.uint8)

    def question(now_s: float, epoch: int) -> int | None:
        view, ask = views.read(now_s, Header(Kind.NEWER_VIEW, epoch=epoch), none, cluster.before)
        assert view is None
        return ask

    assert [question(1.0, epoch) for epoch in (1, 2, 2, 3, 2)] == [None, 1, None, 1, None]
    assert question(1.0, 1 << 62) == 1
    assert [question(1.0 + 2 * ASK_FIRST_S, 3), question(1.0 + 2 * ASK_FIRST_S, 4)] == [1, None], (
        "one that lied hides none"
    )


@pytest.mark.parametrize("authenticated", [False, True])
def test_a_worker_makes_a_view_of_its_difference_and_asks_for_the_whole_after_a_gap(
    cluster: Cluster, authenticated: bool
) -> None:
    views = NewViews("fake", cluster.before.ranges, lambda came: None, lambda view: None, authenticated=authenticated)
    after = replace(cluster.before, epoch=2, reason="the next")
    frame = difference_frame(2, ViewDifference.between(cluster.before, after).encode())
    header, body = unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8)
    assert views.read(1.0, header, body, cluster.before) == (after, None)
    assert views.read(1.0, header, body, after) == (None, None)
    other = replace(cluster.before, reason="another of the same epoch")
    assert views.read(1.0, header, body, other) == (None, None if authenticated else 0)
    with pytest.raises(FrameError, match="VIEW_DIFFERENCE cannot be read"):
        views.read(1.0, header, body[::-1], cluster.before)
    with pytest.raises(FrameError, match="holds the view of epoch"):
        views.read(1.0, header._replace(epoch=9), body, cluster.before)
