"""Takes cuts again and again while a story goes on, as a coordinator would, and checks each that counts as
consistent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Any, TypeVar

from chaos.sim.checks.cuts import CutCheck
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import STORE_TIMEOUT_S, Cluster
from coordinator.core.errors import StoreUnavailable
from coordinator.core.view import ServerInfo
from elasticps.admin.admin_pb2 import RestoreRequest, RestoreResponse
from elasticps.admin.interface import AdminInterface, CutState, CutWritten, WorkerHeld
from elasticps.admin.service import Admin
from elasticps.checkpoint.cuts import CutTaker, GivenUp, Inconsistent, RoundsDiffer
from elasticps.errors import ClusterUnreachable

T = TypeVar("T")
HOST = "cutter"
HOLD_S = (0.3, 1.0)
PAUSE_S = 0.1
ANSWER_S = 0.5
TRAVEL_S = 0.002  # of a call, and of its answer
SLOW, SLOW_S = 0.1, (0.02, 0.1)  # so many calls to log a cut take long
THOUGHTS = 20  # a step hardly takes as long as so many
QUIET_S = 1.0  # so long after a worker has died its successor is there
CLOSED_S = 4.0  # so long after it has closed the round that its predecessor was closing


class Afar:
    """A server's part in cuts, called from another host: calls and answers travel, may be lost, and come late."""

    def __init__(self, cluster: Cluster, info: ServerInfo, random: Random) -> None:
        self._cluster = cluster
        self._info = info
        self._random = random

    async def hold(self, cut: int, hold_s: float) -> bool:
        return await self._call(lambda server: _now(server.cuts.hold(cut, hold_s)))

    async def held(self, cut: int) -> Mapping[int, WorkerHeld]:
        return await self._call(lambda server: _now(server.cuts.held(cut)))

    async def release(self, cut: int) -> None:
        async def release(server: AdminInterface) -> None:
            server.cuts.release(cut)

        await self._call(release)

    async def take(self, cut: int, since: int, url: str) -> bool:
        if self._random.random() < SLOW:
            await asyncio.sleep(self._random.uniform(*SLOW_S))
        return await self._call(lambda server: server.cuts.take(cut, since, url))

    async def state(self, cut: int) -> CutState:
        """Returns the server's state at a cut, and has the server write the cut, which real drivers ask for apart."""

        async def state(server: AdminInterface) -> CutState:
            await server.cuts.written(cut, 0.0)
            return server.cuts.state(cut)

        return await self._call(state)

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        return await self._call(lambda server: server.cuts.written(cut, min(wait_s, ANSWER_S / 2)))

    async def restore(self, request: RestoreRequest) -> RestoreResponse:
        """Asks the server to restore lost ranges."""
        return await self._call(lambda server: Admin(lambda: server, None).Restore(request, None))  # type: ignore[arg-type]

    async def _call(self, call: Callable[[AdminInterface], Coroutine[Any, Any, T]]) -> T:
        clock, here = self._cluster.clock, asyncio.get_running_loop()
        answer: asyncio.Future[T] = here.create_future()
        found = self._cluster.servers.get(self._info.name)
        server = self._cluster.life(self._info.name, self._info.incarnation)

        def arrived() -> None:
            if self._cluster.over:
                return
            task = found.loop.create_task(call(server.admin))  # type: ignore[union-attr]
            task.add_done_callback(done)

        def done(task: asyncio.Task[T]) -> None:
            if not task.cancelled() and self._cluster.network.reaches(self._info.name, HOST):
                clock.after(self._travel_s, _soon, here, answered, task)

        def answered(task: asyncio.Task[T]) -> None:
            if not answer.done():
                answer.set_result(task.result())

        if found is not None and server is not None and self._cluster.network.reaches(HOST, self._info.name):
            clock.after(self._travel_s, _soon, found.loop, arrived)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise ClusterUnreachable(f"server {self._info.name} did not answer") from None

    @property
    def _travel_s(self) -> float:
        return self._random.expovariate(1 / TRAVEL_S)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *given: Any) -> None:
    loop.call_soon(call, *given)


async def _now(value: T) -> T:
    return value


class Cutter:
    """Takes cuts as long as `on()`.

    taken    how many were consistent
    died_s   when a worker died last
    calm     no process and no link is slow, so that every cut succeeds unless a worker dies in it, or unless it is
             shorter than a worker may take for a step. One other cut may fail, but not two in a row: under bounded
             delay a worker that pulls in the midst of a step may wait for a worker that holds already
    think_s  the mean time between two calls of a worker
    """

    def __init__(self, cluster: Cluster, check: CutCheck, on: Callable[[], bool], calm: bool, think_s: float) -> None:
        self.taken = 0
        self.died_s = -QUIET_S
        self._calm = calm
        self._failed = False  # the last one, for no good reason
        self._long_s = THOUGHTS * think_s
        self._cluster = cluster
        self._check = check
        self._on = on

    def start(self) -> None:
        """Starts taking cuts, on a host of its own."""
        self._cluster.start_task(HOST, self._run)

    async def _run(self) -> None:
        cluster = self._cluster
        random = cluster.clock.chance("cuts")
        store = cluster.store.client(HOST, STORE_TIMEOUT_S)
        while self._on():
            await asyncio.sleep(random.expovariate(1 / PAUSE_S))
            began_s, formed = cluster.clock.now, cluster.view is not None
            hold_s = random.uniform(*HOLD_S)
            driver = CutTaker(store, lambda info: Afar(cluster, info, random), hold_s)
            try:
                cut = await driver.attempt("")
            except Inconsistent as error:  # the proof is for peers that break the protocol: here none does
                if isinstance(error, RoundsDiffer) and began_s < self.died_s + CLOSED_S:
                    continue
                cluster.broken(Violation("who holds writes nothing", str(error)))
                return
            except (GivenUp, StoreUnavailable) as error:
                late = began_s <= self.died_s + QUIET_S or hold_s < self._long_s
                failed = self._calm and formed and self._on() and not late
                if failed and self._failed:
                    cluster.broken(Violation("cuts come about", str(error)))
                self._failed = failed
                cluster.clock.note(f"no cut: {error}")
                continue
            self._check.consistent(cut)
            self.taken, self._failed = self.taken + 1, False
            cluster.clock.note(f"cut {cut.number} after {cut.held_s:.4f} s: {dict(cut.verdict.clocks)}")
