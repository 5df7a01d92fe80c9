"""The audit: what it compares, and that it finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

import elasticps as eps
from coordinator.memory import MemoryStore
from coordinator.view import ServerInfo
from elasticps import background
from elasticps.admin import AdminServer, start_admin
from elasticps.audit import AuditReport, Found, Judged, audit, audit_store, compare
from tests.e2e.oracle import Trainers
from tests.server.conftest import DIM, RANGES, TABLE, WORKER, Group

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
def test_whatever_differs_is_said_with_range_and_server(other: Found, says: str) -> None:
    (difference,) = compare(3, NAMES, [HEAD, HEAD, other])
    assert (difference.range, difference.server) == (3, "s2")
    assert says in difference.text


@pytest.mark.parametrize(
    ("told", "clocks", "broken"),
    [
        (9, (9, 9), False),
        (8, (9, 10), False),
        (10, (9, 10), True),
        (4, (5, None), False),  # its first step, above the base clock 4, is under way
        (5, (5, None), True),  # that step is acknowledged, and a range has nothing of it
    ],
)
def test_a_worker_was_told_too_much_if_a_range_has_less(
    told: int, clocks: tuple[int | None, ...], broken: bool
) -> None:
    group = Group()
    group.infos = {"s0": ServerInfo("s0", 1, "127.0.0.1:1")}
    view = group.make_view(lambda r: ["s0"])
    judged = Judged(2)
    found = {r: Found(1, b"", {} if clock is None else {4: clock}) for r, clock in enumerate(clocks)}
    judged.judge(view, view, {"s0": found})
    (worker,) = judged.workers({4: told}, {4: "w"})
    assert worker.broken is broken
    assert worker.pending == clocks.count(None)
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


def staged(test: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            group = Group()
            stack.push_async_callback(group.close)
            admins = {}
            for name in NAMES:
                server = await group.start(name)
                admin = admins[name] = await start_admin("127.0.0.1", 0, lambda server=server: server)  # type: ignore[misc]
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


def test_untouched_replicas_are_clean_and_clocks_are_told() -> None:
    async def test(stage: Stage) -> None:
        report = await stage.audit()
        assert report.clean, report
        assert (report.compared, report.short) == (3 * RANGES, 0)
        (worker,) = report.workers
        assert (worker.id, worker.name, worker.told, worker.applied, worker.lag) == (WORKER, "w", 4, 5, 1)

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
        stage.group.servers["s2"].replica.clocks.row(WORKER)[3] -= 1 << 16
        report = await stage.audit()
        assert [(d.range, d.server) for d in report.differences] == [(3, "s2")]
        assert [worker.applied for worker in report.workers] == [4]

    staged(test)


def test_a_step_that_a_worker_knows_to_be_committed_must_be_there() -> None:
    async def test(stage: Stage) -> None:
        stage.group.servers["s0"].fast.tell(WORKER, 6)
        report = await stage.audit()
        assert report.wrong
        assert not report.differences
        assert [(worker.told, worker.applied) for worker in report.workers if worker.broken] == [(6, 5)]

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


# -------------------------------------------------------------------------------------------------- a cluster at work


def test_a_healthy_cluster_is_clean_while_workers_push(cluster: eps.LocalCluster) -> None:
    trainers = Trainers(cluster.url, seeds=(1, 2), app="audited")
    try:
        for _ in range(5):
            trainers.progress()
            report = audit(cluster.url)
            assert report.clean, report
            assert report.compared == 2 * report.ranges
            mine = {worker.id: worker for worker in report.workers}
            for trainer in trainers.all:
                assert 0 < mine[trainer.ps.worker.id].told <= mine[trainer.ps.worker.id].applied
        command = [sys.executable, "-m", "elasticps", "audit", "--url", cluster.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["clean"]
        assert {worker["name"] for worker in document["workers"]} >= {"audited/audited-w1", "audited/audited-w2"}
        trainers.finish()
    finally:
        trainers.close()
