"""Opens the target at a URL."""

from __future__ import annotations

import os
from pathlib import Path
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
        target = FolderTarget(unquote(parts.path), source, dtype, pace_s)
        _check_writable(unquote(parts.path))
        return target
    raise ConfigError(
        f"rows are published to redis://host:port/database, rediss://… with TLS, or file:///folder, got {to!r}"
    )


def _check_writable(folder: str) -> None:
    """Makes the folder if it is not there. Raises ConfigError where no file can be written: at the start that is a
    mistake; later it is tried again."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write there"
    except (OSError, ValueError) as error:
        reason = "a file of this name is there" if isinstance(error, FileExistsError) else str(error)
    if reason:
        raise ConfigError(f"no rows can be published into {folder}: {reason}; name a folder that this user may write")
