"""A hostile peer of servers: noise, malformed frames, frames that never end, floods of connections, endless requests
whose answers nobody reads; with TLS also certificates of strangers, and hellos in the names of others.

What it does is drawn anew at each turn, against one server of the newest view. It is a worker of the cluster itself, so
it gets past the hello; but it pushes to no table, since whoever may train may also change every row. Whether servers
bear it is for the load to find out: this only ends, after its time.

Run as `python -m chaos.live.hostile URL NAME SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import elasticps as eps
from chaos.live.load import TIMEOUT_S, say_ready
from coordinator.core.url import parse
from elasticps.errors import Error
from elasticps.security import credentials_of
from elasticps.security.authority import Authority
from elasticps.security.credentials import Credentials
from elasticps.security.identity import Identity, Role
from elasticps.wire.frames import HEADER_BYTES, MAGIC, Header, Kind, json_frame, unpack_header

AT_ONCE = 4  # things that it does
FLOOD = 300  # connections at once: more than may be in a handshake
PAUSE_S = 1.0
UNREAD_S = 4.0
UNREAD = 400  # questions, each for
PULLED_ROWS = 2000  # rows of
DIM = 128
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_ABSURD: tuple[object, ...] = (-1, 1 << 31, 1 << 64, 1 << 70, 1e308, None, True, "", "\ud800", "x" * 5000, [], [[]], {})
_FIELDS = (
    "id", "spec", "round", "workers", "name", "app", "epoch", "count", "shard", "size", "epochs", "seed", "members",
)  # fmt: skip
_CONTROL = (
    Kind.CREATE, Kind.GET_CLOCKS, Kind.GET_VIEW, Kind.BARRIER_JOIN, Kind.BARRIER_ARRIVE, Kind.ROUND_CLOSE,
    Kind.CLAIM_SHARDS, Kind.BARRIER_LEAVE, Kind.JOIN, Kind.REPORT_CLOCK, Kind.HELLO, Kind.ROOM, Kind.WELCOME,
    Kind.REPORT,
)  # fmt: skip


class Hostile:
    """One hostile peer, for as long as `run` goes on."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self._ps = eps.connect(url, worker=name, app=name, timeout=TIMEOUT_S)
        self._table = self._ps.table(name, dim=DIM, optimizer=eps.Accumulate())
        self._random = random.Random(name)
        self._credentials = credentials_of(url)
        worker = self._ps.worker
        self._entered = 0
        self._cluster = self._ps.view.cluster
        self._hello = {"cluster": self._cluster, "worker": worker.id, "name": worker.name, "app": worker.app}
        self._turns: list[Callable[[], Coroutine[None, None, None]]] = [
            self._noise, self._unknown_frames, self._half_a_frame, self._flood, self._malformed, self._malformed,
            self._unread,
        ]  # fmt: skip
        self._strangers: Credentials | None = None
        if self._credentials is not None and (files := parse(url).tls) is not None:
            cluster = parse(url).cluster
            theirs = Authority.create(folder / "tls").issue(Identity(cluster, Role.WORKER, name, name))
            self._strangers = Credentials(replace(theirs, ca=files.ca), cluster)
            self._turns += [self._other_authority, self._in_others_names]

    async def run(self, seconds: float) -> None:
        """Attacks with several tasks at once, each doing one thing after another."""
        end = time.monotonic() + seconds

        async def go_on() -> None:
            while time.monotonic() < end:
                with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    await asyncio.wait_for(self._random.choice(self._turns)(), end - time.monotonic() + PAUSE_S)

        await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
        await asyncio.to_thread(self._ps.close)
        if not self._entered:
            raise Error("no server has let it in, so what a worker may do was not tried")

    # --- strangers ----------------------------------------------------------------------------------------------------

    async def _noise(self) -> None:
        await self._say(await self._dial(), self._random.randbytes(self._random.randrange(1, 1 << 17)))

    async def _unknown_frames(self) -> None:
        await self._say(await self._dial(), self._header(self._random.randrange(256)) + b"[" * 20_000)

    async def _half_a_frame(self) -> None:
        await self._say(await self._dial(), Header(Kind.HELLO, body=1 << 19).pack() + b"{" * 1000)

    async def _flood(self) -> None:
        streams = await asyncio.gather(*(self._dial() for _ in range(FLOOD)), return_exceptions=True)
        await asyncio.sleep(PAUSE_S)
        for each in streams:
            if not isinstance(each, BaseException):
                each[1].transport.abort()

    async def _other_authority(self) -> None:
        assert self._strangers is not None
        await self._say(await self._dial(self._strangers), json_frame(Kind.HELLO, self._hello))

    # --- one that is let in -------------------------------------------------------------------------------------------

    async def _in_others_names(self) -> None:
        server = self._random.choice(self._ps.view.servers)
        to = [server.name, server.incarnation]
        who = self._random.choice(({"leader": "c0"}, {"peer": to, "number": 1 << 40}))
        hello = json_frame(Kind.HELLO, {"cluster": self._cluster, "to": to} | who)
        await self._say(await self._dial(self._credentials, server.address), hello)

    async def _malformed(self) -> None:
        stream = await self._enter()
        await self._say(stream, b"".join(self._nonsense() for _ in range(self._random.randrange(1, 30))))

    async def _unread(self) -> None:
        _, writer = await self._enter()
        keys = b"".join(key.to_bytes(8, "little") for key in range(PULLED_ROWS))
        header = Header(Kind.PULL, body=len(keys), epoch=self._ps.view.epoch, table=self._table.id, items=PULLED_ROWS)
        writer.write(b"".join(header._replace(request=request).pack() + keys for request in range(UNREAD)))
        await asyncio.sleep(UNREAD_S)
        writer.transport.abort()

    def _nonsense(self) -> bytes:
        """Returns a frame that is well formed up to some point."""
        chance, epoch = self._random, self._ps.view.epoch + self._random.choice((0, 0, 0, -1, 1, 1 << 60))
        if (draw := chance.random()) < 0.6:
            fields = {name: self._absurd() for name in chance.sample(_FIELDS, chance.randrange(1, 6))}
            text = json.dumps(fields).encode()
            return self._framed(chance.choice(_CONTROL), text, epoch)
        if draw < 0.8:
            return self._framed(chance.choice(_CONTROL), b"[" * 20_000, epoch)
        # No table has this number: a push to one that is there, and is well formed by chance, would be a good one.
        pushed = Header(Kind.PUSH, chance.randrange(8), 64, 7, epoch, chance.randrange(1 << 50), table=1 << 31, items=3)
        return pushed.pack() + chance.randbytes(8) + (1 << 31).to_bytes(4, "little") * 14

    def _absurd(self) -> object:
        value = self._random.choice(_ABSURD)
        return [value] * self._random.randrange(1, 4) if self._random.random() < 0.3 else value

    def _framed(self, kind: Kind, text: bytes, epoch: int) -> bytes:
        text += b" " * (-len(text) % 8)
        return Header(kind, self._random.randrange(64), len(text), 7, max(0, epoch)).pack() + text

    def _header(self, kind: int) -> bytes:
        rest = self._random.randbytes(HEADER_BYTES - 6)
        return MAGIC.to_bytes(4, "little") + bytes((2, kind)) + rest

    # --- plumbing -----------------------------------------------------------------------------------------------------

    async def _enter(self) -> Stream:
        stream = await self._dial(self._credentials)
        stream[1].write(json_frame(Kind.HELLO, self._hello))
        header = unpack_header(await asyncio.wait_for(stream[0].readexactly(HEADER_BYTES), UNREAD_S))
        self._entered += header.kind == Kind.WELCOME
        return stream

    async def _dial(self, credentials: Credentials | None = None, address: str = "") -> Stream:
        address = address or self._random.choice(self._ps.view.servers).address
        host, _, port = address.rpartition(":")
        context = None if credentials is None else credentials.client_context()
        return await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)

    async def _say(self, stream: Stream, data: bytes) -> None:
        """Sends bytes, then waits a while for the server to end the connection."""
        reader, writer = stream
        writer.write(data)
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), PAUSE_S)
        writer.transport.abort()


def main(arguments: Sequence[str] = sys.argv) -> None:
    """Runs a hostile peer for some seconds."""
    with tempfile.TemporaryDirectory(prefix="elasticps-hostile-") as folder:
        hostile = Hostile(arguments[1], arguments[2], Path(folder))
        say_ready()
        asyncio.run(hostile.run(float(arguments[3])))


if __name__ == "__main__":
    main()
