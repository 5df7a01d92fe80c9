"""Checkpoints of real processes while workers push whole numbers and a server is killed: what is read back is exactly
the sum of each worker's steps up to its clock, whatever number of increments it lies in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.local import LocalCluster
from tests.e2e.oracle import DIM, KEYS, OWN_KEYS, SHAPE, Ledger, Trainers, check_sums

APP = "saved"
SEEDS = (1, 2)


def values_of(storage: Storage, cut: int) -> NDArray[np.float64]:
    """What a checkpoint has, as the oracle's vector."""
    contents = Contents(storage, catalog.chain(storage, cut))
    found: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, (number, spec) in contents.manifest.tables.items():
        rows = found.setdefault(name, {})
        for unit in contents.units(number):
            for piece in contents.read(unit):
                for key, row in zip(piece.keys.tolist(), piece.rows, strict=True):
                    assert key not in rows
                    rows[key] = row[: 4 * spec.dim].copy().view(np.float32)
    counted, summed = found[f"{APP}/counted"], found[f"{APP}/summed"]
    nothing = np.zeros(DIM, np.float32)
    shared = np.concatenate([counted.get(key, nothing) for key in KEYS.tolist()])
    own = [counted.get(OWN_KEYS + seed, nothing)[0] for seed in SEEDS]
    dense = np.concatenate([summed[key] for key in sorted(summed)])[: int(np.prod(SHAPE))]
    return np.concatenate([shared, own, dense]).astype(np.float64)


def ledgers(trainers: Trainers, manifest: Manifest) -> list[Ledger]:
    """The steps of each trainer that are in a checkpoint."""
    found = []
    for trainer in trainers.all:
        entry = manifest.workers[trainer.ps.worker.name]
        steps = entry.clock - trainer.ps._dispatcher.session.base
        found.append(Ledger(trainer.seed, steps, steps))
    return found


def make(url: str, place: str, *, full: bool = False) -> Manifest:
    """A checkpoint; given up ones are tried again."""
    why: Exception | None = None
    for _ in range(10):
        try:
            return checkpoint_cluster(url, place, full=full)
        except CheckpointError as error:
            why = error
    raise AssertionError(f"ten checkpoints were given up, the last one because {why}")


def test_every_checkpoint_has_each_worker_s_steps_up_to_its_clock_and_none_later(tmp_path: Path) -> None:
    place = tmp_path.as_uri()
    with LocalCluster(servers=3, ranges=32) as cluster:
        trainers = Trainers(cluster.url, seeds=SEEDS, app=APP)
        try:
            trainers.progress()
            manifests = []
            for number in range(6):
                manifests.append(make(cluster.url, place, full=number == 4))
                if number == 2:
                    cluster.kill("s1")
                trainers.progress(5)
            trainers.finish()
            assert [bool(manifest.since) for manifest in manifests] == [False, True, True, True, False, True]
            steps = [0] * len(SEEDS)
            for manifest in manifests:
                found = ledgers(trainers, manifest)
                check_sums(values_of(Storage(place), manifest.cut), found)
                before, steps = steps, [ledger.begun for ledger in found]
                assert all(now > earlier for now, earlier in zip(steps, before, strict=True))
        finally:
            trainers.close()


def test_a_place_that_takes_no_files_is_told_and_training_goes_on(cluster: eps.LocalCluster) -> None:
    place = "file:///proc/nowhere"
    with eps.connect(cluster.url, worker="w", app="refused", timeout=60) as ps:
        table = ps.table("refused", dim=2, optimizer=eps.Accumulate())
        keys, ones = np.arange(100), np.ones((100, 2), np.float32)
        ps.push({table: (keys, ones)}).result()
        with pytest.raises(CheckpointError, match="cannot be"):
            checkpoint_cluster(cluster.url, place, full=True)
        ps.push({table: (keys, ones)}).result()
        assert (table.pull(keys) == 2).all()
