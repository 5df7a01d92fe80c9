"""A story, drawn from a seed: which processes there are, how bad the links are, and which faults happen when."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from chaos.sim.network import Weather
from chaos.sim.small_limits import MOST_RANGES
from coordinator.membership import LEASE_S

FLAVOURS = (
    "calm", "kills", "stalls", "partitions", "resets", "readers", "store", "moves", "crowds", "mixed",
    "limps", "tangles", "terms", "ghosts", "flaps", "alone", "drains", "tight", "suspicions", "levels",
    "outcasts", "heirs", "exodus", "takers", "hurried",
)  # fmt: skip
ON_REQUEST = ("frozen", "large")  # played only on request: workers that stall for longer than leases; large clusters
TRAININGS = ("free", "bounded", "rounds", "shards", "shards in rounds")
CALM = (
    "calm",
    "resets",
    "moves",
    "drains",
    "tight",
    "exodus",
)  # stories in which no process and no link is slow

FAULTS: dict[str, tuple[str, ...]] = {
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
    "limps": ("server limps", "server limps", "worker restarts"),
    "tangles": (
        "server joins",
        "server joins",
        "leader stalls",
        "leader dies",
        "store away",
        "servers apart",
        "one way",
        "server dies",
        "reset all",
    ),
    "terms": ("leader stalls", "leader without store", "leader stalls", "leader dies", "server dies"),
    "ghosts": ("worker doubles", "worker dies cut off", "worker dies cut off", "worker restarts"),
    "flaps": ("reset all", "reset all", "tear", "tear", "worker reads nothing"),
    "alone": ("server stalls", "server stalls", "leader apart", "one way", "server joins", "reset all"),
    "drains": ("server drains", "server drains", "server drains", "server joins", "worker restarts"),
    "tight": ("server joins", "server drains", "reset", "worker restarts"),
    "levels": ("level joiner cut off", "level joiner cut off", "server joins", "server drains", "server dies"),
    "takers": ("level joiner takes over", "level joiner takes over", "server dies", "server dies", "server joins"),
    "heirs": ("server and worker die",),
    "exodus": ("servers drain", "servers drain", "server joins"),
    "hurried": (
        "server dies",
        "host dies",
        "servers drain",
        "servers drain",
        "server drains",
        "server joins",
        "server stalls",
        "leader dies",
        "store apart",
    ),
    "outcasts": ("server cut off", "server cut off", "server cut off", "leader stalls", "worker restarts"),
    "frozen": ("worker stalls",),
    "large": (
        "server dies",
        "server dies",
        "server joins",
        "server drains",
        "worker restarts",
        "leader dies",
    ),
}
FAULTS["resets"] += ("tear", "tear")
FAULTS["mixed"] = tuple(sorted({what for some in FAULTS.values() for what in some}))

_MOST = {
    "resets": 16, "readers": 12, "calm": 3, "limps": 3, "flaps": 24, "tangles": 10, "ghosts": 10, "levels": 12,
    "heirs": 3, "frozen": 2,
}  # fmt: skip
"""How many faults a story of this flavour has; others have 7."""
_LONG_S = {
    "terms": (1.5, 3.0), "flaps": (0.02, 0.2), "limps": (1.0, 1.6), "levels": (0.05, 0.6), "outcasts": (0.0, 0.1),
    "frozen": (LEASE_S + 0.5, LEASE_S + 2),
}  # fmt: skip
"""How long faults last, from and to; in other flavours between an instant and more than a lease."""
_HURRY_S = (0.005, 0.05, 0.3)
"""How long a server that drains has to hand over its ranges, in stories of the flavour "hurried"."""
_LASTS_S = {"limps": 1.7, "heirs": 1.7, "takers": 2.5, "terms": 1.0, "frozen": LEASE_S + 2}
"""How long before the end of training the last fault begins: a later one would be cut short."""


_THINK_S = {
    "free": (0.005, 0.03),
    "bounded": (0.005, 0.03),
    "rounds": (0.03,),
    "shards": (0.03, 0.06),  # so that they are not all done before anything goes wrong
    "shards in rounds": (0.03,),
}


@dataclass(frozen=True)
class Fault:
    """A fault: when, which (a name of `faults.KINDS`), and for how long; `pick`, in [0, 1), chooses what it hits."""

    at_s: float
    what: str
    pick: float
    for_s: float


@dataclass(frozen=True)
class App:
    """An application.

    kind     how it trains, as in TRAININGS
    workers  how many
    bound    of its staleness
    large    some of its pulls are large
    readers  threads of each worker that pull beside the one that trains
    think_s  the mean time between two calls of a worker
    eager    its workers ask for their start, and for data shards, before they make sure that the tables exist
    """

    name: str
    kind: str
    workers: int
    window: int
    bound: int
    large: bool
    readers: int
    think_s: float
    eager: bool


@dataclass(frozen=True, order=True)
class Kind:
    """A kind of stories: what a set of them has in common.

    flavour   which faults happen; "": drawn by the seed
    training  how workers train; "": drawn by the seed
    cuts      consistent cuts are taken meanwhile, and, with `grows`, checkpoints made of them
    short     workers shorten what they send
    caches    workers that push freely cache rows
    together  these workers pull several tables and tensors at once, and behind pushes, and ask for sums of all rows
    few       workers push few keys at once, so that most steps tick only some ranges
    drops     one more application makes and drops tables
    grows     one more application has tables that admit keys and forget rows
    readers   two readers follow the tables of an application, and hold now and then
    proven    as with certificates, workers take views from the store alone while it answers; in calm stories servers
              send forged ones
    servers, workers, ranges  how many; 0: drawn by the seed. All or none
    seconds   how long they train; 0: drawn by the seed, or, in a large cluster, until each worker has taken its steps
    """

    flavour: str = ""
    training: str = ""
    cuts: bool = False
    short: bool = False
    caches: bool = False
    together: bool = False
    few: bool = False
    drops: bool = False
    proven: bool = False
    grows: bool = False
    readers: bool = False
    servers: int = 0
    workers: int = 0
    ranges: int = 0
    seconds: float = 0.0


DROPS = App("drops", "tables", 2, 4, 0, large=False, readers=0, think_s=0.02, eager=False)
GROWS = App("grows", "growing", 2, 4, 0, large=False, readers=0, think_s=0.02, eager=False)
ANY = Kind()
SIZES = ("servers", "workers", "ranges", "seconds")
FLAGS = ("cuts", "short", "caches", "together", "few", "drops", "proven", "grows", "readers")
RIGHT_CLOCKS = 0.4  # of the stories in which tables grow
WRONG_S = 2 * 3600.0, 40 * 3600.0
SHARE = 0.25  # of the stories of any kind have what a kind may ask for


@dataclass(frozen=True)
class Story:
    """The plan of one seed. small: limits of the servers are so low that they are met all the time."""

    seed: int
    kind: Kind
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
    def drain_timeout_s(self) -> float | None:
        """After how long a server ends that was asked to drain; None: it has all the time it needs."""
        return Random(f"hurry {self.seed}").choice(_HURRY_S) if self.flavour == "hurried" else None

    @property
    def calm(self) -> bool:
        return self.flavour in CALM

    @property
    def counted(self) -> bool:
        """Whether training lasts until each worker has taken some steps, not for a time."""
        return bool(self.kind.servers) and not self.kind.seconds

    @property
    def cuts(self) -> bool:
        """Whether consistent cuts are taken meanwhile."""
        return self._has("cuts")

    @property
    def short(self) -> bool:
        """Whether workers send keys once or as differences, and compress pushes."""
        return self._has("short")

    @property
    def caches(self) -> bool:
        """Whether workers cache rows."""
        return self._has("caches")

    @property
    def together(self) -> bool:
        """Whether workers pull several tables at once, and behind pushes."""
        return self._has("together")

    @property
    def few(self) -> bool:
        """Whether workers push few keys at once."""
        return self._has("few")

    @property
    def proven(self) -> bool:
        """Whether workers take views from the store alone."""
        return self._has("proven")

    @property
    def readers(self) -> bool:
        """Whether readers follow the tables of an application."""
        return self._has("readers") and self.flavour not in ("tight", "large")

    @property
    def grows(self) -> bool:
        """Whether an application has tables that admit keys and forget rows."""
        return GROWS in self.apps

    @property
    def wrong_clock(self) -> tuple[str, float]:
        """The host whose clock is wrong, "" for none, and by how many seconds."""
        random = Random(f"clocks {self.seed}")
        if not self.grows or random.random() < RIGHT_CLOCKS:
            return "", 0.0
        host = random.choice(["c0", "c1", *(f"s{i}" for i in range(self.servers))])
        return host, random.choice((-1, 1)) * random.uniform(*WRONG_S)

    def _has(self, what: str) -> bool:
        return _has(self.seed, self.kind, what)

    @property
    def tight(self) -> bool:
        """Whether the limit of a frame is small."""
        return self.flavour == "tight"


def _has(seed: int, kind: Kind, what: str) -> bool:
    chance = Random(f"{what} {seed}").random()
    return bool(getattr(kind, what)) or (kind == ANY and chance < SHARE)


def tell(seed: int, kind: Kind = ANY) -> Story:
    """Draws the story of a seed, of a kind."""
    random = Random(f"story {seed} {kind.flavour} {kind.training}")
    flavour = kind.flavour or FLAVOURS[seed % len(FLAVOURS)]
    servers = random.choice((2, 3, 3, 4)) + {"drains": 1, "exodus": 2, "hurried": 2}.get(flavour, 0)
    training_s = kind.seconds or random.uniform(1.0, 2.5) + _LASTS_S.get(flavour, 0.0)
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
        kind,
        flavour,
        servers,
        1 if flavour == "alone" else random.choice((2, 2, min(3, servers))),
        max(random.choice((4, 8, 8, MOST_RANGES)), MOST_RANGES if flavour == "tight" else 0),
        weather,
        tuple(_app(random, i, flavour, kind.training) for i in range(random.choice((1, 1, 2))))
        + (DROPS,) * (flavour != "tight" and _has(seed, kind, "drops"))
        + (GROWS,) * (flavour != "tight" and _has(seed, kind, "grows")),
        tuple(sorted(_faults(random, flavour, training_s, lies=_has(seed, kind, "proven")), key=lambda f: f.at_s)),
        training_s,
        random.random() < 0.6 or flavour == "tight",  # what fills a replica has to fit into frames, too
    )


def _app(random: Random, index: int, flavour: str, training: str) -> App:
    kinds = TRAININGS[:1] if flavour == "tight" else TRAININGS[:2] if flavour == "readers" else TRAININGS
    chosen = random.choice((*kinds, "free"))
    kind = training if training and flavour != "tight" else chosen  # its small frames have room for nothing else
    return App(
        f"app{index}",
        kind,
        random.choice((1, 2, 2, 3)),
        random.choice((1, 2, 4)),
        random.choice((0, 1, 3)),
        random.random() < 0.5,
        random.choice((0, 0, 1, 2) if flavour not in ("readers", "levels") else (1, 2, 3)),
        random.choice(_THINK_S[kind]) if flavour != "frozen" else 0.1,
        flavour == "heirs",
    )


def _faults(random: Random, flavour: str, training_s: float, *, lies: bool) -> list[Fault]:
    usual = FAULTS[flavour] + ("server lies",) * (lies and flavour in CALM)  # else the store may be far away
    count = random.randint(2, _MOST.get(flavour, 7))
    least_s, most_s = _LONG_S.get(flavour, (0.0, 0.0))
    return [
        Fault(
            random.uniform(0.3, training_s - _LASTS_S.get(flavour, 0.0)),
            random.choice(usual),
            random.random(),
            random.uniform(least_s, most_s) or random.choice((0.05, 0.3, 1.0, 2.0)) * random.uniform(0.5, 1.5),
        )
        for _ in range(count)
    ]
