"""The checkpoints that a leading coordinator takes: every so often, and when a worker asks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.storage import Storage
from elasticps.local import LocalCluster
from elasticps.local.process import Process
from elasticps.local.zygote import OURS
from tests.e2e.oracle import PAUSE_S
from tests.zygotes import Shared

KEYS = np.arange(100)


def test_a_coordinator_takes_checkpoints_every_so_often_and_when_a_worker_asks(tmp_path: Path) -> None:
    place = (tmp_path / "saved").as_uri()
    with LocalCluster(servers=1, replicas=1) as cluster, eps.connect(cluster.url, worker="w0", timeout=30.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        command = [*OURS, "coordinator", "--url", cluster.operator_url, "--name", "c1"]
        command += ["--checkpoint-every", "1s", "--checkpoint-url", place]
        zygote = Shared(tmp_path / "zygote.log", os.environ) if Shared.possible() else None
        coordinator = Process.start("c1", "coordinator", command, tmp_path, None, zygote)
        try:
            cluster.kill("c0")  # it comes to lead
            steps, deadline = 0, time.monotonic() + 120
            while len(catalog.cuts_of(Storage(place))) < 2:
                assert time.monotonic() < deadline, coordinator.log.read_text()
                ps.push({table: (KEYS, np.ones((len(KEYS), 2), np.float32))}).result()
                steps += 1
                time.sleep(PAUSE_S)
            cut = ps.checkpoint().result(120)
        finally:
            coordinator.popen.terminate()
            coordinator.popen.wait()
    contents = Contents(Storage(place), catalog.chain(Storage(place), cut))
    assert contents.manifest.workers["w0"].clock == steps
    ((number, spec),) = contents.manifest.tables.values()
    pieces = [piece for unit in contents.units(number) for piece in contents.read(unit)]
    assert sorted(np.concatenate([piece.keys for piece in pieces]).tolist()) == KEYS.tolist()
    for piece in pieces:
        weights = np.ascontiguousarray(piece.rows[:, : 4 * spec.dim]).view(np.float32)
        assert (weights == steps).all()
