"""A server that stands still past its exclusion, and goes on: it is back with what it lacks, and no copy is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from coordinator.core import planner
from coordinator.core.view import View
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from replication.chain import CopyState
from replication.retained import Retained
from tests.sim.conftest import wait_for

KEYS = np.arange(9)
AWAY_S = 2.0


class Pushing:
    """A worker that pushes ones all the time; at the end every row must be the number of its steps."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.steps = 0
        self._over = False
        self._rows: list[float] = []
        cluster.start_worker("w0", self._program)
        wait_for(cluster, lambda: self.steps > 3 and cluster.clock.now > 1.0)  # servers have begun to beat

    def _program(self, threads: Threads) -> None:
        with self.cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            while not self._over:
                step = ps.push({table: (KEYS, np.ones((len(KEYS), 1), np.float32))})
                threads.sleep(0.02)
                if self.steps % 4 == 0:
                    step.result()
                self.steps += 1
            step.result()
            self._rows += table.pull(KEYS)[:, 0].tolist()

    def go_on(self) -> None:
        before = self.steps
        wait_for(self.cluster, lambda: self.steps > before + 5)

    def end(self) -> None:
        self._over = True
        wait_for(self.cluster, lambda: bool(self._rows))
        assert self._rows == [float(self.steps)] * len(KEYS)


def leave_out(cluster: Cluster, name: str) -> None:
    """A server stands still until the other goes on without it."""
    cluster.servers[name].process.stall()
    wait_for(cluster, lambda: copy_states(cluster) == {CopyState.LATE})


def copy_states(cluster: Cluster) -> set[int]:
    view = cluster.view
    assert view is not None
    return set(view.copy_state.tolist())


def sent_bytes(cluster: Cluster) -> int:
    """Of snapshots, by the servers that live."""
    return sum(found.now.snapshots.sent_bytes for found in cluster.servers.values() if found.now is not None)


def rest_on(cluster: Cluster, name: str, other: str) -> None:
    """All the rest is up to one server."""
    wait_for(cluster, cluster.whole)
    cluster.kill(cluster.servers[other].process, power=False)
    wait_for(cluster, lambda: (v := cluster.view) is not None and set(v.heads.tolist()) == {v.index(name)})


@pytest.mark.parametrize("name", ["s0", "s1"])
def test_a_server_that_was_away_is_back_with_the_same_copies(cluster: Cluster, name: str) -> None:
    pushing = Pushing(cluster)
    wait_for(cluster, cluster.whole)
    before = cluster.view
    assert before is not None
    assert set(before.heads.tolist()) == {0, 1}, "it heads some and is behind in others"
    began = sent_bytes(cluster)
    leave_out(cluster, name)
    pushing.go_on()
    cluster.servers[name].process.thaw()
    wait_for(cluster, cluster.whole)
    after = cluster.view
    assert after is not None
    assert [s.member for s in after.servers] == [s.member for s in before.servers]
    assert sent_bytes(cluster) == began
    pushing.go_on()
    rest_on(cluster, name, "s1" if name == "s0" else "s0")
    pushing.end()


def test_a_server_that_stays_away_is_waited_for_no_longer(cluster: Cluster) -> None:
    pushing = Pushing(cluster)
    leave_out(cluster, "s0")
    wait_for(cluster, lambda: copy_states(cluster) == {CopyState.NONE})
    cluster.servers["s0"].process.thaw()
    rest_on(cluster, "s0", "s1")
    found = cluster.servers["s0"].now
    assert found is not None
    assert found.me.incarnation > 1
    pushing.end()


def too_many_bytes(cluster: Cluster) -> None:
    """What s0 lacks is more than s1 may keep."""
    pushing = Pushing(cluster)
    found = cluster.servers["s1"].now
    assert found is not None
    found.replica.retained.budget_bytes = 3000
    leave_out(cluster, "s0")
    for _ in range(5):
        pushing.go_on()
    cluster.servers["s0"].process.thaw()
    rest_on(cluster, "s0", "s1")
    pushing.end()


def comes_back_empty(cluster: Cluster) -> None:
    """s0 is away, and killed, and started again."""
    pushing = Pushing(cluster)
    leave_out(cluster, "s0")
    pushing.go_on()
    cluster.kill(cluster.servers["s0"].process, power=True)
    cluster.start_server("s0")
    rest_on(cluster, "s0", "s1")
    pushing.end()


def go_on_with_the_youngest(patch: pytest.MonkeyPatch) -> None:
    """What is given up is only the older part."""

    def mutant(self: Retained, ranges: Any) -> None:
        self._parts = self._parts[-1:]
        self.nbytes = sum(part.operation.nbytes for part in self._parts)

    patch.setattr(Retained, "give_up", mutant)


def take_a_name_for_a_server(patch: pytest.MonkeyPatch) -> None:
    """Who has come back under the name of a late copy's server has the copy."""
    init = planner._Step.__init__

    def mutant(self: Any, view: View, members: planner.Members, health: planner.Health) -> None:
        newest = {server.name: server for server in members.servers}
        late = {int(i) for i in view.joining[view.copy_state == CopyState.LATE]}
        servers = tuple(newest.get(s.name, s) if i in late else s for i, s in enumerate(view.servers))
        init(self, replace(view, servers=servers), members, health)

    patch.setattr(planner._Step, "__init__", mutant)
    patch.setattr(Retained, "covers", lambda self, ranges, seqs: self.keeps(ranges))


STORIES: dict[Callable[[Cluster], None], Callable[[pytest.MonkeyPatch], None]] = {
    too_many_bytes: go_on_with_the_youngest,
    comes_back_empty: take_a_name_for_a_server,
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_copy_that_cannot_be_completed_is_filled_again(cluster: Cluster, story: Callable[[Cluster], None]) -> None:
    story(cluster)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: STORIES[story].__name__)
def test_stories_of_returning_servers_find_planted_bugs(
    cluster: Cluster, story: Callable[[Cluster], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    STORIES[story](monkeypatch)
    with pytest.raises(AssertionError):
        story(cluster)


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_falls_silent_as_a_level_joiner_takes_its_place_keeps_its_copy(
    cluster: Cluster, dies: bool
) -> None:
    """That one was dead, or dies before it has acknowledged anything alone: the only other copy was thrown away."""
    pushing = Pushing(cluster)
    wait_for(cluster, cluster.whole)
    cluster.kill(cluster.servers["s1"].process, power=True)
    cluster.start_server("s1")
    only = cluster.servers["s0"].now
    assert only is not None
    wait_for(cluster, lambda: (v := cluster.view) is not None and bool((v.joining >= 0).any()))
    cluster.store.up = False  # the leader can write no view
    wait_for(cluster, lambda: len(only.replica.shared().reported) > 0)
    cluster.clock.run(cluster.clock.now + 0.1)  # it hears what is level
    cluster.servers["s0"].process.stall()
    cluster.clock.run(cluster.clock.now + 1.0)
    cluster.store.up = True
    wait_for(cluster, lambda: (v := cluster.view) is not None and v.index("s1") in v.heads.tolist())
    if dies:
        cluster.kill(cluster.servers["s1"].process, power=True)
    else:
        wait_for(cluster, lambda: copy_states(cluster) == {CopyState.LATE})
        pushing.go_on()
    cluster.servers["s0"].process.thaw()
    if dies:
        wait_for(cluster, lambda: (v := cluster.view) is not None and set(v.heads.tolist()) == {v.index("s0")})
        pushing.go_on()
    else:
        rest_on(cluster, "s0", "s1")
    assert cluster.servers["s0"].now is only
    pushing.end()
