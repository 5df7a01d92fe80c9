"""Chaos plans as data: which cluster, which load, which faults when. Pure.

A plan is a YAML file (`parse`), checked against the tables below; an error names the file, the path in it, and what is
allowed there. `expand` makes a timeline of it: the same plan, seed and duration give the same faults at the same times.
The process that a fault hits is chosen when its time has come (`chaos.live.targets`), by a number that is drawn here.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticps.errors import ConfigError
from elasticps.system.memory import parse_size

KINDS = ("local", "netns", "kubernetes")
SECONDS_MAX = 7 * 86400.0
ACTIONS_MAX = 100_000

Span = tuple[float, float]  # a number drawn evenly from low to high; both are equal where it is fixed


class PlanError(ConfigError):
    """A plan cannot be used; the text says where, and what is allowed there."""


@dataclass(frozen=True)
class Verb:
    """A fault that plans may name.

    roles   of processes that it may hit; the first is the role that the target `random` means
    needs   fields that must be given; `takes`: that may be. Each is a number or [low, high]
    hurts   it can take a server's copies away: done only while every range has another full replica
    network it needs a network of our own (namespaces, or the proxy)
    pods    it can be done to pods as well
    alone   it begins when all ranges are whole and no fault of a process goes on; no other fault begins meanwhile
    """

    about: str
    roles: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    hurts: bool = False
    network: bool = False
    pods: bool = True
    alone: bool = False


_PROCESSES = ("server", "coordinator", "worker", "etcd", "reader")
VERBS: Mapping[str, Verb] = {
    "kill": Verb("SIGKILL; `back`: seconds until it is started again", _PROCESSES, (), ("back",), hurts=True),
    "terminate": Verb("SIGTERM: a server drains; `back` as above, from its end", _PROCESSES, (), ("back",), hurts=True),
    "restart": Verb("SIGTERM, and started again as soon as it has ended", _PROCESSES, (), (), hurts=True),
    "pause": Verb("SIGSTOP, and SIGCONT after `for`", _PROCESSES, ("for",), (), hurts=True),
    "cut": Verb("no packet from target to `to` (way: out, in or both)", _PROCESSES, ("for",), (), True, network=True),
    "delay": Verb("packets of the target take `ms` longer", _PROCESSES, ("for", "ms"), ("jitter",), network=True),
    "loss": Verb("`percent` of the target's packets are lost", _PROCESSES, ("for", "percent"), (), network=True),
    "rate": Verb("the target sends at most `mbit` per second", _PROCESSES, ("for", "mbit"), (), network=True),
    "etcd-outage": Verb("every etcd member is killed, and started again after `for`", (), ("for",), pods=False),
    "etcd-full": Verb("etcd has used up its space, and refuses every write", (), ("for",), pods=False),
    "etcd-new": Verb("etcd loses its data; `for` later the new one is told to adopt the cluster", (), ("for",),
                     pods=False, alone=True),
    "hog": Verb("`processes` that use all the CPU they get", (), ("for",), ("processes",), pods=False),
    "hoard": Verb("a worker that adds rows up to what servers hold, and goes on there", (), ("for",), pods=False),
    "hostile": Verb("`processes` that send what they must not, and flood servers with connections", (), ("for",),
                    ("processes",), pods=False),
    "grow": Verb("`count` more servers", (), (), ("count",)),
    "cordon": Verb("the node of the target takes no new pods; Kubernetes only", ("server", "coordinator"), ("for",)),
    "shrink": Verb("SIGTERM to a server that does not come back", ("server",), (), (), hurts=True),
}  # fmt: skip
REFUSED: Mapping[str, str] = {
    "disk-full": "servers write no checkpoints to a disk, so there is none to fill",
}
GROUPS = ("others", "servers", "coordinators", "etcd", "workers", "everyone")
WAYS = ("both", "out", "in")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*[0-9]+")
_ETCD_POD = re.compile(r"([A-Za-z0-9-]+-)?etcd(-[0-9]+)?")  # the word for all of them, or one by name
_ROLE_WORDS = ("random", "head-of:hottest", "head-of:RANGE", "tail", "tail-of:RANGE", "joining", "leader", "standby",
               "worker", "etcd", "reader")  # fmt: skip
_RANGE_WORD = re.compile(r"(head|tail)-of:(\d+)")
WORD_ROLES: Mapping[str, str] = {
    "head-of:hottest": "server", "tail": "server", "joining": "server", "leader": "coordinator",
    "standby": "coordinator", "worker": "worker", "etcd": "etcd", "reader": "reader",
}  # fmt: skip


@dataclass(frozen=True)
class ClusterPlan:
    """The cluster of a run. proxy: servers and etcd are reached through a proxy that can cut and delay; memory: of each
    server at most, "" for any. url, namespace, server_labels and the like are for Kubernetes, where the cluster exists
    before the run."""

    kind: str = "local"
    servers: int = 4
    replicas: int = 2
    coordinators: int = 2
    etcd: int = 1
    ranges: int = 32
    proxy: bool = False
    tls: bool = False
    memory: str = ""
    url: str = ""
    namespace: str = "default"
    server_set: str = "elasticps-server"
    server_labels: str = "app.kubernetes.io/component=server"
    coordinator_labels: str = "app.kubernetes.io/component=coordinator"
    etcd_labels: str = "app.kubernetes.io/component=etcd"


@dataclass(frozen=True)
class LoadPlan:
    """The load of a run: workers that push whole numbers (the audit load), or copies of a training command.

    keys     rows that all workers share; `filling`: rows more, so that filling a replica takes a moment
    window   steps that a worker leaves unacknowledged; `pause_ms`: between two steps of one worker
    readers  whether readers follow beside, and what they show is checked: not for a `command`, nor on Kubernetes
    command  instead of the audit load; {url}, {worker} and {number} are filled in
    """

    workers: int = 2
    keys: int = 400
    filling: int = 20_000
    window: int = 4
    pause_ms: float = 2.0
    readers: bool = True
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class FaultPlan:
    """One entry of `faults`: the fault, its target, and when it is done: `at` a time, `every` so many seconds on
    average, or `times` times, evenly drawn; the latter two from `start` until `until` (None: the calm at the end)."""

    do: str
    target: str = ""
    at: Span | None = None
    every: float | None = None
    times: int | None = None
    start: float = 0.0
    until: float | None = None
    fields: Mapping[str, Span] = field(default_factory=dict)
    to: str = "everyone"
    way: str = "both"


@dataclass(frozen=True)
class Promises:
    """The promises of a run beyond exact content. settle_s: within so many seconds all ranges are whole at the end;
    stall_s: the longest time that a worker may go without a commit (None: it is only reported)."""

    settle_s: float = 60.0
    stall_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """A plan. duration: seconds of load; calm: the last of them, in which no fault begins."""

    name: str
    about: str
    duration: float
    calm: float
    cluster: ClusterPlan
    load: LoadPlan
    faults: tuple[FaultPlan, ...]
    promises: Promises


@dataclass(frozen=True)
class Action:
    """One fault at its time. draw: in [0, 1), picks among several possible targets; values: the drawn fields."""

    number: int
    at: float
    do: str
    target: str
    draw: float
    values: Mapping[str, float]
    to: str = "everyone"
    way: str = "both"

    def value(self, name: str, otherwise: float = 0.0) -> float:
        """Returns a field's value, or `otherwise` if the plan does not give it."""
        return self.values.get(name, otherwise)


# ------------------------------------------------------------------------------------------------------------ expand


def expand(plan: Plan, seed: int, duration: float | None = None) -> tuple[Action, ...]:
    """Returns the timeline of a plan under a seed, in order of time. A shorter duration leaves out the faults that
    would begin later; the others stay the same, except those of entries that say `times`."""
    length = plan.duration if duration is None else duration
    last = max(0.0, length - plan.calm)
    drawn: list[tuple[float, int, FaultPlan, float, dict[str, float]]] = []
    for index, fault in enumerate(plan.faults):
        chance = random.Random(f"{seed}/{index}")
        end = min(last, fault.until if fault.until is not None else last)
        for at in _times(fault, end, chance):
            draw = chance.random()
            values = {name: _draw(span, chance) for name, span in fault.fields.items()}
            if at <= end:
                drawn.append((at, index, fault, draw, values))
            if len(drawn) > ACTIONS_MAX:
                raise PlanError(f"plan {plan.name}: more than {ACTIONS_MAX:,} faults in {length:g} s")
    drawn.sort(key=lambda each: each[:2])
    return tuple(
        Action(number, round(at, 3), fault.do, fault.target, draw, values, fault.to, fault.way)
        for number, (at, _, fault, draw, values) in enumerate(drawn)
    )


def _times(fault: FaultPlan, end: float, chance: random.Random) -> Iterable[float]:
    if fault.at is not None:
        yield _draw(fault.at, chance)
    elif fault.times is not None:
        yield from sorted(chance.uniform(fault.start, max(fault.start, end)) for _ in range(fault.times))
    elif fault.every is not None:
        at = fault.start + chance.expovariate(1.0 / fault.every)
        while at <= end:
            yield at
            at += chance.expovariate(1.0 / fault.every)


def _draw(span: Span, chance: random.Random) -> float:
    return round(chance.uniform(*span), 3)


# ------------------------------------------------------------------------------------------------------------- parse


def parse(text: str, name: str, source: str) -> Plan:
    """Reads a plan from YAML text. Raises PlanError if it cannot be used; `source` names the file in errors."""
    try:
        import yaml
    except ImportError:
        raise PlanError("chaos plans are YAML: pip install 'elasticps[chaos]'") from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{source}: not YAML: {error}") from None
    return _plan(_Place(source, document), name)


class _Place:
    """A value in a plan and the path to it, for messages."""

    def __init__(self, source: str, value: Any, path: str = "") -> None:
        self.source = source
        self.value = value
        self.path = path

    def error(self, text: str) -> PlanError:
        return PlanError(f"{self.source}: {self.path or 'the plan'}: {text}")

    def fields(self, known: Iterable[str]) -> dict[str, _Place]:
        """Returns the fields of a mapping. Raises PlanError for unknown ones."""
        known = list(known)
        if not isinstance(self.value, dict):
            raise self.error(f"must be a mapping with some of {', '.join(known)}, not {self.value!r}")
        if unknown := [str(key) for key in self.value if key not in known]:
            raise self.error(f"unknown {', '.join(map(repr, unknown))}; allowed are {', '.join(known)}")
        dot = f"{self.path}." if self.path else ""
        return {key: _Place(self.source, value, f"{dot}{key}") for key, value in self.value.items()}

    def items(self) -> list[_Place]:
        if not isinstance(self.value, list):
            raise self.error(f"must be a list, not {self.value!r}")
        return [_Place(self.source, value, f"{self.path}[{i}]") for i, value in enumerate(self.value)]

    def text(self, allowed: Iterable[str] = ()) -> str:
        allowed = tuple(allowed)
        if not isinstance(self.value, str) or (allowed and self.value not in allowed):
            raise self.error(f"must be {'one of ' + ', '.join(allowed) if allowed else 'a text'}, not {self.value!r}")
        return self.value

    def size(self) -> str:
        """Returns a size of memory, as the command line takes it."""
        try:
            parse_size(text := self.text())
        except ConfigError as error:
            raise self.error(str(error)) from None
        return text

    def switch(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error(f"must be true or false, not {self.value!r}")
        return self.value

    def count(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.error(f"must be a whole number from {low} to {high}, not {self.value!r}")
        return self.value

    def number(self, low: float, high: float) -> float:
        good = type(self.value) in (int, float) and math.isfinite(self.value) and low <= self.value <= high
        if not good:
            raise self.error(f"must be a number from {low:g} to {high:g}, not {self.value!r}")
        return float(self.value)

    def span(self, low: float, high: float) -> Span:
        """Returns a number, or [low, high] to draw from."""
        if not isinstance(self.value, list):
            number = self.number(low, high)
            return number, number
        if len(self.value) != 2:
            raise self.error(f"must be a number or [low, high], not {self.value!r}")
        first, last = (item.number(low, high) for item in self.items())
        if first > last:
            raise self.error(f"must be [low, high] with low first, not {self.value!r}")
        return first, last


def _plan(place: _Place, name: str) -> Plan:
    parts = place.fields(("about", "duration", "calm", "cluster", "load", "faults", "promises"))
    if missing := [key for key in ("about", "duration", "faults") if key not in parts]:
        raise place.error(f"{', '.join(missing)} must be given")
    cluster = _read(parts.get("cluster"), ClusterPlan, _CLUSTER)
    plan = Plan(
        name,
        parts["about"].text(),
        parts["duration"].number(1, SECONDS_MAX),
        parts["calm"].number(0, 3600) if "calm" in parts else 3.0,
        cluster,
        _read(parts.get("load"), LoadPlan, _LOAD),
        tuple(_fault(each) for each in parts["faults"].items()),
        _read(parts.get("promises"), Promises, _PROMISES),
    )
    _check_cluster(plan, parts.get("cluster") or place)
    for each, fault in zip(parts["faults"].items(), plan.faults, strict=True):
        _check_network(each, fault, cluster)
    return plan


Reader = Callable[[_Place], Any]
_CLUSTER: Mapping[str, Reader] = {
    "kind": lambda p: p.text(KINDS),
    "servers": lambda p: p.count(1, 64),
    "replicas": lambda p: p.count(1, 16),
    "coordinators": lambda p: p.count(1, 5),
    "etcd": lambda p: p.count(1, 5),
    "ranges": lambda p: _power_of_two(p),
    "proxy": lambda p: p.switch(),
    "tls": lambda p: p.switch(),
    "memory": lambda p: p.size(),
    **{key: lambda p: p.text() for key in ("url", "namespace", "server_set", "server_labels", "coordinator_labels",
                                           "etcd_labels")},
}  # fmt: skip
_LOAD: Mapping[str, Reader] = {
    "workers": lambda p: p.count(1, 64),
    "keys": lambda p: p.count(50, 100_000),
    "filling": lambda p: p.count(0, 50_000_000),
    "window": lambda p: p.count(1, 64),
    "pause_ms": lambda p: p.number(0, 10_000),
    "readers": lambda p: p.switch(),
    "command": lambda p: tuple(each.text() for each in p.items()),
}
_PROMISES: Mapping[str, Reader] = {
    "settle_s": lambda p: p.number(1, 3600),
    "stall_s": lambda p: p.number(0.01, 3600),
}
_LIMITS: Mapping[str, Span] = {
    "for": (0.01, 86400), "back": (0, 86400), "ms": (0, 10_000), "jitter": (0, 10_000), "percent": (0, 100),
    "mbit": (0.01, 100_000), "processes": (1, 64), "count": (1, 32),
}  # fmt: skip


def _read(place: _Place | None, kind: Callable[..., Any], readers: Mapping[str, Reader]) -> Any:
    if place is None:
        return kind()
    return kind(**{key: readers[key](each) for key, each in place.fields(readers).items()})


def _power_of_two(place: _Place) -> int:
    count = place.count(2, 65536)
    if count & (count - 1):
        raise place.error(f"must be a power of two, not {count}")
    return count


def _fault(place: _Place) -> FaultPlan:
    timing = ("at", "every", "times", "from", "until")
    everything = ("do", "target", "to", "way", *timing, *_LIMITS)
    parts = place.fields(everything)
    if "do" not in parts:
        raise place.error(f"must say what to `do`: one of {', '.join(VERBS)}")
    if (do := parts["do"].value) in REFUSED:
        raise parts["do"].error(f"{do} is not possible: {REFUSED[do]}")
    verb = VERBS[parts["do"].text(VERBS)]
    allowed = ("do", *timing, *verb.needs, *verb.takes, *(("target",) if verb.roles else ()))
    parts = place.fields((*allowed, "to", "way") if do == "cut" else allowed)
    if missing := [key for key in (*(("target",) if verb.roles else ()), *verb.needs) if key not in parts]:
        raise place.error(f"{do} needs {', '.join(missing)}")
    if sum(key in parts for key in ("at", "every", "times")) != 1:
        raise place.error("must have one of at, every and times")
    if "at" in parts and ("from" in parts or "until" in parts):
        raise place.error("from and until go with every or times, not with at")
    start = parts["from"].number(0, SECONDS_MAX) if "from" in parts else 0.0
    return FaultPlan(
        do,
        _target(parts["target"], verb) if "target" in parts else "",
        parts["at"].span(0, SECONDS_MAX) if "at" in parts else None,
        parts["every"].number(0.05, SECONDS_MAX) if "every" in parts else None,
        parts["times"].count(1, 10_000) if "times" in parts else None,
        start,
        parts["until"].number(start, SECONDS_MAX) if "until" in parts else None,
        {key: parts[key].span(*_LIMITS[key]) for key in _LIMITS if key in parts},
        _group(parts["to"]) if "to" in parts else "everyone",
        parts["way"].text(WAYS) if "way" in parts else "both",
    )


def _target(place: _Place, verb: Verb) -> str:
    word = place.text()
    if word != "random" and word not in WORD_ROLES and not _RANGE_WORD.fullmatch(word) and not _NAME.fullmatch(word):
        raise place.error(f"must be a name such as s1, or one of {', '.join(_ROLE_WORDS)}, not {word!r}")
    role = WORD_ROLES.get(word, "server" if _RANGE_WORD.fullmatch(word) else "")
    if role and role not in verb.roles:
        raise place.error(f"{word} is a {role}; this fault hits only {', '.join(verb.roles)}")
    return word


def _group(place: _Place) -> str:
    word = place.text()
    if word not in GROUPS and not _NAME.fullmatch(word):
        raise place.error(f"must be a name such as s1, or one of {', '.join(GROUPS)}, not {word!r}")
    return word


def _check_cluster(plan: Plan, place: _Place) -> None:
    cluster = plan.cluster
    if cluster.kind == "kubernetes" and not cluster.url:
        raise place.error("kind kubernetes needs the cluster's url, such as etcd://elasticps-etcd:2379/demo")
    if cluster.kind != "kubernetes" and cluster.replicas > cluster.servers:
        raise place.error(f"{cluster.replicas} replicas need as many servers, not {cluster.servers}")
    if cluster.proxy and cluster.kind != "local":
        raise place.error("proxy goes with kind local")
    if cluster.kind == "kubernetes" and (cluster.tls or cluster.memory):
        raise place.error(
            "tls and memory are for clusters that are made for the run, not for one that is there already"
        )


def _check_network(place: _Place, fault: FaultPlan, cluster: ClusterPlan) -> None:
    if VERBS[fault.do].network and cluster.kind == "local" and not cluster.proxy:
        raise place.error(
            f"{fault.do} needs a network that can be disturbed: cluster.kind netns (as root, or with user namespaces), "
            "or kind local with proxy: true"
        )
    if cluster.kind != "kubernetes" and fault.do == "cordon":
        raise place.error("cordon needs nodes: it is possible only with cluster.kind kubernetes")
    if cluster.kind == "kubernetes" and (VERBS[fault.do].network or not VERBS[fault.do].pods):
        raise place.error(f"{fault.do} is not possible on Kubernetes")
    if cluster.kind == "kubernetes" and fault.do == "pause" and _ETCD_POD.fullmatch(fault.target):
        raise place.error(
            "etcd cannot be paused on Kubernetes: its process is number 1 of its pod, which takes no SIGSTOP from "
            "inside, and the pod has no shell to send it; kill it instead"
        )
