"""Two workers under SSP without slack, one of which rests: the other one's pull has to wait for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.client.client import Client
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import SSP
from tests.sim.conftest import wait_for

REST_S, POLL_S = 5.0, 0.01
KEYS = np.arange(9)
ONES = np.ones((9, 1), np.float32)


class RestingPair:
    """w1 joins, rests, and pushes; w0 pushes and pulls. reported: what they have done, in order: "w0 is there",
    "joined", "asks", "pushes" and what the pull has read.

    may_ask    whether w0 may go on to its push, by its client; asked again and again
    pause_s    how long w0 waits from there on
    rests_on   what has to be reported before w1's rest begins
    opens_late w1 opens its table after its rest
    """

    def __init__(
        self, cluster: Cluster, may_ask: Callable[[Client], bool], pause_s: float = 0.0, rests_on: str = "joined",
        opens_late: bool = False,
    ) -> None:  # fmt: skip
        self.reported: list[str] = []
        self._cluster, self._may_ask, self._pause_s = cluster, may_ask, pause_s
        self._rests_on, self._opens_late = rests_on, opens_late

    def rests(self, threads: Threads) -> None:
        """The program of w1."""
        with self._cluster.connect(threads, "w1", SSP(staleness=0), 1, "app") as ps:
            if not self._opens_late:
                ps.table("t", dim=1, optimizer=Accumulate())
            ps.resume()
            self.reported.append("joined")
            while self._rests_on not in self.reported:
                threads.sleep(POLL_S)
            threads.sleep(REST_S)
            table = ps.table("t", dim=1, optimizer=Accumulate())
            self.reported.append("pushes")
            ps.push({table: (KEYS, ONES)}).result()
            ps.flush()

    def reads(self, threads: Threads) -> None:
        """The program of w0."""
        with self._cluster.connect(threads, "w0", SSP(staleness=0), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            ps.resume()
            self.reported.append("w0 is there")
            while "joined" not in self.reported or not self._may_ask(ps):
                threads.sleep(POLL_S)
            threads.sleep(self._pause_s)
            ps.push({table: (KEYS, ONES)}).result()
            self.reported.append("asks")
            self.reported.append(f"read {table.pull(KEYS).sum():g}")

    def check(self) -> None:
        """Waits for the pull, which has to come behind w1's push and have both pushes in it."""
        wait_for(self._cluster, lambda: "read" in self.reported[-1])
        assert self.reported[-3:] == ["asks", "pushes", "read 18"]


def knows(ps: Client, name: str) -> bool:
    """Whether a client knows a server."""
    return name in [server.name for server in ps.view.servers]
