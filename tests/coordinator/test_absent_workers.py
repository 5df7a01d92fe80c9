"""Missing workers count as departed only after a lease in which the store was available."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.core.patience import AWAY_S, COME_BACK_S, LeaseGrace
from coordinator.core.store import Store
from coordinator.core.view import ClusterConfig, Roster, WorkerInfo
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_worker
from tests.coordinator.support import FaultyStore, until_key

A, B = WorkerInfo(1, "a", 1, "x"), WorkerInfo(2, "b", 1, "x")
BOTH = Roster(1, (A, B))


def well(until_s: float) -> LeaseGrace:
    grace, now = LeaseGrace(0.0), 0.0
    while now < until_s:
        now += 1.0
        grace.answered(now)
    return grace


def test_a_missing_worker_has_left_if_the_store_was_available() -> None:
    assert well(20.0).present(BOTH, [A], (), 20.5) == [A]


def test_after_a_start_or_an_outage_missing_workers_may_come_back() -> None:
    assert LeaseGrace(0.0).present(BOTH, [A], (), 0.1) == [A, B]
    grace = well(20.0)
    silent = 20.0 + AWAY_S + 0.1
    assert grace.present(BOTH, [A], (), silent) == [A, B], "the leases may have run out before we notice"
    grace.answered(silent)
    assert grace.present(BOTH, [], (), silent + 0.5) == [A, B]
    for second in range(1, 7):
        grace.answered(silent + second)
    assert grace.left_s(silent + COME_BACK_S + 0.01) == 0
    assert grace.present(BOTH, [A], (), silent + COME_BACK_S + 0.01) == [A]


def test_a_worker_that_signed_off_or_restarted_is_not_waited_for() -> None:
    again = WorkerInfo(7, "b", 2, "x")
    assert LeaseGrace(0.0).present(BOTH, [again], ("a",), 0.1) == [again]


def ids(value: bytes) -> list[int]:
    return [worker.id for worker in Roster.decode(value).workers]


@asynccontextmanager
async def leading(store: Store) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_coordinator(store, name="c0", stop=stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


async def test_leases_that_ran_out_during_an_outage_remove_no_worker() -> None:
    """The store stands still for everybody, and forgets all leases before anybody can renew one."""
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    await create_cluster(memory, ClusterConfig(4))
    lost: list[str] = []
    workers = [
        await register_worker(faulty, name=f"w{i}", app="default", ttl_s=1.0, on_lost=lost.append) for i in range(3)
    ]
    listed = [worker.info.id for worker in workers]
    async with leading(faulty):
        await until_key(memory, "roster", lambda entry: entry is not None and ids(entry.value) == listed)
        before = await memory.get("roster")
        faulty.out = True
        for worker in workers:
            await until_key(memory, f"workers/default/{worker.info.name}", lambda entry: entry is None)
        faulty.out = False
        for worker in workers:
            await until_key(memory, f"workers/default/{worker.info.name}", lambda entry: entry is not None)
        newcomer = await register_worker(faulty, name="new", app="default", on_lost=lost.append)
        await until_key(memory, "roster", lambda entry: entry is not None and newcomer.info.id in ids(entry.value))
        after = await memory.get("roster")
        assert before is not None
        assert after is not None
        assert Roster.decode(after.value).version == Roster.decode(before.value).version + 1, "nobody left meanwhile"
        assert not lost
        for session in (*workers, newcomer):
            await session.close()
        await until_key(memory, "roster", lambda entry: entry is not None and ids(entry.value) == [])
