"""Where rows are published to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    chosen: the tables that were asked for; None: all of the application. share: of the keys, as 2/8; "": all."""

    cluster: str
    application: str
    chosen: frozenset[str] | None
    share: str = ""

    def check_share(self, there: object, where: str) -> None:
        """Raises ConfigError unless what an earlier run has left there is of the same share."""
        if (there or "") != self.share:
            ours = f"share {self.share}" if self.share else "all keys"
            raise ConfigError(
                f"{where} has {f'share {there}' if there else 'all keys'} of the rows, and {ours} would replace them: "
                "give each share a place of its own, or delete what is there"
            )

    def owns(self, table: str, cluster: object, application: object) -> bool:
        """Whether a table that is described as this cluster's and application's is this publisher's to delete."""
        if self.chosen is not None:
            return table in self.chosen
        return cluster == self.cluster and application == self.application


def shown(to: str) -> str:
    """A target's URL without a password in it."""
    scheme, slashes, rest = to.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
