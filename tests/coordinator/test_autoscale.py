"""Decisions about the number of servers, compared with a dumb twin that keeps everything it has seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.autoscale import AutoscalePolicy, Autoscaler, LoadMeter, ScaleDecision
from coordinator.core.planner import Members
from coordinator.core.sizing import estimate, measure, rows_mark
from coordinator.core.view import View
from tests.client.views import view

MIB = 1 << 20
LIMIT = 1024 * MIB
POLICY = AutoscalePolicy(1, 8, grow_after_s=30, shrink_after_s=100)


@cache
def spread(servers: int, replicas: int) -> View:
    chains = [[(r + i) % servers for i in range(min(replicas, servers))] for r in range(16)]
    padded = [chain + [-1] * (replicas - len(chain)) for chain in chains]
    return view(padded, servers=tuple(f"s{i}" for i in range(servers)))


class Cluster:
    """Servers that share rows and load evenly, and what they report."""

    def __init__(self, servers: int, replicas: int = 2, rows_mib: float = 100, load: float = 0.0) -> None:
        self.servers, self.replicas, self.rows_mib, self.load = servers, replicas, rows_mib, load
        self.limit = LIMIT
        self.now = 0.0
        self._cpu_s: dict[tuple[str, int], float] = {}

    def view(self) -> View:
        return spread(self.servers, self.replicas)

    def members(self) -> Members:
        return Members("c", self.view().servers)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for i in range(self.servers):
            key = f"s{i}", 1
            self._cpu_s[key] = self._cpu_s.get(key, 0.0) + seconds * self.load / self.servers

    def statuses(self) -> dict[str, dict[str, Any]]:
        rows = int(self.rows_mib * MIB / self.servers * min(1, self.servers / self.replicas))
        return {
            name: {"id": name, "incarnation": 1, "bytes": rows, "memory_used": rows + 64 * MIB,
                   "memory_limit": self.limit, "uptime_s": self.now, "cpu_s": self._cpu_s.get((name, 1), 0.0)}
            for name in (f"s{i}" for i in range(self.servers))
        }  # fmt: skip

    def step(self, scaler: Autoscaler) -> ScaleDecision:
        return scaler.step(self.servers, self.view(), self.members(), self.statuses(), self.now)

    def run(self, scaler: Autoscaler, seconds: int, every_s: int = 10) -> list[int]:
        """Does what the scaler decides; returns the numbers of servers, without repetition."""
        numbers = [self.servers]
        for _ in range(0, seconds, every_s):
            self.wait(every_s)
            found = self.step(scaler).servers
            if found != numbers[-1]:
                numbers.append(found)
                self.servers = found
        return numbers


def test_servers_whose_memory_is_short_get_more_without_waiting() -> None:
    cluster = Cluster(2, rows_mib=1500)
    scaler = Autoscaler(POLICY, 2)
    cluster.step(scaler)
    cluster.wait(2)
    found = cluster.step(scaler)
    assert found.servers == 4
    assert found.reason == "each of 2 uses 99% of the memory up to which it takes new rows; 85% is the limit"


def test_load_grows_a_cluster_only_once_it_has_lasted() -> None:
    cluster = Cluster(2, load=1.9)
    scaler = Autoscaler(POLICY, 2)
    waits = []
    for _ in range(5):
        cluster.wait(10)
        waits.append(cluster.step(scaler))
    assert [each.servers for each in waits] == [2, 2, 2, 2, 4]
    assert waits[1].reason == "waits 30 s more: each of 2 is busy 95% of the time; 75% is the limit"


def test_a_peak_of_load_grows_nothing() -> None:
    cluster = Cluster(2, load=1.9)
    scaler = Autoscaler(POLICY, 2)
    assert cluster.run(scaler, 30) == [2]
    cluster.load = 1.0
    assert cluster.run(scaler, 10) == [2]
    cluster.load = 1.9
    assert cluster.run(scaler, 30) == [2]


def test_a_cluster_shrinks_by_the_most_that_was_needed_meanwhile() -> None:
    cluster = Cluster(6, load=0.7)
    scaler = Autoscaler(POLICY, 2)
    assert cluster.run(scaler, 50) == [6]
    cluster.load = 1.5  # four would be enough
    assert cluster.run(scaler, 20) == [6]
    cluster.load = 0.1
    assert cluster.run(scaler, 100) == [6, 4]
    assert cluster.run(scaler, 150) == [4, 2]


def test_there_are_never_fewer_servers_than_replicas_or_than_allowed() -> None:
    cluster = Cluster(6)
    assert cluster.run(Autoscaler(POLICY, 3), 1000)[-1] == 3
    cluster = Cluster(6)
    assert cluster.run(Autoscaler(AutoscalePolicy(4, 8), 3), 2000)[-1] == 4
    with pytest.raises(ValueError, match="2 servers cannot hold 3 replicas"):
        Autoscaler(AutoscalePolicy(1, 2), 3)


def test_bounds_are_kept_at_once_but_never_by_losing_room() -> None:
    cluster = Cluster(2)
    cluster.wait(10)
    assert cluster.step(Autoscaler(AutoscalePolicy(3, 8), 2)).servers == 3
    cluster = Cluster(6)
    cluster.wait(10)
    assert cluster.step(Autoscaler(AutoscalePolicy(1, 4), 2)).servers == 4
    cluster = Cluster(6, rows_mib=2500)
    cluster.wait(10)
    found = cluster.step(Autoscaler(AutoscalePolicy(1, 4), 2))
    assert (found.servers, found.reason) == (5, "there are to be 4 servers at most, which had no memory for it")


def test_nothing_is_decided_from_part_of_the_cluster() -> None:
    cluster = Cluster(3, rows_mib=4000)
    scaler = Autoscaler(POLICY, 2)
    cluster.wait(10)
    cluster.step(scaler)
    cluster.wait(10)
    statuses = cluster.statuses()
    del statuses["s1"]
    found = scaler.step(3, cluster.view(), cluster.members(), statuses, cluster.now)
    assert found == ScaleDecision(3, "waits: no answer from s1")
    found = scaler.step(4, cluster.view(), cluster.members(), cluster.statuses(), cluster.now)
    assert found == ScaleDecision(4, "waits: 3 of 4 servers are there")
    leaving = Members("c", cluster.view().servers, frozenset({cluster.view().servers[2].member}))
    found = scaler.step(2, cluster.view(), leaving, cluster.statuses(), cluster.now)
    assert found == ScaleDecision(2, "waits: s2 is to leave")
    joining = np.full(16, -1, np.int32)
    joining[3] = 2
    moving = replace(cluster.view(), joining=joining)
    found = scaler.step(3, moving, cluster.members(), cluster.statuses(), cluster.now)
    assert found == ScaleDecision(3, "waits: 1 ranges are being filled")
    cluster.wait(10)
    assert cluster.step(scaler).servers > 3


def test_a_policy_needs_room_between_its_marks() -> None:
    for wrong in (
        {"min_servers": 0}, {"min_servers": 3, "max_servers": 2}, {"memory_low": 0.9}, {"load_high": 1.5},
        {"load_low": 0.0}, {"grow_after_s": -1.0}, {"shrink_after_s": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"servers|shares|seconds"):
            AutoscalePolicy(**wrong)


def test_load_needs_two_reports_of_each_incarnation() -> None:
    def report(name: str, uptime_s: float, cpu_s: float, incarnation: int = 1) -> dict[str, Any]:
        return {"id": name, "incarnation": incarnation, "uptime_s": uptime_s, "cpu_s": cpu_s}

    meter = LoadMeter()
    assert meter.step([]) is None
    assert meter.step([report("a", 10, 4), report("b", 10, 4)]) is None
    assert meter.step([report("a", 12, 5), report("b", 14, 5)]) == pytest.approx(0.75)
    assert meter.step([report("a", 12.5, 5.5), report("b", 16, 5)]) == pytest.approx(0.5)  # a: too soon, as before
    assert meter.step([report("a", 20, 9), report("b", 1, 9, 2)]) is None
    assert meter.step([report("a", 22, 9), report("b", 2, 9.5, 2)]) == pytest.approx(0.5)


# --- properties -----------------------------------------------------------------------------------------------------


def clusters() -> st.SearchStrategy[Cluster]:
    return st.builds(
        Cluster, st.integers(1, 10), st.integers(1, 4), st.floats(0, 8000), st.floats(0, 8),
    )  # fmt: skip


@settings(max_examples=40)
@given(clusters(), st.integers(1, 8), st.integers(0, 4))
def test_a_steady_cluster_is_changed_until_it_fits_and_then_left_alone(cluster: Cluster, least: int, more: int) -> None:
    policy = AutoscalePolicy(least, max(least + more, cluster.replicas), grow_after_s=30, shrink_after_s=100)
    numbers = cluster.run(Autoscaler(policy, cluster.replicas), 1500, 20)
    lowest, highest = min(numbers), max(numbers)
    assert lowest >= min(numbers[0], max(least, cluster.replicas))
    assert highest <= max(numbers[0], policy.max_servers)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(numbers, numbers[1:], numbers[2:], strict=False))
    assert turns == 0  # never up and down again
    assert cluster.run(Autoscaler(policy, cluster.replicas), 600, 20) == [cluster.servers]


@given(clusters(), st.floats(0, 2000), st.floats(0, 2))
def test_more_to_hold_or_to_do_never_means_fewer_servers(cluster: Cluster, rows_mib: float, load: float) -> None:
    scaled = []
    for more in (False, True):
        other = Cluster(cluster.servers, cluster.replicas, cluster.rows_mib, cluster.load)
        if more:
            other.rows_mib, other.load = other.rows_mib + rows_mib, other.load + load
        scaler = Autoscaler(AutoscalePolicy(1, 10, grow_after_s=0, shrink_after_s=0), cluster.replicas)
        other.wait(10)
        other.step(scaler)
        other.wait(10)
        scaled.append(other.step(scaler).servers)
    assert scaled[0] <= scaled[1]


@given(clusters())
def test_a_cluster_that_scaled_down_has_the_memory_that_a_dry_run_asks_for(cluster: Cluster) -> None:
    scaler = Autoscaler(AutoscalePolicy(1, 10, shrink_after_s=0), cluster.replicas)
    before = cluster.servers
    cluster.wait(10)
    cluster.step(scaler)
    cluster.wait(10)
    found = cluster.step(scaler).servers
    needed = estimate(measure(cluster.statuses().values(), cluster.view()), found)
    assert needed is not None
    if found < before:
        assert needed.each < needed.mark
        assert 0 < needed.servers <= found


class Twin:
    """Keeps every look since the last change or doubt, and tries every number of servers."""

    def __init__(self, policy: AutoscalePolicy, replicas: int) -> None:
        self.policy, self.replicas = policy, replicas
        self.looks: list[tuple[float, int, float, float, int]] = []  # time, servers, rows and load of all, limit

    def fits(self, rows: float, load: float, limit: int, n: int, memory: float, busy: float) -> bool:
        each = int(64 * MIB + rows / n * min(1.0, n / self.replicas))
        room = not limit or each <= memory * rows_mark(limit, n, self.replicas)
        return room and load / n <= busy

    def step(self, now: float, servers: int, rows: float, load: float, limit: int) -> int:
        p, least = self.policy, max(self.policy.min_servers, self.replicas)
        self.looks.append((now, servers, rows, load, limit))
        answer = servers
        if servers < least:
            answer = least
        elif servers > p.max_servers:
            fitting = [n for n in range(p.max_servers, servers) if self.fits(rows, 0, limit, n, p.memory_high, 1e9)]
            answer = min(fitting, default=servers)
        elif not self.fits(rows, load, limit, servers, p.memory_high, p.load_high):
            full = not self.fits(rows, 0, limit, servers, p.memory_high, 1e9)
            if full or self.lasted(now, p.grow_after_s, lambda r, b, m: not self.fine(r, b, m, servers)):
                middle = (p.memory_low + p.memory_high) / 2, (p.load_low + p.load_high) / 2
                better = [n for n in range(servers + 1, p.max_servers + 1) if self.fits(rows, load, limit, n, *middle)]
                answer = min(better, default=p.max_servers)
        elif self.lasted(now, p.shrink_after_s, lambda r, b, m: self.enough(r, b, m, servers, least) < servers):
            answer = max(
                self.enough(r, b, m, servers, least)
                for r, b, m in self.since(lambda r, b, m: self.enough(r, b, m, servers, least) < servers)
            )
        if answer != servers:
            self.looks.clear()
        return answer

    def fine(self, rows: float, load: float, limit: int, n: int) -> bool:
        return self.fits(rows, load, limit, n, self.policy.memory_high, self.policy.load_high)

    def enough(self, rows: float, load: float, limit: int, servers: int, least: int) -> int:
        if not self.fine(rows, load, limit, servers):
            return servers
        low = self.policy.memory_low, self.policy.load_low
        some = [
            n for n in range(least, servers) if all(self.fits(rows, load, limit, k, *low) for k in range(n, servers))
        ]
        return min(some, default=servers)

    def since(self, condition: Any) -> list[tuple[float, float, int]]:
        found = []
        for _, _, rows, load, limit in reversed(self.looks):
            if not condition(rows, load, limit):
                break
            found.append((rows, load, limit))
        return found

    def lasted(self, now: float, seconds: float, condition: Any) -> bool:
        count = len(self.since(condition))
        return count > 0 and now - self.looks[-count][0] >= seconds


@given(
    st.integers(1, 8), st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), st.sampled_from([0, LIMIT, 4 * LIMIT]),
    st.lists(st.tuples(st.sampled_from([0, 200, 900, 2000, 4000]), st.sampled_from([0, 4, 12, 24, 40])), max_size=25),
)  # fmt: skip
def test_the_autoscaler_decides_as_its_twin(
    servers: int, replicas: int, least: int, more: int, limit: int, looks: list[tuple[int, int]]
) -> None:
    policy = AutoscalePolicy(least, max(least + more, replicas), grow_after_s=16, shrink_after_s=32)
    scaler, twin, cluster = Autoscaler(policy, replicas), Twin(policy, replicas), Cluster(servers, replicas)
    cluster.limit = limit
    cluster.wait(8)
    loads: dict[str, float] = {}
    for i, (rows_mib, eighths) in enumerate(looks):
        cluster.rows_mib, cluster.load = rows_mib, eighths / 8
        cluster.wait(8)
        statuses = cluster.statuses()
        found = scaler.step(cluster.servers, cluster.view(), cluster.members(), statuses, cluster.now)
        known = i > 0 and loads.keys() == statuses.keys()
        loads = dict.fromkeys(statuses, 0.0)
        inside = max(policy.min_servers, replicas) <= cluster.servers <= policy.max_servers
        if inside and not known:
            assert found.servers == cluster.servers
            continue
        held = measure(statuses.values(), cluster.view())
        load = cluster.load if known else 0.0
        assert found.servers == twin.step(cluster.now, cluster.servers, held.rows, load, limit), found.reason
        cluster.servers = found.servers
