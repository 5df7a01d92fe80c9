"""Fault plans as data: what goes wrong when, made from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What can go wrong. Times are virtual seconds."""

    CRASH_SERVER = "crash server"
    CRASH_TWO = "crash two servers"
    CRASH_IN_OUTAGE = "crash server while the store is down"
    CRASH_CUT_OFF = "crash a server that is cut off from its peers, and restart a worker"
    STRIKE_FILLING = "crash in a filling"
    FREEZE_SERVER = "freeze server"
    SLOW_SERVER = "slow server"
    RESET_LINK = "reset link"
    RESET_ALL_LINKS = "reset all links"
    RESET_LINES = "reset the leader's lines"
    PARTITION = "partition"
    CRASH_LEADER = "crash leader"
    FREEZE_LEADER = "freeze leader"
    STORE_OUTAGE = "store outage"
    RESTART_WORKER = "restart worker"
    MOVE_RANGE = "move range"
    JOIN_SERVER = "start a server"
    DRAIN_SERVER = "drain server"
    KILL_WORKER = "kill worker"
    FREEZE_WORKER = "freeze worker"


@dataclass(frozen=True)
class Fault:
    """One fault: `a` and `b` pick its targets, modulo how many there are; `lasts_s` where it has a length."""

    at_s: float
    kind: Kind
    a: int
    b: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.a}, {self.b}) at {self.at_s:.4f} s for {self.lasts_s:.4f} s"


@dataclass(frozen=True)
class Plan:
    """A whole scenario: the cluster, the network's temper, the load, and the faults in order. anywhere: the share of
    pulls that any full replica may answer; operations: how often the operator begins one, per look; roster_lag_s: how
    long a roster may take to reach a server that does not ask for it; bound: of pulls, as in frames; rests: how often a
    worker takes no part for a while, per look; rounds: whether training is synchronous; shards: how many there are in
    each of `epochs`, 0 for workers with samples of their own."""

    seed: int
    servers: int
    replicas: int
    ranges: int
    workers: int
    window: int
    steps: int
    budget_bytes: int
    delay_s: float
    one_frame: bool
    cas_trouble: float
    roster_lag_s: float
    anywhere: float
    operations: float
    fills: int
    pieces: int
    faults_end_s: float
    faults: tuple[Fault, ...]
    bound: int = 0
    rests: float = 0.0
    rounds: bool = False
    shards: int = 0
    epochs: int = 1

    @property
    def scripted(self) -> bool:
        """Whether workers train in rounds or on shards, and not just one sample after another."""
        return self.rounds or self.shards > 0

    @property
    def gentle(self) -> bool:
        """Whether servers come and go and nothing goes wrong: nor is the network so slow that anybody looks dead."""
        return self.delay_s <= 0.001 and all(fault.kind in GENTLE for fault in self.faults)


_WEIGHTS = {
    Kind.CRASH_SERVER: 4,
    Kind.CRASH_TWO: 1,
    Kind.CRASH_IN_OUTAGE: 1,
    Kind.CRASH_CUT_OFF: 2,
    Kind.STRIKE_FILLING: 3,
    Kind.FREEZE_SERVER: 3,
    Kind.SLOW_SERVER: 2,
    Kind.RESET_LINK: 4,
    Kind.RESET_ALL_LINKS: 1,
    Kind.RESET_LINES: 1,
    Kind.PARTITION: 3,
    Kind.CRASH_LEADER: 1,
    Kind.FREEZE_LEADER: 1,
    Kind.STORE_OUTAGE: 1,
    Kind.RESTART_WORKER: 2,
    Kind.MOVE_RANGE: 4,
    Kind.JOIN_SERVER: 2,
    Kind.DRAIN_SERVER: 3,
}

GENTLE = frozenset((Kind.JOIN_SERVER, Kind.DRAIN_SERVER))
"""What goes wrong for nobody: where there is nothing else, only what must move is copied."""


def random_plan(seed: int) -> Plan:
    """The scenario of a seed: the same one on every machine."""
    rng = random.Random(f"plan {seed}")
    replicas = rng.choice((1, 2, 2, 2, 3, 3))
    end = rng.uniform(0.3, 0.8)
    gentle = rng.random() < 0.08
    kinds = [kind for kind in _WEIGHTS if not gentle or kind in GENTLE]
    weights = [_WEIGHTS[kind] for kind in kinds]
    faults = [
        Fault(
            at_s=rng.uniform(0.0, end),
            kind=rng.choices(kinds, weights)[0],
            a=rng.randrange(1 << 16),
            b=rng.randrange(1 << 16),
            lasts_s=rng.choice((rng.uniform(0.001, 0.02), rng.uniform(0.02, 0.4))),
        )
        for _ in range(rng.choice((rng.randint(2, 12), rng.randint(15, 30))))
    ]
    training = random.Random(f"training {seed}")
    rounds, shards = (
        training.random() < 0.4,
        training.choice((0, 0, 0, training.randint(5, 15), training.randint(15, 30))),
    )
    if not gentle and (rounds or shards):
        faults += [_lost_worker(training, end) for _ in range(training.choice((0, 1, 2, 4)))]
    return Plan(
        seed=seed,
        servers=rng.randint(max(2, replicas), 5),
        replicas=replicas,
        ranges=rng.choice((2, 4, 8)),
        workers=rng.randint(1, 3),
        window=rng.randint(1, 4),
        steps=rng.randint(10, 40),
        budget_bytes=rng.choice((150, 1000, 1 << 20)),
        delay_s=rng.choice((0.0002, 0.001) if gentle else (0.0002, 0.001, 0.004)),
        one_frame=rng.random() < 0.3,
        cas_trouble=rng.choice((0.0, 0.0, 0.3)),
        roster_lag_s=rng.choice((0.02, 0.02, 0.3)),
        anywhere=rng.choice((0.0, 0.3)),
        operations=rng.choice((0.0, 0.1, 0.4)),
        fills=rng.randint(1, 8),
        pieces=rng.randint(1, 4),
        faults_end_s=end,
        faults=tuple(sorted(faults, key=lambda f: f.at_s)),
        bound=rng.choice((0, 1, 2, 3)),
        rests=rng.choice((0.0, 0.02)),
        rounds=rounds,
        shards=shards,
        epochs=training.choice((1, 1, 2)) if shards else 1,
    )


def _lost_worker(rng: random.Random, end_s: float) -> Fault:
    """A worker that dies, or that nobody hears for a while."""
    return Fault(
        at_s=rng.uniform(0.0, end_s),
        kind=rng.choice((Kind.KILL_WORKER, Kind.KILL_WORKER, Kind.FREEZE_WORKER)),
        a=rng.randrange(1 << 16),
        b=rng.randrange(1 << 16),
        lasts_s=rng.uniform(0.01, 0.3),
    )
