"""The slow link of `elasticps bench traffic`, and what its lines say."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import traffic
from benchmarks.relay import BURST_S, CHUNK, Bucket, pass_on, stand_in
from benchmarks.traffic import FilterRun, line_of
from benchmarks.training import FILTERS
from elasticps.model.spec import SGD, TableSpec


def test_a_link_hands_on_every_byte_and_counts_them_each_way() -> None:
    async def scene() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(CHUNK):
                writer.write(data * 2)
                await writer.drain()
            writer.close()

        up, down = Bucket(), Bucket()
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link = await stand_in(f"127.0.0.1:{port}", up, down)
        reader, writer = await asyncio.open_connection(*link.sockets[0].getsockname())
        writer.write(b"ab" * 100_000)
        writer.write_eof()
        received = await reader.read()
        assert len(received) == 400_000
        assert set(received) == set(b"ab")
        assert (up.bytes, down.bytes) == (200_000, 400_000)
        writer.close()
        for each in (link, server):
            each.close()
            await each.wait_closed()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_link_with_a_delay_holds_each_piece_from_when_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        now, slept, sleep = 0.0, [], asyncio.sleep

        async def wait(seconds: float) -> None:
            nonlocal now
            slept.append(seconds)
            now += seconds
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", wait)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)
        got: list[bytes] = []

        class Sink:
            def write(self, data: bytes) -> None:
                got.append(data)

            def write_eof(self) -> None:
                got.append(b"end")

            async def drain(self) -> None: ...

        bucket, source = Bucket(), asyncio.StreamReader()
        bucket.delay_s = 5.0
        source.feed_data(b"one")
        passing = asyncio.create_task(pass_on(bucket, source, Sink()))  # type: ignore[arg-type]
        while not slept:
            await sleep(0)
        source.feed_data(b"two")
        source.feed_eof()
        await passing
        assert got == [b"one", b"two", b"end"]
        assert slept[0] == 5.0
        assert sum(slept) == 10.0  # what came later waits as long

    asyncio.run(scene())


def test_bytes_beyond_the_rate_wait_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        slept = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        bucket = Bucket()
        await bucket.take(1 << 30)
        assert slept == []  # no limit
        bucket.per_s = 1000.0
        await bucket.take(1000)
        await bucket.take(2000)
        assert slept[0] == pytest.approx(1.0 - BURST_S)
        assert 2.9 < slept[1] < 3.0 - BURST_S  # behind the first
        assert bucket.bytes == (1 << 30) + 3000

    asyncio.run(scene())


def test_each_result_is_compared_with_the_same_seed_without_filters() -> None:
    none = [FilterRun(100.0, 100.0, 0.75, {0: 10.0, 100: 1.0}), FilterRun(120.0, 80.0, 0.77, {0: 30.0, 100: 3.0})]
    runs = [
        FilterRun(50.0, 30.0, 0.74, {0: 20.0, 100: 4.0}, (1, 4), (1, 8), 3),
        FilterRun(60.0, 20.0, 0.77, {0: 10.0, 100: 8.0}, (3, 4), (5, 8), 2),
    ]
    line = line_of("dlrm", "int8", runs, none)
    assert (line.up_per_step, line.down_per_step, line.of_none) == (55, 25, 0.4)
    assert (line.up_of_none, line.keys_of_none, line.rows_of_none, line.oldest) == (0.5, 0.5, 0.375, 3)
    assert (line.score, line.lost) == ([0.74, 0.77], 0.005)
    assert line_of("dlrm", "none", none, none).keys_of_none == 1
    assert line.samples_per_s == {0: 15.0, 100: 6.0}


@pytest.mark.parametrize("name", sorted({name for names in traffic.FILTERS.values() for name in names}))
def test_every_kind_of_filters_can_be_had(name: str) -> None:
    push, pull = FILTERS[name]
    TableSpec("t", 16, SGD(0.1), push=push, pull=pull)
