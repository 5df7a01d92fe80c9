"""A worker says in etcd where it goes on after a pause, and hears no answer: it goes on, also after the next pause."""

from __future__ import annotations

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.client.core.join import PastRun
from elasticps.client.registry import Registry
from elasticps.errors import ClusterUnreachable, Error
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from tests.sim.conftest import wait_for

ROW, ONE = np.array([1]), np.ones((1, 1), np.float32)


def test_a_worker_whose_pause_was_written_without_an_answer_pauses_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, lost, errors, over = Registry.keep, list[PastRun](), list[str](), list[bool]()

    def keep_or_fail(self: Registry, past: PastRun, timeout_s: float) -> int | None:
        found = keep(self, past, timeout_s)
        if self._name.endswith("w1") and past.steps > 0 and not lost:
            lost.append(past)
            raise ClusterUnreachable("etcd gave no answer")
        return found

    monkeypatch.setattr(Registry, "keep", keep_or_fail)

    def program(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            try:
                for turn in range(4 if name == "w1" else 1000):
                    if name == "w1":
                        for _ in ps.shards(1, 1, name=str(turn)):
                            ps.push({table: (ROW, ONE)}).result()
                        threads.sleep(1.0)  # the end of the shards is a pause
                    ps.push({table: (ROW, ONE)}).result()
                    threads.sleep(0.05)
                    if over:
                        break
            except Error as error:
                errors.append(f"{name}: {error!r}")
            over.append(True)

    for name in ("w0", "w1"):
        cluster.start_worker(name, program)
    wait_for(cluster, lambda: len(over) == 2, 60.0)
    assert lost
    assert errors == [], errors
