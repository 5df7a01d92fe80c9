"""Where rows are published to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from elasticps.errors import ConfigError, Indefinite
from elasticps.publishing.core.batches import PublishBatch

DEFAULT_PREFIX = "elasticps:"


class PublishError(Indefinite):
    """A target did not take rows, or not all of them: it may take them later, from a whole listing on."""


class PublishTarget(Protocol):
    """Takes batches, in order.

    pace_s  seconds from one batch to the next, at least
    """

    pace_s: float

    def open(self) -> None:
        """Begins, before each listing. Raises PublishError if it cannot be reached; ConfigError if it can never be."""

    def write(self, batch: PublishBatch) -> None:
        """Writes all of a batch. Raises PublishError: then a listing follows, after `open`."""

    @property
    def wants_listing(self) -> bool:
        """Whether a listing is to come next, though nothing failed."""

    def close(self) -> None:
        """Ends it."""


@dataclass
class PublishedSource:
    """Whose rows they are: written beside them, so that others' are told from these.

    chosen: the tables that were asked for; None: all of the application."""

    cluster: str
    application: str
    chosen: frozenset[str] | None

    def owns(self, table: str, cluster: object, application: object) -> bool:
        """Whether a table that is described as this cluster's and application's is this publisher's to delete."""
        if self.chosen is not None:
            return table in self.chosen
        return cluster == self.cluster and application == self.application


def target_of(to: str, source: PublishedSource, dtype: str, prefix: str, pace_s: float) -> PublishTarget:
    """The target at a URL. Raises ConfigError for one that there cannot be."""
    try:
        parts = urlsplit(to)
    except ValueError as error:
        raise ConfigError(f"rows cannot be published to {to!r}: {error}") from None
    if parts.scheme in ("redis", "rediss", "unix"):
        from elasticps.publishing.redis_target import RedisTarget

        return RedisTarget(to, source, dtype, prefix, pace_s)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and len(parts.path) > 1 and parts.path[0] == "/":
        from elasticps.publishing.folder_target import FolderTarget

        return FolderTarget(unquote(parts.path), source, dtype, pace_s)
    raise ConfigError(
        f"rows are published to redis://host:port/database, rediss://… with TLS, or file:///folder, got {to!r}"
    )


def shown(to: str) -> str:
    """A target's URL without a password in it."""
    scheme, slashes, rest = to.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
