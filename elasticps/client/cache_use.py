"""What a cache has done, and where there may be none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elasticps.errors import ConfigError
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
class Counts:
    """As in `CacheUse`."""

    asked: int = 0
    hits: int = 0
    unchanged: int = 0
    oldest: int = 0
    nbytes: int = 0
    whole_bytes: int = 0
