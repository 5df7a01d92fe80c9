"""Reductions over real sockets, computed at tails in slices between other requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from coordinator.core.view import Roster, WorkerInfo
from elasticps.server.core import partial
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.roles import reductions
from elasticps.store import register_reduction
from elasticps.wire.frames import Header, Kind, json_body
from elasticps.wire.headers import PullHeader
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, function_body
from tests.server.conftest import DIM, SPEC, TABLE, WORKER, Answer, Group, Run, Worker, until

KEYS = np.random.default_rng(1).choice(10_000, 400, replace=False)


def ask(worker: Worker, epoch: int, r: int, name: str = "l2", table: int = TABLE, *constants: float) -> Answer:
    body = function_body(name, constants)
    return worker.ask(ReduceHeader(table, r, epoch=epoch).header(len(body)), body)


async def reduce_all(worker: Worker, epoch: int, ranges: int, name: str) -> list[tuple[int, bytes]]:
    found = []
    for r in range(ranges):
        header, body = await asyncio.wait_for(ask(worker, epoch, r, name), 10)
        assert header.kind == Kind.REDUCED, body
        reduced = ReducedHeader.of(header)
        assert reduced.range == r
        found.append((reduced.rows, body))
    return found


def test_every_replica_computes_the_same_bits_and_only_the_tail_answers(run: Run) -> None:
    async def story(group: Group) -> None:
        for name in "ab":
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        at_head, at_tail = await group.connect("a"), await group.connect("b")
        for clock, value in ((1, 0.1), (2, 1e-3)):
            header, _ = await asyncio.wait_for(at_head.push(view, "a", clock, KEYS[::clock].tolist(), value), 10)
            assert header.kind == Kind.OK
        first = {name: await reduce_all(at_tail, view.epoch, view.ranges, name) for name in ("l1", "l2", "nonzero")}
        assert sum(rows for rows, _ in first["l2"]) == len(KEYS)
        total = sum(np.frombuffer(body, np.float64)[0] for rows, body in first["l1"] if rows)
        twin = np.full(len(KEYS), np.float32(0.1))
        twin[::2] += np.float32(1e-3)
        assert total == pytest.approx(DIM * twin.astype(np.float64).sum(), rel=1e-12)
        assert sum(np.frombuffer(body, np.float64)[0] for rows, body in first["nonzero"] if rows) == DIM * len(KEYS)
        header, body = await asyncio.wait_for(ask(at_head, view.epoch, 0), 10)
        assert json_body(body)["code"] == "stale-view"
        view = group.make_view(lambda r: ["b", "a"])
        group.adopt(view)
        for name, before in first.items():
            assert await reduce_all(at_head, view.epoch, view.ranges, name) == before

    run(story)


def test_other_requests_are_served_between_slices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "SLICE_ROWS", 1)

    async def story(group: Group) -> None:
        (second,) = group.enrol(1)
        server = await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        one, other = await group.connect("a"), await group.connect("a", worker=second)
        await asyncio.wait_for(one.push(view, "a", 1, KEYS.tolist(), 1.0), 10)
        requests = [ask(one, view.epoch, r) for r in range(view.ranges)]
        first = await asyncio.wait_for(requests[0], 10)
        pull = PullHeader(0, view.epoch, 0, 0, TABLE, len(KEYS)).header()
        header, _ = await asyncio.wait_for(one.ask(pull, KEYS.astype(np.int64).tobytes()), 10)
        assert header.kind == Kind.ROWS
        assert not requests[-1].done()  # hundreds of turns are left
        own = await asyncio.wait_for(ask(other, view.epoch, 0), 10)
        assert own[1] == first[1]
        assert not requests[-1].done()  # connections take turns
        assert (await asyncio.wait_for(other.push(view, "a", 1, KEYS.tolist(), 1.0), 10))[0].kind == Kind.OK
        done = [await asyncio.wait_for(answer, 20) for answer in requests]
        assert sum(header.clock for header, _ in done) == len(KEYS)
        assert server.store.rows == len(KEYS)

    run(story)


def test_requests_for_moved_ranges_and_lost_connections_are_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "SLICE_ROWS", 1)

    async def story(group: Group) -> None:
        for name in "ab":
            await group.start(name)
        view = group.make_view(lambda r: ["b", "a"])
        group.adopt(view)
        head, tail = await group.connect("b"), await group.connect("a")
        await asyncio.wait_for(head.push(view, "b", 1, KEYS.tolist(), 1.0), 10)
        tail.known[view.epoch] = view
        answers = [ask(tail, view.epoch, r) for r in range(view.ranges)]
        await asyncio.wait_for(answers[0], 10)
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        codes = {
            json_body(body)["code"] for header, body in await asyncio.gather(*answers) if header.kind == Kind.ERROR
        }
        assert codes == {"stale-view"}

        held = group.servers["b"].reductions
        assert group.view is not None
        for r in range(view.ranges):
            ask(head, group.view.epoch, r)
        await until(lambda: held.waiting)
        head.writer.transport.abort()
        await until(lambda: not held.waiting and not held._jobs)

    run(story)


def test_a_reduction_leaves_out_operations_that_a_level_joiner_may_lack(run: Run) -> None:
    """It may be the next tail: as with pulls."""

    async def story(group: Group) -> None:
        for name in "ab":
            await group.start(name)
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        head, tail = await group.connect("a"), await group.connect("b")
        await asyncio.wait_for(head.push(view, "a", 1, KEYS.tolist(), 1.0), 10)
        await group.start("c")
        view = group.make_view(lambda r: ["a", "b"], lambda r: "c")
        group.adopt(view)
        server = group.servers["b"]
        await until(lambda: len(server.replica.levels()) == view.ranges)
        group.stop("c")
        pushed = head.push(view, "a", 2, KEYS.tolist(), 1.0)
        await until(lambda: (server.replica.seq > server.replica.acked).any())
        r = int(np.flatnonzero(server.replica.seq > server.replica.acked)[0])
        answer = ask(tail, view.epoch, r, "sum")
        await until(lambda: server.pulls._unshown)
        assert not server.reductions.waiting
        assert not answer.done()
        group.adopt(view := group.make_view(lambda r: ["a", "b"]))
        assert (await asyncio.wait_for(pushed, 10))[0].kind == Kind.OK
        header, body = await asyncio.wait_for(answer, 10)
        if header.kind == Kind.ERROR:  # the view was told first
            assert json_body(body)["code"] == "stale-view"
            header, body = await asyncio.wait_for(ask(tail, view.epoch, r, "sum"), 10)
        assert np.frombuffer(body, np.float64).tolist() == [2.0 * DIM * header.clock]

    run(story)


def fails(keys: Any, w: Any, s: Any, c: Any) -> None:
    if w[0, 0] > c[0]:
        raise ValueError("too large")


def nothing(s: Any, later: Any) -> None:
    pass


def test_impossible_reductions_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    register_reduction("fails", fails, nothing, constants=1)
    monkeypatch.setattr(reductions, "MAX_WAITING", 1)

    async def story(group: Group) -> None:
        stranger = WORKER + 1
        group.roster = Roster(1, (WorkerInfo(WORKER, "w", 1, "default"), WorkerInfo(stranger, "x", 1, "other")), "c")
        server = await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        server.know_tables({TABLE: RegisteredTable("default", SPEC)})
        worker = await group.connect("a")
        await asyncio.wait_for(worker.push(view, "a", 1, KEYS.tolist(), 2.0), 10)
        theirs = await group.connect("a", create=False, worker=stranger, worker_name="x", app="other")

        async def code(requests: Answer) -> tuple[str, str]:
            header, body = await asyncio.wait_for(requests, 10)
            assert header.kind == Kind.ERROR
            document = json_body(body)
            return document["code"], document["message"]

        assert (await code(ask(theirs, view.epoch, 0)))[0] == "foreign"
        assert (await code(ask(worker, view.epoch, 0, table=99)))[0] == "unknown-table"
        found, text = await code(ask(worker, view.epoch, 0, "unheard"))
        assert found == "spec"
        assert "no reduction is registered as 'unheard'" in text
        assert (await code(ask(worker, view.epoch, 0, "fails")))[0] == "spec"
        found, text = await code(ask(worker, view.epoch, 0, "fails", TABLE, 1.0))
        assert found == "failed"
        assert "too large" in text
        header, body = await asyncio.wait_for(ask(worker, view.epoch, 0, "fails", TABLE, 3.0), 10)
        assert (header.kind, body) == (Kind.REDUCED, bytes(8))
        both = [ask(worker, view.epoch, r) for r in (0, 1)]
        assert (await both[0])[0].kind == Kind.REDUCED
        assert (await code(both[1]))[0] == "busy"
        with pytest.raises(asyncio.IncompleteReadError):
            await ask(worker, view.epoch, view.ranges)
        assert "there is no range 16" in worker.refused
        again = await group.connect("a")
        with pytest.raises(asyncio.IncompleteReadError):
            await again.ask(Header(Kind.REDUCE, epoch=view.epoch, table=TABLE))
        assert "not JSON" in again.refused

    run(story)
