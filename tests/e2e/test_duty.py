"""The checkpoints that a leading coordinator takes: every so often, and when a worker asks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.storage import Storage
from elasticps.local import LocalCluster

KEYS = np.arange(100)


def test_a_coordinator_takes_checkpoints_every_so_often_and_when_a_worker_asks(tmp_path: Path) -> None:
    place = (tmp_path / "saved").as_uri()
    with LocalCluster(servers=1, replicas=1) as cluster, eps.connect(cluster.url, worker="w0", timeout=30.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        command = [sys.executable, "-m", "elasticps", "coordinator", "--url", cluster.operator_url, "--name", "c1"]
        command += ["--checkpoint-every", "1s", "--checkpoint-url", place]
        with (tmp_path / "c1.log").open("wb") as log:
            coordinator = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            cluster.kill("c0")  # it comes to lead
            steps, deadline = 0, time.monotonic() + 120
            while len(catalog.cuts_of(Storage(place))) < 2:
                assert time.monotonic() < deadline, (tmp_path / "c1.log").read_text()
                ps.push({table: (KEYS, np.ones((len(KEYS), 2), np.float32))}).result()
                steps += 1
            cut = ps.checkpoint().result(120)
        finally:
            coordinator.terminate()
            coordinator.wait()
    contents = Contents(Storage(place), catalog.chain(Storage(place), cut))
    assert contents.manifest.workers["w0"].clock == steps
    ((number, spec),) = contents.manifest.tables.values()
    pieces = [piece for unit in contents.units(number) for piece in contents.read(unit)]
    assert sorted(np.concatenate([piece.keys for piece in pieces]).tolist()) == KEYS.tolist()
    for piece in pieces:
        weights = np.ascontiguousarray(piece.rows[:, : 4 * spec.dim]).view(np.float32)
        assert (weights == steps).all()
