"""A slow link: a process between workers and servers, which counts bytes and holds them back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from benchmarks.workers import Process
from elasticps.system import background

CHUNK = 64 << 10
BURST_S = 0.002  # what may leave at once
ON_THE_LINE = 1024  # chunks


class Link:
    """A relay in a process of its own, before these servers. ports: for each server's address, the port of this
    machine at which the relay stands in for it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._process = Process("relay:Relay", addresses=addresses)
        self.ports: dict[str, int] = self._process.ask("ports")

    def limit(self, mbit: float) -> None:
        """Lets at most so many Mbit leave it each second from now on, in each direction; 0: any amount."""
        self._process.ask("limit", mbit=mbit)

    def delay(self, ms: float) -> None:
        """Holds every byte back for so long from now on, in each direction."""
        self._process.ask("delay", ms=ms)

    def count(self) -> tuple[int, int]:
        """Bytes so far, towards the servers and from them."""
        up, down = self._process.ask("count")
        return up, down

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


class Relay:
    """The relay in its process: all connections together share one bucket for each direction."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._up, self._down = Bucket(), Bucket()
        self._servers = background.run(self._listen(addresses))

    async def _listen(self, addresses: Iterable[str]) -> dict[str, asyncio.Server]:
        return {address: await stand_in(address, self._up, self._down) for address in addresses}

    def ports(self) -> dict[str, int]:
        return {address: server.sockets[0].getsockname()[1] for address, server in self._servers.items()}

    def limit(self, mbit: float) -> None:
        self._up.per_s = self._down.per_s = mbit * 1e6 / 8

    def delay(self, ms: float) -> None:
        self._up.delay_s = self._down.delay_s = ms / 1e3

    def count(self) -> tuple[int, int]:
        return self._up.bytes, self._down.bytes

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class Bucket:
    """Tokens of one direction. bytes: how many have passed; delay_s: how long each takes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.per_s = 0.0
        self.delay_s = 0.0
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Returns when so many bytes may leave."""
        self.bytes += nbytes
        if not self.per_s:
            return
        now = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now - BURST_S) + nbytes / self.per_s
        if self._free_s > now:
            await asyncio.sleep(self._free_s - now)


async def pass_on(bucket: Bucket, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Passes bytes from `source` to `sink` until the source ends or breaks."""
    loop, line = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](ON_THE_LINE)

    async def arrive() -> None:
        while True:
            due, data = await line.get()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()

    async def leave() -> None:
        data = b"-"
        while data:
            data = await source.read(CHUNK)
            await bucket.take(len(data))
            await line.put((loop.time() + bucket.delay_s, data))

    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(arrive())
            both.create_task(leave())
    except* OSError:
        sink.close()


async def stand_in(address: str, up: Bucket, down: Bucket) -> asyncio.Server:
    """Listens for one server."""
    host, port = address.rsplit(":", 1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(host, int(port), limit=CHUNK)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(up, reader, inner_writer), pass_on(down, inner_reader, writer))
        for side in (inner_writer, writer):
            side.close()

    return await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK)
