"""The coordination store goes away and comes back; training never notices."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import pytest

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.store import Store
from coordinator.core.view import Roster
from elasticps.system import background
from tests.conftest import NewCluster
from tests.e2e.oracle import PAUSE_S, Watcher, owners, wait_for

T = TypeVar("T")


def test_training_goes_on_while_etcd_is_away_and_everything_recovers(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=2)
    keys, grads = np.arange(100), np.ones((100, 2), np.float32)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (keys, grads)}).result()
        cluster.stop_etcd()
        lease_s = 11.0  # longer than any lease: servers 5 s, workers 10 s
        ends = time.monotonic() + lease_s
        steps = 1
        while time.monotonic() < ends:
            ps.push({table: (keys, grads)}).result()
            steps += 1
            time.sleep(PAUSE_S)
        cluster.start_etcd()
        later = ps.table("later", dim=2, optimizer=eps.Accumulate())  # needs etcd
        ps.push({table: (keys, grads), later: (keys, grads)}).result()
        with eps.connect(cluster.url, worker="w1", timeout=60.0) as other:  # needs watches, leases and a leader
            again = other.table("t", dim=2, optimizer=eps.Accumulate())
            other.push({again: (keys, grads)}).result()
        assert set(table.pull(keys).ravel().tolist()) == {steps + 2.0}
        assert set(later.pull(keys).ravel().tolist()) == {1.0}


def test_a_frozen_etcd_ends_no_process(local_cluster: NewCluster) -> None:
    """Longer than any lease: as it thaws all have run out, of workers that push all the time."""
    cluster = local_cluster(servers=2)
    keys, grads = np.arange(100), np.ones((100, 2), np.float32)
    over = threading.Event()

    def train(name: str) -> int:
        with eps.connect(cluster.url, worker=name, timeout=60.0) as ps:
            table = ps.table("t", dim=2, optimizer=eps.Accumulate())
            steps = 0
            while not over.wait(PAUSE_S):
                ps.push({table: (keys, grads)}).result()
                steps += 1
            return steps

    with ThreadPoolExecutor(6) as threads:
        training = [threads.submit(train, f"w{i}") for i in range(6)]
        try:
            wait_for(lambda: len(roster_of(cluster.url)) == 6, lambda: cluster.log("c0"), 100.0)
            listed = roster_of(cluster.url)
            cluster.pause("etcd")
            time.sleep(7.0)  # not a wait for anything: leases have to run out
            cluster.resume("etcd")
            wait_for(lambda: cluster.log("c0").count("leads cluster") > 1, lambda: cluster.log("c0"), 100.0)
            assert roster_of(cluster.url) == listed, "the new leader keeps them"
            with eps.connect(cluster.url, worker="new", timeout=60.0):  # a roster is written
                assert set(listed) < set(roster_of(cluster.url))
        finally:
            over.set()
        steps = sum(each.result(100.0) for each in training)
    with eps.connect(cluster.url, worker="reader", timeout=60.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        assert set(table.pull(keys).ravel().tolist()) == {float(steps)}


def test_a_worker_whose_registration_is_lost_registers_again(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=2)
    keys, grads = np.arange(100), np.ones((100, 2), np.float32)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (keys, grads)}).result()
        me = ps.worker.id

        def left_out() -> bool:
            on_store(cluster.url, lambda store: store.delete("workers/default/w0"))
            return me not in roster_of(cluster.url)

        wait_for(left_out, lambda: cluster.log("c0"), 100.0)
        for _ in range(200):
            ps.push({table: (keys, grads)}).result()
        wait_for(lambda: me in roster_of(cluster.url), lambda: cluster.log("c0"), 100.0)
        assert set(table.pull(keys).ravel().tolist()) == {201.0}


def test_a_new_etcd_adopts_the_running_servers(local_cluster: NewCluster) -> None:
    """Its data are gone. Training goes on, nobody joins what is there instead, and adopting it loses nothing."""
    cluster = local_cluster(servers=2)
    keys, grads = np.arange(100), np.ones((100, 2), np.float32)
    admin = cluster.server("s0").admin
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (keys, grads)}).result()
        cluster.stop_etcd()
        shutil.rmtree(cluster.directory / "etcd")
        cluster.start_etcd()
        wait_for(lambda: "holds no cluster" in cluster.log("s0"), lambda: cluster.log("s0"), 100.0)
        ps.push({table: (keys, grads)}).result()
        with pytest.raises(eps.ClusterUnreachable, match="holds no cluster, not"):
            ps.table("u", dim=2, optimizer=eps.Accumulate())
        command = [sys.executable, "-m", "elasticps", "cluster", "adopt", "--url", cluster.url, "--server", admin]
        subprocess.run(command, check=True, capture_output=True)
        with eps.connect(cluster.url, worker="w1", timeout=60.0) as other:
            assert other.worker.id > ps.worker.id
            again = other.table("t", dim=2, optimizer=eps.Accumulate())
            other.push({again: (keys, grads)}).result()
            ps.push({table: (keys, grads)}).result()
            assert set(again.pull(keys).ravel().tolist()) == {4.0}


def test_a_new_etcd_gets_the_tables_of_each_application(local_cluster: NewCluster) -> None:
    """Tables of one name belong to two applications; a worker of each lives, and one of each comes."""
    cluster = local_cluster(servers=2)
    keys, grads = np.arange(100), np.ones((100, 2), np.float32)
    admin = cluster.server("s0").admin

    def table_of(ps: eps.Client) -> eps.SparseTable:
        return ps.table("t", dim=2, optimizer=eps.Accumulate())

    def connect(worker: str, app: str) -> eps.Client:
        return eps.connect(cluster.url, worker=worker, app=app, timeout=60.0)

    with connect("w0", "default") as ours, connect("w0", "ads") as theirs:
        tables = {ps: table_of(ps) for ps in (ours, theirs)}
        only = theirs.table("only", dim=2, optimizer=eps.Accumulate())
        for ps, table in tables.items():
            ps.push({table: (keys, grads)}).result()
        cluster.stop_etcd()
        shutil.rmtree(cluster.directory / "etcd")
        cluster.start_etcd()
        wait_for(lambda: "holds no cluster" in cluster.log("s0"), lambda: cluster.log("s0"), 100.0)
        command = [sys.executable, "-m", "elasticps", "cluster", "adopt", "--url", cluster.url, "--server", admin]
        subprocess.run(command, check=True, capture_output=True)
        for app, ps in (("default", ours), ("ads", theirs)):
            with connect("w1", app) as other:
                again = table_of(other)
                assert again.id == tables[ps].id
                other.push({again: (keys, grads)}).result()
                ps.push({tables[ps]: (keys, grads)}).result()
                assert set(again.pull(keys).ravel().tolist()) == {3.0}
        theirs.push({only: (keys, grads)}).result()
        listing = on_store(cluster.url, lambda store: store.list("tables/"))
        assert [entry.key for entry in listing.entries] == ["tables/ads/only", "tables/ads/t", "tables/default/t"]


def roster_of(url: str) -> list[int]:
    entry = on_store(url, lambda store: store.get("roster"))
    return [] if entry is None else [worker.id for worker in Roster.decode(entry.value).workers]


def on_store(url: str, call: Callable[[Store], Awaitable[T]]) -> T:
    async def once() -> T:
        store = await open_store(url)
        try:
            return await call(store)
        finally:
            await store.close()

    return background.run(once(), 30.0)


def test_a_worker_waits_for_a_frozen_etcd_until_its_timeout(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=1)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps, ThreadPoolExecutor(1) as threads:
        cluster.pause("etcd")
        opening = threads.submit(ps.table, "t", dim=2, optimizer=eps.Accumulate())
        done, _ = wait([opening], timeout=5.5)  # a call of the store gave up after 5 s
        cluster.resume("etcd")
        assert not done
        assert opening.result(60.0).pull(np.arange(1)).shape == (1, 2)


def test_a_server_that_was_left_out_waits_for_etcd_to_register_again(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=2)
    watcher = Watcher(cluster.url)
    try:
        old = cluster.server("s0").incarnation
        cluster.pause("s0")
        watcher.wait(lambda view: ("s0", old) not in owners(view), "without s0")
        # We may see the view before the leader has its answer. Without that it tells s0 nothing until etcd is back.
        wait_for(lambda: f"gone=s0#{old}" in cluster.log("c0"), lambda: cluster.log("c0"), 100.0)
        cluster.stop_etcd()
        cluster.resume("s0")
        wait_for(lambda: "cannot register, trying on" in cluster.log("s0"), lambda: cluster.log("s0"), 100.0)
        cluster.start_etcd()
        view = watcher.wait(lambda view: {name for name, _ in owners(view)} == {"s0", "s1"}, "s0 to be back")
        assert ("s0", old) not in owners(view)
    finally:
        watcher.close()
