"""Announced rounds, beside a model that has a set of closed rounds for each range and no memory of connections."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.server.core.round_announcements import DecidedRound, RoundAnnouncements
from elasticps.wire.frames import Buffer, FrameError, Kind, unpack_header
from elasticps.wire.rounds import MOST_APPS, LastWorkers, RoundClose, round_body, round_close
from replication.chain import Member

P = 6
ME = Member("s0", 1)
SERVERS = [ME, *(Member(f"s{i}", 1) for i in range(1, 5))]


def view(epoch: int, heads: list[int]) -> Any:
    members = tuple(SERVERS)
    return cast(Any, SimpleNamespace(epoch=epoch, heads=np.array(heads), as_chains=SimpleNamespace(members=members)))


def close_of(frame: list[Buffer]) -> RoundClose:
    header = unpack_header(frame[0])
    assert header.kind == Kind.ROUND_CLOSE
    assert header.body == len(frame[1])
    return RoundClose.of(header, np.frombuffer(frame[1], np.uint8))


class Cluster:
    """Heads that close rounds in the ranges they have, one view after another, and the links to them. closed: by
    application and range, the rounds that are closed there with their workers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.announcements = RoundAnnouncements(ME, self.send, lambda member: None, self.close_here, self.done)
        self.epoch, self.heads = 0, [0] * P
        self.links: dict[Member, LastWorkers] = {}  # and what the other side knows
        self.on_the_way: list[tuple[Member, RoundClose]] = []  # per link in order
        self.answers: list[tuple[Member, int]] = []
        self.closed: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {}
        self.decided: dict[str, DecidedRound] = {}
        self.finished: dict[str, int] = {}

    # what is called by what is tested

    def send(self, member: Member, frame: list[Buffer]) -> None:
        assert member in self.links
        self.on_the_way.append((member, close_of(frame)))

    def close_here(self, round: DecidedRound, request: int, epoch: int) -> None:
        self.close(ME, round, epoch)
        self.answers.append((ME, request))

    def done(self, round: DecidedRound) -> None:
        for r in range(P):
            assert self.closed.get((round.app, r), {}).get(round.clock) == round.workers, "it is not closed everywhere"
        self.finished[round.app] = round.clock

    # what happens

    def close(self, member: Member, round: DecidedRound, epoch: int) -> None:
        for r, head in enumerate(self.heads):
            if SERVERS[head] == member:
                rounds = self.closed.setdefault((round.app, r), {})
                assert rounds.setdefault(round.clock, round.workers) == round.workers
                assert sorted(rounds) == list(range(1, max(rounds) + 1)), "a round was left out"

    def change_view(self) -> None:
        self.epoch += 1
        self.heads = [self.random.randrange(len(SERVERS)) for _ in range(P)]
        headless = self.random.random() < 0.2
        self.announcements.adopt(view(self.epoch, [-1, *self.heads[1:]] if headless else self.heads))

    def connect(self, member: Member) -> None:
        self.disconnect(member)
        self.links[member] = LastWorkers()
        self.announcements.connected(member)

    def disconnect(self, member: Member) -> None:
        self.on_the_way = [each for each in self.on_the_way if each[0] != member]
        self.answers = [each for each in self.answers if each[0] != member]
        if self.links.pop(member, None) is not None:
            self.announcements.disconnected(member)

    def arrive(self) -> None:
        """The oldest frame on some link arrives. What its head no longer has under a newer view is not answered."""
        member = self.random.choice(self.on_the_way)[0]
        at = next(i for i, each in enumerate(self.on_the_way) if each[0] == member)
        _, close = self.on_the_way.pop(at)
        workers = self.links[member].follow(close)
        if close.epoch == self.epoch:
            self.close(member, DecidedRound(close.app, close.clock, workers), close.epoch)
            self.answers.append((member, close.request))

    def decide(self) -> None:
        app = self.random.choice(["one", "other", "größer"])
        last = self.decided.get(app, DecidedRound(app, 0, ()))
        if last.clock == self.finished.get(app, 0):
            workers = set(last.workers) or {1}
            if self.random.random() < 0.5:
                workers ^= set(self.random.sample(range(1, 9), 2))
            self.decided[app] = DecidedRound(app, last.clock + 1, tuple(sorted(workers or {9})))
            self.announcements.begin(self.decided[app])

    def announce_again(self) -> None:
        """This server heads the group range again, and another one may have closed the round meanwhile."""
        for app, round in self.decided.items():
            self.announcements.forget(app)
            self.announcements.begin(round)

    def step(self) -> None:
        what = self.random.random()
        if what < 0.05:
            self.change_view()
        elif what < 0.2:
            self.connect(self.random.choice(SERVERS[1:]))
        elif what < 0.25:
            self.disconnect(self.random.choice(SERVERS[1:]))
        elif what < 0.27:
            self.announce_again()
        elif what < 0.4:
            self.decide()
        elif what < 0.7 and self.on_the_way:
            self.arrive()
        elif self.answers:
            self.announcements.closed(*self.answers.pop(self.random.randrange(len(self.answers))))

    def settle(self) -> None:
        """Nothing goes wrong any more."""
        self.epoch += 1
        self.announcements.adopt(view(self.epoch, self.heads))
        for member in SERVERS[1:]:
            self.connect(member)
        while self.on_the_way or self.answers:
            while self.on_the_way:
                self.arrive()
            while self.answers:
                self.announcements.closed(*self.answers.pop())


@given(st.integers(0, 1 << 32))
def test_a_round_that_is_done_is_closed_in_all_ranges_by_the_same_workers(seed: int) -> None:
    cluster = Cluster(seed)
    cluster.change_view()
    for _ in range(200):
        cluster.step()
    cluster.settle()
    assert cluster.finished == {app: round.clock for app, round in cluster.decided.items()}
    assert not cluster.announcements.owing


def test_a_head_that_is_not_connected_is_dialled_and_told_when_it_is() -> None:
    sent, needed, done = list[Member](), list[Member](), list[DecidedRound]()
    announcements = RoundAnnouncements(
        ME, lambda member, frame: sent.append(member), needed.append, lambda *_: None, done.append
    )
    announcements.adopt(view(1, [1] * P))
    announcements.begin(DecidedRound("a", 1, (3, 4)))
    assert (sent, needed) == ([], [SERVERS[1]])
    announcements.connected(SERVERS[1])
    assert sent == [SERVERS[1]]
    announcements.disconnected(SERVERS[1])
    assert needed == [SERVERS[1]] * 2
    announcements.closed(SERVERS[1], 1)
    assert done == [DecidedRound("a", 1, (3, 4))]
    announcements.disconnected(SERVERS[1])
    assert needed == [SERVERS[1]] * 2, "there is nothing to tell it"


def test_a_round_of_the_same_workers_names_nobody() -> None:
    frames: list[list[Buffer]] = []
    announcements = RoundAnnouncements(
        ME, lambda member, frame: frames.append(frame), lambda member: None, lambda *_: None, lambda round: None
    )
    announcements.adopt(view(1, [1, 2, 3, 4, 1, 2]))
    for member in SERVERS[1:]:
        announcements.connected(member)
    many = tuple(range(1, 10_001))
    for clock, workers in enumerate([many, (*many,), (*many[1:], 20_000)], 1):
        announcements.begin(DecidedRound("app", clock, workers))
    sizes = [len(frame[1]) for frame in frames]
    assert sizes == [8 + 8 * 10_000] * 4 + [8] * 4 + [8 + 16] * 4
    assert len({id(frame[1]) for frame in frames}) == 3, "what all heads get is written once"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(1, 9), min_size=1))))
def test_both_ends_of_a_connection_know_the_same_workers(rounds: list[tuple[str, set[int]]]) -> None:
    here, there = LastWorkers(), LastWorkers()
    for app, workers in rounds:
        last, now = here.of(app), tuple(sorted(workers))
        joined, left = sorted(workers - {*last}), sorted({*last} - workers)
        frame = round_close(1, 1, app.encode(), 1, len(left), round_body(app.encode(), left, joined))
        here.note(app, now)
        assert there.follow(close_of(frame)) == now


def test_only_the_workers_of_the_last_few_applications_are_kept() -> None:
    last = LastWorkers()
    for number in range(MOST_APPS + 1):
        last.note(f"app{number}", (number + 1,))
    assert last.of("app0") == ()
    assert last.of("app1") == (2,)


@pytest.mark.parametrize(
    ("left", "joined"), [((), ()), ((3,), (4,)), ((1, 1), (4,)), ((1,), (2,)), ((), (4, 4)), ((1, 2), ())]
)
def test_a_difference_that_does_not_go_on_from_the_last_round_is_refused(
    left: tuple[int, ...], joined: tuple[int, ...]
) -> None:
    last = LastWorkers()
    if left or joined:
        last.note("a", (1, 2))
    with pytest.raises(FrameError):
        last.follow(RoundClose(1, 1, "a", 5, left, joined))


@pytest.mark.parametrize(
    ("name", "clock", "left", "body"),
    [
        (4, 1, 0, b"abcd"),  # not padded
        (2000, 1, 0, b"a" * 2000),
        (1, 0, 0, b"a" + bytes(15)),  # no round
        (1, 1, 0, b"a" + bytes(15)),  # no worker is 0
        (1, 1, 2, b"a" + bytes(7) + (1).to_bytes(8, "little")),
        (1, 1, 0, b"a" + bytes(7) + (1 << 40).to_bytes(8, "little")),
        (1, 1, 0, b"\xff" + bytes(7) + (1).to_bytes(8, "little")),
        (16, 1, 0, b"a" + bytes(7)),
    ],
)
def test_a_malformed_round_close_is_refused(name: int, clock: int, left: int, body: bytes) -> None:
    header = unpack_header(round_close(1, 1, b"a", 1, 0, b"")[0])._replace(
        table=name, clock=clock, items=left, body=len(body)
    )
    with pytest.raises(FrameError):
        RoundClose.of(header, np.frombuffer(body, np.uint8))
