"""WATCH and USE: a server asks a worker what it does, as somebody looks at the cluster; the worker says it. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

from elasticps.wire.frames import FrameError, Header, Kind

_BODY = struct.Struct("<8q")


class WatchHeader(NamedTuple):
    """WATCH: say what you do."""

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.WATCH)

    @classmethod
    def of(cls, h: Header) -> WatchHeader:
        """The inverse of `header`."""
        return cls()


class UseHeader(NamedTuple):
    """USE: what `worker` does."""

    worker: int

    def header(self) -> Header:
        """The 64 bytes' fields, before the body."""
        return Header(Kind.USE, body=_BODY.size, worker=self.worker)

    @classmethod
    def of(cls, h: Header) -> UseHeader:
        """The inverse of `header`."""
        return cls(h.worker)


class Use(NamedTuple):
    """What a worker has done since it began.

    clock, committed     steps pushed, of which so many are committed
    sent, received       bytes to and from all servers
    wanted, kept         rows that pulls wanted of tables with a cache, of which so many were shown from there
    shards               that it holds now
    """

    clock: int
    committed: int
    sent: int
    received: int
    wanted: int
    kept: int
    shards: int

    def body(self) -> bytes:
        """What stands behind the header of a USE."""
        return _BODY.pack(*self, 0)

    @classmethod
    def of(cls, body: bytes) -> Use:
        """The inverse of `body`. Raises `FrameError` for what nobody can have done."""
        if len(body) != _BODY.size:
            raise FrameError(f"what a worker does is told in {_BODY.size} bytes, not in {len(body)}")
        found = cls(*_BODY.unpack(body)[:-1])
        if min(found) < 0 or found.committed > found.clock or found.kept > found.wanted:
            raise FrameError(f"a worker says that it has done {found}")
        return found
