"""Checkpoints of real processes while workers push whole numbers and a server is killed: what is read back is exactly
the sum of each worker's steps up to its clock, whatever number of increments it lies in."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.restore import restore_cluster
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.local import LocalCluster
from tests.e2e.oracle import DIM, KEYS, OWN_KEYS, SHAPE, Ledger, Trainers, check_sums

APP = "saved"
SEEDS = (1, 2)
NUMBERS = itertools.count()


def values_of(storage: Storage, cut: int) -> NDArray[np.float64]:
    """The content of a checkpoint as the oracle's vector."""
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


def test_every_checkpoint_has_exactly_each_workers_steps_up_to_its_clock(tmp_path: Path) -> None:
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


def test_an_unwritable_folder_is_reported_and_training_continues(cluster: eps.LocalCluster) -> None:
    place = "file:///proc/nowhere"
    with eps.connect(cluster.url, worker="w", app="refused", timeout=60) as ps:
        table = ps.table("refused", dim=2, optimizer=eps.Accumulate())
        keys, ones = np.arange(100), np.ones((100, 2), np.float32)
        ps.push({table: (keys, ones)}).result()
        with pytest.raises(CheckpointError, match="cannot be"):
            checkpoint_cluster(cluster.url, place, full=True)
        ps.push({table: (keys, ones)}).result()
        assert (table.pull(keys) == 2).all()


def push(ps: eps.Client, table: eps.SparseTable, value: float = 1) -> None:
    ps.push({table: (np.arange(100), np.full((100, 2), value, np.float32))}).result()


def test_a_full_disk_is_reported_and_training_continues(cluster: eps.LocalCluster, tmp_path: Path) -> None:
    """Of one server: it may write no file of more than a few bytes."""
    place = tmp_path.as_uri()
    pid = cluster.servers[0].pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with eps.connect(cluster.url, worker="w", app="full", timeout=60) as ps:
        table = ps.table("full", dim=2, optimizer=eps.Accumulate())
        push(ps, table)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"server s\d.* has given up: .*File too large"):
                checkpoint_cluster(cluster.url, place)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        assert catalog.look(Storage(place)).manifests == {}
        push(ps, table)
        manifest = checkpoint_cluster(cluster.url, place)
        assert [*catalog.look(Storage(place)).manifests] == catalog.cuts_of(Storage(place)) == [manifest.cut]
        assert (table.pull(np.arange(100)) == 2).all()


def truncated(data: bytes) -> bytes:
    return data[:-7]


def altered(data: bytes) -> bytes:
    return data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]


def newer(data: bytes) -> bytes:
    return data.replace(b'"version": 2', b'"version": 4')


def foreign(data: bytes) -> bytes:
    return b"PK\3\4 no checkpoint at all"


@pytest.mark.parametrize(
    ("damage", "of", "says"),
    [
        (truncated, "gone-*/*.safetensors", r"cannot be restored: .* has \d+ bytes, not"),
        (altered, "gone-*/*.safetensors", "was altered: range"),
        (truncated, "manifest.json", "is no manifest of a checkpoint, or was cut off"),
        (altered, "manifest.json", "was altered|is no manifest"),
        (newer, "manifest.json", "was written by a newer elasticps: this one reads versions up to 3"),
        (foreign, "manifest.json", "is no manifest of a checkpoint, or was cut off"),
        (None, "gone-*/*.safetensors", r"cannot be restored: .* is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_training_continues(
    cluster: eps.LocalCluster, tmp_path: Path, damage: Callable[[bytes], bytes] | None, of: str, says: str
) -> None:
    place, app = tmp_path.as_uri(), f"damaged{next(NUMBERS)}"
    with eps.connect(cluster.url, worker="w", app=app, timeout=60) as ps:
        table, beside = (ps.table(name, dim=2, optimizer=eps.Accumulate()) for name in ("gone", "beside"))
        push(ps, table)
        manifest = checkpoint_cluster(cluster.url, place, full=True)
        ps.drop_table("gone")
        victim = max((tmp_path / manifest.folder).glob(of), key=lambda one: one.stat().st_size)
        if damage is None:
            victim.unlink()
        else:
            victim.write_bytes(damage(victim.read_bytes()))
        with pytest.raises(CheckpointError, match=says):
            restore_cluster(cluster.url, place, tables=[f"{app}/gone"])
        assert [*ps.tables()] == ["beside"]
        push(ps, beside)
        assert (beside.pull(np.arange(100)) == 1).all()


def test_learning_rates_set_for_all_workers_are_restored(cluster: eps.LocalCluster, tmp_path: Path) -> None:
    place = tmp_path.as_uri()
    with eps.connect(cluster.url, worker="w", app="rates", timeout=60) as ps:
        table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
        push(ps, table)
        table.set_lr(0.25)
        checkpoint_cluster(cluster.url, place)
        ps.drop_table("t")
        restore_cluster(cluster.url, place, tables=["rates/t"])
        again = ps.open("t")
        assert isinstance(again, eps.SparseTable)
        push(ps, again)
        assert (again.pull(np.arange(100)) == -1.25).all()
    with eps.connect(cluster.url, worker="other", app="rates", timeout=60) as ps:
        again = ps.open("t")
        assert isinstance(again, eps.SparseTable)
        push(ps, again)
        assert (again.pull(np.arange(100)) == -1.5).all()
