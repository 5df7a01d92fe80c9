"""Two fake servers and the views that they, and a fake store, tell a client of."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import ServerInfo, View
from elasticps.model.spec import Consistency
from tests.client.fakes import DIM, FakeRegistry, FakeServer

RANGES = 8


KEYS = np.arange(40)


ONES = np.ones((40, DIM), np.float32)


Eventually = Callable[[Callable[[], bool]], None]


def chains(servers: list[ServerInfo], owners: list[list[int]], epoch: int = 1) -> View:
    """A view in which range r has the chain owners[r % len(owners)]."""
    replicas = max(map(len, owners))
    rows = [owners[r % len(owners)] for r in range(RANGES)]
    padded = np.array([c + [-1] * (replicas - len(c)) for c in rows], np.int32)
    return View("fake", epoch, RANGES, replicas, tuple(servers), padded, np.full(RANGES, -1, np.int32),
                np.full(RANGES, epoch, np.int64), "test")  # fmt: skip


def connect_to_all(client: eps.Client) -> None:
    """Connects a client to all servers that can be reached."""
    dispatcher = client._dispatcher
    with dispatcher.lock:
        for member in dispatcher.routes.members:
            dispatcher.connections.want(member)
    deadline_s = time.monotonic() + 5
    while any(peer.trouble == "not connected yet" for peer in list(dispatcher.connections.missing.values())):
        if time.monotonic() > deadline_s:  # it accepts, and says nothing
            return
        time.sleep(0.005)


class Cluster:
    """Two servers a and b; each heads half of the ranges and is the tail of the other half."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.a, self.b = FakeServer("a"), FakeServer("b")
        self.servers = [self.a, self.b]
        self.before = chains([self.a.info, self.b.info], [[0, 1], [1, 0]])
        self.after = chains([self.b.info], [[0]], epoch=2)  # a is gone
        self.a.view = self.b.view = self.before
        self.control = FakeRegistry(self.before)
        self.clients: list[eps.Client] = []
        patch.setattr("elasticps.client.client.Registry", self.control)
        patch.setattr("elasticps.client.parts.LEAVE_S", 0.1)  # some end while they are owed something

    def connect(self, timeout: float = 30.0, consistency: Consistency | None = None) -> eps.Client:
        """A client that is connected to both, as one is that has had something to ask of each."""
        client = eps.connect("etcd://127.0.0.1:1/fake", worker="w", timeout=timeout, consistency=consistency)
        self.clients.append(client)
        connect_to_all(client)
        return client

    def table(self, ps: eps.Client) -> eps.SparseTable:
        return ps.table("t", dim=DIM, optimizer=eps.Accumulate())
