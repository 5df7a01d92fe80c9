"""A push of which a server refuses something ticks as empty. Whoever dies before it has said so, the worker is told."""

from __future__ import annotations

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.network import Socket
from chaos.sim.threads import Threads
from elasticps.client.protocol.session import ASKED_BYTES
from elasticps.errors import ServerFull
from elasticps.optimizers import Accumulate
from elasticps.server.memory_limit import MemoryLimit
from elasticps.spec import ASP
from tests.sim.conftest import wait_for

KNOWN = np.arange(9)
DIM = 16


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of servers that have no room for new rows."""
    names = set[str]()
    look = MemoryLimit.look

    def looked(self: MemoryLimit) -> None:
        look(self)
        if self._server in names:
            self._path.room = 0

    monkeypatch.setattr(MemoryLimit, "look", looked)
    return names


class Pushing:
    """A worker that pushes rows that there are, and then, as a server is full, rows of which some are new."""

    def __init__(self, cluster: Cluster, full: set[str], rows: int, parts: int = 1) -> None:
        self.cluster = cluster
        self.outcome = ""
        self.new = np.arange(100, 100 + rows)
        self.rows: list[float] = []
        self._parts = parts
        self._full = full
        self._ready = self._go = False
        cluster.start_worker("w0", self._program)
        wait_for(cluster, lambda: self._ready and cluster.whole())

    def _program(self, threads: Threads) -> None:
        with self.cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=DIM, optimizer=Accumulate())
            ps.push({table: (KNOWN, np.ones((len(KNOWN), DIM), np.float32))}).result()
            self._ready = True
            while not self._go:
                threads.sleep(0.005)
            step = ps.step()
            for keys in np.array_split(self.new, self._parts):
                step.push({table: (keys, np.ones((len(keys), DIM), np.float32))})
            try:
                step.commit().result()
                self.outcome = "done"
            except ServerFull:
                self.outcome = "full"
            self.rows = table.pull(self.new)[:, 0].tolist()

    def push(self, head: str) -> None:
        """Is refused new rows by a server from which nothing comes any more; waits until the other has the tick."""
        self._full.add(head)
        cluster = self.cluster
        wait_for(cluster, lambda: (found := cluster.servers[head].now) is not None and found.fast.room == 0)
        view = cluster.view
        assert view is not None
        headed = np.flatnonzero(view.heads == [s.name for s in view.servers].index(head))
        assert headed.size
        cluster.network.lose(head, "w0")
        self._go = True
        other = next(s.name for s in view.servers if s.name != head)
        wait_for(cluster, lambda: bool((self.progress(other)[headed] == 2 << 16).all()))
        assert not self.outcome

    def progress(self, name: str) -> np.ndarray:
        """The worker's, at a server."""
        server = self.cluster.servers[name].now
        assert server is not None
        worker = int(server.executor.replica.clocks.workers.max())
        return server.executor.replica.clocks.read(worker)

    def check(self) -> None:
        wait_for(self.cluster, lambda: bool(self.rows))
        assert self.outcome == "full"
        assert 0 < sum(self.rows) < len(self.rows), "one server has refused its rows, the other one not"


LITTLE, MUCH = 40, 2 * ASKED_BYTES // (4 * DIM)  # so that it is sent again at once, or the clocks are asked first


@pytest.mark.parametrize("rows", [LITTLE, MUCH])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_head_that_refused_it_dies(cluster: Cluster, full: set[str], rows: int, parts: int) -> None:
    pushing = Pushing(cluster, full, rows, parts)
    pushing.push("s0")
    cluster.kill(cluster.servers["s0"].process, power=True)
    pushing.check()


@pytest.mark.parametrize("rows", [LITTLE, MUCH])
def test_the_connection_breaks(cluster: Cluster, full: set[str], rows: int) -> None:
    pushing = Pushing(cluster, full, rows)
    pushing.push("s0")

    def between(sock: Socket) -> bool:
        return sock.peer is not None and {sock.process.host, sock.peer.process.host} == {"s0", "w0"}

    for sock in [sock for sock in cluster.network.sockets if between(sock)]:
        cluster.network.reset(sock)
    cluster.clock.run(cluster.clock.now + 0.1)
    cluster.network.heal("s0", "w0")
    pushing.check()


@pytest.mark.parametrize("rows", [LITTLE, MUCH])
def test_all_die_that_had_the_tick_before_it_was_copied(cluster: Cluster, full: set[str], rows: int) -> None:
    pushing = Pushing(cluster, full, rows)
    cluster.network.lose("s1", "w0")
    pushing.push("s0")
    cluster.kill(cluster.servers["s0"].process, power=True)
    cluster.start_server("s2")
    wait_for(cluster, lambda: _heads(cluster, "s1") and cluster.whole())
    assert not pushing.outcome
    cluster.kill(cluster.servers["s1"].process, power=True)
    pushing.check()


def _heads(cluster: Cluster, name: str) -> bool:
    view = cluster.view
    return view is not None and any(s.name == name for s in view.servers) and "s0" not in [s.name for s in view.servers]
