"""Pulls over real sockets: every row of every answer is compared with what the table holds for that key."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticps.model.optimizers import SGD
from elasticps.model.spec import Normal, TableSpec
from elasticps.store import initial_rows
from elasticps.store.codec import digests
from elasticps.wire.frames import HEADER_BYTES, LAST, Header, Kind, json_frame, unpack_header
from elasticps.wire.headers import ListKeysHeader, PullHeader
from tests.server.conftest import TABLE, Group, Run, Worker

WIDE, DIM = 8, 256
INIT = Normal(std=1.0, seed=3)


async def create_wide(worker: Worker, epoch: int) -> None:
    spec = TableSpec("wide", DIM, SGD(lr=0.1), INIT).to_json()
    body = json_frame(Kind.CREATE, {"id": WIDE, "spec": spec})[HEADER_BYTES:]
    header, _ = await worker.ask(Header(Kind.CREATE, epoch=epoch), body)
    assert header.kind == Kind.OK


async def read_rows(reader: asyncio.StreamReader, requests: int) -> dict[int, NDArray[np.float32]]:
    """The whole answers of so many pulls."""
    chunks: dict[int, list[bytes]] = {}
    left = requests
    while left:
        raw = await asyncio.wait_for(reader.readexactly(HEADER_BYTES), 60)
        header = unpack_header(raw)
        content = await reader.readexactly(header.body)
        assert header.kind == Kind.ROWS, content
        chunks.setdefault(header.request, []).append(content)
        left -= header.flags & LAST
    return {request: np.frombuffer(b"".join(parts), np.float32).reshape(-1, DIM) for request, parts in chunks.items()}


def test_large_waiting_answers_have_the_requested_rows(run: Run) -> None:
    async def story(group: Group) -> None:
        await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        worker = await group.connect("a", create=False)
        await create_wide(worker, view.epoch)
        worker.task.cancel()  # from here on nothing is read until all is asked
        await asyncio.gather(worker.task, return_exceptions=True)
        requests = {100 + i: np.arange(4_000, dtype=np.int64) * 7 + i * 1_000_000 for i in range(6)}
        for request, keys in requests.items():
            header = Header(Kind.PULL, 0, keys.nbytes, request, view.epoch, table=WIDE, items=len(keys))
            worker.writer.write(header.pack() + keys.tobytes())
        answers = await read_rows(worker.reader, len(requests))
        for request, keys in requests.items():
            np.testing.assert_array_equal(answers[request], initial_rows(INIT, keys, DIM))

    run(story)


def test_keys_are_listed_only_by_their_tail(run: Run) -> None:
    async def story(group: Group) -> None:
        for name in "ab":
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"] if r % 2 else ["b", "a"])
        group.adopt(view)
        worker = await group.connect("a")
        for r in range(view.ranges):
            ask = ListKeysHeader(TABLE, r, 0, 10, epoch=view.epoch).header()
            header, body = await worker.ask(ask)
            assert header.kind == (Kind.ERROR if r % 2 else Kind.KEYS), body
        for wrong in (ListKeysHeader(99, 0, 0, 10, epoch=view.epoch), ListKeysHeader(99, 0, 0, 0, epoch=view.epoch)):
            header, body = await worker.ask(wrong.header())
            assert b"unknown-table" in body
        with pytest.raises(asyncio.IncompleteReadError):
            await worker.ask(ListKeysHeader(TABLE, view.ranges, 0, 10, epoch=view.epoch).header())
        assert "there is no range 16" in worker.refused

    run(story)


def test_digests_match_the_rows_of_a_pull(run: Run) -> None:
    async def story(group: Group) -> None:
        await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        worker = await group.connect("a")
        keys = np.arange(9)
        await worker.push(view, "a", 1, keys[3:].tolist(), 2.5)
        answers = []
        for digests_ in (False, True):
            ask = PullHeader(0, view.epoch, 1, 0, TABLE, len(keys), digests=digests_).header()
            header, body = await asyncio.wait_for(worker.ask(ask, keys.tobytes()), 10)
            assert (header.kind, header.items) == (Kind.ROWS, len(keys))
            answers.append(body)
        rows = np.frombuffer(answers[0], np.float32, count=len(keys) * 3).reshape(len(keys), 3)
        assert rows[:, 0].tolist() == [0.0] * 3 + [2.5] * 6
        assert np.frombuffer(answers[1], np.uint64).tolist() == digests(rows).tolist()
        assert len({*digests(rows).tolist()}) == 2

    run(story)


def test_slots_of_a_table_without_any_are_an_empty_answer(run: Run) -> None:
    async def story(group: Group) -> None:
        await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        worker = await group.connect("a", create=False)
        await create_wide(worker, view.epoch)
        keys = np.arange(5)
        ask = PullHeader(0, view.epoch, 0, 0, WIDE, len(keys), slots=True).header()
        header, body = await asyncio.wait_for(worker.ask(ask, keys.tobytes()), 10)
        assert (header.kind, header.items, body) == (Kind.ROWS, len(keys), b"")

    run(story)
