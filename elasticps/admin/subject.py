"""What the admin service speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.view import ServerInfo


class MarkedRange(NamedTuple):
    """A range at a mark: its sequence number, the digest of its rows, and how far every worker had come in it."""

    seq: int
    digest: bytes
    workers: tuple[int, ...]
    progress: tuple[int, ...]


class Subject(Protocol):
    """What these services speak of: a server."""

    @property
    def epoch(self) -> int: ...
    @property
    def me(self) -> ServerInfo: ...
    @property
    def told(self) -> Mapping[int, int]: ...
    def cluster_known(self) -> Mapping[str, Any]:
        """The fields of ClusterResponse in admin.proto."""

    def status(self) -> Mapping[str, Any]:
        """The fields of StatusResponse in admin.proto."""

    def tables(self) -> Sequence[Mapping[str, Any]]:
        """The fields of TableStatus in admin.proto, for each table."""

    async def mark(self, mark: int) -> bool:
        """Has every replica of the ranges headed here note their digests; False if the view changed meanwhile."""

    def marked(self, mark: int) -> Mapping[int, MarkedRange]:
        """What this replica found at a mark, by range."""
