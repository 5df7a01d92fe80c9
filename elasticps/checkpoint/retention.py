"""Which files below a place of checkpoints nobody will ever need. Pure.

Checkpoints that were given up leave files without a manifest; merges that died in the midst, and two clusters that took
the same number, leave files beside those that a manifest names. A file that nobody names may be one that is being
written, though, by somebody who has not published yet. So it goes only if its folder has been still for long, or if it
is known to be of our own cluster and of an older cut than one that is published: servers write the newest cut alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping

from elasticps.checkpoint.manifest import NAME

STILL_S = 3600.0  # no file takes as long to be written

# A table's folder with a file of rows, as servers and merges call them; and what `Storage` has before it has its name.
_ROWS = re.compile(r"[A-Za-z0-9_-]+-[0-9]+/[A-Za-z0-9._-]+\.[0-9]{3,}\.safetensors")
_PART = re.compile(r"([A-Za-z0-9_-]+-[0-9]+/)?[A-Za-z0-9._-]*[.-][0-9a-f]{32}\.part")


def is_of_checkpoint(path: str) -> bool:
    """Whether a path below a checkpoint's folder is one that elasticps gives: no other is ever deleted."""
    return path == NAME or _ROWS.fullmatch(path) is not None or _PART.fullmatch(path) is not None


def mark_of(cluster: str) -> str:
    """How names of files begin that servers of a cluster write: tells whose they are, and keeps two clusters apart that
    take the same number in one place."""
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
