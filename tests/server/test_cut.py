"""Checkpoint cuts at servers: holding workers, marks in the log, and ranges that move."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.admin.cuts import read_state, read_written, write_state, write_written
from elasticps.admin.interface import CutState, CutTaken, CutWritten, WorkerHeld, Writing, WrittenFile
from elasticps.kernels.hashing import group_range
from elasticps.model.optimizers import Accumulate
from elasticps.model.sharding import ShardSpec
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.cut import MOST_S, CutHold, CutNotes, by_column
from elasticps.server.core.data_shards import ShardLedger
from elasticps.server.core.operations import CutMark
from elasticps.server.server import Server
from elasticps.store import Table
from elasticps.store.cuts import PassedCuts
from elasticps.wire.frames import Block, Kind, json_frame
from elasticps.wire.headers import HeldHeader, HoldHeader, ReleaseHeader
from replication.step_records import StepRecord
from tests.server.conftest import RANGES, WORKER, Group, Run, Worker, until

P = 8

# ---------------------------------------------------------------------------------------------------------- who holds


class HoldingTwin:
    """Decides from all messages that ever came, looked through from the beginning each time."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, ...], float]] = []

    def current(self, now: float) -> tuple[int, float]:
        """The cut that is held for, 0 for none, and until when."""
        cut, until_s = 0, 0.0
        for what, numbers, at in self.log:
            if what == "begin" and numbers[0] > cut and 0 < numbers[1] <= MOST_S:
                cut, until_s = numbers[0], at + numbers[1]
            elif what == "release" and numbers[0] == cut:
                until_s = 0.0
        return (cut, until_s) if now < until_s else (0, 0.0)

    def held(self, cut: int, now: float) -> dict[int, WorkerHeld]:
        if not cut or self.current(now)[0] != cut:
            return {}
        first = min(i for i, (what, numbers, _) in enumerate(self.log) if what == "begin" and numbers[0] == cut)
        heard = [numbers for what, numbers, _ in self.log[first:] if what == "hear" and numbers[0] == cut]
        rounds = {app: max([n[2] for n in heard if n[1] % 2 == app and n[3]], default=0) for app in (0, 1)}
        last = {worker: (clock, still_open) for _, worker, clock, still_open in heard}
        return {
            w: WorkerHeld(clock, cut, 3 * clock)
            for w, (clock, still_open) in last.items()
            if not still_open and clock >= rounds[w % 2]
        }


cuts, workers, clocks = st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)
messages = st.one_of(
    st.tuples(st.just("begin"), st.tuples(cuts, st.sampled_from((0, 2, 5, 100)))),
    st.tuples(st.just("hear"), st.tuples(cuts, workers, clocks, st.integers(0, 1))),
    st.tuples(st.just("release"), st.tuples(cuts)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(messages, st.sampled_from((0.0, 0.5, 3.0))), max_size=25))
def test_a_worker_counts_as_holding_by_its_newest_message_and_its_commits(
    story: list[tuple[tuple[str, tuple[int, ...]], float]],
) -> None:
    holding, twin, now = CutHold(), HoldingTwin(), 0.0
    for (what, numbers), pause_s in story:
        now += pause_s
        if what == "begin":
            held = holding.begin(numbers[0], numbers[1], now)
            twin.log.append((what, numbers, now))
            assert held == (twin.current(now)[0] == numbers[0])
        elif what == "hear":
            cut, worker, clock, still_open = numbers
            report = HeldHeader(cut, worker, clock, bool(still_open), digest=3 * clock, epoch=cut)
            holding.hear(f"app{worker % 2}", report, now)
            if twin.current(now)[0] == cut:
                twin.log.append((what, numbers, now))
        else:
            holding.release(numbers[0])
            twin.log.append((what, numbers, now))
        for cut in (1, 2, 3):
            assert holding.held(cut, now) == twin.held(cut, now)
        hold = holding.tells("app0", now)
        assert (0 if hold is None else hold.cut) == twin.current(now)[0]


def test_an_open_round_delays_only_workers_of_its_application() -> None:
    holding = CutHold()
    assert holding.begin(1, 5.0, 0.0)
    assert not holding.hear("a", HeldHeader(1, 5, 8), 1.0)
    assert not holding.hear("b", HeldHeader(1, 7, 3), 1.0)
    assert holding.hear("a", HeldHeader(1, 6, 9, open=True), 1.0)
    assert holding.held(1, 1.0) == {7: WorkerHeld(3, 0, 0)}
    assert holding.tells("a", 1.0) == HoldHeader(1, 4000, 9)
    assert holding.tells("b", 1.0) == HoldHeader(1, 4000, 0)
    assert not holding.hear("a", HeldHeader(1, 6, 9), 2.0)
    holding.hear("a", HeldHeader(1, 5, 9), 2.0)
    holding.hear("a", HeldHeader(1, 8, 0, apart=True), 2.0)
    clocks = {worker: report.clock for worker, report in holding.held(1, 2.0).items()}
    assert clocks == {5: 9, 6: 9, 7: 3, 8: 0}


# ----------------------------------------------------------------------------------------------------- what is noted


def test_only_the_newest_cut_is_noted_and_a_late_one_changes_nothing() -> None:
    cuts, notes, rounds, shards = PassedCuts(P), CutNotes(), Rounds(P), ShardLedger(P)
    column = np.array([WORKER]), np.array([3 << 16])

    def apply(number: int, ranges: list[int], writer: str) -> list[int]:
        first: list[int] = cuts.passed(np.array(ranges), number)[0].tolist()
        for r in first:
            notes.note(CutMark(number, 0, writer, 1, ""), r, 7, column, rounds, shards, {})
        return first

    assert apply(1, [0, 1, 2], "s0") == [0, 1, 2]
    assert apply(1, [2, 3], "s1") == [3]
    assert {r for r, _ in notes.by(1, "s0", 1)} == {0, 1, 2}
    assert list(by_column(notes.by(1, "s0", 1)).values()) == [[0, 1, 2]]
    assert apply(2, [0], "s0") == [0]
    assert list(notes.by(1, "s0", 1)) == []
    assert apply(1, [0, 4], "s0") == [4]  # a range that an older head has cut late
    assert {r for r, _ in notes.by(2, "s0", 1)} == {0}
    notes.erase(np.array([0]))
    assert list(notes.by(2, "s0", 1)) == []
    assert cuts.newest.tolist() == [2, 1, 1, 1, 1, 0, 0, 0]
    assert apply(2, [0], "s1") == []


def test_rounds_and_shards_are_noted_at_their_home_range() -> None:
    notes, rounds, shards = CutNotes(), Rounds(2), ShardLedger(2)
    home = group_range("a", 2)
    rounds.enter("a", 1, [WORKER, 6])
    rounds.decide("a", 1, [WORKER, 6])

    tables = {1: Table(TableSpec("t", 2, Accumulate()), 1, 2)}
    key = next(key for key in range(99) if tables[1].ranges_of(np.array([key]))[0] == home)
    block = Block(1, np.array([key]), np.ones((1, 2), np.float32), np.empty(0, np.float32))
    rounds.close("a", 1, [WORKER, 6], 2, np.array([0, 1]), tables)
    rounds.keep("a", 2, 6, np.array([0, 1]), [block])
    assert rounds.retained_in(1 - home, tables) == []  # what it has no rows of it does not keep
    found = shards._open("a", "train", ShardSpec(100, 10, 1, None))
    assert found is not None
    found.hand_out(WORKER, 1)
    clocks, records = (np.array([WORKER]), np.array([1 << 16])), [(WORKER, StepRecord(1, 0, b"\1" + bytes(7)))]
    notes.note(CutMark(1, 0, "s0", 1, ""), home, 3, clocks, rounds, shards, tables, records)
    ((_, noted),) = notes.by(1, "s0", 1)
    assert noted.column.clocks() == {WORKER: 1 << 16}
    assert (noted.column.closed, noted.column.retained) == ((("a", 1),), (("a", 2, 6),))
    assert noted.home is not None
    assert noted.home["groups"][0]["decided"] == 1
    assert noted.home["shards"][0]["doing"] == [[WORKER, 0, 0, 0, 0]]
    taken = CutTaken((home,), noted.column.clocks(), dict(noted.column.closed), noted.column.retained)
    file = WrittenFile("000001/t/s0-1.000.safetensors", 10, 8, 2, "ab", 3, (0, 1))
    state = CutState(1, 2, 3, [taken], {home: noted.home}, noted.records)
    assert state.records == records
    assert read_state(write_state(state)) == state
    for written in (CutWritten(1, 2, Writing(1, [file], "no")), CutWritten(1, 0, None)):
        assert read_written(write_written(written)) == written


# ----------------------------------------------------------------------------------------------- servers in one loop


class Hook:
    """Records what each replica reports as a cut passes."""

    def __init__(self, server: Server) -> None:
        self.seen: list[tuple[int, int, CutMark]] = []
        server.executor.cut_passed = self.passed

    def passed(self, ranges: np.ndarray, seqs: np.ndarray, mark: CutMark, inside: object) -> None:
        self.seen += [(r, seq, mark) for r, seq in zip(ranges.tolist(), seqs.tolist(), strict=True)]


async def two(group: Group) -> None:
    for name in ("s0", "s1"):
        await group.start(name)
    group.adopt(group.make_view(lambda r: ["s0", "s1"] if r % 2 else ["s1", "s0"]))


async def three(group: Group) -> dict[str, Hook]:
    hooks = {name: Hook(await group.start(name)) for name in ("s0", "s1", "s2")}
    group.adopt(group.make_view(lambda r: ["s0", "s1", "s2"] if r % 2 else ["s1", "s2", "s0"]))
    return hooks


def test_every_replica_passes_a_cut_once_at_the_same_place_in_its_log(run: Run) -> None:
    async def test(group: Group) -> None:
        hooks = await three(group)
        assert group.view is not None
        workers = {name: await group.connect(name) for name in ("s0", "s1")}
        for clock in range(1, 8):
            for name, worker in workers.items():
                pushed = worker.push(group.view, name, clock, range(100), 1.0)
                if clock == 5 and name == "s0":
                    taken = asyncio.ensure_future(group.servers["s0"].admin.cuts.take(1, 0, "file:///x"))
                await pushed
        assert await taken
        assert await group.servers["s1"].admin.cuts.take(1, 0, "file:///x")
        assert await group.servers["s0"].admin.cuts.take(1, 0, "file:///x")  # again: nothing is left to cut
        for hook in hooks.values():
            assert sorted(hook.seen) == sorted(hooks["s0"].seen)
            assert sorted(r for r, _, _ in hook.seen) == list(range(RANGES))
        noted = [server.executor.cuts.noted for server in group.servers.values()]
        assert noted[0] == noted[1] == noted[2]
        state = group.servers["s1"].admin.cuts.state(1)
        assert {r for one in state.taken for r in one.ranges} == {r for r in range(RANGES) if not r % 2}
        assert [dict(one.clocks) for one in state.taken] == [{WORKER: 7 << 16}]
        assert state.newest == 1

    run(test)


def test_a_request_waiting_for_written_files_is_answered_at_once(run: Run, tmp_path: Path) -> None:
    async def test(group: Group) -> None:
        await two(group)
        assert group.view is not None
        worker = await group.connect("s0")
        await worker.push(group.view, "s0", 1, range(100), 1.0)
        server = group.servers["s0"]
        assert await server.admin.cuts.written(1, 60.0) == (1, 0, None)
        assert await server.admin.cuts.take(1, 0, tmp_path.as_uri())
        writer, server.checkpoints._row_writer = server.checkpoints._row_writer, _Stuck()
        assert (await server.admin.cuts.written(1, 0.01)).writing == (RANGES // 2 - 1, [], "")
        for arguments in server.checkpoints._row_writer.put_by:
            writer.put(*arguments)
        answers = await asyncio.gather(*(server.admin.cuts.written(1, 60.0) for _ in range(2)))
        for incarnation, ranges, writing in answers:
            assert (incarnation, ranges) == (1, RANGES // 2)
            assert writing is not None
            assert (writing.ranges_done, writing.failed) == (ranges, "")
            assert all((tmp_path / "000001" / file.path).stat().st_size == file.bytes for file in writing.files)
            assert sum(file.rows for file in writing.files) > 0
        assert not server.checkpoints._waiters
        waits = asyncio.ensure_future(server.admin.cuts.written(1, 60.0))
        assert await waits == answers[0]
        writer.close()

    run(test)


class _Stuck:
    """Keeps what is to be written."""

    def __init__(self) -> None:
        self.put_by: list[tuple[Any, ...]] = []

    def put(self, *arguments: Any) -> None:
        self.put_by.append(arguments)

    def close(self) -> None:
        pass


def test_a_range_that_moves_takes_its_cut_along(run: Run) -> None:
    async def test(group: Group) -> None:
        await three(group)
        assert group.view is not None
        worker = await group.connect("s0")
        await worker.push(group.view, "s0", 1, range(100), 1.0)
        for name in ("s0", "s1"):
            assert await group.servers[name].admin.cuts.take(4, 0, "")
        await group.start("s3")
        group.adopt(group.make_view(lambda r: ["s0", "s1"], lambda r: "s3"))
        joiner = group.servers["s3"].store.cuts
        await until(lambda: (joiner.newest == 4).all())
        tail = group.servers["s1"]
        await until(lambda: len(tail.leaders._connections) == 0 and tail.replica.waiting.all())
        group.adopt(group.make_view(lambda r: ["s3", "s0"]))
        new = Hook(group.servers["s3"])
        assert await group.servers["s3"].admin.cuts.take(4, 0, "")
        assert new.seen == []
        assert group.servers["s3"].admin.cuts.state(4).taken == []
        assert await group.servers["s3"].admin.cuts.take(5, 4, "")
        assert sorted(r for r, _, _ in new.seen) == list(range(RANGES))

    run(test)


def test_a_cut_that_waited_notes_the_clocks_of_its_place_in_the_log(run: Run) -> None:
    """All that waited for a view is let in at once: the clocks must be those of the cut's place, not of the end."""

    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["s0", "s1"]))
        head, view = group.servers["s0"], group.view
        assert view is not None
        workers = await group.connect("s0")
        await workers.push(view, "s0", 1, range(50), 1.0)
        head.replica.core.neighbours.full.add(head.replica.core.neighbours.slot(group.servers["s1"].member))
        head.replica.core.congested = True
        cut = asyncio.ensure_future(head.admin.cuts.take(1, 0, ""))
        await until(lambda: head.replica.parked == 1)
        later = workers.push(view, "s0", 2, range(50), 1.0)
        await until(lambda: head.replica.parked == 2)
        head.replica.core.neighbours.full.clear()
        head.replica.core.congested = False
        head.executor.perform(head.replica.go_on)
        assert await cut
        await later
        for server in group.servers.values():
            found = {tuple(one.column.clocks().items()) for one in server.executor.cuts.noted.values()}
            assert found == {((WORKER, 1 << 16),)}

    run(test)


def test_workers_that_connect_during_a_cut_hold_until_the_release(run: Run) -> None:
    async def test(group: Group) -> None:
        (second,) = group.enrol(1)
        server = await group.start("s0")
        group.adopt(group.make_view(lambda r: ["s0"]))
        cuts = server.admin.cuts
        early = await group.connect("s0")
        assert cuts.hold(3, 50.0)
        assert cuts.hold(3, 50.0)  # again: nobody is told twice
        assert not cuts.hold(2, 50.0)
        host, _, port = group.infos["s0"].address.rpartition(":")
        late = Worker(*await asyncio.open_connection(host, int(port)))
        group.workers.append(late)
        hello = {"cluster": "c", "worker": second, "name": f"w{second}", "app": "default"}
        late.writer.write(json_frame(Kind.HELLO, hello))
        await until(lambda: len(late.unsolicited) == 2)  # else the release may be over before it is heard
        early.writer.write(HeldHeader(3, WORKER, 8, digest=5, epoch=1).header().pack())
        await until(lambda: cuts.held(3))
        assert cuts.held(3) == {WORKER: WorkerHeld(8, 1, 5)}
        cuts.release(3)
        await until(lambda: len(late.unsolicited) == 3)
        welcome, hold, release = late.unsolicited
        assert [welcome.kind, hold.kind, release.kind] == [Kind.WELCOME, Kind.HOLD, Kind.RELEASE]
        assert HoldHeader.of(hold).cut == 3
        assert 0 < HoldHeader.of(hold).left_ms <= 50_000
        assert ReleaseHeader.of(release) == ReleaseHeader(3)
        assert cuts.held(3) == {}
        assert not cuts.hold(3, 50.0)
        await until(lambda: len(early.unsolicited) == 3)
        assert [header.kind for header in early.unsolicited] == [Kind.WELCOME, Kind.HOLD, Kind.RELEASE]

    run(test)


def test_workers_that_connect_after_a_release_hear_of_it() -> None:
    """They may have been told to hold on a connection that has ended since."""
    hold = CutHold()

    def seen() -> int:
        return hold.released

    assert seen() == 0
    hold.begin(3, 10.0, 100.0)
    assert seen() == 0
    hold.release(3)
    assert seen() == 3
    hold.begin(4, 10.0, 101.0)
    assert seen() == 0  # nor when its time is over: who holds knows that time


def test_a_worker_on_a_new_connection_goes_on_after_a_release_that_it_missed(run: Run) -> None:
    async def test(group: Group) -> None:
        server = await group.start("s0")
        group.adopt(group.make_view(lambda r: ["s0"]))
        cuts = server.admin.cuts
        assert cuts.hold(3, 50.0)
        cuts.release(3)
        worker = await group.connect("s0")
        await until(lambda: len(worker.unsolicited) >= 2)
        welcome, release = worker.unsolicited[:2]
        assert [welcome.kind, release.kind] == [Kind.WELCOME, Kind.RELEASE]
        assert ReleaseHeader.of(release) == ReleaseHeader(3)

    run(test)


@pytest.mark.parametrize("held", [HeldHeader(3, WORKER + 1, 8), HeldHeader(3, WORKER, 1 << 60)])
def test_a_forged_hold_report_ends_its_connection(run: Run, held: HeldHeader) -> None:
    async def test(group: Group) -> None:
        server = await group.start("s0")
        group.adopt(group.make_view(lambda r: ["s0"]))
        worker = await group.connect("s0")
        assert server.admin.cuts.hold(3, 5.0)
        worker.writer.write(held.header().pack())
        await until(lambda: worker.refused)
        assert server.admin.cuts.held(3) == {}

    run(test)
