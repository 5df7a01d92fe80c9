"""WATCH and USE: a server asks a worker for its activity, and the worker reports it. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

from elasticps.wire.frames import FrameError, Header, Kind

_BODY = struct.Struct("<8q")


class WatchHeader(NamedTuple):
    """WATCH: asks a worker for its activity, as somebody looks at the cluster."""

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.WATCH)

    @classmethod
    def of(cls, h: Header) -> WatchHeader:
        """The inverse of `header`."""
        return cls()


class UseHeader(NamedTuple):
    """USE: the activity of `worker`."""

    worker: int

    def header(self) -> Header:
        """The 64 bytes' fields, before the body."""
        return Header(Kind.USE, body=_BODY.size, worker=self.worker)

    @classmethod
    def of(cls, h: Header) -> UseHeader:
        """The inverse of `header`."""
        return cls(h.worker)


class Activity(NamedTuple):
    """Counts of what a worker has done since it began.

    clock, committed         steps pushed, and how many of them are committed
    sent, received           bytes to and from all servers
    cache_reads, cache_hits  rows pulled from tables with a cache, and how many of them the cache had
    shards                   data shards that it holds now
    """

    clock: int
    committed: int
    sent: int
    received: int
    cache_reads: int
    cache_hits: int
    shards: int

    def body(self) -> bytes:
        """The body of a USE frame."""
        return _BODY.pack(*self, 0)

    @classmethod
    def of(cls, body: bytes) -> Activity:
        """The inverse of `body`. Raises `FrameError` for counts that contradict each other."""
        if len(body) != _BODY.size:
            raise FrameError(f"a worker's activity has {_BODY.size} bytes, not {len(body)}")
        found = cls(*_BODY.unpack(body)[:-1])
        if min(found) < 0 or found.committed > found.clock or found.cache_hits > found.cache_reads:
            raise FrameError(f"a worker reports impossible counts: {found}")
        return found
