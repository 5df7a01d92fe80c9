"""What a cache asks servers for, batch by batch, what it has done so far (`CacheUse`), and where there may be none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.client.pull import Pull
from elasticps.client.runtime import Lock
from elasticps.errors import ConfigError, Error
from elasticps.model.caching import Cache


class CacheUse(NamedTuple):
    """What a cache has done since it was made.

    rows         kept now; given_up: keys that gave way to others
    asked        rows that pulls wanted, of which
    hits         were shown without asking anybody, none older than `oldest` steps,
    unchanged    were too old, and as a server said still the same
    nbytes       received of rows, slots and digests; whole_bytes: what all rows would have taken
    """

    rows: int
    given_up: int
    asked: int
    hits: int
    unchanged: int
    oldest: int
    nbytes: int
    whole_bytes: int

    @property
    def hit_rate(self) -> float:
        """The part of all rows that nobody was asked for."""
        return self.hits / self.asked if self.asked else 0.0


NOT_USED = CacheUse(0, 0, 0, 0, 0, 0, 0, 0)


def check_cache(name: str, cache: Cache, in_rounds: bool, bound: int | None) -> None:
    """ConfigError for a cache that would show rows older than the consistency allows."""
    if in_rounds:
        raise ConfigError(
            f"table {name!r}: under BSP a pull sees all rounds so far, which no row that is kept does: leave out "
            "cache=, and look ahead with elasticps.torch.prefetch"
        )
    if bound is not None and cache.staleness > bound:
        raise ConfigError(
            f"table {name!r}: rows of Cache(staleness={cache.staleness}) would be older than "
            f"SSP(staleness={bound}) allows: a kept row's steps count towards that"
        )


@dataclass
class CacheCounts:
    """As in `CacheUse`."""

    asked: int = 0
    hits: int = 0
    unchanged: int = 0
    oldest: int = 0
    nbytes: int = 0
    whole_bytes: int = 0


Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Where = NDArray[np.int64]
Flags = NDArray[np.bool_]
NOTHING = np.empty(0, np.int64)


@dataclass(eq=False)
class CacheBatch:
    """A pull, or a look ahead: distinct keys, the place of each, and what is asked of servers.

    values     float32 [n, dim], where rows go; None for a look ahead
    upto       the newest step that had begun when it asked last
    often      which keys are wanted so often that slots are asked for with their rows
    asked, compared, wanted, coming
               indices of keys: asked for; compared; found changed, to be asked for; brought by other batches
    """

    number: int
    keys: Keys
    where: Where
    values: Rows | None
    any_replica: bool
    upto: int
    lock: Lock
    often: Flags
    fetched: Where
    compared: Where
    coming: Where
    others: tuple[int, ...]
    digests: NDArray[np.uint64] | None = None  # of what is compared, as it was
    changed: Where = field(default_factory=lambda: NOTHING)
    rows: Pull | None = None
    slots: Pull | None = None
    check: Pull | None = None
    due: bool = True  # nobody has been asked yet
    left: bool = False  # what it asks for is on its way
    over: bool = False
    given_up: bool = False  # over, and rows lack
    error: Error | None = None

    @property
    def come(self) -> bool:
        """Whether all of that is there, and nobody has looked at it."""
        return self.left and all(read.done() for read in self.reads)

    @property
    def reads(self) -> list[Pull]:
        """What is on its way."""
        return [read for read in (self.rows, self.slots, self.check) if read is not None]


@dataclass(eq=False)
class SlotQuestion:
    """A question for slots of rows at some places. asked: somebody sends it; begun: it has left, or will not."""

    number: int
    where: Where
    read: Pull
    fetched: bool = False
    begun: bool = False
