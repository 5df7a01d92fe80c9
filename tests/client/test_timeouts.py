"""What a caller has given up, or is told that it failed: its memory is its own again, and trying again does it once.

Found in a review, each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.client.registrations import Registration
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_frame, unpack_header
from tests.client.fake_cluster import KEYS, ONES, Cluster

LARGE = 40_000  # floats of a tensor: more than one read of a socket


def test_the_rest_of_a_pull_that_timed_out_is_not_written_anywhere(cluster: Cluster) -> None:
    ps = cluster.connect(timeout=20.0)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    tensor = ps.tensor("w", init=np.zeros(LARGE, np.float32), optimizer=eps.Accumulate())
    rows, out = np.empty((len(KEYS), 4), np.float32), np.empty(LARGE, np.float32)
    for server in cluster.servers:
        server.silent.add(Kind.PULL)
    read: Any = ps.pull_async({table: KEYS, tensor: None}, {table: rows, tensor: out})
    with pytest.raises(eps.Timeout):
        read.result(0.3)
    rows[:] = out[:] = -2  # they are the caller's again
    for server in cluster.servers:
        server.silent.clear()
        server.value, server.row = 5.0, tensor.dim
        server.hang_up()  # what is wanted still is asked again
    assert (tensor.pull() == 5).all()
    assert (rows == -2).all()
    assert (out == -2).all()


def test_a_pull_given_up_as_its_answer_arrives_leaves_its_array_alone(cluster: Cluster) -> None:
    """One thread gives a pull up while another, which reads, is about to put its rows there."""
    ps = cluster.connect(timeout=20.0)
    tensor = ps.tensor("w", init=np.zeros(LARGE, np.float32), optimizer=eps.Accumulate())
    for server in cluster.servers:
        server.value, server.row = 5.0, tensor.dim
    dispatcher, done = ps._dispatcher, threading.Event()
    out = np.empty(LARGE, np.float32)
    read = tensor.prepare(out, "tail")
    sink = dispatcher.pulls.sink

    def given_up_then(header: Header) -> Sequence[memoryview] | None:
        targets = sink(header)
        if targets is not None and not done.is_set():
            other = threading.Thread(target=dispatcher.forget_pull, args=(read, eps.Timeout("too long")))
            other.start()
            other.join()
            out[:] = -2
            done.set()
        return targets

    dispatcher.pulls.sink = given_up_then  # type: ignore[method-assign]
    ps._parts.reads.start(read)
    assert done.wait(10)
    assert (tensor.pull() == 5).all()  # on the next connection, when the first one has been read
    assert (out == -2).all()


def in_rounds(cluster: Cluster, timeout: float) -> eps.Client:
    """A worker that takes part, and never hears that a round is over."""
    for server in cluster.servers:
        server.silent.add(Kind.BARRIER_ARRIVE)
    ps = cluster.connect(timeout=timeout, consistency=eps.BSP())
    ps._steps._joining.active = True
    return ps


def test_a_pull_that_fails_after_its_push_was_sent_fails_alone(cluster: Cluster) -> None:
    """`Timeout` of `push_pull` means that nothing has left: who tried again pushed twice."""
    ps = in_rounds(cluster, timeout=1.0)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    step, pull = ps.push_pull({table: (KEYS, ONES)}, {table: KEYS})
    assert step.clock == ps.clock == 1
    with pytest.raises(eps.Timeout):
        pull.result()


def test_each_thread_waits_for_a_round_only_as_long_as_its_own_timeout(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = in_rounds(cluster, timeout=60.0)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    step, waits = ps.push({table: (KEYS, ONES)}), threading.Event()
    dispatcher = ps._dispatcher
    carry_out = dispatcher.carry_out

    def begin_to_wait(script: Any) -> Any:
        waits.set()
        return carry_out(script)

    monkeypatch.setattr(dispatcher, "carry_out", begin_to_wait)
    ended: list[str] = []

    def patient() -> None:
        try:
            ps.flush()
        except eps.Error as error:
            ended.append(str(error))

    other = threading.Thread(target=patient)
    other.start()
    assert waits.wait(10)
    with pytest.raises(eps.Timeout, match="another thread"):
        step.result(0.2)
    assert not ended
    dispatcher.fence("the end of this test")
    other.join()
    assert ended


def a_table(cluster: Cluster, ps: eps.Client, **options: object) -> eps.SparseTable:
    table = ps.table("t", dim=4, optimizer=eps.Accumulate(), **options)  # type: ignore[arg-type]
    registry: Any = cluster.control
    registry.find = lambda app, name, timeout_s: Registration(1, table.spec, 7, "w", True, 1)
    return table


def test_cached_rows_are_dropped_even_if_clearing_the_table_times_out(cluster: Cluster) -> None:
    """It may have happened, and be answered late."""
    ps = cluster.connect(timeout=2.0)
    table = a_table(cluster, ps, cache=eps.Cache(100, 8))
    cluster.a.value = cluster.b.value = 3.0
    assert (table.pull(KEYS) == 3).all()
    cluster.a.silent.add(Kind.ERASE)
    with pytest.raises(eps.Timeout):
        ps.clear_table("t")
    cluster.a.value = cluster.b.value = 0.0
    assert (table.pull(KEYS) == 0).all()


def test_a_table_that_was_cleared_by_name_still_counts_the_bytes_of_its_keys(cluster: Cluster) -> None:
    ps = cluster.connect(timeout=10.0)
    table = a_table(cluster, ps, push=[eps.KeyDeltas()])
    ps.push({table: (KEYS, ONES)}).result()
    before = table.key_bytes.whole
    ps.clear_table("t")
    ps.push({table: (KEYS, ONES)}).result()
    assert table.key_bytes.whole == 2 * before


def test_a_welcome_on_a_closed_connection_is_ignored(cluster: Cluster) -> None:
    """One thread has received it, and waits for the lock under which another closes all of them."""
    ps = cluster.connect(timeout=5.0)
    dispatcher = ps._dispatcher
    cluster.a.silent.add(Kind.HELLO)
    (peer,) = [peer for peer in dispatcher.connections.peers.values() if peer.info.name == "a"]
    frame = json_frame(Kind.WELCOME, {"server": "a", "incarnation": 1, "cluster": "fake"})
    with dispatcher.lock:
        dispatcher.hurt()
        dispatcher._mend()
        assert peer.link.socket is None
        dispatcher._on_frame(peer.link, unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8))
        assert not peer.link.ready
