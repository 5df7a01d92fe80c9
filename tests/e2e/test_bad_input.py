"""Bad input is reported to its caller, and the servers keep serving."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import WorkerInfo
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.wire.frames import ALL_RANGES, LAST, Header, Kind, block_head, json_body, json_frame, unpack_header
from tests.e2e.conftest import Connect

GRADS = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("keys", "grads", "text"),
    [
        ([1.5, 2.0], GRADS, "keys must be int64, got float64"),
        ([np.nan, 2.0], GRADS, "NaN"),
        (np.array([1, 2], np.uint64), GRADS, "got uint64"),
        (np.array(["a", "b"]), GRADS, "keys must be int64"),
        (np.zeros((2, 1), np.int64), GRADS, "one dimension"),
        ([1, 2], GRADS.astype(np.float64), "must be float32, got float64"),
        ([1, 2], GRADS[:1], r"shape \(2, 3\), got \(1, 3\)"),
        ([1, 2], GRADS[:, :2], r"shape \(2, 3\), got \(2, 2\)"),
    ],
)
def test_a_wrong_push_is_refused_before_it_is_sent(connect: Connect, keys: Any, grads: Any, text: str) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    with pytest.raises(eps.InputError, match=text):
        ps.push({table: (keys, grads)})
    assert ps.clock == 0
    ps.push({table: ([1, 2], GRADS)}).result()
    assert table.pull([1, 2]).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_refused_step_without_a_waiter_is_raised_by_flush(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    connect("w1").drop_table("t")
    ps.push({table: ([1, 2], GRADS)})
    with pytest.raises(eps.UnknownTable, match="no table with id") as refusal:
        ps.flush()
    assert refusal.value.refused["t"].tolist() == [1, 2]
    ps.flush()  # told once
    assert (ps.clock, ps.committed) == (1, 1)
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    ps.push({table: ([1, 2], GRADS)}).result()
    assert table.pull([1, 2]).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_empty_batches_are_a_tick_and_nothing_to_pull(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    ps.push({table: (np.empty(0, np.int64), np.empty((0, 3), np.float32))}).result()
    assert ps.committed == 1
    assert table.pull([]).shape == (0, 3)
    assert table.pull(np.empty(0, np.int64)).shape == (0, 3)


def test_a_conflicting_spec_is_refused_with_the_difference(connect: Connect) -> None:
    ps = connect()
    ps.table("t", dim=3, optimizer=eps.Adagrad(lr=0.1))
    with pytest.raises(eps.SpecError, match="dim is 3, not 4"):
        ps.table("t", dim=4, optimizer=eps.Adagrad(lr=0.1))
    with pytest.raises(eps.SpecError, match="optimizer is"):
        connect("w1").table("t", dim=3, optimizer=eps.SGD(lr=0.1))


def test_handles_of_other_clients_are_refused(connect: Connect) -> None:
    table = connect("a").table("t", dim=3, optimizer=eps.Accumulate())
    with pytest.raises(eps.InputError, match="is not open on this client: it was dropped"):
        connect("b").push({table: ([1, 2], GRADS)})
    ps = connect("c")
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    with pytest.raises(eps.InputError, match="pair"):
        ps.push({table: GRADS})


def test_wrong_out_arrays_are_refused(connect: Connect) -> None:
    table = connect().table("t", dim=3, optimizer=eps.Accumulate())
    with pytest.raises(eps.InputError, match="out must be a float32 array of shape"):
        table.pull([1, 2], out=np.empty((2, 3), np.float64))
    with pytest.raises(eps.InputError, match="writable"):
        table.pull([1, 2], out=np.broadcast_to(np.float32(0), (2, 3)))


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("etcd://127.0.0.1:1/demo", eps.ClusterUnreachable, "127.0.0.1:1"),
        ("http://127.0.0.1:1/demo", eps.ConfigError, "must begin with etcd://"),
        ("etcd://127.0.0.1:1", eps.ConfigError, "names no cluster"),
        ("", eps.ConfigError, "ELASTICPS_URL"),
    ],
)
def test_a_wrong_url_is_reported_within_the_timeout(url: str, error: type[Exception], text: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=text):
        eps.connect(url, timeout=1.0)
    assert time.monotonic() - started < 30


def test_a_cluster_that_does_not_exist_is_named(cluster: eps.LocalCluster) -> None:
    with pytest.raises(eps.ClusterUnreachable, match="nobody"):
        eps.connect(cluster.url.replace("/local", "/nobody"), timeout=4.0)  # etcd answers before, however busy


# --- raw bytes at a server's port ------------------------------------------------------------------------------------


@pytest.fixture
def server(cluster: eps.LocalCluster) -> tuple[str, int]:
    host, port = cluster.servers[0].address.split(":")
    return host, int(port)


def ask(server: tuple[str, int], data: bytes, count: int = 0) -> list[tuple[Header, bytes]]:
    """Sends bytes and returns the frames that come back: so many of them, 0 for all until the server closes."""
    with socket.create_connection(server, timeout=60.0) as sock:
        received = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            while (not count or len(frames_in(received)) < count) and (piece := sock.recv(1 << 16)):
                received += piece
    return frames_in(received)


def frames_in(received: bytes) -> list[tuple[Header, bytes]]:
    """The whole frames in some bytes."""
    frames = []
    while len(received) >= 64 and len(received) >= 64 + (header := unpack_header(received)).body:
        frames.append((header, received[64 : 64 + header.body]))
        received = received[64 + header.body :]
    return frames


@pytest.fixture
def guest(cluster: eps.LocalCluster, connect: Connect) -> Iterator[WorkerInfo]:
    """A worker whose only connection to a server is the test's own."""
    registry = Registry.open(cluster.url, 20.0, Runtime())
    ps = connect("host")
    yield registry.register("guest", ps.app, lambda why: None, 20.0, ps.view.cluster)
    registry.close()


def hello(ps: eps.Client, cluster: str = "", worker: WorkerInfo | None = None) -> bytes:
    worker, cluster = worker or ps.worker, cluster or ps.view.cluster
    return json_frame(Kind.HELLO, {"cluster": cluster, "worker": worker.id, "name": worker.name, "app": worker.app})


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda f: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64), "malformed", "not an elasticps frame"),
        (lambda f: f[:4] + b"\x07" + f[5:], "version", "wire version 7"),
        (lambda f: f[:5] + b"\x3f" + f[6:], "malformed", "unknown frame kind"),
        (lambda f: f[:8] + (1 << 60).to_bytes(8, "little") + f[16:], "malformed", "over the limit"),
        (lambda f: Header(Kind.PUSH).pack(), "malformed", "before HELLO"),
        (lambda f: Header(Kind.OK).pack(), "malformed", "came before HELLO"),
        (lambda f: Header(Kind.HELLO, 0, 8).pack() + b"[1,2,3] ", "malformed", "not an object"),
    ],
)
def test_malformed_bytes_are_answered_and_the_connection_closed(
    server: tuple[str, int], connect: Connect, change: Callable[[bytes], bytes], code: str, text: str
) -> None:
    ((header, body),) = ask(server, change(hello(connect())))
    document = json_body(body)
    assert (header.kind, document["code"]) == (Kind.ERROR, code)
    assert text in document["message"]


def test_a_hello_for_another_cluster_is_refused(server: tuple[str, int], connect: Connect) -> None:
    ((_, body),) = ask(server, hello(connect(), cluster="other"), 1)
    assert json_body(body)["code"] == "cluster"


def test_an_unknown_table_is_refused_and_the_connection_goes_on(
    server: tuple[str, int], connect: Connect, guest: WorkerInfo
) -> None:
    ps = connect()
    ps.push({}).result()
    pull = Header(Kind.PULL, 0, 8, 1, ps.view.epoch, table=987_654, items=1).pack() + bytes(8)
    join = Header(Kind.JOIN, request=2).pack()
    frames = ask(server, hello(ps, worker=guest) + pull + join, 3)
    assert [h.kind for h, _ in frames] == [Kind.WELCOME, Kind.ERROR, Kind.OK]
    assert json_body(frames[1][1])["code"] == "unknown-table"


def test_frames_cut_short_leave_the_server_serving(server: tuple[str, int], connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    frame = hello(ps) + Header(Kind.PUSH, LAST | ALL_RANGES, 4096, 1, 1, 1, ps.worker.id, items=1).pack()
    for cut in (1, 63, 64, 100, len(frame)):
        with socket.create_connection(server) as sock:
            sock.sendall(frame[:cut])
    ps.push({table: ([1], GRADS[:1])}).result()
    assert table.pull([1]).tolist() == [[1, 1, 1]]


def test_a_client_that_stops_reading_takes_no_memory_and_delays_no_others(
    server: tuple[str, int], cluster: eps.LocalCluster, connect: Connect, guest: WorkerInfo
) -> None:
    import psutil

    ps = connect()
    table = ps.table("wide", dim=16_384, optimizer=eps.Accumulate())
    keys = np.arange(64, dtype=np.int64)
    pull = Header(Kind.PULL, 0, keys.nbytes, 1, ps.view.epoch, table=table.id, items=64).pack() + keys.tobytes()
    process = psutil.Process(cluster.servers[0].pid)
    before = process.memory_info().rss
    with socket.create_connection(server, timeout=1.0) as sock:
        sock.sendall(hello(ps, worker=guest))
        with pytest.raises(TimeoutError):  # it blocks once the server stops reading
            sock.sendall(pull * 20_000)  # 4 MiB of answers each
        assert process.memory_info().rss - before < 200 << 20
        ps.push({table: (keys, np.ones((64, 16_384), np.float32))}).result()
        assert float(table.pull(keys[:2]).sum()) == 2 * 16_384


def test_random_and_mutated_frames_leave_the_server_serving(server: tuple[str, int], connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Accumulate())
    ps.push({table: ([1, 2], GRADS)}).result()
    rng = random.Random(1)
    block = block_head(table.id, 2, 3, np.empty(0, np.float32)) + np.array([1, 2]).tobytes() + GRADS.tobytes()
    spare = connect("fuzz")
    valid = [
        hello(spare),
        Header(Kind.JOIN, LAST, request=1, clock=0).pack(),
        Header(Kind.PULL, 0, 16, 2, ps.view.epoch, table=table.id, items=2).pack() + np.array([1, 2]).tobytes(),
        Header(Kind.PUSH, LAST | ALL_RANGES, len(block), 3, ps.view.epoch, 999, spare.worker.id, items=1).pack()
        + block,
        json_frame(Kind.CREATE, {"id": 77, "spec": table.spec.to_json()}, request=4),
    ]
    for _ in range(300):
        frames = bytearray(b"".join(rng.choices(valid, k=4)))
        frames[: len(valid[0])] = valid[0]
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(frames))
            frames[at] = rng.randrange(256)
        data = bytes(frames) if rng.random() < 0.8 else rng.randbytes(rng.randrange(300))
        with socket.create_connection(server, timeout=60.0) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.02)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):  # a frame of an epoch to come is held for a while: do not wait for that
                pass
    assert table.pull([1, 2]).tolist() == [[1, 1, 1], [1, 1, 1]]
    ps.push({table: ([1, 2], GRADS)}).result()
    assert table.pull([1, 2]).tolist() == [[2, 2, 2], [2, 2, 2]]
