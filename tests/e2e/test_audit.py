"""The audit compares replicas and finds differences."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from elasticps.admin import AdminServer, start_admin
from elasticps.admin.audit import AuditReport, Found, Judged, WorkerClocks, audit_store, compare
from elasticps.admin.interface import MarkedRange
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core import audit as audits
from elasticps.server.core.audit import MARKS_RETAINED, PART_BYTES, Marks, slices
from elasticps.server.core.operations import AuditMark
from elasticps.store import Table
from elasticps.system import background
from elasticps.system.coordination import read_view
from replication.step_records import home_range
from tests.e2e.oracle import Trainers, audited
from tests.server.conftest import DIM, RANGES, TABLE, WORKER, Group, Worker

NAMES = ["s0", "s1", "s2"]
HEAD = Found(7, b"rows", {1: 5, 2: 9})


def test_equal_replicas_differ_in_nothing() -> None:
    assert compare(3, NAMES, [HEAD, HEAD, HEAD]) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (HEAD._replace(seq=8), "at operation 8 of the log, at the head at 7"),
        (HEAD._replace(digest=b"else"), "other rows than at the head s0"),
        (HEAD._replace(clocks={1: 5, 2: 8, 3: 1}), "other clocks than at the head s0 for worker id 2, 3"),
    ],
)
def test_each_difference_names_its_range_and_server(other: Found, says: str) -> None:
    (difference,) = compare(3, NAMES, [HEAD, HEAD, other])
    assert (difference.range, difference.server) == (3, "s2")
    assert says in difference.text


@pytest.mark.parametrize(
    ("reported", "clocks", "broken"),
    [
        (9, (9, 9), False),
        (8, (9, 10), False),
        (10, (9, 10), True),
        (9, (9, None), False),  # no step of it ticked the other range
        (9, (9, 4), False),
        (4, (None, 5), False),  # its first step, above the base clock 4, is under way
        (5, (None, 5), True),  # that step is acknowledged, and its home range has nothing of it
    ],
)
def test_an_acknowledged_step_that_the_home_range_lacks_is_found(
    reported: int, clocks: tuple[int | None, ...], broken: bool
) -> None:
    group = Group()
    group.infos = {"s0": ServerInfo("s0", 1, "127.0.0.1:1")}
    view = group.make_view(lambda r: ["s0"])
    judged = Judged(2)
    found = {r: Found(1, b"", {} if clock is None else {4: clock}) for r, clock in enumerate(clocks)}
    judged.judge(view, view, {"s0": found})
    (worker,) = judged.workers({4: reported}, {4: "w"})
    assert worker.broken is broken
    assert home_range(4, 2) == 0
    assert worker.pending == (clocks[0] is None)
    assert not judged.open


def test_ranges_that_changed_or_were_not_answered_for_stay_open() -> None:
    group = Group()
    group.infos = {name: ServerInfo(name, 1, "127.0.0.1:1") for name in NAMES}
    before = group.make_view(lambda r: NAMES[:2])
    after = group.make_view(lambda r: NAMES[1:] if r == 3 else NAMES[:2])
    everywhere = dict.fromkeys(range(RANGES), HEAD)
    judged = Judged(RANGES)
    judged.judge(before, after, {"s0": everywhere, "s1": {r: HEAD for r in everywhere if r != 5}})
    assert judged.open == {3, 5}
    assert judged.reasons == {3: "its chain changed meanwhile", 5: "the mark did not get to s1"}
    judged.judge(after, after, {"s1": everywhere, "s2": everywhere})
    assert judged.open == {5}
    assert judged.reasons[5] == "s0 did not answer"


# ------------------------------------------------------------------------------------------------- servers in one loop


class Stage:
    """Three servers with admin services, that all hold every range, and a worker that has pushed."""

    def __init__(self, group: Group, admins: dict[str, AdminServer], store: MemoryStore) -> None:
        self.group, self.admins, self.store = group, admins, store

    async def audit(self, timeout_s: float = 10.0) -> AuditReport:
        return await audit_store(self.store, timeout_s)

    async def lose_s2(self) -> None:
        """Server s2 is left out of the view."""
        view = self.group.make_view(lambda r: NAMES[:2])
        await self.write(replace(view, servers=view.servers[:2], reason="s2 lost (silent for 0.8 s)"))

    async def write(self, view: View) -> None:
        """It is the newest."""
        entry = await self.store.get("view")
        assert entry is not None
        await self.store.compare_and_set("view", view.encode(), expect=entry.revision)
        self.group.view = view
        self.group.adopt(view)


def staged(test: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            group = Group()
            stack.push_async_callback(group.close)
            admins = {}
            for name in NAMES:
                server = await group.start(name)
                admin = admins[name] = await start_admin("127.0.0.1", 0, lambda server=server: server.admin)  # type: ignore[misc]
                stack.push_async_callback(admin.stop, 0.0)
                group.infos[name] = replace(group.infos[name], admin=admin.address)
            view = group.make_view(lambda r: NAMES)
            group.adopt(view)
            store = MemoryStore()
            await store.compare_and_set("view", view.encode(), expect=0)
            await store.compare_and_set("roster", group.roster.encode(), expect=0)
            worker = await group.connect("s0")
            for clock in range(1, 6):
                await worker.push(view, "s0", clock, range(200), 1.0, table=1)  # one step outstanding: this one
            await test(Stage(group, admins, store))

    background.run(main())


def test_untouched_replicas_are_clean_and_clocks_are_reported() -> None:
    async def test(stage: Stage) -> None:
        report = await stage.audit()
        assert report.clean, report
        assert (report.compared, report.short) == (3 * RANGES, 0)
        (worker,) = report.workers
        assert (worker.id, worker.name, worker.acknowledged, worker.applied, worker.lag) == (WORKER, "w", 4, 5, 1)

    staged(test)


def test_a_changed_row_is_found_in_its_range_at_its_server() -> None:
    async def test(stage: Stage) -> None:
        table = stage.group.servers["s1"].store.tables[TABLE]
        table.apply(np.array([77]), np.full((1, DIM), 1e-3, np.float32), np.empty(0, np.float32))
        report = await stage.audit()
        assert report.wrong
        (difference,) = report.differences
        assert difference.server == "s1"
        assert "other rows" in difference.text
        assert table.count_range(difference.range)

    staged(test)


def test_a_changed_clock_is_found() -> None:
    async def test(stage: Stage) -> None:
        clocks, one = stage.group.servers["s2"].replica.clocks, np.array([3])
        clocks.set(WORKER, one, clocks.of(WORKER, one) - (1 << 16))
        report = await stage.audit()
        assert [(d.range, d.server) for d in report.differences] == [(3, "s2")]
        assert [worker.applied for worker in report.workers] == [5]  # at its home range, which is another

    staged(test)


def test_a_step_that_a_worker_knows_to_be_committed_must_be_there() -> None:
    async def test(stage: Stage) -> None:
        stage.group.servers["s0"].fast.note_acknowledged(WORKER, 6)
        report = await stage.audit()
        assert report.wrong
        assert not report.differences
        assert [(worker.acknowledged, worker.applied) for worker in report.workers if worker.broken] == [(6, 5)]

    staged(test)


def test_a_silent_server_leaves_its_ranges_unjudged() -> None:
    async def test(stage: Stage) -> None:
        await stage.admins["s2"].stop(0.0)
        report = await stage.audit(timeout_s=1.0)
        assert not report.clean
        assert not report.wrong
        assert len(report.unjudged) == RANGES
        assert all("s2" in reason for reason in report.unjudged.values())

    staged(test)


# ------------------------------------------------------------------------------------------------------- large ranges


def rows_in(count: int, dim: int = 64) -> dict[int, Table]:
    table = Table(TableSpec("t", dim, Accumulate()), TABLE, 4)
    table.apply(np.arange(count), np.ones((count, dim), np.float32), np.empty(0, np.float32))
    return {TABLE: table}


def test_large_ranges_are_audited_in_parts_and_small_ones_together() -> None:
    tables, every = rows_in(40_000), np.arange(4)
    marks = list(slices(tables, every, 9))
    assert {mark.id for _, mark in marks} == {9}
    for r in range(4):
        mine = [mark for ranges, mark in marks if r in ranges]
        assert [mark.part for mark in mine] == list(range(mine[0].parts))
        table = tables[TABLE]
        assert table.count_range(r) * table.stride / len(mine) <= PART_BYTES
        whole = table.digest_range(r)
        assert sum(table.digest_range(r, mark.part, mark.parts) for mark in mine) % (1 << 64) == whole
    assert [(ranges.tolist(), mark) for ranges, mark in slices(rows_in(100), every, 9)] == [
        ([0, 1, 2, 3], AuditMark(9))
    ]


def test_parts_are_put_together_and_a_range_that_came_late_has_none() -> None:
    marks = Marks()
    ends = [MarkedRange(seq, bytes([seq]), (), ()) for seq in range(3)]
    for part in range(3):
        marks.note(AuditMark(1, part, 3), 0, ends[part])
        if part:
            marks.note(AuditMark(1, part, 3), 1, ends[part])
    assert list(marks.of(1)) == [0]
    assert marks.of(1)[0].seq == 2
    other = Marks()
    for part in (0, 2, 1):  # what differs in any part shows
        other.note(AuditMark(1, (0, 2, 1).index(part), 3), 0, ends[part]._replace(seq=(0, 2, 1).index(part)))
    assert other.of(1)[0].digest != marks.of(1)[0].digest
    for later in range(2, 2 + MARKS_RETAINED):
        marks.note(AuditMark(later), 0, ends[0])
    assert not marks.of(1)
    assert not marks._parts


def test_pushes_go_on_between_the_parts_of_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all replicas still agree, at every part's own place of the log."""
    monkeypatch.setattr(audits, "PART_BYTES", 64)

    async def test(stage: Stage) -> None:
        worker = stage.group.workers[0]
        view = stage.group.view
        assert view is not None
        applied: list[tuple[int, AuditMark]] = []
        for server in stage.group.servers.values():
            note = server.executor.marks.note

            def noted(mark: AuditMark, r: int, found: MarkedRange, note: Any = note, seqs: Any = applied) -> None:
                seqs.append((found.seq, mark))
                note(mark, r, found)

            server.executor.marks.note = noted  # type: ignore[method-assign]
        pushing = asyncio.create_task(push_on(worker, view))
        report = await stage.audit()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        assert report.clean, report
        assert max(mark.parts for _, mark in applied) > 2

    staged(test)


async def push_on(worker: Worker, view: View) -> None:
    clock = 5
    while True:
        clock += 1
        await worker.push(view, "s0", clock, range(200), 1.0, table=1)


def test_a_row_that_changes_in_one_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "PART_BYTES", 64)
    test_a_changed_row_is_found_in_its_range_at_its_server()


def test_a_server_that_is_lost_meanwhile_is_part_of_the_answer() -> None:
    async def test(stage: Stage) -> None:
        group = stage.group
        before = group.view
        assert before is not None
        admin = group.servers["s0"].admin.mark

        async def lose_first(mark: int) -> bool:
            if group.view is before:
                await stage.lose_s2()
            return await admin(mark)

        group.servers["s0"].admin.mark = lose_first  # type: ignore[method-assign]
        report = await stage.audit()
        assert not report.differences
        assert report.lost == {"s2": "s2 lost (silent for 0.8 s)"}
        assert not report.clean

    staged(test)


def test_an_audit_does_not_wait_for_a_server_that_left_the_view() -> None:
    """A frozen one had all the time there was, and nothing was compared then."""

    async def test(stage: Stage) -> None:
        requested = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requested.set()
            with closing(writer):
                await reader.read()
                await reader.read()

        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as frozen:
            host, port = frozen.sockets[0].getsockname()
            stage.group.infos["s2"] = replace(stage.group.infos["s2"], admin=f"{host}:{port}")
            await stage.write(stage.group.make_view(lambda r: NAMES))
            auditing = asyncio.create_task(stage.audit(timeout_s=300.0))
            await requested.wait()
            await stage.lose_s2()
            report = await asyncio.wait_for(auditing, 60.0)
        assert report.compared == 2 * RANGES
        assert not report.unjudged
        assert report.lost == {"s2": "s2 lost (silent for 0.8 s)"}

    staged(test)


def test_an_audit_that_compared_nothing_reports_it() -> None:
    def report(**more: Any) -> AuditReport:
        values: dict[str, Any] = {
            "cluster": "c", "epoch": 3, "ranges": 4, "replicas": 2, "compared": 8, "alone": 0, "short": 0,
            "differences": (), "workers": (), "unjudged": {}, "lost": {}, "seconds": 1.0,
        }  # fmt: skip
        return AuditReport(**values | more)

    assert report().clean
    assert report(compared=7, alone=1).clean
    assert not report(compared=4, alone=4).clean
    assert not report(compared=3, alone=3, unjudged={2: "no time was left"}).clean
    assert report(compared=4, alone=4, replicas=1).clean
    assert not report(lost={"s1": "silent"}).clean
    assert report(compared=4, alone=4).as_dict()["idle"]


# -------------------------------------------------------------------------------------------------- a cluster at work


def test_a_healthy_cluster_is_clean_while_workers_push(cluster: eps.LocalCluster) -> None:
    trainers = Trainers(cluster.url, seeds=(1, 2), app="audited")
    try:
        for _ in range(5):
            trainers.progress()
            report = audited(cluster.url)
            assert report.clean, report
            assert report.compared == 2 * report.ranges
            mine = {worker.id: worker for worker in report.workers}
            for trainer in trainers.all:
                assert 0 < mine[trainer.ps.worker.id].acknowledged <= mine[trainer.ps.worker.id].applied
        command = [sys.executable, "-m", "elasticps", "audit", "--url", cluster.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["clean"]
        assert {worker["name"] for worker in document["workers"]} >= {"audited/audited-w1", "audited/audited-w2"}
        trainers.finish()
    finally:
        trainers.close()


def test_an_unknown_cluster_and_one_without_servers_give_different_errors() -> None:
    async def main() -> None:
        store = MemoryStore("demo")
        with pytest.raises(eps.ClusterUnreachable, match=r"knows of no cluster 'demo'.*`elasticps cluster adopt`"):
            await read_view(store)
        await create_cluster(store, ClusterConfig())
        with pytest.raises(eps.ClusterUnreachable, match="cluster 'demo' has no view: no server has served yet"):
            await read_view(store)

    background.run(main())


def test_a_worker_that_has_left_lags_behind_nothing() -> None:
    """It learns of its last steps without telling any server, and the audit said that it lagged."""
    assert WorkerClocks(WORKER, "w", 4, 5, 0, False).lag == 1
    assert WorkerClocks(WORKER, "", 4, 5, 0, False).lag == 0
