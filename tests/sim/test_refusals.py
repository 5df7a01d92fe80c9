"""A push ticks without the rows that a server refuses. Whoever dies before it has said so, the worker hears which rows
these are, and pushes exactly these again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.network import Socket
from chaos.sim.threads import Threads
from elasticps.client.core.session import RESEND_BYTES
from elasticps.errors import ServerFull
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP, BSP, Threshold
from elasticps.server.roles.memory_limit import MemoryLimit
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
        self.refused: list[int] = []
        self.after: set[float] = set()
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
            for i, keys in enumerate(np.array_split(self.new, self._parts)):
                keys = np.concatenate([keys, KNOWN[i :: self._parts]])
                step.push({table: (keys, np.ones((len(keys), DIM), np.float32))})
            try:
                step.commit().result()
                self.outcome = "done"
            except ServerFull as error:
                self.outcome = "full"
                self.refused = error.refused["t"].tolist()
            self.rows = table.pull(self.new)[:, 0].tolist()
            if not self.refused:
                return
            again, every = np.array(self.refused), np.concatenate([self.new, KNOWN])
            self._full.clear()
            while len(again):
                try:
                    ps.push({table: (again, np.ones((len(again), DIM), np.float32))}).result()
                    break
                except ServerFull as error:  # they have not looked yet
                    again = error.refused["t"]
                    threads.sleep(0.05)
            self.after = set((table.pull(every)[:, 0] - np.isin(every, KNOWN)).tolist())

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
        assert self.refused == self.new[np.array(self.rows) == 0].tolist()
        wait_for(self.cluster, lambda: bool(self.after))
        assert self.after == {1.0}, "each row of the step is applied once"


LITTLE, MUCH = 40, 2 * RESEND_BYTES // (4 * DIM)  # so that it is sent again at once, or the clocks are asked first


@pytest.mark.parametrize("rows", [LITTLE, MUCH])
@pytest.mark.parametrize("parts", [1, 3])
def test_refused_rows_are_reported_when_the_head_that_refused_them_dies(
    cluster: Cluster, full: set[str], rows: int, parts: int
) -> None:
    pushing = Pushing(cluster, full, rows, parts)
    pushing.push("s0")
    cluster.kill(cluster.servers["s0"].process, power=True)
    pushing.check()


@pytest.mark.parametrize("rows", [LITTLE, MUCH])
def test_refused_rows_are_reported_when_the_connection_breaks(cluster: Cluster, full: set[str], rows: int) -> None:
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
def test_refused_rows_are_reported_when_all_servers_die_that_had_the_tick(
    cluster: Cluster, full: set[str], rows: int
) -> None:
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


def test_error_feedback_that_was_sent_with_refused_rows_is_kept_again(cluster: Cluster, full: set[str]) -> None:
    """Rows of 9 are kept at the worker; with 5 more they leave, and are refused where there is no room."""
    keys, found = np.arange(40), list[tuple[list[int], list[float]]]()

    def program(threads: Threads) -> None:
        with cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=DIM, optimizer=Accumulate(), push=[Threshold(10.0)])

            def push(some: np.ndarray, value: float) -> list[int]:
                try:
                    ps.push({table: (some, np.full((len(some), DIM), value, np.float32))}).result()
                except ServerFull as error:
                    return [int(key) for key in error.refused["t"]]
                return []

            push(keys, 9.0)
            full.add("s0")
            threads.sleep(1.0)
            refused = push(keys, 5.0)
            found.append((refused, table.pull(keys)[:, 0].tolist()))
            full.clear()
            threads.sleep(1.0)
            assert not push(np.array(refused), 5.0)
            found.append(([], table.pull(keys)[:, 0].tolist()))
            assert not push(keys, 9.0), "nothing is kept any more: these do not leave"
            found.append(([], table.pull(keys)[:, 0].tolist()))

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: len(found) == 3)
    (refused, first), (_, second), (_, third) = found
    assert 0 < len(refused) < len(keys)
    assert first == [0.0 if key in refused else 14.0 for key in keys.tolist()]
    assert second == third == [14.0] * len(keys)


def test_under_bsp_refused_rows_of_a_share_count_as_zero_and_are_raised_when_the_round_is_closed(
    cluster: Cluster, full: set[str]
) -> None:
    ready = set[str]()
    old, new, found = np.arange(10), np.arange(10, 40), dict[str, tuple[list[int], list[float]]]()

    def program(name: str) -> Callable[[Threads], None]:
        def run(threads: Threads) -> None:
            with cluster.connect(threads, name, BSP(), 1, "app") as ps:
                table = ps.table("t", dim=DIM, optimizer=Accumulate())
                ps.resume()
                ready.add(name)
                while len(ready) < 2:
                    threads.sleep(0.01)
                ps.push({table: (old, np.full((10, DIM), 2, np.float32))}).result()
                full.add("s0")
                threads.sleep(1.0)
                every = np.concatenate([old, new]) if name == "w0" else old
                grads = np.full((len(every), DIM), 2, np.float32)
                refused = np.empty(0, np.int64)
                try:
                    ps.push({table: (every, grads)}).result()
                except ServerFull as error:
                    refused = error.refused["t"]
                    assert ps.committed == 2
                rows = table.pull(np.concatenate([old, new]))[:, 0].tolist()
                full.clear()
                threads.sleep(1.0)
                again = np.concatenate([old, refused])  # with the gradients of the next step
                ps.push({table: (again, np.full((len(again), DIM), 2, np.float32))}).result()
                assert len(refused) == 0 or name == "w0"
                found[name] = refused.tolist(), rows
                found[name + " at last"] = [], table.pull(np.concatenate([old, new]))[:, 0].tolist()

        return run

    for name in ("w0", "w1"):
        cluster.start_worker(name, program(name))
    wait_for(cluster, lambda: len(found) == 4)
    refused, rows = found["w0"]
    assert 0 < len(refused) < len(new)
    assert rows == [4.0] * 10 + [0.0 if key in refused else 1.0 for key in new.tolist()]
    assert found["w1"] == ([], rows)
    assert found["w0 at last"] == found["w1 at last"] == ([], [6.0] * 10 + [1.0] * 30)
