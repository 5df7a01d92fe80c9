"""Workers are asked for their activity by one server each, only while an operator looks."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.view import Roster, WorkerInfo
from elasticps.server.roles import worker_activity
from elasticps.wire.activity import Activity, UseHeader
from elasticps.wire.frames import Kind
from tests.server.conftest import Group, Run, Worker, until

IDS = (5, 6, 7, 8)


async def two_servers(group: Group) -> dict[str, list[Worker]]:
    """Each with a connection of every worker."""
    group.roster = Roster(1, tuple(WorkerInfo(i, f"w{i}", 1, "default") for i in IDS), "c")
    for name in "ab":
        await group.start(name)
    group.adopt(group.make_view(lambda r: ["a", "b"]))
    return {
        name: [await group.connect(name, create=False, worker=i, worker_name=f"w{i}") for i in IDS] for name in "ab"
    }


def say(worker: Worker, use: Activity, as_worker: int = 0) -> None:
    worker.writer.write(UseHeader(as_worker or worker.id).header().pack() + use.body())


def watched(worker: Worker) -> int:
    return sum(header.kind == Kind.WATCH for header in worker.unsolicited)


def test_each_worker_reports_to_one_server_while_an_operator_looks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_activity, "EVERY_S", 3600.0)  # once, however long it takes

    async def story(group: Group) -> None:
        workers = await two_servers(group)
        everybody = [worker for some in workers.values() for worker in some]
        admins = {name: group.servers[name].admin for name in "ab"}
        assert sum(map(watched, everybody)) == 0  # nobody has looked yet
        for _ in range(5):  # however many look
            assert [admin.activity()["uses"] for admin in admins.values()] == [[], []]
        await until(lambda: sum(map(watched, everybody)) == len(IDS))
        workers_of = {name: [w.id for w in some if watched(w)] for name, some in workers.items()}
        assert sorted(workers_of["a"] + workers_of["b"]) == list(IDS)
        for some in workers.values():
            for worker in some:
                if watched(worker):
                    say(worker, Activity(worker.id, 1, 2, 3, 5, 4, 6))
        await until(lambda: all(len(admins[name].activity()["uses"]) == len(workers_of[name]) for name in "ab"))
        reports = [use for admin in admins.values() for use in admin.activity()["uses"]]
        assert sorted(use["worker"] for use in reports) == list(IDS)
        assert reports[0] == {
            "worker": reports[0]["worker"], "clock": reports[0]["worker"], "committed": 1, "sent": 2, "received": 3,
            "wanted": 5, "kept": 4, "shards": 6,
        }  # fmt: skip
        assert sum(map(watched, everybody)) == len(IDS)
        monkeypatch.setattr(worker_activity, "EVERY_S", 0.0)
        admins["a"].activity()
        await until(lambda: sum(map(watched, everybody)) == len(IDS) + len(workers_of["a"]))

    run(story)


def test_a_worker_that_has_gone_is_not_shown_and_false_reports_are_refused(run: Run) -> None:
    async def story(group: Group) -> None:
        workers = (await two_servers(group))["a"]
        server = group.servers["a"]
        for worker in workers[:2]:
            say(worker, Activity(3, 2, 0, 0, 0, 0, 0))
        await until(lambda: len(server.admin._activity._reported) == 2)
        await workers[0].close()
        await until(lambda: [c.worker for c in server.admin._activity._reported] == [workers[1].id])
        say(workers[2], Activity(3, 2, 0, 0, 0, 0, 0), as_worker=workers[3].id)
        await until(lambda: workers[2].refused)
        assert f"says what {workers[3].id} does" in workers[2].refused
        say(workers[3], Activity(1, 9, 0, 0, 0, 0, 0))
        await until(lambda: workers[3].refused)
        assert "impossible counts" in workers[3].refused
        with pytest.raises(asyncio.IncompleteReadError):
            await workers[3].task

    run(story)
