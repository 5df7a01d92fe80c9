"""A tail reports a joiner that makes no progress."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.data_shards import ShardLedger
from elasticps.server.roles import snapshots
from elasticps.server.roles.context import LastServed
from elasticps.server.roles.snapshots import BACKLOG_BYTES, STALLED_S, SnapshotSender
from elasticps.store import Store
from elasticps.wire.frames import HEADER_BYTES, Kind, json_body
from replication.chain import Member
from replication.effects import NextChunk, SnapshotRange
from tests.server.conftest import RANGES, Group, Run, until

P = 2
B, C = Member("b", 1), Member("c", 1)


class Loop:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[..., None], *arguments: Any) -> object:
        self.calls.append((at, lambda: call(*arguments)))
        return self.calls[-1]

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> object:
        return self.call_at(self.now + delay_s, call, *arguments)


class Tail:
    """A sender of snapshots with one table; `run` lets time pass, and asks for what stands still ten times a second."""

    def __init__(self) -> None:
        self.loop = Loop()
        store = Store(P)
        table = store.create(TableSpec("t", 64, Accumulate()), 1)
        table.put_if_absent(np.arange(8000, dtype=np.int64), np.ones((8000, 64), np.float32))
        self.delivered: list[tuple[int, bool]] = []
        self.filling: tuple[Member, int] | None = (B, 3)
        self.backlog = 0
        replica: Any = SimpleNamespace(piece=None)
        executor: Any = SimpleNamespace(
            store=store, rounds=Rounds(P), shards=ShardLedger(P), replica=replica, handlers={},
            perform=lambda event, r, serial, upto, last, content: self.delivered.append((serial, last)),
        )  # fmt: skip
        serving: Any = SimpleNamespace(ranges=P, joiner=lambda r: self.filling)
        context: Any = SimpleNamespace(
            loop=self.loop, executor=executor, serving=serving, last_served=LastServed(self.loop.time)
        )
        links: Any = SimpleNamespace(backlog=lambda peer: self.backlog, full=lambda peer: False)
        self.snapshots = SnapshotSender(context, links)

    def start(self, peer: Member, serial: int) -> None:
        self.snapshots.start(SnapshotRange(peer, 0, 3, serial))

    def next(self, serial: int) -> None:
        self.snapshots.next(NextChunk(B, 0, serial))

    def run(self, seconds: float) -> set[Member]:
        end, found = self.loop.now + seconds, set()
        while self.loop.now < end:
            due = [call for at, call in self.loop.calls if at <= self.loop.now]
            self.loop.calls = [(at, call) for at, call in self.loop.calls if at > self.loop.now]
            for call in due:
                call()
            found = self.snapshots.stalled()
            self.loop.now += 0.1
        return found


def test_a_joiner_that_installs_nothing_is_reported_and_a_slow_one_is_not() -> None:
    tail = Tail()
    tail.start(B, 1)
    for _ in range(3):  # slowly, but it gets on
        assert not tail.run(STALLED_S - 1)
        tail.next(1)
    assert not tail.run(STALLED_S - 1)
    assert tail.run(2) == {B}
    tail.next(1)
    assert not tail.run(1)


def test_the_last_piece_counts_as_well_until_the_joiner_has_all() -> None:
    tail = Tail()
    tail.start(B, 1)
    while not tail.delivered or not tail.delivered[-1][1]:
        tail.run(0.2)
        tail.next(1)
    assert len(tail.delivered) > 3
    tail.run(1)
    tail.filling = None
    assert not tail.run(STALLED_S + 1)


def test_ranges_are_sent_one_by_one_with_all_last_pieces_at_the_end() -> None:
    tail = Tail()
    for r in range(P):
        tail.snapshots.start(SnapshotRange(B, r, 3, r))
    while sum(last for _, last in tail.delivered) < P:
        tail.run(0.1)
        serial, _ = tail.delivered[-1]
        tail.snapshots.next(NextChunk(B, serial, serial))
    *others, first, second = tail.delivered
    assert (first, second) == ((0, True), (1, True))
    assert others == sorted(others)
    assert {serial for serial, _ in others} == {0, 1}


def test_a_joiner_that_reads_nothing_is_reported() -> None:
    tail = Tail()
    tail.backlog = BACKLOG_BYTES + 1
    tail.start(B, 1)
    assert tail.run(STALLED_S + 1) == {B}
    assert not tail.delivered


def test_restarting_a_filling_is_not_progress() -> None:
    """The joiner installs the first piece, and ends the link because of the second."""
    tail = Tail()
    found = set()
    for serial in range(1, int(STALLED_S) + 5):
        tail.start(B, serial)
        tail.run(0.5)
        tail.next(serial)
        found |= tail.run(0.5)
    assert found == {B}


def test_each_filling_has_its_own_time_limit() -> None:
    tail = Tail()
    tail.start(B, 1)
    assert tail.run(STALLED_S + 1) == {B}
    tail.filling = C, 4
    assert not tail.run(1)
    tail.start(C, 2)
    assert not tail.run(STALLED_S - 1)
    tail.filling = C, 5
    tail.start(C, 3)
    assert not tail.run(STALLED_S - 1)
    assert tail.run(2) == {C}


def test_a_tail_that_was_stopped_reports_no_joiner() -> None:
    tail = Tail()
    tail.start(B, 1)
    tail.run(1)
    tail.loop.now += 10 * STALLED_S
    assert not tail.snapshots.stalled()
    assert not tail.run(STALLED_S - 1)
    assert tail.run(2) == {B}


def test_a_server_reports_a_stalled_joiner(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "STALLED_S", 0.4)

    async def test(group: Group) -> None:
        a, b = await group.start("a"), await group.start("b")
        group.adopt(group.make_view(lambda r: ["a"]))
        await group.connect("a")
        b.peer.handlers[Kind.SNAPSHOT_CHUNK] = lambda *_: None
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        await until(lambda: reported(a.leaders.report()) == [["b", 1]])
        group.adopt(group.make_view(lambda r: ["a"]))
        assert reported(a.leaders.report()) == []
        b.peer.handlers[Kind.SNAPSHOT_CHUNK] = b.links.receive
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        await until(lambda: len(a.replica.levels()) == RANGES)
        assert reported(a.leaders.report()) == []

    run(test)


def reported(frame: bytes) -> object:
    return json_body(frame[HEADER_BYTES:])["stalled"]
