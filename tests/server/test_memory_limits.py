"""Servers near their memory limit refuse new rows along the whole chain; all else goes on."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, replace

import numpy as np
import pytest

from coordinator.core.sizing import fill_mark, rows_mark
from coordinator.core.view import View
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import MinCount
from elasticps.model.spec import TableSpec
from elasticps.server.core.headroom import REPORT_LOOKS, ServerMemory
from elasticps.server.core.requests import RequestError, RequestTicket
from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.roles import memory_limit
from elasticps.server.server import Server
from elasticps.store.index import GROWN_BYTES
from elasticps.system.memory import Reading
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import Header, Kind, json_body
from elasticps.wire.headers import PushHeader
from elasticps.wire.refusals import decode_refused
from replication.progress import before_part
from tests.server import conftest
from tests.server.conftest import DIM, RANGES, TABLE, WORKER, Answer, Group, Run, Worker, until

LIMIT = 1 << 30
KEYS = list(range(200))
MORE = list(range(200, 400))


@dataclass
class Gauge:
    """The memory readings of a server."""

    used: int = 100 << 20
    available: int = LIMIT

    def read(self) -> Reading:
        return Reading(self.used, self.available)


async def chain(group: Group, names: str) -> dict[str, Gauge]:
    """Servers under one view in which every chain is `names`, each with its own gauge."""
    gauges = {name: Gauge() for name in names}
    for name, gauge in gauges.items():
        await group.start(name, memory=ServerMemory(LIMIT, gauge.read))
    group.adopt(group.make_view(lambda r: list(names)))
    await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
    return gauges


async def begin(group: Group, names: str, compiled: bool = True) -> tuple[dict[str, Gauge], Worker, View]:
    """A chain with one worker at its head, whose frames compiled code takes, or Python; and the view."""
    gauges = await chain(group, names)
    for server in group.servers.values():
        server.fast.h[H_ENABLED] = compiled
    worker = await group.connect(names[0])
    assert group.view is not None
    return gauges, worker, group.view


def test_buffers_fit_above_the_upper_mark() -> None:
    """The log, as much of it again that TLS has made for a successor which does not read, and what is kept aside."""
    assert fill_mark(LIMIT) + 3 * ServerMemory(LIMIT).share(LIMIT) <= LIMIT


def look(group: Group) -> None:
    for server in group.servers.values():
        server.memory.look()


async def until_full(group: Group, head: str, nbytes: int = 0) -> None:
    """Waits until the head knows that a server behind it has no more than so much headroom."""
    look(group)
    await until(lambda: group.servers[head].fast.room <= nbytes)


async def code(answer: Answer) -> str:
    header, body = await asyncio.wait_for(answer, 10)
    return "ok" if header.kind == Kind.OK else str(json_body(body)["code"])


def digests(server: Server) -> list[int]:
    table = server.store.tables[TABLE]
    return [table.digest_range(r) for r in range(RANGES)]


def values(group: Group, keys: list[int]) -> list[float]:
    """The value of all weights of these rows at each server."""
    found = []
    for server in group.servers.values():
        out = np.empty((len(keys), DIM), np.float32)
        server.store.tables[TABLE].gather(np.array(keys), out)
        assert (out == out[0, 0]).all()
        found.append(float(out[0, 0]))
    return found


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_push_adds_no_rows_if_a_server_of_the_chain_is_full(run: Run, who: str, compiled: bool) -> None:
    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "abc", compiled)
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        gauges[who].used = LIMIT
        look(group)  # b hears of c, and then a of b
        await until(lambda: who == "a" or group.servers["b"].headroom.least.nbytes < 0 or who == "b")
        await until_full(group, "a")

        header, body = await asyncio.wait_for(worker.push(view, "a", 2, [*KEYS, *MORE], 1.0), 10)
        refusal = json_body(body)
        assert header.kind == Kind.ERROR
        assert (refusal["code"], refusal["server"], refusal["table"]) == ("memory", who, "t")
        assert refusal["bytes"] >= len(MORE) * 4 * DIM
        assert f"server {who} uses" in refusal["message"]
        assert "scale" in refusal["message"]
        assert {table: sorted(keys) for table, keys in refusal["rows"].items()} == {str(TABLE): MORE}
        # It ticked without the new rows: those that are there are updated, the next step follows, and all replicas are
        # the same.
        assert values(group, KEYS) == [2.0] * 3
        assert await code(worker.push(view, "a", 3, KEYS, 1.0)) == "ok"
        tables = [server.store.tables[TABLE] for server in group.servers.values()]
        assert [table.rows for table in tables] == [len(KEYS)] * 3
        assert digests(group.servers["a"]) == digests(group.servers["b"]) == digests(group.servers["c"])

        gauges[who].used = 0
        look(group)
        await until(lambda: group.servers["b"].headroom.least.nbytes > 0)
        look(group)
        await until(lambda: group.servers["a"].headroom.least.nbytes > 0)
        look(group)
        assert await code(worker.push(view, "a", 4, MORE, 1.0)) == "ok"
        assert [table.rows for table in tables] == [len(KEYS) + len(MORE)] * 3
        assert (values(group, KEYS), values(group, MORE)) == ([3.0] * 3, [1.0] * 3)

    run(story)


@pytest.mark.parametrize("compiled", [True, False])
def test_headroom_is_counted_down_between_two_measurements(run: Run, compiled: bool) -> None:
    """Nothing is read or told meanwhile: the head counts what it gives away."""

    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "ab", compiled)
        gauges["b"].used = rows_mark(LIMIT, 2, 3) - 64 * 1024
        await until_full(group, "a", 64 * 1024)
        answers = [worker.push(view, "a", n + 1, range(100 * n, 100 * n + 100), 1.0) for n in range(20)]
        codes = [await code(answer) for answer in answers]
        assert codes[0] == "ok"
        assert "memory" in codes
        assert set(codes[codes.index("memory") :]) == {"memory"}
        table = group.servers["b"].store.tables[TABLE]
        assert table.rows == 100 * codes.index("memory")
        assert 48 * 1024 < table.rows * (table.stride + GROWN_BYTES) <= 64 * 1024

    run(story)


def test_refused_initial_values_make_no_rows(run: Run) -> None:
    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "ab")
        gauges["a"].used = LIMIT
        await until_full(group, "a")
        assert await code(worker.init(view, "a", KEYS, 1.0)) == "memory"
        assert group.servers["a"].store.rows == group.servers["b"].store.rows == 0
        gauges["a"].used = 0
        look(group)
        assert await code(worker.init(view, "a", KEYS, 1.0)) == "ok"
        assert group.servers["a"].store.rows == group.servers["b"].store.rows == len(KEYS)

    run(story)


def test_memory_left_on_the_machine_counts_too(run: Run) -> None:
    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "ab")
        gauges["b"].available = 10 << 20
        await until_full(group, "a")
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "memory"

    run(story)


def test_predecessors_hear_of_ample_room_seldom_and_of_little_room_at_each_look(run: Run) -> None:
    async def story(group: Group) -> None:
        gauges = await chain(group, "ab")
        first, second = (group.servers[name].headroom for name in "ab")

        def reported(looks: int) -> list[bool]:
            found = []
            for _ in range(looks):
                second.look(0)
                found.append(second.report() is not None)
            return found

        assert reported(2 * REPORT_LOOKS) == [True, *[False] * (REPORT_LOOKS - 1)] * 2
        gauges["b"].used += second.mark // 32
        assert reported(3) == [True, False, False]
        gauges["b"].used = second.mark - second.mark // 8
        assert reported(3) == [True, True, True]
        first.look(0)
        assert first.report() is None  # it has no predecessor

    run(story)


def test_dropped_rows_give_headroom(run: Run) -> None:
    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "a")
        server = group.servers["a"]
        assert await code(worker.push(view, "a", 1, range(20_000), 1.0)) == "ok"
        table = server.store.tables[TABLE]
        gauges["a"].used = server.headroom.mark
        server.memory.look()
        assert server.fast.room == 0
        table.drop_range(0)
        server.memory.look()
        assert server.fast.room > table.stride * 20_000 // RANGES // 2

    run(story)


def test_memory_of_moved_ranges_is_returned(run: Run) -> None:
    """What one table had is no room for another one, and a server would go beyond its limit."""

    async def test(group: Group) -> None:
        await chain(group, "a")
        server = group.servers["a"]
        table = server.store.create(TableSpec("wide", 128, Accumulate()), 50)
        table.put(np.arange(40_000), np.ones((40_000, 128), np.float32))
        for r in range(RANGES - 3):
            table.drop_range(r)
        before, dropped = server.store.nbytes, table.reusable_bytes
        assert dropped > 12 << 20
        for _ in range(30):
            look(group)
        assert table.reusable_bytes < 4 << 20
        assert server.store.nbytes < before - (8 << 20)

    run(test)


def test_memory_freed_by_one_table_is_hardly_headroom_for_others(run: Run) -> None:
    """Whose rows take new memory: at 512 MiB servers came to 620, after ranges had moved and other tables grew."""

    async def test(group: Group) -> None:
        gauge = (await chain(group, "a"))["a"]
        server = group.servers["a"]
        table = server.store.create(TableSpec("wide", 128, Accumulate()), 50)
        table.put(np.arange(80_000), np.ones((80_000, 128), np.float32))
        for r in range(RANGES - 1):
            table.drop_range(r)
        assert table.reusable_bytes > 24 << 20
        gauge.used = server.headroom.mark
        server.headroom.look(server.store.reusable_bytes)
        assert 0 < server.headroom.least.nbytes <= LIMIT // 64

    run(test)


def test_heads_share_the_headroom_of_a_tail(run: Run) -> None:
    """By the ranges that they have of what the full server holds: a has a quarter of c's ranges, and so has b."""

    async def story(group: Group) -> None:
        gauges = {name: Gauge() for name in "abc"}
        for name, gauge in gauges.items():
            await group.start(name, memory=ServerMemory(LIMIT, gauge.read))
        group.adopt(group.make_view(lambda r: (["a", "c"], ["b", "c"], ["c"], ["c"])[r % 4]))
        await until(lambda: all(not server.links.suspects() for server in group.servers.values()))
        gauges["c"].used = rows_mark(LIMIT, 3, 3) - 4000
        look(group)
        await until(lambda: [group.servers[name].fast.room for name in "abc"] == [1000, 1000, 4000])

    run(story)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_successor_of_a_refusing_head_gives_the_same_refusal(run: Run, compiled: bool) -> None:
    """The worker may have heard nothing of it: its head, or the connection, may have been gone before."""

    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "abc", compiled)
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        gauges["a"].used = LIMIT
        await until_full(group, "a")
        assert await code(worker.push(view, "a", 2, [*KEYS, *MORE], 1.0)) == "memory"
        assert await code(worker.push(view, "a", 3, KEYS, 1.0)) == "ok"
        again = await group.connect("a", create=False)
        assert await code(again.push(view, "a", 2, [*KEYS, *MORE], 1.0)) == "memory"
        gauges["a"].used = 0
        look(group)
        assert await code(again.push(view, "a", 2, [*KEYS, *MORE], 1.0)) == "memory", "it is not applied now"
        assert await refused(again, view.epoch) == [2]
        second = await group.connect("b", create=False)
        group.stop("a")
        view = group.make_view(lambda r: ["b", "c"])
        group.adopt(view)
        await until(lambda: second.views)
        assert await refused(second, view.epoch) == [2]
        assert await code(second.push(view, "b", 2, [*KEYS, *MORE], 1.0)) == "memory"
        assert await code(second.push(view, "b", 3, KEYS, 1.0)) == "ok"
        assert await code(second.push(view, "b", 4, [*KEYS, *MORE], 1.0)) == "ok"
        assert digests(group.servers["b"]) == digests(group.servers["c"])

    run(story)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_last_part_of_a_step_is_answered_with_refusals_of_all_parts(run: Run, compiled: bool) -> None:
    """The head that was to say so of the first part is gone, and it is not asked for that again."""

    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "abc", compiled)
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        gauges["a"].used = LIMIT
        await until_full(group, "a")
        first = PushHeader(0, view.epoch, 2, before_part(2, 0), 1, last=False).header(0)
        assert await code(worker.ask(first, worker._block(view, "a", [*KEYS[:50], *MORE], 1.0))) == "memory"
        second = await group.connect("b", create=False)
        group.stop("a")
        view = group.make_view(lambda r: ["b", "c"])
        group.adopt(view)
        await until(lambda: second.views)
        assert await refused(second, view.epoch) == [], "the step is not committed yet"
        last = PushHeader(0, view.epoch, 2, before_part(2, 1), 1, 1).header(0)
        header, body = await asyncio.wait_for(second.ask(last, second._block(view, "b", KEYS[50:], 1.0)), 10)
        assert header.kind == Kind.ERROR
        assert sorted(json_body(body)["rows"][str(TABLE)]) == MORE
        assert values(group, KEYS) == [2.0] * 2
        next_one = last._replace(clock=3, first=0, part=0)
        assert await code(second.ask(next_one, second._block(view, "b", KEYS, 1.0))) == "ok"
        assert digests(group.servers["b"]) == digests(group.servers["c"])

    run(story)


async def refused(worker: Worker, epoch: int) -> list[int]:
    """The steps that a head says to be without something."""
    header, body = await worker.ask(Header(Kind.GET_CLOCKS, epoch=epoch, worker=WORKER))
    steps = ClocksFrame.of(header, np.frombuffer(body, np.uint8), RANGES).refused
    refused = decode_refused(steps, RANGES)
    assert all((why["code"], why["server"], why["table"]) == ("memory", "a", "t") for _, why, _ in refused)
    assert all(sorted(rows.keys[TABLE].tolist()) == MORE for _, _, rows in refused)
    return [clock for clock, _, _ in refused]


def test_the_rows_of_a_refused_push_are_freed(run: Run) -> None:
    """Nor what it brought: nothing of it waits for the collector, which seldom comes by."""

    def held() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (RequestTicket, RequestError)]

    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "ab")
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        gauges["a"].used = LIMIT
        await until_full(group, "a")
        gc.collect()
        before = len(held())  # of other tests
        gc.disable()
        try:
            for clock in range(2, 12):
                assert await code(worker.push(view, "a", clock, [*KEYS, *MORE], 1.0)) == "memory"
            assert await code(worker.push(view, "a", 12, KEYS, 1.0)) == "ok"  # all replicas have the others, too
            retained = held()
        finally:
            gc.enable()
        assert len(retained) - before <= 2

    run(story)


def share(worker: Worker, view: View, clock: int, first: bool = False) -> Answer:
    """Pushes to all rows of KEYS, for a synchronous round. first: the worker has pushed nothing before."""
    header = PushHeader(0, view.epoch, clock, 0 if first else before_part(clock, 0), 1, round=True).header(0)
    return worker.ask(header, worker._block(view, "a", KEYS, 1.0))


def test_shares_of_a_round_take_bounded_memory_of_a_full_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no new rows, and were taken without an end, past the limit."""

    async def story(group: Group) -> None:
        (second,) = group.enrol(1)
        gauges, first, view = await begin(group, "ab")
        other = await group.connect("a", worker=second, base=1)
        rounds = [group.servers[name].executor.rounds for name in "ab"]
        assert await code(first.push(view, "a", 1, KEYS, 1.0)) == "ok"
        assert await code(share(first, view, 2)) == "ok"
        one = rounds[0].nbytes
        assert one >= len(KEYS) * (8 + 4 * DIM)
        monkeypatch.setattr(memory_limit, "SHARES_BYTES", one * 3 // 2)
        assert await code(share(other, view, 2, first=True)) == "ok"  # there is room
        await group.close_round(2, [first.id])
        assert [each.nbytes for each in rounds] == [0, 0]

        gauges["b"].used = LIMIT
        await until_full(group, "a")
        assert await code(share(first, view, 3)) == "ok"  # rounds go on
        before = values(group, KEYS)
        header, body = await asyncio.wait_for(share(other, view, 3), 10)
        refusal = json_body(body)
        assert (header.kind, refusal["code"], refusal["server"], refusal["bytes"]) == (Kind.ERROR, "memory", "b", one)
        assert "kept until their round closes" in refusal["message"]
        assert sorted(refusal["rows"][str(TABLE)]) == KEYS
        assert [each.nbytes for each in rounds] == [one, one]
        await group.close_round(3, [first.id])
        assert values(group, KEYS) == [value + 1 for value in before]  # that of the first, alone in the round
        assert await code(share(other, view, 4)) == "ok"
        assert digests(group.servers["a"]) == digests(group.servers["b"])

    run(story)


def test_a_worker_cannot_push_for_many_open_rounds(run: Run) -> None:
    """What is kept for rounds that do not close would grow without an end."""

    async def story(group: Group) -> None:
        _, worker, view = await begin(group, "ab")
        codes = [await code(share(worker, view, clock)) for clock in range(1, 6)]
        assert codes == ["ok", "ok", "ahead", "ahead", "ahead"]
        for server in group.servers.values():
            retained = [
                each for r in range(RANGES) for each in server.executor.rounds.retained_in(r, server.store.tables)
            ]
            assert {clock for _, clock, _ in retained} == {1, 2}
        await group.close_round(1, [worker.id])
        assert await code(share(worker, view, 6)) == "ok"

    run(story)


def test_a_share_on_a_full_server_loses_only_its_new_rows(run: Run) -> None:
    async def story(group: Group) -> None:
        gauges, worker, view = await begin(group, "ab")
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        gauges["b"].used = LIMIT
        await until_full(group, "a")
        header = PushHeader(0, view.epoch, 2, before_part(2, 0), 1, round=True).header(0)
        header, body = await asyncio.wait_for(worker.ask(header, worker._block(view, "a", [*KEYS, *MORE], 1.0)), 10)
        assert sorted(json_body(body)["rows"][str(TABLE)]) == MORE
        await group.close_round(2, [worker.id])
        assert values(group, KEYS) == [2.0] * 2
        assert [server.store.rows for server in group.servers.values()] == [len(KEYS)] * 2

    run(story)


@pytest.mark.parametrize("compiled", [True, False])
def test_keys_that_only_wait_for_a_row_need_no_room_for_one(
    run: Run, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for their entries is enough; with the push that makes the rows it is not."""
    spec = replace(conftest.SPEC, admission=MinCount(2))
    monkeypatch.setattr(conftest, "SPEC", spec)

    async def story(group: Group) -> None:
        _, worker, view = await begin(group, "a", compiled)
        server = group.servers["a"]
        server.fast.room = len(KEYS) * GROWN_BYTES
        assert await code(worker.push(view, "a", 1, KEYS, 1.0)) == "ok"
        assert server.fast.room == 0
        server.fast.room = len(KEYS) * GROWN_BYTES
        assert await code(worker.push(view, "a", 2, KEYS, 1.0)) == "memory"
        assert server.store.tables[TABLE].rows == 0
        server.fast.room = len(KEYS) * server.store.tables[TABLE].row_bytes
        assert await code(worker.push(view, "a", 3, KEYS, 1.0)) == "ok"
        assert server.store.tables[TABLE].rows == len(KEYS)

    run(story)


@pytest.mark.parametrize("compiled", [True, False])
def test_keys_that_wait_for_a_row_take_room(run: Run, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "SPEC", replace(conftest.SPEC, admission=MinCount(3)))

    async def story(group: Group) -> None:
        _, worker, view = await begin(group, "a", compiled)
        server = group.servers["a"]
        for clock in (1, 2):  # counted again they take none
            server.fast.room = 1 << 30
            assert await code(worker.push(view, "a", clock, KEYS, 1.0)) == "ok"
            assert (1 << 30) - server.fast.room == (len(KEYS) * GROWN_BYTES if clock == 1 else 0)

    run(story)
