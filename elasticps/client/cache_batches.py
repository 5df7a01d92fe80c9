"""What a cache asks servers for, batch by batch, what it has done so far (`CacheUse`), and where there may be none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.client.pull import ServerPull
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
    """The keys of one pull, or of one look ahead, and what servers are asked for them."""

    number: int  # its name in the index
    keys: Keys  # distinct, int64 [n]
    where: Where  # the entry of each key, int64 [n]
    values: Rows | None  # float32 [n, dim], where rows go; None for a look ahead
    any_replica: bool  # rows may come from any replica
    upto: int  # the newest step that had begun when servers were asked last
    lock: Lock  # held by the thread that asks servers
    often: Flags  # keys that are used so often that slots are fetched with their rows
    fetched: Where  # indices of keys whose rows are asked for
    compared: Where  # indices of keys whose rows' digests are asked for
    coming: Where  # indices of keys whose rows other batches bring
    others: tuple[int, ...]  # the numbers of these batches
    digests: NDArray[np.uint64] | None = None  # of the rows that are compared, as they were
    changed: Where = field(default_factory=lambda: NOTHING)  # indices of keys that were found changed: fetched next
    rows: ServerPull | None = None  # of `fetched`
    slots: ServerPull | None = None  # of those of `fetched` that are used often
    check: ServerPull | None = None  # of the digests of `compared`
    due: bool = True  # nothing was sent yet
    left: bool = False  # the pulls are on their way
    over: bool = False  # nothing more is asked
    given_up: bool = False  # over, and rows lack
    error: Error | None = None  # for the thread that waits for the batch

    @property
    def come(self) -> bool:
        """Whether all answers are there and not taken in yet."""
        return self.left and all(read.done() for read in self.reads)

    @property
    def reads(self) -> list[ServerPull]:
        """The pulls on their way."""
        return [read for read in (self.rows, self.slots, self.check) if read is not None]


@dataclass(eq=False)
class SlotQuestion:
    """A question for the optimizer's state of rows. fetched: a thread sends it; begun: it has left, or will not."""

    number: int
    where: Where
    read: ServerPull
    fetched: bool = False
    begun: bool = False


def same_rows(one: Rows, other: Rows) -> Flags:
    """Which rows are the same, bit for bit."""
    return cast(Flags, (one.view(np.int32) == other.view(np.int32)).all(axis=1))
