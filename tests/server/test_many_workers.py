"""What a server does for each worker does not grow with the number of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coordinator.core.view import Roster, WorkerInfo
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import MAX_REMEMBERED, BarrierGroup
from elasticps.server.fast import layout as at
from elasticps.server.fast import recent_log
from elasticps.server.fast.path import FastPath
from elasticps.server.fast.recent_log import ENTRY_WORDS, MOST_ENTRIES
from elasticps.server.network.connection import Connection
from elasticps.wire.frames import Header, Kind
from replication.messages import OperationKind
from tests.server.conftest import RANGES, WORKER, Group, Run, until
from tests.server.test_group_log import APP, Head, Worker

NOTHING = np.empty(0, np.uint8)


class CountedMembers(dict[int, int]):
    """Members of a round that count how often one of them is looked at."""

    looks = 0

    def get(self, *arguments: Any) -> Any:
        self.looks += 1
        return super().get(*arguments)

    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        for item in super().items():
            self.looks += 1
            yield item


class Rounds:
    """A head of the group range with so many members, and their requests."""

    def __init__(self, workers: int) -> None:
        self.head = Head()
        self.head.workers = {w: Worker(w) for w in range(1, workers + 1)}
        for worker in self.head.workers.values():
            worker.name = f"w{worker.worker}"
        self.barrier: BarrierCoordinator = self.head.barrier()
        self.head.rounds.enter(APP, 3, self.head.workers)
        self.group.members = self.members = CountedMembers(self.group.members)

    @property
    def group(self) -> BarrierGroup:
        return self.head.rounds.groups[APP]

    def ask(self, worker: int, kind: Kind, body: Any = NOTHING, clock: int = 0, request: int = 0) -> None:
        header = Header(kind, 0, len(body), request, 1, clock=clock)
        self.barrier.handlers[kind](self.head.workers[worker], header, body)


@pytest.mark.parametrize("order", [1, -1])
def test_an_arrival_at_a_round_costs_no_look_at_all_its_members(order: int) -> None:
    count = 300
    rounds = Rounds(count)
    for worker in list(rounds.head.workers)[::order]:
        assert rounds.group.decided == 0
        rounds.ask(worker, Kind.BARRIER_ARRIVE, clock=1)
    assert rounds.group.decided == 1
    assert rounds.group.workers == tuple(range(1, count + 1))
    assert rounds.members.looks < 10 * count


def test_a_round_ends_with_the_worker_that_is_missing_whether_it_arrives_or_leaves() -> None:
    rounds = Rounds(5)
    for worker in (1, 2, 4):
        rounds.ask(worker, Kind.BARRIER_ARRIVE, clock=1)
    gone = rounds.head.workers.pop(3)
    rounds.barrier.recheck()
    assert rounds.group.decided == 0
    rounds.head.workers[3] = gone  # its lease had run out, and it is there again
    rounds.ask(5, Kind.BARRIER_ARRIVE, clock=1)
    assert rounds.group.decided == 0, "worker 3 is missing"
    del rounds.head.workers[3]
    rounds.barrier.recheck()
    assert rounds.group.workers == (1, 2, 4, 5)


def test_a_repeated_arrival_is_answered_only_to_a_worker_of_the_round() -> None:
    rounds = Rounds(4)
    for worker in range(1, 5):
        rounds.ask(worker, Kind.BARRIER_ARRIVE, clock=1)
    rounds.head.workers[9] = stranger = Worker(9)
    stranger.name = "w9"
    rounds.ask(4, Kind.BARRIER_ARRIVE, clock=1)
    assert rounds.head.logged[-1].kind == OperationKind.BARRIER_DECISION
    rounds.ask(9, Kind.BARRIER_ARRIVE, clock=1)
    assert rounds.head.refused == [(9, "left-out")]


def test_the_rounds_of_as_many_workers_are_remembered_as_a_roster_lists() -> None:
    rounds = Rounds(2).head.rounds
    group = rounds.groups[APP]
    group.last = {1000 + w: w % 7 for w in range(MAX_REMEMBERED)}
    rounds.decide(APP, 1, (1, 2))
    assert len(group.last) == MAX_REMEMBERED
    assert {1, 2} <= group.last.keys()
    assert not {1000, 1007} & group.last.keys(), "they were away for the longest"


def test_a_newer_roster_concerns_only_connections_of_workers_that_came_or_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    original = Connection.set_rostered

    def note(self: Connection, rostered: bool) -> None:
        looked.append(self.worker)
        original(self, rostered)

    async def test(group: Group) -> None:
        others = group.enrol(6)
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        for worker in (WORKER, *others):
            await group.connect("a", create=False, worker=worker)
        monkeypatch.setattr(Connection, "set_rostered", note)
        listed = group.roster.workers
        server.follow(Roster(2, (*listed, WorkerInfo(500, "new", 1, "default")), "c"))
        assert looked == []
        server.follow(Roster(3, tuple(w for w in listed if w.id != others[0]), "c"))
        assert looked == [others[0]]
        server.follow(Roster(4, listed, "c"))
        assert looked == [others[0]] * 2
        newer = WorkerInfo(501, listed[2].name, 2, "default")
        server.follow(Roster(5, (*listed[:2], *listed[3:], newer), "c"))
        assert looked == [others[0]] * 2 + [listed[2].id]
        await until(lambda: listed[2].id not in {c.worker for c in server.handshake.workers})
        assert server.handshake.connections_of(listed) == [
            c for w in listed for c in server.handshake.workers if c.worker == w.id
        ]

    run(test)


def test_a_place_that_a_connection_has_left_is_used_again(run: Run) -> None:
    async def test(group: Group) -> None:
        others = group.enrol(3)
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        first = await group.connect("a", create=False)
        for worker in others[:2]:
            await group.connect("a", create=False, worker=worker)
        slots = {c.worker: c.slot for c in server.handshake.workers}
        await first.close()
        await until(lambda: WORKER not in {c.worker for c in server.handshake.workers})
        await group.connect("a", create=False, worker=others[2])
        (last,) = (c.slot for c in server.handshake.workers if c.worker == others[2])
        assert last == slots[WORKER]

    run(test)


@pytest.mark.parametrize("held", [0, 33, 170, 16_384])
def test_the_recent_log_is_for_as_many_ranges_as_a_server_has_copies_of(held: int) -> None:
    path = FastPath(16_384, 1 << 20)
    path.recent.fit(held)
    assert path.recent.fits(held)
    stride, entries = path.counter(at.H_STRIDE), path.counter(at.H_FREE_ENTRY_COUNT)
    assert max(held, 16) <= stride <= max(2 * held, 16)
    assert entries == min(MOST_ENTRIES, max(64, ENTRY_WORDS // stride))
    assert path.counter(at.H_FREE_FRAME_COUNT) == entries


def test_a_server_makes_room_in_its_recent_log_for_the_ranges_that_a_view_gives_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_log, "LEAST_STRIDE", 1)

    async def test(group: Group) -> None:
        for name in "abc":
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"] if r == 0 else ["b", "c"])
        group.adopt(view)
        strides = {name: server.fast.counter(at.H_STRIDE) for name, server in group.servers.items()}
        assert strides == {"a": 1, "b": RANGES, "c": RANGES}
        worker = await group.connect("a")
        for clock in range(1, 4):
            header, _ = await worker.push(view, "a", clock, range(200), 1.0)
            assert header.kind == Kind.OK
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        assert group.servers["a"].fast.counter(at.H_STRIDE) == RANGES

    run(test)
