"""Opens the target at a URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from elasticps.errors import ConfigError
from elasticps.publishing.folder_target import FolderTarget
from elasticps.publishing.redis_target import RedisTarget
from elasticps.publishing.targets import PublishedSource, PublishTarget


def target_of(to: str, source: PublishedSource, dtype: str, prefix: str, pace_s: float) -> PublishTarget:
    """The target at a URL. Raises ConfigError for one that there cannot be."""
    try:
        parts = urlsplit(to)
    except ValueError as error:
        raise ConfigError(f"rows cannot be published to {to!r}: {error}") from None
    if parts.scheme in ("redis", "rediss", "unix"):
        return RedisTarget(to, source, dtype, prefix, pace_s)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and len(parts.path) > 1 and parts.path[0] == "/":
        return FolderTarget(unquote(parts.path), source, dtype, pace_s)
    raise ConfigError(
        f"rows are published to redis://host:port/database, rediss://… with TLS, or file:///folder, got {to!r}"
    )
