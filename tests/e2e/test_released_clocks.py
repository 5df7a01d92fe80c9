"""Workers under bounded delay wait at themselves: the head of their group range dies, moves, or waits for one that
stands still."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.kernels.hashing import group_range
from tests.e2e.oracle import wait_for
from tests.e2e.worker_process import child, counts, ones

KEYS = np.arange(40)
STEPS = 150


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[eps.LocalCluster]:
    with eps.LocalCluster(servers=3, replicas=2, ranges=32) as cluster:
        yield cluster


def head_of_group(ps: eps.Client) -> str:
    """The server that heads the group range of a worker's application."""
    view = ps.view
    return view.servers[int(view.heads[group_range(ps.app, view.ranges)])].name


class Pulling(threading.Thread):
    """A pull of all keys, in a thread."""

    def __init__(self, ps: eps.Client) -> None:
        super().__init__()
        self.table = counts(ps)
        self.rows: NDArray[np.float32] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.rows = self.table.pull(KEYS)
        except BaseException as error:
            self.error = error


def test_a_pull_that_waits_goes_on_when_the_head_of_the_group_range_dies(own_cluster: eps.LocalCluster) -> None:
    options: dict[str, Any] = {"app": "dies", "timeout": 60.0, "consistency": eps.SSP(staleness=0)}
    with (
        eps.connect(own_cluster.url, worker="a", **options) as a,
        eps.connect(own_cluster.url, worker="b", **options) as b,
    ):
        for ps in (a, b):
            counts(ps)
            ps.resume()
        a.push({counts(a): ones(KEYS)}).result()
        pulling = Pulling(a)
        pulling.start()
        delay = a._parts.dispatcher.delay
        wait_for(lambda: bool(delay._questions), lambda: "it does not wait", 30)
        victim = head_of_group(a)
        own_cluster.kill(victim)
        wait_for(lambda: head_of_group(a) != victim, lambda: "nobody has taken over", 60)
        assert pulling.is_alive(), "b has pushed nothing"
        b.push({counts(b): ones(KEYS)}).result()
        pulling.join(60)
        assert pulling.error is None
        assert pulling.rows is not None
        assert (pulling.rows == 2).all()
        own_cluster.start_server(victim)


def test_others_wait_for_a_worker_that_stands_still_until_its_lease_has_ended(own_cluster: eps.LocalCluster) -> None:
    options: dict[str, Any] = {"app": "frozen", "timeout": 60.0, "consistency": eps.SSP(staleness=2)}
    with eps.connect(own_cluster.url, worker="alive", **options) as ps:
        table = counts(ps)
        ps.resume()
        with child("bounded", own_cluster.url, "frozen", "frozen", 7, consistency="ssp") as frozen:
            frozen.hear_until("base")
            for _ in range(3):
                frozen.hear_until("clock")
                ps.push({table: ones(KEYS)})
                table.pull(KEYS)
            frozen.process.send_signal(signal.SIGSTOP)
            began, first = time.monotonic(), ps.clock
            longest = 0.0
            for _ in range(10):
                ps.push({table: ones(KEYS)})
                began_s = time.monotonic()
                row = table.pull(KEYS)
                longest = max(longest, time.monotonic() - began_s)
            assert ps.clock == first + 10
            assert longest > 0.5, "it waited for the one that stands still"
            assert time.monotonic() - began < 40
            own = KEYS[KEYS != 7]
            assert (row[own] == ps.clock - ps.resume().clock).all()
            frozen.process.send_signal(signal.SIGCONT)


def test_bounded_steps_go_on_while_the_cluster_grows_and_shrinks(own_cluster: eps.LocalCluster) -> None:
    errors: list[BaseException] = []
    seen: list[int] = []
    ready = threading.Barrier(2)

    def train(name: str, options: dict[str, Any]) -> None:
        try:
            with eps.connect(own_cluster.url, worker=name, **options) as ps:
                table = counts(ps)
                ps.resume()
                ready.wait(60)
                base = ps.clock
                for step in range(1, STEPS + 1):
                    ps.push({table: ones(KEYS)})
                    rows = table.pull(KEYS)
                    least = step + max(0, step - 1)  # its own, and all but one of the other's
                    assert (rows >= least).all(), (name, step, rows.min())
                    assert (rows <= step + STEPS).all()
                    if name == "a":
                        seen.append(ps.clock - base)
                    time.sleep(0.02)
                ps.flush()
        except BaseException as error:
            errors.append(error)
            ready.abort()

    options: dict[str, Any] = {"app": "grows", "timeout": 100.0, "consistency": eps.SSP(staleness=1)}
    threads = [threading.Thread(target=train, args=(name, options)) for name in "ab"]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(seen) > 10 or bool(errors), lambda: "no progress", 60)
    own_cluster.scale(4)
    wait_for(lambda: len(seen) > 40 or bool(errors), lambda: "no progress", 60)
    own_cluster.scale(3)
    for thread in threads:
        thread.join(200)
    assert not errors, errors
    with eps.connect(own_cluster.url, worker="reader", app="grows", timeout=30.0) as ps:
        assert (counts(ps).pull(KEYS) == 2 * STEPS).all()
