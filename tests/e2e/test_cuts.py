"""Consistent cuts of real processes while workers push whole numbers and a server is killed: what is there at a cut is
exactly the sum of each worker's steps up to one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.store import Store
from coordinator.core.view import View
from elasticps.checkpoint.create import by_grpc
from elasticps.checkpoint.cuts import ConsistentCut, CutTaker
from elasticps.local import LocalCluster
from elasticps.system import background
from tests.e2e.oracle import Ledger, Sums, Trainers, check_sums

CUTS = 8
KILL_AT = 3
APP = "cuts"


async def cut_now(kind: type[CutTaker], store: Store, **more: Any) -> tuple[ConsistentCut, CutTaker]:
    """A cut, and what took it."""
    async with by_grpc(None) as connect:
        driver = kind(store, connect, **more)
        return await driver.take("memory://cuts", attempts=20), driver


class Looking(CutTaker):
    """Reads all there is while workers still hold: pulls are not held, and show what every range had at the cut."""

    def __init__(self, *given: Any, ps: eps.Client, sums: Sums) -> None:
        super().__init__(*given)
        self._ps, self._sums = ps, sums
        self.found: NDArray[np.float64] = np.empty(0)

    async def _log(self, *given: Any) -> View:
        view = await super()._log(*given)
        self.found = await asyncio.to_thread(self._sums.read, self._ps)
        return view


def ledgers(trainers: Trainers, cut: ConsistentCut) -> Sequence[Ledger]:
    """The steps of each trainer that are in a cut."""
    found = []
    for trainer in trainers.all:
        steps = cut.verdict.clocks[trainer.ps.worker.id] - trainer.ps._dispatcher.session.base
        found.append(Ledger(trainer.seed, steps, steps))
    return found


def test_every_cut_has_exactly_each_workers_steps_up_to_one_clock() -> None:
    with (
        LocalCluster(servers=3, ranges=32) as cluster,
        eps.connect(cluster.url, worker="reader", app=APP, timeout=60) as ps,
        ThreadPoolExecutor(1) as beside,
    ):
        trainers = Trainers(cluster.url, seeds=(1, 2), app=APP)
        store = background.run(open_store(cluster.url, timeout_s=20.0))
        try:
            trainers.progress()
            before = [0, 0]
            for number in range(CUTS):
                cutting = beside.submit(background.run, cut_now(Looking, store, ps=ps, sums=Sums([1, 2])))
                if number == KILL_AT:
                    cluster.kill("s1")
                cut, driver = cutting.result(120)
                assert isinstance(driver, Looking)
                found = ledgers(trainers, cut)
                check_sums(driver.found, found)
                assert not cut.verdict.left_out
                now = [ledger.begun for ledger in found]
                assert all(there > earlier for there, earlier in zip(now, before, strict=True))
                before = now
                trainers.progress(5)
            trainers.finish()
        finally:
            trainers.close()
            background.run(store.close())


def test_an_idle_worker_in_rounds_does_not_delay_a_cut(cluster: eps.LocalCluster) -> None:
    """One of two has pushed its share and computes for long; the other has not pushed: both hold after that round."""
    with (
        eps.connect(cluster.url, worker="a", app="still", consistency=eps.BSP(), timeout=30) as a,
        eps.connect(cluster.url, worker="b", app="still", consistency=eps.BSP(), timeout=30) as b,
    ):
        tables = [ps.table("t", dim=2, optimizer=eps.Accumulate()) for ps in (a, b)]
        ones = np.ones((4, 2), np.float32)
        for ps, table in zip((a, b), tables, strict=True):
            ps.resume()
            ps.push({table: (np.arange(4), ones)})
        store = background.run(open_store(cluster.url, timeout_s=20.0))
        try:
            cut, _ = background.run(cut_now(CutTaker, store))
        finally:
            background.run(store.close())
        assert [cut.verdict.clocks[ps.worker.id] for ps in (a, b)] == [1, 1]
        assert cut.verdict.rounds["still"] == 1
        np.testing.assert_array_equal(tables[0].pull(np.arange(4)), ones)
