"""What lies where a cluster's checkpoints are kept."""

from __future__ import annotations

from typing import Any

from elasticps.checkpoint import catalog as catalogs
from elasticps.checkpoint.storage import Storage

SHOWN = 50


def catalog(url: str) -> dict[str, Any]:
    """The newest ones, newest first. Raises CheckpointError."""
    there = catalogs.look(Storage(url))
    found: list[dict[str, Any]] = [
        {
            "cut": m.cut, "since": m.since, "time": m.time, "cluster": m.cluster, "rows": m.rows, "bytes": m.nbytes,
            "tables": len(m.tables), "error": "",
        }
        for m in there.manifests.values()
    ]  # fmt: skip
    found += [{"cut": cut, "error": text} for cut, text in there.unreadable.items()]
    found.sort(key=lambda each: each["cut"], reverse=True)
    return {"url": url, "error": "", "checkpoints": found[:SHOWN], "unpublished": list(there.unpublished)[-SHOWN:]}
