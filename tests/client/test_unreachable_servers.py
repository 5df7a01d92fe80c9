"""A client whose servers are frozen, unreachable or come back empty: what goes on, and what errors report."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import ServerInfo
from elasticps.client.connections import CONNECT_TIMEOUT_S
from elasticps.kernels.hashing import hash_key, range_shift, table_salt
from elasticps.model.spec import Consistency
from elasticps.wire.frames import Kind
from tests.client.fake_cluster import KEYS, ONES, RANGES, Cluster, chains


def pending(wait: Callable[[float], object], *words: str) -> str:
    """Waits with short timeouts until the error contains all of the words; the error's text."""
    text, deadline_s = "", time.monotonic() + 40
    while not all(word in text for word in words):
        assert time.monotonic() < deadline_s, f"{words} not in: {text}"
        with pytest.raises(eps.Timeout) as error:
            wait(0.2)
        text = str(error.value)
    return text


def alone(cluster: Cluster) -> tuple[list[int], list[int]]:
    """Each range has one replica; keys whose rows a has, and b."""
    view = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = view
    found = {key: int(hash_key(np.int64(key), table_salt(1)) >> np.uint64(range_shift(RANGES))) for key in range(40)}
    return [key for key, r in found.items() if r % 2 == 0], [key for key, r in found.items() if r % 2]


@pytest.mark.parametrize("accepts", [True, False])
def test_a_frozen_server_delays_no_other(cluster: Cluster, accepts: bool) -> None:
    frozen = socket.create_server(("127.0.0.1", 0), backlog=5 if accepts else 0)  # the system accepts, nobody speaks
    waiting = [] if accepts else [socket.socket() for _ in range(3)]
    for sock in waiting:  # with a full backlog connections neither succeed nor fail
        sock.setblocking(False)
        sock.connect_ex(frozen.getsockname())
    info = ServerInfo("z", 1, f"127.0.0.1:{frozen.getsockname()[1]}")
    cluster.control.view = chains([cluster.a.info, cluster.b.info, info], [[0, 1], [1, 0]])
    cluster.a.view = cluster.b.view = cluster.control.view
    ps = cluster.connect()
    table = cluster.table(ps)
    started = time.monotonic()
    for _ in range(20):
        ps.push({table: (KEYS, ONES)}).result()
        table.pull(KEYS)
    assert not next(p for p in ps._dispatcher.connections.peers.values() if p.info.name == "z").link.ready
    assert (
        time.monotonic() - started < 20 * CONNECT_TIMEOUT_S
    )  # what an attempt takes, which is what they would wait for
    for sock in (*waiting, frozen):
        sock.close()


def test_a_timeout_names_each_server_that_owes_an_answer_and_since_when(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.kill()
    step = ps.push({})
    text = pending(step.result, "(connection refused)")
    for part in (f"server a at {cluster.a.address}, head of 4 ranges (0, 2, 4, 6): unreachable for ", "owes step 2",
                 "the cluster's view is at epoch 1"):  # fmt: skip
        assert part in text
    assert "server b" not in text


def test_ranges_of_a_server_that_came_back_empty_are_reported_lost(cluster: Cluster) -> None:
    alone = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = alone
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.incarnation = 2
    cluster.a.hang_up()
    step = ps.push({})
    text = pending(step.result, "its data are lost")
    assert "has begun empty, and no other server has the rows of ranges 0, 2, 4, 6, of any table" in text
    assert "unreachable" not in text


def test_ranges_of_a_server_that_came_back_empty_elsewhere_are_reported_lost(cluster: Cluster) -> None:
    """As a pod does: at the old address nobody answers any more, and the view says what has become of it."""
    alone = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = alone
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.kill()
    step = ps.push({})
    pending(step.result, "unreachable for")
    cluster.b.view = cluster.control.view = replace(
        chains([cluster.a.info, cluster.b.info], [[0], [1]], epoch=2), empty=(("a", 2),)
    )
    text = pending(step.result, "its data are lost")
    assert "it came back as incarnation 2 and has begun empty" in text
    assert "`elasticps restore --ranges all-lost` brings them back" in text
    assert "unreachable" not in text


@pytest.mark.parametrize(("empty", "consistency"), [(True, eps.ASP()), (False, eps.SSP(staleness=1))])
def test_a_new_worker_can_read_the_ranges_that_have_replicas(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, empty: bool, consistency: Consistency
) -> None:
    monkeypatch.setattr("elasticps.client.absence.ABSENT_S", 0.3)
    of_a, of_b = alone(cluster)
    if empty:
        cluster.a.incarnation = 2
    else:
        cluster.a.kill()
    ps = cluster.connect(timeout=4.0, consistency=consistency)
    table = cluster.table(ps)
    cluster.b.value = 7.0
    assert (table.pull(of_b) == 7.0).all()
    why = "its data are lost" if empty else "unreachable for"
    text = pending(lambda timeout: table.pull_async(of_a).result(timeout), why)
    assert f"server a at {cluster.a.address}, head of 4 ranges (0, 2, 4, 6): {why}" in text
    with pytest.raises(eps.Timeout, match=why):
        ps.push({table: (KEYS, ONES)})


def test_a_server_that_was_away_gets_new_tables_before_any_push(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticps.client.absence.ABSENT_S", 0.3)
    alone(cluster)
    cluster.a.incarnation = 2
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.incarnation = 1
    ps.push({table: (KEYS, ONES)}).result()
    kinds = [header.kind for header in cluster.a.got(Kind.CREATE, Kind.PUSH)]
    assert kinds == [Kind.CREATE, Kind.PUSH]


def test_an_error_names_the_servers_that_cannot_be_reached(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.client.absence.ABSENT_S", 0.1)
    cluster.a.kill()
    with pytest.raises(eps.ClusterUnreachable, match="cannot connect to server a at"):
        cluster.connect(timeout=0.5)
    alone(cluster)
    cluster.b.kill()
    for _ in range(4):  # whether the view is asked of b first, or b is tried when a is found to be absent
        with pytest.raises(eps.ClusterUnreachable, match=r"cannot connect to server a at .*, b at "):
            cluster.connect(timeout=1.0)


def test_ranges_that_a_neighbour_still_has_are_not_reported_lost(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.incarnation = 2
    cluster.a.hang_up()
    assert "lost: " not in pending(ps.push({}).result, "it was started again")
