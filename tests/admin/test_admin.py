from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any, ClassVar

import pytest

from coordinator.core.view import ServerInfo
from elasticps.admin import AdminServer, admin_pb2, admin_pb2_grpc, fetch_health, fetch_hot, fetch_status, start_admin
from elasticps.admin.client import fetch_marked, open_channel, take_mark
from elasticps.admin.cuts import CutClient
from elasticps.admin.interface import CutState, CutTaken, CutWritten, MarkedRange, WorkerHeld, Writing, WrittenFile
from elasticps.errors import ClusterUnreachable, ConfigError
from elasticps.system import background
from elasticps.wire.headers import MAX_CUT
from replication.progress import PART_BITS
from replication.step_records import StepRecord

HELD = WorkerHeld(120, 7, (1 << 64) - 1)
STATUS: dict[str, Any] = {
    "id": "s0",
    "pid": os.getpid(),
    "address": "127.0.0.1:4000",
    "admin": "127.0.0.1:4001",
    "incarnation": 3,
    "state": "serving",
    "epoch": 7,
    "ranges_headed": 85,
    "ranges_held": 86,
    "rows": 5_000_000_000,
    "bytes": 1 << 40,
    "connections": 2,
    "pushes": 10,
    "pulls": 20,
    "rows_pushed": 300,
    "rows_pulled": 400,
    "refused": 6,
    "parked": 7,
    "tables": 1,
    "uptime_s": 1.5,
    "ranges_joining": 3,
    "log_bytes": 1 << 33,
    "sent_bytes": 1 << 34,
    "memory_used": 1 << 35,
    "memory_mark": 1 << 36,
    "memory_limit": 1 << 37,
    "leader_clock": 1.5e9,
    "readers": [{"name": "r0", "app": "default", "age_s": 0.5, "unread_bytes": 100}],
}


class Cuts:
    """Cut 2 is being taken."""

    def __init__(self) -> None:
        self.happened: list[tuple[object, ...]] = []

    def hold(self, cut: int, hold_s: float) -> bool:
        self.happened.append(("hold", cut, hold_s))
        return cut == 2

    def held(self, cut: int) -> dict[int, WorkerHeld]:
        return {4: HELD} if cut == 2 else {}

    def release(self, cut: int) -> None:
        self.happened.append(("release", cut))

    async def take(self, cut: int, since: int, url: str) -> bool:
        self.happened.append(("take", cut, since, url))
        return cut == 2

    def state(self, cut: int) -> CutState:
        taken = [CutTaken((0, 5), {4: 120 << PART_BITS}, {"a": 9})]
        return CutState(3, 7, 2, taken, {}, [(9, StepRecord(4, 3, b"\5"))])

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        self.happened.append(("written", cut, wait_s))
        return CutWritten(3, 2, Writing(1, [WrittenFile("a", 9, 8, 1, "ab", 4, (0,))]) if cut == 2 else None)


class FakeServer:
    """The admin side of a server with fixed answers."""

    epoch = 7
    me = ServerInfo("s0", 3, "127.0.0.1:4000", "127.0.0.1:4001")
    acknowledged: ClassVar = {4: 120}
    restoring: ClassVar[Any] = None

    def __init__(self, **changes: Any) -> None:
        self._status = {**STATUS, **changes}
        self.cuts = Cuts()
        self._marks: dict[int, dict[int, MarkedRange]] = {}

    def status(self) -> dict[str, Any]:
        return self._status

    def cluster_known(self) -> dict[str, Any]:
        return {"name": "s0", "incarnation": 1, "view": b"", "roster": b"", "newest": 7}

    def activity(self) -> dict[str, Any]:
        return {"incarnation": 3, "received_bytes": 9, "workers": [4, 6], "clocks": [121, 1], "push": [1, 0],
                "uses": [{"worker": 4, "clock": 9, "kept": 2}]}  # fmt: skip

    def tables(self) -> list[dict[str, Any]]:
        return [{"id": 3, "rows_headed": 5, "rows": 10, "bytes": 640}]

    async def hot(self, seconds: float) -> dict[str, Any]:
        table = {"id": 5, "name": "ads/t", "sampled": 10, "lost": 1, "keys": [-3, 4], "counts": [6, 2]}
        return {"incarnation": 3, "pulls": 7, "pushes": int(seconds), "sampled": 10, "ranges": [9], "range_counts": [8],
                "tables": [table]}  # fmt: skip

    async def mark(self, mark: int) -> bool:
        self._marks[mark] = {5: MarkedRange(90, b"d" * 16, (4, 6), (121 << PART_BITS | 3, 1 << PART_BITS))}
        return mark != 1

    def marked(self, mark: int) -> dict[int, MarkedRange]:
        return self._marks.get(mark, {})


async def started(**changes: Any) -> AdminServer:
    server_side = FakeServer(**changes)
    return await start_admin("127.0.0.1", 0, lambda: server_side)


def test_a_checkpoint_cut_is_taken_over_the_admin_port() -> None:
    async def main() -> None:
        server_side = FakeServer()
        server = await start_admin("127.0.0.1", 0, lambda: server_side)
        try:
            there = CutClient(server.address, 5.0)
            assert await there.hold(2, 1.5)
            assert not await there.hold(1, 1.5)
            assert await there.held(2) == {4: HELD}
            assert await there.take(2, 1, "file:///x")
            assert not await there.take(3, 1, "file:///x")
            with pytest.raises(ClusterUnreachable, match="no cut 3 since 3"):
                await there.take(3, 3, "file:///x")
            for beyond in (0, MAX_CUT + 1):
                with pytest.raises(ClusterUnreachable, match=f"a cut's number is from 1 to {MAX_CUT}, got {beyond}"):
                    await there.hold(beyond, 1.5)
            with pytest.raises(ClusterUnreachable, match=f"no cut {MAX_CUT + 1} since 1"):
                await there.take(MAX_CUT + 1, 1, "file:///x")
            with pytest.raises(ClusterUnreachable, match="of 5000 letters"):
                await there.take(3, 1, "x" * 5000)
            await there.release(2)
            assert await there.state(2) == server_side.cuts.state(2)
            assert (await there.written(2, 0.25)).writing == (1, [WrittenFile("a", 9, 8, 1, "ab", 4, (0,))], "")
            assert await there.written(3, 60.0) == (3, 2, None)
            await there.close()
            assert server_side.cuts.happened == [
                ("hold", 2, 1.5), ("hold", 1, 1.5), ("take", 2, 1, "file:///x"), ("take", 3, 1, "file:///x"),
                ("release", 2), ("written", 2, 0.25), ("written", 3, 5.0),
            ]  # fmt: skip
        finally:
            await server.stop(0.0)

    background.run(main())


def test_status_arrives_as_the_server_gave_it() -> None:
    async def main() -> None:
        server = await started()
        try:
            status = await fetch_status(server.address, timeout_s=30.0)
            assert status.pop("cpu_s") > 0
            assert 0 <= time.time() - status.pop("clock") < 1_000
            assert status == STATUS
        finally:
            await server.stop()

    background.run(main())


def test_hot_keys_arrive_as_the_server_gave_them() -> None:
    async def main() -> None:
        server = await started()
        try:
            found = await fetch_hot(server.address, 2.0, timeout_s=30.0)
        finally:
            await server.stop()
        table = {"id": 5, "name": "ads/t", "sampled": 10, "lost": 1, "keys": [[-3, 6], [4, 2]]}
        counted = {"incarnation": 3, "pulls": 7, "pushes": 2, "sampled": 10}
        assert found == counted | {"ranges": [[9, 8]], "tables": [table]}

    background.run(main())


def test_a_mark_is_taken_and_its_ranges_are_reported_with_whole_steps() -> None:
    async def main() -> None:
        server = await started()
        try:
            assert not (await fetch_marked(server.address, 1 << 62, 30.0)).ranges
            assert await take_mark(server.address, 1 << 62, 30.0)
            assert not await take_mark(server.address, 1, 30.0)
            answer = await fetch_marked(server.address, 1 << 62, 30.0)
        finally:
            await server.stop()
        (found,) = answer.ranges
        assert (found.range, found.seq, found.digest) == (5, 90, b"d" * 16)
        assert dict(zip(found.workers, found.clocks, strict=True)) == {4: 121, 6: 1}
        assert [(each.worker, each.clock) for each in answer.told] == [(4, 120)]
        assert (answer.epoch, answer.incarnation) == (7, 3)

    background.run(main())


def test_health_follows_set_serving() -> None:
    async def main() -> None:
        server = await started()
        try:
            assert await fetch_health(server.address, 30.0) == "NOT_SERVING"
            await server.set_serving(True)
            assert await fetch_health(server.address, 30.0) == "SERVING"
            assert await fetch_health(server.address, 30.0, "elasticps.v1.Admin") == "SERVING"
            assert await fetch_health(server.address, 30.0, "elasticps.v1.Other") == "SERVICE_UNKNOWN"
        finally:
            await server.stop()

    background.run(main())


def test_a_status_that_does_not_fit_the_message_fails_the_call_and_not_the_server() -> None:
    async def main() -> None:
        server = await started(rows=-1)
        try:
            with pytest.raises(ClusterUnreachable, match=server.address):
                await fetch_status(server.address, timeout_s=30.0)
            assert await fetch_health(server.address, 30.0) == "NOT_SERVING"
        finally:
            await server.stop()

    background.run(main())


def test_an_unreachable_server_is_named_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterUnreachable, match=address):
            background.run(fetch_status(address, timeout_s=30.0))


def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            with pytest.raises(ClusterUnreachable, match=r"did not answer within 0\.2 s"):
                await asyncio.wait_for(fetch_status(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2), 10)

    background.run(main())


def test_a_taken_port_is_a_clear_error() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"admin port 127.0.0.1:{port}"):
                await start_admin("127.0.0.1", port, FakeServer)

    background.run(main())


def test_a_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def main() -> None:
        server = await started()
        try:
            assert (await fetch_status(server.address, timeout_s=30.0))["id"] == "s0"
        finally:
            await server.stop()

    background.run(main())


def test_activity_shows_the_traffic_that_the_server_counts() -> None:
    async def look() -> admin_pb2.ActivityResponse:
        admin = await start_admin("127.0.0.1", 0, FakeServer)
        async with open_channel(admin.address, None) as channel:
            answer: admin_pb2.ActivityResponse = await admin_pb2_grpc.AdminStub(channel).Activity(
                admin_pb2.ActivityRequest(), timeout=20
            )
        await admin.stop(0)
        return answer

    answer = background.run(look())
    assert (list(answer.workers), list(answer.clocks), list(answer.push)) == ([4, 6], [121, 1], [1, 0])
    assert (answer.incarnation, answer.received_bytes, len(answer.bounds_s)) == (3, 9, 0)
