"""Workers that stand still for longer than their leases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from chaos.sim.checks.rounds import Rounds
from chaos.sim.checks.sums import COLUMNS, KEYS
from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP, BSP, Consistency
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.requests import Asker, Body
from elasticps.wire.frames import Header
from tests.sim.conftest import wait_for

PART_S = 0.4
FROZEN_S = 13.0
SHARDS = 40

Program = Callable[[Threads, Callable[[float], object]], None]


@pytest.mark.parametrize(("frozen", "parts"), [("w0", 1), ("w1", 3)])
def test_a_worker_in_rounds_goes_on_after_it_was_frozen_and_every_step_counts_once(
    cluster: Cluster, frozen: str, parts: int
) -> None:
    """What it had pushed for a round that was closed without it is its share of a later one."""
    rounds, keys = Rounds("app"), np.arange(KEYS)
    steps: dict[str, int] = {}
    seen = {0: np.zeros((KEYS, COLUMNS), np.float32)}
    ids: dict[str, set[int]] = {}
    over: set[str] = set()
    training = [True]

    def program(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, BSP(), 1, "app") as ps:
            column = rounds.start(ps.worker.id)
            table = ps.table("t", dim=COLUMNS, optimizer=Accumulate())
            grads = rounds.grads(column, keys)
            while training:
                with ps.step() as step:
                    for part in np.array_split(keys, parts):
                        step.push({table: (part, grads[part])})
                        threads.sleep(PART_S)
                steps[name] = steps.get(name, 0) + 1
                seen[ps.clock] = table.pull(keys)
                rounds.check(name, column, ps.clock, seen[ps.clock])
                ids.setdefault(name, set()).add(ps.worker.id)
        over.add(name)

    started = {name: cluster.start_worker(name, program) for name in ("w0", "w1")}
    wait_for(cluster, lambda: min(steps.get("w0", 0), steps.get("w1", 0)) > 1)
    cluster.clock.run(cluster.clock.now + PART_S / 2)  # in the middle of its next step
    process = started[frozen].process
    process.stall()
    cluster.clock.run(cluster.clock.now + FROZEN_S)
    assert len(cluster.counted) == 1
    process.thaw()
    before = steps[frozen]
    wait_for(cluster, lambda: steps[frozen] > before + 2)
    training.clear()
    wait_for(cluster, lambda: over == {"w0", "w1"})
    assert all(len(used) == 1 for used in ids.values())
    assert steps["w0"] != steps["w1"]
    assert len(seen) == max(seen) + 1
    shares = sum((seen[n][0, :2] != seen[n - 1][0, :2]).astype(int) for n in range(1, len(seen)))
    assert sorted(shares) == sorted(steps.values())


class _OverShards:
    """Workers w0 and w1 train shards until there are none left: the second stands still in between.

    taken: what each was given; trained: the sum of what was pushed for each shard, over all.
    """

    def __init__(self, cluster: Cluster, consistency: Consistency, frozen_s: float, program: Program) -> None:
        self.taken: dict[str, list[int]] = {"w0": [], "w1": []}
        self.trained: list[float] = []
        over: set[str] = set()

        def train(threads: Threads) -> None:
            name = threads.process.host
            with cluster.connect(threads, name, consistency, 1, "app") as ps:
                table = ps.table("t", dim=1, optimizer=Accumulate())
                for shard in ps.shards(SHARDS, 1):
                    self.taken[name].append(shard.start)
                    row = np.array([shard.start])
                    program(threads, lambda value: ps.push({table: (row, np.full((1, 1), value, np.float32))}))  # noqa: B023
                over.add(name)
                if name == "w0":
                    self.trained.extend(table.pull(np.arange(SHARDS))[:, 0].tolist())

        started = {name: cluster.start_worker(name, train) for name in self.taken}
        wait_for(cluster, lambda: min(map(len, self.taken.values())) > 2)
        started["w1"].process.stall()
        self.in_hand = self.taken["w1"][-1]
        cluster.clock.run(cluster.clock.now + frozen_s)
        started["w1"].process.thaw()
        wait_for(cluster, lambda: over == {"w0", "w1"} and bool(self.trained))
        self.twice = set(self.taken["w0"]) & set(self.taken["w1"])


def test_a_shard_whose_round_was_closed_without_its_worker_is_trained(cluster: Cluster) -> None:
    def program(threads: Threads, push: Callable[[float], object]) -> None:
        push(2)
        threads.sleep(1.0)

    over = _OverShards(cluster, BSP(), FROZEN_S, program)
    assert len(over.twice) <= 1  # what the other one was given while w1 was lost, and w1 had pushed
    for shard, value in enumerate(over.trained):
        assert value in ((1, 2) if shard not in over.twice else (1, 2, 3, 4)), shard


def test_only_the_shard_that_a_frozen_worker_had_taken_is_trained_twice(cluster: Cluster) -> None:
    """It is lost when its lease has run out: what it was given besides is not its own any more when it goes on."""

    def program(threads: Threads, push: Callable[[float], object]) -> None:
        threads.sleep(1.0)  # it stands still here, before its step
        push(1)

    over = _OverShards(cluster, ASP(), 4 * FROZEN_S, program)  # so long that the other one has everything
    assert over.twice == {over.in_hand}
    assert [shard for shard, value in enumerate(over.trained) if value != 1] in ([], [over.in_hand])


def test_a_worker_that_was_frozen_while_it_waited_for_another_goes_on(cluster: Cluster) -> None:
    steps, over = {"w0": 0, "w1": 0}, set()
    late, training = [False], [True]

    def program(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, BSP(), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            while training:
                while name == "w0" and late[0] and len(cluster.counted) == 2:
                    threads.sleep(0.1)
                threads.sleep(0.5)
                ps.push({table: (np.arange(9), np.ones((9, 1), np.float32))})
                table.pull(np.arange(9))
                steps[name] += 1
        over.add(name)

    started = {name: cluster.start_worker(name, program) for name in steps}
    wait_for(cluster, lambda: min(steps.values()) > 1)
    late[0] = True
    cluster.clock.run(cluster.clock.now + 2.0)
    started["w1"].process.stall()
    cluster.clock.run(cluster.clock.now + FROZEN_S)
    late[0] = False
    before = dict(steps)
    assert before["w0"] > before["w1"] + 1
    started["w1"].process.thaw()
    wait_for(cluster, lambda: steps["w1"] > before["w1"] + 2)
    training.clear()
    wait_for(cluster, lambda: over == {"w0", "w1"})


def test_a_step_counts_once_when_its_worker_never_heard_that_it_was_in_the_round(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off as it says that it is done, loses its lease, and asks again when there has been one more round: it
    was told that this one had been closed without it, and pushed the step anew."""
    steps, rows, over = {"w0": 0, "w1": 0}, list[float](), set[str]()
    training, away = [True], list[float]()

    def program(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, BSP(), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            ps.resume()
            over.add(name)
            while len(over) < 2:
                threads.sleep(0.01)
            while training:
                threads.sleep(0.5 if name == "w0" else 0.01)
                key = 0 if name == "w0" else 100 + steps[name]  # one for each of its steps
                ps.push({table: (np.array([key]), np.ones((1, 1), np.float32))}).result()
                steps[name] += 1
            ps.flush()
            if name == "w1":
                rows.extend(table.pull(np.arange(100, 100 + steps[name]))[:, 0].tolist())

    arrive = BarrierCoordinator._arrive

    def last_heard(self: BarrierCoordinator, connection: Asker, header: Header, body: Body) -> None:
        if connection.worker_name.endswith("w1") and header.clock == 3 and not away:
            away.append(cluster.clock.now)
            for host in ("s0", "s1", "store"):
                cluster.network.lose(host, "w1")
                cluster.network.lose("w1", host)
        arrive(self, connection, header, body)

    monkeypatch.setattr(BarrierCoordinator, "_arrive", last_heard)
    for name in ("w0", "w1"):
        cluster.start_worker(name, program)
    wait_for(cluster, lambda: bool(away))
    cluster.clock.run(cluster.clock.now + 1.0)
    for sock in [s for s in cluster.network.sockets if s.process.host == "w1"]:
        cluster.network.reset(sock)
    wait_for(cluster, lambda: len(cluster.counted) == 1)
    closed = steps["w0"]
    wait_for(cluster, lambda: steps["w0"] > closed + 1)
    done = steps["w1"]
    for host in ("s0", "s1", "store"):
        cluster.network.heal(host, "w1")
        cluster.network.heal("w1", host)
    wait_for(cluster, lambda: steps["w1"] > done + 1)
    training.clear()
    wait_for(cluster, lambda: bool(rows))
    assert rows[:4] == [0.5] * 4, "each was in one round, of two"
