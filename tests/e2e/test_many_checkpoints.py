"""Two hundred checkpoints while workers push whole numbers and servers are killed: each one, restored into another
number of servers, is exactly the sum of each worker's steps up to its clock. In ten runs, each with clusters of its
own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.restore import restore_cluster
from tests.conftest import NewCluster
from tests.e2e.oracle import Sums, Trainers, Watcher
from tests.e2e.test_checkpoints import APP, SEEDS, make

RUNS, EACH = 10, 20
TABLES = (f"{APP}/counted", f"{APP}/summed")


class Expected:
    """The sum of each trainer's steps up to the clocks of one checkpoint after the other."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers
        self._sums = Sums(SEEDS)
        self._steps = dict.fromkeys(SEEDS, 0)

    def at(self, manifest: Manifest) -> np.ndarray:
        for trainer in self._trainers.all:
            entry = manifest.workers[trainer.ps.worker.name]
            steps = entry.clock - trainer.ps._dispatcher.session.base
            assert steps > self._steps[trainer.seed], "a checkpoint has steps that the one before has not"
            for number in range(self._steps[trainer.seed] + 1, steps + 1):
                self._sums.values += self._sums.of(trainer.seed, number)
            self._steps[trainer.seed] = steps
        return self._sums.values.copy()


def restored(url: str, place: str, cut: int) -> np.ndarray:
    """What a cluster has when a checkpoint is there. Its tables go again."""
    with eps.connect(url, worker="reader", app=APP, timeout=60) as ps:
        restore_cluster(url, place, cut=cut, tables=TABLES)
        found = Sums(SEEDS).read(ps)
        for name in TABLES:
            ps.drop_table(name.partition("/")[2])
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(RUNS))
def test_each_of_many_checkpoints_is_exact(run: int, local_cluster: NewCluster, tmp_path: Path) -> None:
    servers, others = (2, 3, 4)[run % 3], (3, 1, 2)[run % 3]
    place = tmp_path.as_uri()
    other = local_cluster(servers=others, replicas=1, ranges=16)
    cluster = local_cluster(servers=servers, replicas=2, ranges=32, restart=True)
    watcher = Watcher(cluster.url)
    trainers = Trainers(cluster.url, seeds=SEEDS, app=APP)
    try:
        trainers.progress()
        expected, differ = Expected(trainers), []
        for number in range(EACH):
            manifest = make(cluster.url, place, full=number % 5 == run % 5)
            expected_rows = expected.at(manifest)
            if number % 4 == 1:
                watcher.wait(lambda view: bool((view.chains[:, :2] >= 0).all()), "some range has one replica")
                cluster.kill(f"s{(run + number // 4) % servers}")
            if number % 10 == 9:  # clocks, too, and a cluster that was empty
                with eps.LocalCluster(servers=others, replicas=1, ranges=16) as fresh:
                    restore_cluster(fresh.url, place, cut=manifest.cut)
                    with eps.connect(fresh.url, worker="reader", app=APP, timeout=60) as ps:
                        found = Sums(SEEDS).read(ps)
            else:
                found = restored(other.url, place, manifest.cut)
            if not np.array_equal(found, expected_rows):
                differ.append(manifest.cut)
            trainers.progress(5)
        assert not differ, f"checkpoints {differ} of {EACH} differ"
        trainers.finish()
    finally:
        trainers.close()
        watcher.close()
