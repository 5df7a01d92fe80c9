"""Decides how many servers there should be, by their memory and their load. Pure.

Servers are added when one uses more than the high mark, and left out when fewer would use less than the low mark; what
lies between is the hysteresis. A decision needs the same finding for a while, except where memory is short: there
pushes are refused soon. After each change that while begins again, as it does whenever servers come, go or move ranges:
that is the cool-down. A decision rests on reports of all servers, or it is to leave things as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from coordinator.core.planner import Members
from coordinator.core.reasons import names
from coordinator.core.sizing import ClusterUse, fewest, measure, next_enough
from coordinator.core.view import View

MEASURED_S = 1.0  # of CPU time and more make a load; over less it is what happened to come together


@dataclass(frozen=True)
class AutoscalePolicy:
    """What an autoscaler may do, and when. ValueError for numbers that do not go together.

    min_servers, max_servers  how many there may be; never fewer than there are replicas
    memory_low, memory_high   shares of the memory up to which a server takes new rows (`memory_mark`)
    load_low, load_high       shares of a core that a server's event loop uses; it can use one core
    grow_after_s              how long servers must have been above `load_high`; short memory is not waited for
    shrink_after_s            how long fewer must have been enough
    """

    min_servers: int = 1
    max_servers: int = 64
    memory_low: float = 0.6
    memory_high: float = 0.85
    load_low: float = 0.4
    load_high: float = 0.75
    grow_after_s: float = 30.0
    shrink_after_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_servers <= self.max_servers:
            raise ValueError(f"servers from {self.min_servers} to {self.max_servers} are no numbers to scale between")
        for what in ("memory", "load"):
            low, high = getattr(self, f"{what}_low"), getattr(self, f"{what}_high")
            if not 0 < low < high <= 1:
                raise ValueError(f"{what}_low and {what}_high are shares, 0 < low < high ≤ 1, not {low} and {high}")
        for each in fields(self):
            if each.name.endswith("_s") and not 0 <= getattr(self, each.name) < float("inf"):
                raise ValueError(f"{each.name} is a number of seconds, not {getattr(self, each.name)}")


@dataclass(frozen=True)
class ScaleDecision:
    """How many servers there should be, and why."""

    servers: int
    reason: str


class Autoscaler:
    """Decides for one cluster, from one look at it after the other. ValueError for a policy with fewer servers than
    replicas."""

    def __init__(self, policy: AutoscalePolicy, replicas: int) -> None:
        if policy.max_servers < replicas:
            raise ValueError(f"{policy.max_servers} servers cannot hold {replicas} replicas of each range")
        self.policy = policy
        self._least = max(policy.min_servers, replicas)
        self._loads = LoadMeter()
        self._busy_since: float | None = None
        self._spare_since: float | None = None
        self._spare_most = 0  # the largest number that was enough since then

    def step(
        self, servers: int, view: View, members: Members, statuses: Mapping[str, Mapping[str, Any]], now: float
    ) -> ScaleDecision:
        """Decides by a look at the cluster at time `now`, in seconds. servers: how many were asked for last; statuses:
        by name, of the registered servers that have answered (`StatusResponse` of admin.proto)."""
        load = self._loads.step(statuses.values())
        if why := unsettled(servers, view, members, statuses.keys()):
            self._begin_again()
            return ScaleDecision(servers, f"waits: {why}")
        if load is None and self._least <= servers <= self.policy.max_servers:
            return ScaleDecision(servers, "waits: load is a difference, and has been read once")
        found = self._decide(servers, measure(statuses.values(), view, load or 0.0), now)
        if found.servers != servers:
            self._begin_again()
        return found

    def _begin_again(self) -> None:
        self._busy_since = self._spare_since = None
        self._spare_most = 0

    def _decide(self, servers: int, use: ClusterUse, now: float) -> ScaleDecision:
        policy = self.policy
        if servers < self._least:
            return ScaleDecision(self._least, f"there are to be {self._least} servers at least")
        if servers > policy.max_servers:
            fitting = next_enough(policy.max_servers, servers, lambda n: not self._short(use, n)) or servers
            why = f"there are to be {policy.max_servers} servers at most"
            return ScaleDecision(
                fitting, why if fitting == policy.max_servers else f"{why}, which had no memory for it"
            )
        memory, load = self._short(use, servers), self._busy(use, servers)
        if memory or load:
            self._spare_since = None
            if self._busy_since is None:
                self._busy_since = now
            wait_s = 0.0 if memory else policy.grow_after_s - (now - self._busy_since)
            return self._grow(servers, use, memory or load, wait_s)
        self._busy_since = None
        return self._shrink(servers, use, now)

    def _grow(self, servers: int, use: ClusterUse, why: str, wait_s: float) -> ScaleDecision:
        most = self.policy.max_servers
        if servers == most:
            return ScaleDecision(servers, f"{why}, and there are to be {most} servers at most")
        if wait_s > 0:
            return ScaleDecision(servers, f"waits {wait_s:.0f} s more: {why}")
        return ScaleDecision(next_enough(servers + 1, most, lambda n: self._fits(use, n, 0.5)) or most, why)

    def _shrink(self, servers: int, use: ClusterUse, now: float) -> ScaleDecision:
        enough = fewest(servers, self._least, lambda n: self._fits(use, n, 0.0))
        if enough == servers:
            self._spare_since, self._spare_most = None, 0
            return ScaleDecision(servers, "memory and load are as they should be")
        if self._spare_since is None:
            self._spare_since, self._spare_most = now, enough
        self._spare_most = max(self._spare_most, enough)
        wait_s = self.policy.shrink_after_s - (now - self._spare_since)
        if wait_s > 0:
            return ScaleDecision(servers, f"waits {wait_s:.0f} s more: {enough} servers would be enough")
        return ScaleDecision(self._spare_most, f"{self._spare_most} servers have been enough for a while")

    def _fits(self, use: ClusterUse, servers: int, between: float) -> bool:
        """Whether each of `servers` would be no fuller and no busier than so far `between` the low and high marks."""
        policy = self.policy
        memory = policy.memory_low + between * (policy.memory_high - policy.memory_low)
        load = policy.load_low + between * (policy.load_high - policy.load_low)
        room = not use.limit or use.memory(servers) <= memory * use.mark(servers)
        return room and use.load / servers <= load

    def _short(self, use: ClusterUse, servers: int) -> str:
        """Why memory would be short at `servers`; "" if it would not."""
        high = self.policy.memory_high
        if not use.limit or use.memory(servers) <= high * use.mark(servers):
            return ""
        share = use.memory(servers) / use.mark(servers)
        return (
            f"each of {servers} uses {share:.0%} of the memory up to which it takes new rows; {high:.0%} is the limit"
        )

    def _busy(self, use: ClusterUse, servers: int) -> str:
        """Why load would be high at `servers`; "" if it would not."""
        load, high = use.load / servers, self.policy.load_high
        return "" if load <= high else f"each of {servers} is busy {load:.0%} of the time; {high:.0%} is the limit"


def unsettled(servers: int, view: View, members: Members, answered: Collection[str]) -> str:
    """Returns why the cluster's load says nothing now (servers are missing, or ranges move); "" if it does."""
    here = [s for s in members.servers if s.member not in members.draining]
    if len(here) != servers:
        return f"{len(here)} of {servers} servers are there"
    if leaving := sorted(s.name for s in members.servers if s.member in members.draining):
        return f"{names(leaving)} is to leave" if len(leaving) == 1 else f"{names(leaving)} are to leave"
    if silent := sorted(s.name for s in here if s.name not in answered):
        return f"no answer from {names(silent)}"
    if {s.member for s in here} != {s.member for s in view.servers}:
        return "the view has other servers than are registered"
    if moving := int((view.joining >= 0).sum()):
        return f"{moving} ranges are being filled"
    return ""


class LoadMeter:
    """Turns CPU times that servers report into the load of all of them."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, float]] = {}  # (name, incarnation) -> uptime, CPU time
        self._loads: dict[tuple[str, int], float] = {}

    def step(self, statuses: Collection[Mapping[str, Any]]) -> float | None:
        """Seconds of CPU time per second that the event loops of these servers have used together since the last step
        that was at least MEASURED_S earlier; None unless each has been seen before."""
        last, loads = dict[tuple[str, int], tuple[float, float]](), dict[tuple[str, int], float]()
        for status in statuses:
            key = status["id"], status["incarnation"]
            uptime_s, cpu_s = status["uptime_s"], status["cpu_s"]
            before = self._last.get(key)
            if before is None or uptime_s - before[0] >= MEASURED_S:
                last[key] = uptime_s, cpu_s
                if before is not None:
                    loads[key] = max(0.0, (cpu_s - before[1]) / (uptime_s - before[0]))
                continue
            last[key] = before
            if key in self._loads:
                loads[key] = self._loads[key]
        self._last, self._loads = last, loads
        return sum(loads.values()) if len(loads) == len(last) and last else None
