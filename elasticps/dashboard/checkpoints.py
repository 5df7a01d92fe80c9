"""What lies where a cluster's checkpoints are kept."""

from __future__ import annotations

from typing import Any

from elasticps.checkpoint import catalog as catalogs
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage

SHOWN = 50


class CheckpointListing:
    """Of one place. A checkpoint's files are counted once, as nothing of it changes after its manifest is there; what
    they say is for `elasticps checkpoint verify`, which reads all."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._states: dict[int, str] = {}

    def look(self) -> dict[str, Any]:
        """The newest ones, newest first. Raises CheckpointError."""
        storage = Storage(self.url)
        there = catalogs.look(storage)
        newest = sorted(there.manifests.values(), key=lambda m: m.cut, reverse=True)[:SHOWN]
        self._states = {m.cut: self._states.get(m.cut) or _state(storage, m) for m in newest}
        found: list[dict[str, Any]] = [
            {
                "cut": m.cut, "since": m.since, "time": m.time, "cluster": m.cluster, "rows": m.rows, "bytes": m.nbytes,
                "tables": len(m.tables), "state": self._states[m.cut], "error": "",
            }
            for m in newest
        ]  # fmt: skip
        found += [{"cut": cut, "error": text} for cut, text in there.unreadable.items()]
        found.sort(key=lambda each: each["cut"], reverse=True)
        return {"url": self.url, "error": "", "checkpoints": found[:SHOWN],
                "unpublished": list(there.unpublished)[-SHOWN:]}  # fmt: skip


def _state(storage: Storage, manifest: Manifest) -> str:
    sizes = dict(storage.files(manifest.folder))
    wrong = [e.path for e in manifest.files if sizes.get(f"{manifest.folder}/{e.path}") != e.bytes]
    if not wrong:
        return f"{len(manifest.files)} files, as long as written"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"damaged: {wrong[0]}{more} missing, or not as long as written"
