"""Which checkpoints build on which, which checkpoints to keep, and which files no checkpoint needs. Pure.

Checkpoints that were given up leave files without a manifest. Merges that died halfway, and two clusters that took the
same number, leave files beside those that a manifest names. But a file that no manifest names may also be one that is
being written for a checkpoint not yet published. So it is deleted only if its folder has been still for long, or if it
is known to be of our own cluster and of an older cut than one that is published: servers write the newest cut alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elasticps.checkpoint.manifest import NAME, Manifest
from elasticps.errors import CheckpointError, ConfigError

# --- checkpoints ----------------------------------------------------------------------------------------------------

HOUR_S, DAY_S = 3600, 86400


class UnknownCheckpoint(CheckpointError, ConfigError):
    """There is no checkpoint of the requested number: the argument is wrong, no checkpoint is."""


def chain_of(manifests: Mapping[int, Manifest], cut: int, where: str = "") -> list[Manifest]:
    """The chain of a cut: the full checkpoint, then every increment up to it. Raises CheckpointError for a gap, or a
    checkpoint that another cluster has written."""
    found: list[Manifest] = []
    while True:
        if (manifest := manifests.get(cut)) is None:
            missing = f"checkpoint {found[-1].cut} adds to {cut}, which" if found else f"checkpoint {cut}"
            raise CheckpointError(f"{where}: {missing} is not there")
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
    """These cuts and all cuts that they build on, as far as they exist."""
    needed: set[int] = set()
    for start in cuts:
        cut = start
        while cut and cut not in needed:
            needed.add(cut)
            cut = manifests[cut].since if cut in manifests else 0
    return needed


def deletion(manifests: Mapping[int, Manifest], cuts: Collection[int], where: str = "") -> list[int]:
    """The order in which to delete these cuts: newest first, so that none is ever without what it builds on. Raises
    CheckpointError if one is missing, or another one that stays builds on it."""
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
    """Which checkpoints to keep: the newest `last` ones, and the newest one of each of the last `hourly` hours and
    `daily` days in which there is one, by UTC."""

    last: int = 1
    hourly: int = 0
    daily: int = 0

    def __post_init__(self) -> None:
        if self.last < 1 or min(self.hourly, self.daily) < 0:
            raise CheckpointError(f"what is kept must be at least the newest one, got {self}")

    def chosen(self, times: Mapping[int, float]) -> set[int]:
        """The cuts to keep for their own sake. times: by cut."""
        newest_first = sorted(times, reverse=True)
        retained = set(newest_first[: self.last])
        for count, width_s in ((self.hourly, HOUR_S), (self.daily, DAY_S)):
            newest_of: dict[int, int] = {}
            for cut in newest_first:
                newest_of.setdefault(int(times[cut] // width_s), cut)
            retained |= {newest_of[period] for period in sorted(newest_of, reverse=True)[:count]}
        return retained


def superfluous(manifests: Mapping[int, Manifest], keep: Keep) -> list[int]:
    """The cuts that may go: neither kept, nor needed by one that is."""
    retained = keep.chosen({cut: manifest.time for cut, manifest in manifests.items()})
    return sorted(manifests.keys() - builds_on(manifests, retained), reverse=True)


# --- files ----------------------------------------------------------------------------------------------------------

STILL_S = 3600.0  # no file takes as long to be written

# A table's folder with a file of rows, as servers and merges call them; and what `Storage` has before it has its name.
_ROWS = re.compile(r"[A-Za-z0-9_-]+-[0-9]+/[A-Za-z0-9._-]+\.[0-9]{3,}\.safetensors")
_PART = re.compile(r"([A-Za-z0-9_-]+-[0-9]+/)?[A-Za-z0-9._-]*[.-][0-9a-f]{32}\.part")


def is_of_checkpoint(path: str) -> bool:
    """Whether elasticps names files like this below a checkpoint's folder: no others are ever deleted."""
    return path == NAME or _ROWS.fullmatch(path) is not None or _PART.fullmatch(path) is not None


def mark_of(cluster: str) -> str:
    """The prefix of all files that servers of this cluster write: it keeps two clusters apart that take the same number
    in one place."""
    return hashlib.blake2b(cluster.encode(), digest_size=4).hexdigest()


def left_over(
    folders: Mapping[int, Mapping[str, float]], named: Mapping[int, Collection[str] | None], before: float, *,
    own: str = "", below: int = 0,
) -> dict[int, list[str]]:  # fmt: skip
    """By cut the files that may go. folders: by cut, what lies there by its path in the folder, and when it was
    written; named: the files that each manifest names, of cuts that have one; None: it cannot be read, so nothing of
    that cut goes. before: a folder is still if nothing that is not named was written there since. own, below: what
    begins with `own` in a folder without a manifest goes at once if its cut is below that."""
    going = {}
    for cut, files in folders.items():
        if (known := named.get(cut, ())) is None:
            continue
        unnamed = {path: time for path, time in files.items() if path != NAME and path not in known}
        still = max(unnamed.values(), default=0.0) < before
        ours = bool(own) and cut < below and cut not in named
        paths = [path for path in unnamed if still or (ours and path.rpartition("/")[2].startswith(f"{own}."))]
        if paths:
            going[cut] = sorted(paths)
    return going
