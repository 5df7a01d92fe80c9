"""Replication over real sockets: acknowledged pushes are on every replica and survive failures."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from elasticps.server.fast.layout import H_ENABLED, H_FORWARDS
from elasticps.server.server import Server
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import Header, Kind, json_body
from elasticps.wire.headers import PushHeader
from tests.server.conftest import DIM, RANGES, TABLE, WORKER, Group, Run, until

KEYS = list(range(500))


def values(server: Server, keys: list[int]) -> np.ndarray:
    out = np.empty((len(keys), DIM), np.float32)
    server.store.tables[TABLE].gather(np.array(keys, np.int64), out)
    return out


def same_content(servers: list[Server]) -> bool:
    tables = [server.store.tables[TABLE] for server in servers]
    return all(len({table.digest_range(r) for table in tables}) == 1 for r in range(RANGES))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_acknowledged_push_is_applied_on_every_replica(run: Run, count: int) -> None:
    async def test(group: Group) -> None:
        names = [f"s{i}" for i in range(count)]
        for name in names:
            await group.start(name)
        view = group.make_view(lambda r: names)
        group.adopt(view)
        worker = await group.connect("s0")
        for clock in range(1, 20):
            header, _ = await worker.push(view, "s0", clock, KEYS, 1.0)
            assert header.kind == Kind.OK
        assert (values(group.servers[names[-1]], KEYS) == 19).all()
        assert same_content(list(group.servers.values()))
        for name in names[1:]:  # but for the first of a worker nobody has heard of, the usual way
            assert group.servers[name].fast.counter(H_FORWARDS) == 18

    run(test)


def test_the_next_head_goes_on_when_the_head_dies(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1", "s2"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1", "s2"])
        group.adopt(view)
        worker = await group.connect("s0")
        await worker.push(view, "s0", 1, KEYS, 1.0)
        second = await group.connect("s1", create=False)
        group.stop("s0")
        view = group.make_view(lambda r: ["s1", "s2"])
        group.adopt(view)
        await until(lambda: second.views)  # the new head tells its workers
        header, body = await second.ask(Header(Kind.GET_CLOCKS, epoch=view.epoch, worker=WORKER))
        ranges, applied, committed, *_ = ClocksFrame.of(header, np.frombuffer(body, np.uint8), RANGES)
        assert len(ranges) == RANGES
        assert (applied == 1 << 16).all()
        assert (committed == 1 << 16).all()
        header, _ = await second.push(view, "s1", 1, KEYS, 5.0)  # a repeat is answered, not applied
        assert header.kind == Kind.OK
        await second.push(view, "s1", 2, KEYS, 2.0)
        assert (values(group.servers["s2"], KEYS) == 3).all()
        assert same_content(list(group.servers.values()))

    run(test)


def test_a_joining_replica_is_filled_while_pushes_go_on(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        worker = await group.connect("s0")
        keys = list(range(20_000))
        await worker.push(view, "s0", 1, keys, 1.0)
        await group.start("s2")
        view = group.make_view(lambda r: ["s0", "s1"], lambda r: "s2")
        group.adopt(view)
        clock = 1
        while len(group.servers["s1"].replica.levels()) < RANGES:
            clock += 1
            header, _ = await asyncio.wait_for(worker.push(view, "s0", clock, KEYS, 1.0), 10)
            assert header.kind == Kind.OK
        group.stop("s0")
        view = group.make_view(lambda r: ["s1", "s2"])
        group.adopt(view)
        second = await group.connect("s1")
        await asyncio.wait_for(second.push(view, "s1", clock + 1, KEYS, 1.0), 10)
        assert (values(group.servers["s2"], KEYS) == clock + 1).all()
        assert same_content(list(group.servers.values()))

    run(test)


def test_only_workers_make_a_server_busy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills a joiner is no reason to fill it slowly."""
    monkeypatch.setattr("elasticps.server.roles.snapshots.BUSY_S", 3600.0)  # else it may be over before we look

    def busy(server: Server) -> bool:
        return server.last_served.within(3600.0)

    async def test(group: Group) -> None:
        for name in ("s0", "s1", "s2"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        worker = await group.connect("s0")
        for clock in (1, 2, 3):
            await worker.push(view, "s0", clock, KEYS, 1.0)
        head, tail = group.servers["s0"], group.servers["s1"]
        assert busy(head)
        assert not busy(tail)
        group.adopt(group.make_view(lambda r: ["s0", "s1"], lambda r: "s2"))
        await until(lambda: len(tail.replica.levels()) == RANGES)
        assert not busy(tail)

    run(test)


def test_a_push_waits_while_its_successor_is_away_and_commits_without_it(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        worker = await group.connect("s0")
        group.stop("s1")
        pushed = worker.push(view, "s0", 1, KEYS, 1.0)
        await until(lambda: group.servers["s0"].replica.log.nbytes)
        assert not pushed.done()
        group.adopt(group.make_view(lambda r: ["s0"]))
        header, _ = await asyncio.wait_for(pushed, 10)
        assert header.kind == Kind.OK

    run(test)


def test_a_full_log_stops_reading_and_goes_on(run: Run) -> None:
    async def test(group: Group) -> None:
        await group.start("s0", log_budget_bytes=20_000)
        await group.start("s1")
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        worker = await group.connect("s0")
        group.stop("s1")
        answers = [worker.push(view, "s0", clock, KEYS, 1.0) for clock in range(1, 30)]
        await until(lambda: group.servers["s0"].replica.parked)
        assert group.servers["s0"].replica.log.nbytes < 60_000
        await group.start("s1", incarnation=2)
        group.adopt(group.make_view(lambda r: ["s0"], lambda r: "s1"))
        for header, _ in await asyncio.wait_for(asyncio.gather(*answers), 10):
            assert header.kind == Kind.OK
        assert (values(group.servers["s0"], KEYS) == 29).all()

    run(test)


def test_pulls_wait_at_the_tail_for_the_workers_own_pushes(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        head, tail = await group.connect("s0"), await group.connect("s1", create=False)
        keys = np.array([3], np.int64)
        early = tail.ask(Header(Kind.PULL, epoch=1, clock=1, table=TABLE, items=1), keys.tobytes())
        await until(lambda: len(group.servers["s1"].own_steps))
        await head.push(view, "s0", 1, KEYS, 4.0)
        header, body = await asyncio.wait_for(early, 10)
        assert header.kind == Kind.ROWS
        assert np.frombuffer(body[: 4 * DIM], np.float32).tolist() == [4.0] * DIM

    run(test)


def test_keys_out_of_order_are_refused_and_their_step_counts(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1"])
        group.adopt(view)
        worker = await group.connect("s0")
        header = PushHeader(0, 1, 1, 0, 1).header(0)
        keys = np.arange(100, dtype=np.int64)
        from elasticps.wire.frames import block_head

        body = block_head(TABLE, 100, DIM, np.empty(0, np.float32)) + keys.tobytes() + bytes(100 * DIM * 4)
        answer, document = await worker.ask(header, body)
        assert answer.kind == Kind.ERROR
        assert json_body(document)["code"] == "foreign"
        answer, _ = await worker.push(view, "s0", 2, KEYS, 1.0)
        assert answer.kind == Kind.OK
        assert same_content(list(group.servers.values()))

    run(test)


def test_marks_find_equal_digests_on_every_replica(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1", "s2"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0", "s1", "s2"])
        group.adopt(view)
        worker = await group.connect("s0")
        pushes = [worker.push(view, "s0", clock, KEYS, 1.0) for clock in range(1, 30)]
        assert await group.servers["s0"].admin.mark(1)
        await asyncio.gather(*pushes)
        found = [server.admin.marked(1) for server in group.servers.values()]
        assert all(len(f) == RANGES for f in found)
        assert found[0] == found[1] == found[2]
        group.servers["s1"].store.tables[TABLE].apply(
            np.array([1], np.int64), np.ones((1, DIM), np.float32), np.empty(0, np.float32)
        )
        assert await group.servers["s0"].admin.mark(2)
        found = [server.admin.marked(2) for server in group.servers.values()]
        assert found[0] == found[2] != found[1]

    run(test)


def test_a_flood_of_pushes_leaves_the_loop_its_turns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.server.fast.path.TURN_BYTES", 10_000)

    async def test(group: Group) -> None:
        server = await group.start("s0")
        view = group.make_view(lambda r: ["s0"])
        group.adopt(view)
        worker = await group.connect("s0")
        loop, handled = asyncio.get_running_loop(), [0]

        def turn() -> None:
            handled.append(server.executor.counts.count("pushes"))
            loop.call_soon(turn)

        turn()
        many = list(range(5000))
        await asyncio.gather(*[worker.push(view, "s0", clock, many, 1.0) for clock in range(1, 61)])
        assert server.executor.counts.count("pushes") == 60  # frames of 100 kB, all sent at once
        assert max(np.diff(handled)) <= 2

    run(test)


def test_a_pull_of_an_unknown_epoch_is_refused(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["s0"] if r % 2 else ["s1"]))
        worker = await group.connect("s0")
        skipped = group.make_view(lambda r: ["s0"])  # s0 tails every range for a moment, and does not hear of it
        group.adopt(group.make_view(lambda r: ["s0"] if r % 2 else ["s1"]))
        pull = Header(Kind.PULL, epoch=skipped.epoch, table=TABLE, items=1)
        header, body = await worker.ask(pull, np.array([3], np.int64).tobytes())
        assert header.kind == Kind.ERROR
        assert json_body(body)["code"] == "stale-view"

    run(test)


@pytest.mark.parametrize("rows", [1, 100_000], ids=["small", "streamed"])
def test_a_tail_does_not_show_operations_that_its_level_joiner_may_lack(run: Run, rows: int) -> None:
    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        view = group.make_view(lambda r: ["s0"])
        group.adopt(view)
        worker = await group.connect("s0")
        await worker.push(view, "s0", 1, KEYS, 1.0)
        view = group.make_view(lambda r: ["s0"], lambda r: "s1")
        group.adopt(view)
        tail = group.servers["s0"].replica
        await until(lambda: len(tail.levels()) == RANGES)
        joiner = group.servers["s1"]
        joiner.fast.h[H_ENABLED] = 0  # every frame is heard by its replica
        heard = list[Any]()
        receive, joiner.replica.receive = joiner.replica.receive, lambda *a: heard.append(a) or []  # type: ignore[func-returns-value, method-assign, redundant-expr]
        pushed = worker.push(view, "s0", 2, KEYS, 1.0)
        await until(lambda: (tail.seq > tail.acked).any())
        keys = np.array([*KEYS[:1], *range(1000, 1000 + rows - 1)], np.int64)
        pull = worker.ask(Header(Kind.PULL, epoch=view.epoch, clock=2, table=TABLE, items=len(keys)), keys.tobytes())
        settled = worker.ask(Header(Kind.JOIN))  # behind the pull on the same connection
        await settled
        assert not pull.done()
        joiner.replica.receive = receive  # type: ignore[method-assign]
        for arguments in heard:
            joiner.executor.perform(receive, *arguments)
        header, body = await asyncio.wait_for(pull, 10)
        assert header.kind == Kind.ROWS
        assert np.frombuffer(body[: 4 * DIM], np.float32).tolist() == [2.0] * DIM
        await pushed

    run(test)
