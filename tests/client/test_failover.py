"""A client whose servers are lost, freeze or move on to a newer view; the servers are fakes."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

import elasticps as eps
from elasticps.client.core.session import RESEND_BYTES
from elasticps.wire.frames import ANY, BLOCK_BYTES, LAST, REPEAT, TABLES, Kind
from tests.client.fake_cluster import KEYS, ONES, Cluster, Eventually, chains
from tests.client.fakes import DIM


def test_the_port_of_a_killed_fake_server_is_not_reused(cluster: Cluster) -> None:
    """Its like in a test beside did, and answered in its place."""
    host, port = cluster.a.address.split(":")
    cluster.a.kill()
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))


def test_a_step_that_a_lost_head_owed_goes_to_its_successor(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    cluster.a.silent.add(Kind.PUSH)
    step = ps.push({table: (KEYS, ONES)})
    cluster.b.applied = cluster.b.committed = 1 << 16
    cluster.a.kill()
    cluster.b.view = cluster.after  # told when it is asked
    step.result()
    assert ps.view.epoch == 2
    resent = cluster.b.got(Kind.PUSH)[-1]
    assert (resent.epoch, resent.clock, resent.flags & REPEAT) == (2, 2, 0)
    assert ps.committed == 2


def test_an_applied_step_is_repeated_without_its_rows(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.silent.add(Kind.PUSH)
    keys = np.arange(RESEND_BYTES // 8)
    step = ps.push({cluster.table(ps): (keys, np.ones((len(keys), DIM), np.float32))})
    cluster.b.applied, cluster.b.committed = 2 << 16, 1 << 16
    cluster.a.kill()
    cluster.b.tell(cluster.after)
    step.result()
    resent = cluster.b.got(Kind.PUSH)[-1]
    assert (resent.clock, resent.items, bool(resent.flags & REPEAT)) == (2, 0, True)


def test_every_connection_gets_the_base_before_any_push(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    for _ in range(3):
        ps.push({table: (KEYS, ONES)}).result()
    for peer in list(ps._dispatcher.connections.peers.values()):
        assert isinstance(peer.link.socket, socket.socket)
        peer.link.socket.shutdown(socket.SHUT_RDWR)
    ps.push({table: (KEYS, ONES)}).result()
    for server in cluster.servers:
        kinds = [(h.kind, h.flags & LAST) for h in server.got(Kind.HELLO, Kind.JOIN, Kind.PUSH)]
        second = len(kinds) - 1 - kinds[::-1].index((Kind.HELLO, 0))
        assert kinds[second + 1] == (Kind.JOIN, LAST)
        first_push = next(i for i, k in enumerate(kinds) if k[0] == Kind.PUSH)
        assert (Kind.JOIN, LAST) in kinds[:first_push]


def test_pulls_are_repeated_at_the_new_tail(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.silent.add(Kind.PULL)
    cluster.b.value = 5.0
    read = table.pull_async(KEYS)
    cluster.b.tell(cluster.after)
    assert set(read.result().ravel().tolist()) == {5.0}


def test_a_pull_under_an_old_view_is_planned_again(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.value = cluster.b.value = 3.0
    cluster.a.view = cluster.b.view = chains([cluster.a.info, cluster.b.info], [[1], [0]], epoch=2)
    assert set(table.pull(KEYS).ravel().tolist()) == {3.0}
    assert ps.view.epoch == 2


def test_pulls_of_several_tables_are_repeated_at_the_new_tail(cluster: Cluster) -> None:
    ps = cluster.connect()
    tables = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(3)]
    cluster.a.silent.add(Kind.PULL)
    cluster.a.value, cluster.b.value = 3.0, 5.0
    read = ps.pull_async({table: KEYS[: 10 * i + 1] for i, table in enumerate(tables)})
    assert not read.done()
    cluster.b.tell(cluster.after)
    rows = read.result()
    assert [len(rows[table]) for table in tables] == [1, 11, 21]
    assert all(set(rows[table].ravel().tolist()) == {5.0} for table in tables)
    checked = [h for h in cluster.b.got(Kind.PULL) if h.flags & TABLES]
    assert len(checked) >= 2  # its own part, again if it hears of the view before it answers; and a's
    assert {h.epoch for h in checked} == {1, 2}
    assert sum(h.body - BLOCK_BYTES * h.items for h in checked) >= 8 * 33


def test_pulls_of_several_tables_under_an_old_view_are_planned_again(cluster: Cluster) -> None:
    ps = cluster.connect()
    tables = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(3)]
    cluster.a.value = cluster.b.value = 3.0
    cluster.a.view = cluster.b.view = chains([cluster.a.info, cluster.b.info], [[1], [0]], epoch=2)
    rows = ps.pull(dict.fromkeys(tables, KEYS))
    assert all(set(rows[table].ravel().tolist()) == {3.0} and rows[table].shape == (40, DIM) for table in tables)
    assert ps.view.epoch == 2


def test_late_bytes_of_an_old_answer_of_several_tables_are_dropped(cluster: Cluster, eventually: Eventually) -> None:
    ps = cluster.connect()
    tables, many = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(2)], np.arange(100_000)
    out = {table: np.full((len(many), DIM), np.nan, np.float32) for table in tables}
    both = [cluster.a.info, cluster.b.info]
    cluster.a.tell(chains(both, [[0]], epoch=2))  # one server has all: rows come where they belong
    eventually(lambda: ps.view.epoch == 2)
    cluster.a.value, cluster.b.value = -1.0, 2.0
    cluster.a.half.set()
    read = ps.pull_async(dict.fromkeys(tables, many), out)
    eventually(lambda: bool((out[tables[0]] == -1.0).any()))
    cluster.b.tell(chains(both, [[1]], epoch=3))
    rows = read.result()
    assert all(set(rows[table].ravel().tolist()) == {2.0} for table in tables)
    cluster.a.half.clear()
    cluster.a.go.set()
    cluster.a.view = chains(both, [[0]], epoch=4)
    cluster.b.tell(cluster.a.view)
    eventually(lambda: ps.view.epoch == 4)
    assert set(tables[0].pull(KEYS).ravel().tolist()) == {-1.0}  # behind those bytes
    assert all(set(out[table].ravel().tolist()) == {2.0} for table in tables)


def test_late_bytes_of_an_old_answer_are_dropped(cluster: Cluster, eventually: Eventually) -> None:
    ps = cluster.connect()
    size = 300_000
    tensor = ps.tensor("w", init=np.zeros(size, np.float32), optimizer=eps.SGD(lr=1.0))
    assert tensor.spec.dim != DIM  # the fakes answer in rows of DIM floats
    cluster.a.row = cluster.b.row = tensor.spec.dim
    cluster.a.value, cluster.b.value = -1.0, 2.0
    cluster.a.half.set()
    out = np.full(size, np.nan, np.float32)
    read = tensor.pull_async(out)
    eventually(lambda: bool((out == -1.0).any()))
    cluster.b.tell(chains([cluster.a.info, cluster.b.info], [[1]], epoch=2))  # a lives on, and is the tail no more
    assert set(read.result().tolist()) == {2.0}
    cluster.a.go.set()
    cluster.a.view = chains([cluster.a.info, cluster.b.info], [[0]], epoch=3)
    cluster.b.tell(cluster.a.view)
    eventually(lambda: ps.view.epoch == 3)
    assert set(tensor.pull().tolist()) == {-1.0}  # behind those bytes
    assert set(out.tolist()) == {2.0}


def test_a_server_started_again_is_no_reason_to_end(cluster: Cluster) -> None:
    cluster.a.incarnation = 2  # as the view does not know yet
    cluster.b.view = cluster.after
    ps = cluster.connect()
    ps.push({}).result()
    assert ps.view.epoch == 2


def test_a_table_is_created_at_the_heads_of_the_newest_view(cluster: Cluster, eventually: Eventually) -> None:
    ps = cluster.connect()
    cluster.a.silent.add(Kind.CREATE)
    done = threading.Event()

    def create() -> None:
        cluster.table(ps)
        done.set()

    thread = threading.Thread(target=create)
    thread.start()
    eventually(lambda: bool(cluster.b.got(Kind.CREATE)))
    assert not done.is_set()
    cluster.b.tell(cluster.after)
    thread.join(30)
    assert done.is_set()
    assert [h.epoch for h in cluster.b.got(Kind.CREATE)] == [1, 2]


def test_a_pull_given_up_stays_given_up(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.silent.add(Kind.PULL)
    read = table.pull_async(KEYS)
    for _ in range(2):
        with pytest.raises(eps.Timeout, match="connected, not answering"):
            read.result(timeout=0.1)


def test_pulls_may_go_to_any_replica(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    table.pull(np.arange(2000), read="any")
    checked = [h for s in cluster.servers for h in s.got(Kind.PULL)]
    assert len(checked) == 2
    assert all(h.flags & ANY and 300 < h.items < 1700 for h in checked)
    table.pull(KEYS)
    assert not any(s.got(Kind.PULL)[-1].flags & ANY for s in cluster.servers)
    with pytest.raises(eps.InputError, match="'tail'"):
        table.pull(KEYS, read="head")


def test_many_pulls_leave_as_one_frame_per_server(cluster: Cluster) -> None:
    ps = cluster.connect()
    tensors = [ps.tensor("w", init=np.zeros(DIM, np.float32), optimizer=eps.SGD(lr=1.0))] * 5
    cluster.a.value = cluster.b.value = 2.0
    reads = ps.pull_many(tensors)
    for read in reads:
        assert read.result().tolist() == [2.0] * DIM
        assert read.done()
    checked = [header for server in cluster.servers for header in server.got(Kind.PULL)]
    assert [(header.items, header.flags & TABLES) for header in checked] == [(5, TABLES)]  # who has it
