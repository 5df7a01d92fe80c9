"""What happens under a seed: who there is, how bad the links are, and what goes wrong when."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from chaos.sim.network import Weather

_TEN = ("calm", "kills", "stalls", "partitions", "resets", "readers", "store", "moves", "crowds")
FLAVOURS = (*_TEN, "mixed", *_TEN, "suspicions")
KINDS = ("free", "free", "bounded", "rounds", "shards", "shards in rounds")
CALM = ("calm", "resets", "moves")  # stories in which no process and no link is slow for long

_USUAL: dict[str, tuple[str, ...]] = {
    "calm": ("worker restarts", "reset"),
    "kills": ("server dies", "server dies", "worker restarts", "leader dies", "host dies"),
    "stalls": ("server stalls", "server stalls", "worker stalls", "leader stalls", "worker restarts"),
    "suspicions": (
        "server stalls, other dies",
        "server stalls, other dies",
        "server stalls, other dies",
        "leader dies",
        "leader stalls",
        "worker restarts",
    ),
    "partitions": ("servers apart", "one way", "worker apart", "leader apart", "store apart"),
    "resets": ("reset", "reset", "reset", "reset all", "worker restarts"),
    "crowds": ("crowd", "crowd", "worker reads nothing", "reset all", "worker restarts"),
    "store": ("store away", "store apart", "leader dies", "server dies", "worker restarts"),
    "readers": (
        "worker stalls",
        "worker stalls",
        "worker reads nothing",
        "worker reads nothing",
        "reset",
        "server joins",
        "server dies",
    ),
    "moves": ("server joins", "server drains", "server joins", "reset", "worker restarts"),
}
_USUAL["mixed"] = tuple(sorted({what for some in _USUAL.values() for what in some}))


_MOST = {"resets": 16, "readers": 12, "calm": 3}  # faults of a story; 7 of others


@dataclass(frozen=True)
class Fault:
    """At a moment something goes wrong, for a while; `pick` chooses whom it hits."""

    at_s: float
    what: str
    pick: float
    for_s: float


@dataclass(frozen=True)
class App:
    """An application: kind as in KINDS, its workers; bound: of its staleness; large: some of its pulls are; readers:
    threads of each worker that pull beside the one that trains."""

    name: str
    kind: str
    workers: int
    window: int
    bound: int
    large: bool
    readers: int


@dataclass(frozen=True)
class Story:
    """A seed's plan. small: limits of the servers are so low that they are met all the time."""

    seed: int
    flavour: str
    servers: int
    replicas: int
    ranges: int
    weather: Weather
    apps: tuple[App, ...]
    faults: tuple[Fault, ...]
    training_s: float
    small: bool

    @property
    def calm(self) -> bool:
        return self.flavour in CALM


def tell(seed: int) -> Story:
    """The story of a seed."""
    random = Random(f"story {seed}")
    flavour = FLAVOURS[seed % len(FLAVOURS)]
    servers = random.choice((2, 3, 3, 4))
    training_s = random.uniform(1.0, 3.0)
    weather = Weather(
        latency_s=random.choice((0.0001, 0.0003, 0.001, 0.004)),
        bytes_per_s=random.choice((5e6, 50e6, 500e6)),
        buffer_bytes=random.choice((2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)),
        short=random.choice((0.0, 0.05, 0.2, 0.5)),
        cut=random.choice((0.0, 0.2, 0.5)),
        preempted=0.4 if flavour == "readers" else 0.1,
    )
    return Story(
        seed,
        flavour,
        servers,
        random.choice((2, 2, min(3, servers))),
        random.choice((4, 8, 8, 16)),
        weather,
        tuple(_app(random, i, flavour) for i in range(random.choice((1, 1, 2)))),
        tuple(sorted(_faults(random, flavour, training_s), key=lambda fault: fault.at_s)),
        training_s,
        random.random() < 0.6,
    )


def _app(random: Random, index: int, flavour: str) -> App:
    kind = random.choice(KINDS if flavour != "readers" else KINDS[:3])
    return App(
        f"app{index}",
        kind,
        random.choice((1, 2, 2, 3)),
        random.choice((1, 2, 4)),
        random.choice((0, 1, 3)),
        random.random() < 0.5,
        random.choice((0, 0, 1, 2) if flavour != "readers" else (1, 2, 3)),
    )


def _faults(random: Random, flavour: str, training_s: float) -> list[Fault]:
    usual = _USUAL[flavour]
    count = random.randint(2, _MOST.get(flavour, 7))
    return [
        Fault(
            random.uniform(0.3, training_s),
            random.choice(usual),
            random.random(),
            random.choice((0.05, 0.3, 1.0, 2.0)) * random.uniform(0.5, 1.5),
        )
        for _ in range(count)
    ]
