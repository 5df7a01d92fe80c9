"""Ranges that lost every replica are recovered from a checkpoint, and their lost steps are reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.admin.audit import audit
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.range_recovery import restore_ranges
from elasticps.cli.status import look
from elasticps.errors import ConfigError
from elasticps.kernels import hashing
from elasticps.local import LocalCluster
from elasticps.system import background
from tests.conftest import NewCluster

KEYS = np.arange(500)
RANGES = 16
Eventually = Callable[[Callable[[], bool]], None]


def ranges_of(table: eps.SparseTable) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    where = np.empty(len(KEYS), np.int32)
    hashing.key_ranges(KEYS, hashing.table_salt(table.id), hashing.range_shift(RANGES), where)
    return where


def push(ps: eps.Client, table: eps.SparseTable, column: int, steps: int) -> None:
    """Each step adds 1 to a column of all rows."""
    ones = np.zeros((len(KEYS), 2), np.float32)
    ones[:, column] = 1
    for _ in range(steps):
        ps.push({table: (KEYS, ones)})


def kill(cluster: LocalCluster, *names: str) -> None:
    for server in cluster.servers:
        if server.name in names:
            os.kill(server.pid, signal.SIGKILL)


def state(url: str) -> dict[str, Any]:
    """The state that `elasticps status` shows."""
    return background.run(look(url, 20.0))


@pytest.mark.parametrize(
    ("servers", "replicas", "dead"),
    [pytest.param(2, 1, ("s1",), marks=pytest.mark.slow), (3, 2, ("s1", "s2"))],
)
def test_an_operator_recovers_lost_ranges(
    local_cluster: NewCluster, eventually: Eventually, tmp_path: Path, servers: int, replicas: int, dead: tuple[str]
) -> None:
    cluster = local_cluster(servers=servers, replicas=replicas, ranges=RANGES)
    url, place = cluster.url, (tmp_path / "saved").as_uri()
    with eps.connect(url, worker="w0", timeout=60) as ps, eps.connect(url, worker="w1", timeout=60) as other:
        table, its = (each.table("t", dim=2, optimizer=eps.Accumulate()) for each in (ps, other))
        for each, handle, column, steps in ((ps, table, 0, 10), (other, its, 1, 5)):
            push(each, handle, column, steps)
            each.flush()
        checkpoint_cluster(url, place)
        for each, handle, column, steps in ((ps, table, 0, 7), (other, its, 1, 3)):
            push(each, handle, column, steps)
            each.flush()
        with pytest.raises(ConfigError, match="has a replica: nothing of it is lost"):
            restore_ranges(url, "", [0])
        kill(cluster, *dead)
        push(ps, table, 0, 4)  # nobody has these: they come again
        eventually(lambda: bool(state(url)["ranges_waiting"]))
        with pytest.raises(ConfigError, match=r"wait for s[12].*--accept-loss"):
            restore_ranges(url, "", None)
        lost = state(url)["ranges_waiting"]
        reported = restore_ranges(url, "", None, accept_loss=True, timeout_s=60)
        assert reported["ranges"] == lost
        ps.flush()
        push(other, its, 1, 2)
        other.flush()
        gone = np.isin(ranges_of(table), lost)
        assert gone.any()
        assert not gone.all()
        values = table.pull(KEYS)
        assert {*values[gone, 0].tolist()} == {10 + 4}
        assert {*values[gone, 1].tolist()} == {5 + 2}
        assert {*values[~gone, 0].tolist()} == {10 + 7 + 4}
        assert {*values[~gone, 1].tolist()} == {5 + 3 + 2}
        assert reported["rows"] == np.count_nonzero(gone)
        missing = {one["name"]: (one["have"], one["to"]) for one in reported["workers"]}
        assert missing["w0"][0] == ps.resume().clock + 10
        assert 16 <= missing["w0"][1] - ps.resume().clock <= 17  # as far as servers know
        assert missing["w1"][0] == other.resume().clock + 5
    assert not audit(url).wrong  # but with two servers lost there is nothing to compare with


def test_each_tables_policy_decides_about_its_lost_ranges(
    local_cluster: NewCluster, eventually: Eventually, tmp_path: Path
) -> None:
    """All servers die and begin empty. One table that waits keeps the others waiting, a budget waits for a person; what
    workers know to be lost is exact."""
    cluster = local_cluster(servers=1, replicas=1, ranges=RANGES, restart=True)
    url, place = cluster.url, (tmp_path / "saved").as_uri()
    optimizer = eps.Accumulate()
    with eps.connect(url, worker="w0", timeout=90, raise_on_loss=True) as ps:
        table, late = ps.table("t", dim=2, optimizer=optimizer, on_loss="restore"), None
        with pytest.raises(eps.InputError, match="'wait' or 'restore', not 'forget'"):
            table.set_on_loss("forget")
        start = ps.resume().clock
        push(ps, table, 0, 6)
        ps.flush()
        checkpoint_cluster(url, place)
        late = ps.table("late", dim=2, optimizer=optimizer)  # waits, unless it says otherwise
        push(ps, late, 1, 3)
        ps.flush()
        kill(cluster, "s0")
        waiting = table.pull_async(KEYS)
        eventually(lambda: any("default/late has on_loss='wait'" in line for line in state(url)["loss"]))
        assert not state(url)["healthy"]
        late.set_on_loss("restore", 2)
        eventually(lambda: any("nobody knows how many steps of worker w0" in line for line in state(url)["loss"]))
        late.set_on_loss("restore")
        eventually(lambda: state(url)["healthy"])
        eventually(lambda: bool(ps.view.recovery_epoch.any() and ps.losses()))
        with pytest.raises(
            eps.DataLost, match=rf"{RANGES} ranges .* steps {start + 7} to {start + 9} of worker w0 are"
        ):
            table.pull(KEYS)
        assert {*table.pull(KEYS).ravel().tolist()} == {0.0, 6.0}
        assert waiting.result().tobytes() == table.pull(KEYS).tobytes()
        assert not late.pull(KEYS).any()
        push(ps, late, 1, 1)
        push(ps, table, 0, 1)
        ps.flush()
        assert {*late.pull(KEYS)[:, 1].tolist()} == {1.0}
        assert {*table.pull(KEYS)[:, 0].tolist()} == {7.0}
        (loss,) = ps.losses()
        assert (loss.ranges, loss.rows, loss.lacking) == (tuple(range(RANGES)), len(KEYS), ("default/late",))
        assert loss.missing == {"w0": (start + 7, start + 9)}
        eventually(lambda: state(url)["losses"][0]["workers"][0]["to"] == start + 9)
    with eps.connect(url, worker="w0", timeout=30) as ps:
        found = ps.resume()
        assert found.trained == found.clock == start + 11
    assert audit(url).clean
