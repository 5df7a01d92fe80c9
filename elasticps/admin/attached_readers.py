"""The readers of a cluster, from what its servers say of those that they feed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merge_readers(servers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The readers that servers feed, each once: the greatest age that a server gives, None if one says that it has
    applied nothing yet; the bytes of all that it has been sent and has not applied."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in (each for server in servers for each in server.get("readers") or ()):
        merged = found.setdefault(
            (one["app"], one["name"]), {"name": one["name"], "app": one["app"], "age_s": 0.0, "unread_bytes": 0}
        )
        new = one["age_s"] < 0 or merged["age_s"] is None
        merged["age_s"] = None if new else max(merged["age_s"], one["age_s"])
        merged["unread_bytes"] += one["unread_bytes"]
    return [found[key] for key in sorted(found)]
