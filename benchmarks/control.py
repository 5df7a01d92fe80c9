"""What a view costs: its size, the time to adopt and to plan it, and what a worker that comes or goes changes.

No process is started: the leader runs here, on a coordination store in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.runner import Progress, Result, figures, percentiles, seconds_of, silent
from coordinator.core.differences import ViewDifference
from coordinator.core.keys import ROSTER, VIEW
from coordinator.core.planner import Health, Members, Plan, plan, plan_roster
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server, register_worker
from elasticps.client.core.routing import Routes
from elasticps.errors import Error, Timeout
from elasticps.system import background

REPLICAS = 2
ROUNDS = 200
_ROSTER_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ViewCosts:
    """Sizes in bytes, times in ms, each as {"p50", "max"} over `rounds`.

    first               CPU time of the first plan, once
    death_bytes         of the difference that servers and workers are sent when a server dies
    adopt               a worker decodes a view and makes its routes
    plan                by change: a server dies, joins, drains
    roster_plan         one worker joins
    views_for_workers   views written while ten workers join and leave: must be 0
    rosters_for_workers versions of the roster meanwhile
    """

    servers: int
    ranges: int
    workers: int
    first: float
    view_bytes: int
    death_bytes: int
    roster_bytes: int
    encode: dict[str, float]
    adopt: dict[str, float]
    plan: dict[str, dict[str, float]]
    roster_plan: dict[str, float]
    views_for_workers: int
    rosters_for_workers: int

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"replicas": REPLICAS, **asdict(self)}


def run(
    *, servers: int = 100, ranges: int = 1024, workers: int = 1000, rounds: int = ROUNDS, progress: Progress = silent
) -> Result:
    """Measures a cluster of so many servers, ranges and workers. Error if a worker's coming writes a view."""
    progress("planning")
    config = ClusterConfig(ranges, REPLICAS)
    infos = tuple(
        ServerInfo(
            f"server-{i}", 1 + i % 7, f"10.0.{i // 250}.{i % 250}:70{i % 100:02}", f"10.0.0.{i}:8000", f"z{i % 3}"
        )
        for i in range(servers + 1)
    )
    here = Members("bench", infos[:servers])
    began = time.process_time()
    view = _view(plan(None, here, config))
    first = time.process_time() - began
    # As after a long life: ranges changed at different times, many are being filled.
    since = np.random.default_rng(1).integers(1, 100_000, ranges)
    view = replace(view, epoch=100_000, since=since, reason="repair: " + "ranges " * 60)
    encoded = view.encode()
    roster = Roster(9, tuple(WorkerInfo(i + 1, f"worker-{i}", 1, "default") for i in range(workers)))
    more = (*roster.workers, WorkerInfo(workers + 1, "worker-new", 1, "default"))
    dead = Health({infos[3].member: "its connection was reset"})
    draining = replace(here, draining=frozenset([infos[3].member]))
    plans = {
        "dies": _timed(lambda: plan(view, here, config, dead), rounds),
        "joins": _timed(lambda: plan(view, replace(here, servers=infos), config), rounds),
        "drains": _timed(lambda: plan(view, draining, config), rounds),
    }
    views, rosters = background.run(_workers_come_and_go())
    if views:
        raise Error(f"{views} views were written because workers came and went: none should be")
    death = ViewDifference.between(view, _view(plan(view, here, config, dead))).encode()
    found = ViewCosts(
        servers, ranges, workers, round(1e3 * first, 1), len(encoded), len(death), len(roster.encode()),
        _timed(lambda: replace(view).encode(), rounds), _timed(lambda: _adopt(encoded), rounds), plans,
        _timed(lambda: plan_roster(roster, more), rounds), views, rosters,
    )  # fmt: skip
    kinds = {"a worker adopts a view": found.adopt, "the leader encodes it": found.encode}
    kinds |= {f"planned when a server {change}": times for change, times in found.plan.items()}
    kinds |= {"planned when a worker joins": found.roster_plan}
    title = f"control: {ranges:,} ranges, {servers:,} servers, {workers:,} workers"
    shown = figures(title, kinds, ("p50", "max"), digits=2, unit=" ms")
    text = (
        f"the first view took {found.first:,.0f} ms of CPU time; a view has {found.view_bytes:,} bytes, what is sent "
        f"of a server's death {found.death_bytes:,}, the roster {found.roster_bytes:,}; ten workers that came and went "
        f"changed {found.views_for_workers} views and {found.rosters_for_workers} rosters"
    )
    return Result(found, [shown, text])


def _adopt(encoded: bytes) -> Routes:
    view = View.decode(encoded)
    assert view.as_chains.epoch == view.epoch
    return Routes(view)


def _view(decided: Plan | None) -> View:
    assert decided is not None
    assert decided.view is not None
    return decided.view


def _timed(work: Callable[[], object], rounds: int) -> dict[str, float]:
    for _ in range(3):
        work()
    return percentiles([1e3 * seconds_of(work) for _ in range(rounds)], 50, 100, digits=3)


async def _workers_come_and_go() -> tuple[int, int]:
    """How many views and rosters a leader writes while ten workers join and leave again."""
    store, stop = MemoryStore("bench"), asyncio.Event()
    await create_cluster(store, ClusterConfig(64, REPLICAS, min_servers=3))
    leader = asyncio.create_task(run_coordinator(store, name="c0", stop=stop))
    members = [
        await register_server(store, name=f"s{i}", address=f"127.0.0.1:{i + 1}", on_lost=lambda reason: None)
        for i in range(3)
    ]
    try:
        before = await _decoded(store, VIEW)
        workers = [await register_worker(store, name=f"w{i}", app="default") for i in range(10)]
        await _decoded(store, ROSTER, lambda roster: len(roster.workers) == 10)
        for worker in workers:
            await worker.close()
        empty = await _decoded(store, ROSTER, lambda roster: not roster.workers)
        after = await _decoded(store, VIEW)
        return after.epoch - before.epoch, empty.version
    finally:
        stop.set()
        await leader
        for member in members:
            await member.close()


async def _decoded(store: MemoryStore, key: str, accepted: Callable[[Any], bool] = lambda found: True) -> Any:
    deadline = time.monotonic() + _ROSTER_TIMEOUT_S
    while time.monotonic() < deadline:
        entry = await store.get(key)
        if entry is not None:
            found = View.decode(entry.value) if key == VIEW else Roster.decode(entry.value)
            if accepted(found):
                return found
        await asyncio.sleep(0.01)
    raise Timeout(f"the leader wrote no such {key} within {_ROSTER_TIMEOUT_S:g} s")
