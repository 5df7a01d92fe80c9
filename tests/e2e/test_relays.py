"""Relays: readers that feed readers, whatever those do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

import elasticps as eps
from elasticps.readers.pull_server import PullServer
from elasticps.wire.windows import ReadRange, Subscribe
from tests.e2e.test_readers import KEYS, push, shows, table_of
from tests.waiting import eventually

RANGES = 32


@pytest.fixture
def own() -> Iterator[eps.LocalCluster]:
    with eps.LocalCluster(servers=2, ranges=RANGES) as cluster:
        yield cluster


def test_a_reader_that_takes_nothing_does_not_hold_up_its_relay(own: eps.LocalCluster) -> None:
    """It asks for more than sockets take, and does not read: pulls from the relay go on, as does what it follows."""
    rng = np.random.default_rng(1)
    with eps.connect(own.url, worker="w0") as ps:
        wide = ps.table("wide", dim=512, optimizer=eps.SGD(lr=0.1))
        ps.push({wide: (np.arange(8000), np.ones((8000, 512), np.float32))}).result()
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(own.url, every=0.005) as first, PullServer(first, "127.0.0.1", 0) as relay:
            host, _, port = relay.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as greedy:
                every, nothing = np.arange(RANGES), np.full(RANGES, -1)
                greedy.sendall(b"".join(Subscribe(1, 1, every, nothing, nothing * 0, None, "", 5).frame()))
                number = first.table_rows["wide"].number
                for i in range(400):
                    greedy.sendall(b"".join(ReadRange(i + 1, 1, number, i % RANGES, 0, 8192).frame()))
                push(ps, users, rng)
                eventually(shows(first, users))
                with eps.remote_reader(relay.address) as remote:
                    assert (remote.pull({"users": KEYS})["users"] == users.pull(KEYS)).all()
