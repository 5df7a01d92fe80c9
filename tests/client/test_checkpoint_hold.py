"""A worker that is told to hold while a cut is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elasticps as eps
from elasticps.client.core.hold import Hold, Written
from elasticps.client.dispatcher import Dispatcher
from elasticps.wire.frames import Kind
from elasticps.wire.headers import HeldHeader, HoldHeader, ReleaseHeader
from replication.chain import Member
from tests.client.fake_cluster import KEYS, ONES, Cluster

A, B = Member("a", 1), Member("b", 1)
WORKER = 3

# --------------------------------------------------------------------------------------------------- what is decided


class Twin:
    """Decides what to hold from all messages that ever came."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Member, int, float, int]] = []  # what, who, cut, until, rounds

    def cut(self, now: float) -> int:
        released = max((cut for what, _, cut, _, _ in self.messages if what == "release"), default=0)
        newest = max((cut for what, _, cut, _, _ in self.messages if what == "hear"), default=0)
        until_s = max((s for what, _, cut, s, _ in self.messages if what == "hear" and cut == newest), default=0.0)
        return newest if newest > released and now < until_s else 0

    def holds(self, clock: int, now: float) -> bool:
        cut = self.cut(now)
        rounds = max((n for what, _, c, _, n in self.messages if what == "hear" and c == cut), default=0)
        return bool(cut) and (clock == 0 or clock > rounds)


words = st.one_of(
    st.tuples(st.just("hear"), st.sampled_from((A, B)), st.integers(1, 3), st.sampled_from((1.0, 4.0)),
              st.integers(0, 3)),
    st.tuples(st.just("release"), st.sampled_from((A, B)), st.integers(1, 3)),
)  # fmt: skip


@given(st.lists(st.tuples(words, st.sampled_from((0.0, 0.5, 2.0))), max_size=20), st.booleans(), st.booleans())
def test_a_worker_holds_for_the_newest_cut_until_its_release_or_timeout(
    story: list[tuple[tuple[object, ...], float]], settled: bool, rounds: bool
) -> None:
    hold, twin, now = Hold(WORKER), Twin(), 0.0
    over: set[int] = set()  # cuts whose time was over once: their holds may come late, and are not heard
    for word, pause_s in story:
        now += pause_s
        before = twin.cut(now)
        newest = max((cut for what, _, cut, _, _ in twin.messages if what == "hear"), default=0)
        over |= {newest} if newest and not before else set()
        what, who, cut = word[:3]
        assert isinstance(who, Member)
        assert isinstance(cut, int)
        if what == "hear":
            left_s, at = word[3:]
            assert isinstance(left_s, float)
            assert isinstance(at, int)
            hold.left_s(now)
            hold.hear(who, HoldHeader(cut, int(left_s * 1000), at), now)
            if cut >= newest and cut not in over:
                twin.messages.append(("hear", who, cut, now + left_s, at))
        else:
            hold.release(cut)
            twin.messages.append(("release", who, cut, 0.0, 0))
            twin.messages = [w for w in twin.messages if w[0] == "release" or w[2] > cut or w[2] < newest]
            over |= set(range(1, cut + 1))
        for clock in range(5):
            assert hold.holds(clock, now) == twin.holds(clock, now)
        answers = hold.answers(Written(7, settled, rounds), now)
        assert all(header == HeldHeader(twin.cut(now), WORKER, 7, not settled, not rounds) for _, header in answers)
        assert bool(answers) <= bool(twin.cut(now) and (settled or rounds))
        assert hold.answers(Written(7, settled, rounds), now) == []


def test_each_server_that_asks_for_a_hold_gets_each_change_once() -> None:
    hold = Hold(WORKER)
    hold.hear(A, HoldHeader(1, 1000), 0.0)
    assert hold.answers(Written(4, False, False), 0.0) == []
    assert hold.answers(Written(4, True, False), 0.0) == [(A, HeldHeader(1, WORKER, 4, apart=True))]
    hold.hear(B, HoldHeader(1, 1000), 0.1)
    assert hold.answers(Written(4, True, False), 0.1) == [(B, HeldHeader(1, WORKER, 4, apart=True))]
    hold.gone(A)
    hold.hear(A, HoldHeader(1, 900), 0.1)  # on the next connection
    assert [server for server, _ in hold.answers(Written(4, True, False), 0.1)] == [A]


def test_a_worker_in_rounds_reports_an_open_round_and_finishes_it() -> None:
    hold = Hold(WORKER)
    hold.hear(A, HoldHeader(1, 1000), 0.0)
    assert hold.answers(Written(4, False, True), 0.0) == [(A, HeldHeader(1, WORKER, 4, open=True))]
    assert hold.answers(Written(4, True, True, 99, 3), 0.0) == [(A, HeldHeader(1, WORKER, 4, digest=99, epoch=3))]
    assert hold.holds(5, 0.0)
    hold.hear(A, HoldHeader(1, 1000, 5), 0.0)
    assert not hold.holds(5, 0.0)
    assert hold.holds(6, 0.0)
    assert hold.holds(0, 0.0)


def test_a_worker_that_has_to_push_to_a_round_says_so_to_servers_that_have_not_heard_of_it() -> None:
    """B knows none of those who have it open, and would take its last report for one of a worker that holds."""
    hold = Hold(WORKER)
    for server in (A, B):
        hold.hear(server, HoldHeader(1, 1000), 0.0)
    assert len(hold.answers(Written(4, True, True), 0.0)) == 2
    hold.hear(A, HoldHeader(1, 1000, 5), 0.0)
    waits = HeldHeader(1, WORKER, 5, open=True)
    assert sorted(hold.answers(Written(4, True, True), 0.0)) == [(A, waits), (B, waits)]
    assert hold.answers(Written(4, True, True), 0.0) == []
    holds = HeldHeader(1, WORKER, 5)
    assert sorted(hold.answers(Written(5, True, True), 0.0)) == [(A, holds), (B, holds)]
    hold.hear(A, HoldHeader(1, 1000, 6), 0.0)
    assert hold.answers(Written(5, True, False), 0.0)[0][1].apart  # whoever is in no rounds is waited for by nobody


def test_a_server_is_needed_from_its_hold_to_the_release() -> None:
    hold = Hold(WORKER)
    hold.hear(A, HoldHeader(1, 1000), 0.0)
    hold.hear(B, HoldHeader(1, 1000), 0.0)
    hold.gone(B)
    assert hold.servers == {A}
    hold.release(1)
    assert hold.servers == set()


def test_a_late_hold_of_a_released_cut_is_ignored() -> None:
    hold = Hold(WORKER)
    hold.hear(A, HoldHeader(1, 1000), 0.0)
    hold.release(1)
    hold.hear(B, HoldHeader(1, 1000), 0.0)
    assert not hold.holds(1, 0.0)


# --------------------------------------------------------------------------------------------------------- the client


def eventually(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        threading.Event().wait(0.002)


def hold(cluster: Cluster, cut: int = 1, left_ms: int = 60_000, clock: int = 0) -> None:
    for server in cluster.servers:
        server.say(HoldHeader(cut, left_ms, clock).header().pack())


def held(cluster: Cluster) -> list[list[int]]:
    """The clocks at which each server heard that the worker holds."""
    return [[HeldHeader.of(h).clock for h in server.got(Kind.HELD)] for server in cluster.servers]


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_an_idle_worker_holds_without_its_main_thread_and_pulls_go_on(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    hold(cluster)
    eventually(lambda: held(cluster) == [[1], [1]])
    pushing = beside(lambda: ps.push({table: (KEYS, ONES)}).result())
    for _ in range(3):
        assert table.pull(KEYS).shape == ONES.shape
    assert pushing.is_alive()
    assert ps.clock == 1
    cluster.b.say(ReleaseHeader(1).header().pack())
    pushing.join(20)
    assert ps.committed == 2
    assert held(cluster) == [[1], [1]]


def test_a_worker_holds_once_its_steps_are_committed_and_none_is_open(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    step = ps.step()
    step.push({table: (KEYS[:20], ONES[:20])})
    hold(cluster)
    step.push({table: (KEYS[20:], ONES[20:])})
    for _ in range(3):
        table.pull(KEYS)
    cluster.a.silent.add(Kind.PUSH)
    last = step.commit()
    for _ in range(3):
        table.pull(KEYS)
    assert held(cluster) == [[], []]
    cluster.b.applied = cluster.b.committed = 2 << 16
    cluster.a.kill()
    cluster.b.view = cluster.after
    last.result()
    eventually(lambda: held(cluster)[1] == [2])


@pytest.mark.parametrize("what", ["delete", "load", "clear"])
def test_tables_are_not_changed_while_a_worker_holds(cluster: Cluster, what: str) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    hold(cluster)
    eventually(lambda: held(cluster) == [[1], [1]])
    write = {"delete": lambda: table.delete(KEYS), "load": lambda: table.load(KEYS, ONES), "clear": table.clear}[what]
    writing = beside(write)
    for _ in range(3):
        table.pull(KEYS)
    assert not cluster.a.got(Kind.ERASE, Kind.INIT)
    cluster.a.say(ReleaseHeader(1).header().pack())
    writing.join(20)
    assert not writing.is_alive()
    assert cluster.a.got(Kind.ERASE, Kind.INIT)


def test_a_worker_does_not_hold_before_its_deletion_is_answered(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    cluster.a.silent.add(Kind.ERASE)
    writing = beside(lambda: table.delete(KEYS))
    eventually(lambda: cluster.a.got(Kind.ERASE))
    hold(cluster)
    for _ in range(3):
        table.pull(KEYS)
    assert held(cluster) == [[], []]
    cluster.a.silent.clear()
    cluster.a.hang_up()  # on the next connection it is asked again, and answers
    eventually(lambda: held(cluster)[1] == [1])
    writing.join(20)


def test_a_hold_ends_by_itself_after_its_time(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    ps._steps.timeout_s = 0.2  # less than it holds
    hold(cluster, left_ms=2000)
    eventually(lambda: held(cluster) == [[1], [1]])
    ps.push({table: (KEYS, ONES)})
    ps.flush(30)
    assert ps.committed == 2


def test_a_worker_reports_its_hold_on_each_connection(cluster: Cluster) -> None:
    cluster.a.greeting = cluster.b.greeting = HoldHeader(4, 60_000).header().pack()
    ps = cluster.connect()  # joins during the hold
    eventually(lambda: held(cluster) == [[0], [0]])
    cluster.a.hang_up()
    eventually(lambda: held(cluster) == [[0, 0], [0]])
    pushing = beside(lambda: ps.push({}).result())
    cluster.table(ps).pull(KEYS)
    assert pushing.is_alive()
    cluster.a.say(ReleaseHeader(4).header().pack())
    pushing.join(20)
    assert ps.committed == 1
    assert np.array_equal(held(cluster)[0], [0, 0])


def test_a_worker_outside_rounds_enters_none_before_the_release(cluster: Cluster) -> None:
    cluster.a.greeting = cluster.b.greeting = HoldHeader(4, 60_000, 1).header().pack()  # others wait for round 1
    for server in cluster.servers:
        server.silent.add(Kind.BARRIER_JOIN)
    ps = cluster.connect(consistency=eps.BSP())
    eventually(lambda: held(cluster) == [[0], [0]])
    waits: list[int] = []
    wait_released = ps._dispatcher.wait_released

    def waiting(clock: int, timeout_s: float) -> None:
        waits.append(clock)
        wait_released(clock, timeout_s)

    ps._dispatcher.wait_released = waiting  # type: ignore[method-assign]

    def push() -> None:
        with suppress(eps.Closed):
            ps.push({})

    def entered() -> bool:
        return any(server.got(Kind.BARRIER_JOIN) for server in cluster.servers)

    pushing = beside(push)
    eventually(lambda: waits or entered())
    assert not entered()
    cluster.a.say(ReleaseHeader(4).header().pack())
    eventually(entered)
    ps.close()
    pushing.join(20)
    assert not pushing.is_alive()


def test_a_worker_interrupted_while_entering_rounds_can_still_hold() -> None:
    """Found in a review: each cut was given up for it, until it entered again."""
    entering: list[bool] = []

    class Interrupted:
        holding = SimpleNamespace(entered=entering.clear)

        def _enter(self) -> bool:
            entering.append(True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Dispatcher.entering(cast(Dispatcher, Interrupted()), 1.0):
        pass
    assert not entering
