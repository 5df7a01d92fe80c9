"""Which checkpoints build on which, which may go, and which are to be kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elasticps.checkpoint.manifest import Manifest
from elasticps.errors import CheckpointError, ConfigError

HOUR_S, DAY_S = 3600, 86400


class UnknownCheckpoint(CheckpointError, ConfigError):
    """No checkpoint of the number that somebody has asked for: an argument is wrong, and no checkpoint."""


def chain_of(manifests: Mapping[int, Manifest], cut: int, where: str = "") -> list[Manifest]:
    """The full checkpoint that a cut's builds on, and every increment up to it, in this order. CheckpointError for a
    gap, or one that another cluster has written."""
    found: list[Manifest] = []
    while True:
        if (manifest := manifests.get(cut)) is None:
            wanted = f"checkpoint {found[-1].cut} adds to {cut}, which" if found else f"checkpoint {cut}"
            raise CheckpointError(f"{where}: {wanted} is not there")
        if found and (manifest.cluster, manifest.ranges) != (found[0].cluster, found[0].ranges):
            raise CheckpointError(
                f"{where}: checkpoint {found[-1].cut} of cluster {found[0].cluster} adds to {cut}, which is one of "
                f"cluster {manifest.cluster} with {manifest.ranges} ranges"
            )
        found.append(manifest)
        if not manifest.since:
            return found[::-1]
        cut = manifest.since  # which is lower


def builds_on(manifests: Mapping[int, Manifest], cuts: Iterable[int]) -> set[int]:
    """These cuts and all that they build on, as far as they are there."""
    needed: set[int] = set()
    for start in cuts:
        cut = start
        while cut and cut not in needed:
            needed.add(cut)
            cut = manifests[cut].since if cut in manifests else 0
    return needed


def deletion(manifests: Mapping[int, Manifest], cuts: Collection[int], where: str = "") -> list[int]:
    """The order in which these go: newest first, so that at no moment one is there without what it builds on.
    CheckpointError if one is not there, or another one that stays builds on it."""
    if missing := sorted(set(cuts) - manifests.keys()):
        raise UnknownCheckpoint(f"{where}: checkpoint {missing[0]} is not there")
    for cut in sorted(manifests.keys() - set(cuts)):
        if needed := sorted(builds_on(manifests, [cut]) & set(cuts)):
            raise CheckpointError(
                f"{where}: checkpoint {cut} builds on {needed[-1]}: delete it too, or merge it first "
                f"(elasticps checkpoint merge {where} {cut})"
            )
    return sorted(cuts, reverse=True)


@dataclass(frozen=True)
class Keep:
    """What is kept: the newest `last` ones, and the newest one of each of the last `hourly` hours and `daily` days in
    which there is one, by UTC."""

    last: int = 1
    hourly: int = 0
    daily: int = 0

    def __post_init__(self) -> None:
        if self.last < 1 or min(self.hourly, self.daily) < 0:
            raise CheckpointError(f"what is kept must be at least the newest one, got {self}")

    def chosen(self, times: Mapping[int, float]) -> set[int]:
        """Of cuts with their times those that are kept for themselves."""
        newest_first = sorted(times, reverse=True)
        kept = set(newest_first[: self.last])
        for count, width_s in ((self.hourly, HOUR_S), (self.daily, DAY_S)):
            newest_of: dict[int, int] = {}
            for cut in newest_first:
                newest_of.setdefault(int(times[cut] // width_s), cut)
            kept |= {newest_of[period] for period in sorted(newest_of, reverse=True)[:count]}
        return kept


def superfluous(manifests: Mapping[int, Manifest], keep: Keep) -> list[int]:
    """What may go: neither kept nor built on by what is."""
    kept = keep.chosen({cut: manifest.time for cut, manifest in manifests.items()})
    return sorted(manifests.keys() - builds_on(manifests, kept), reverse=True)
