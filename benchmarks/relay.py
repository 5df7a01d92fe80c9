"""A slow link: `python -m benchmarks.relay HOST:PORT …` is a process between one worker and its servers.

It prints the ports at which it stands in for them, as JSON. A line on standard input asks, a line of JSON answers:

    delay MS      every byte takes so long from now on, in each direction
    limit MBIT    so much leaves it each second in each direction from now on, all connections together; 0: any amount
    count         {"up", "down"}: bytes towards the servers, and from them, so far
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

CHUNK = 64 << 10
BURST_S = 0.002  # what may leave at once
ON_THE_LINE = 1024  # chunks


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


async def main(addresses: list[str]) -> None:
    """Stands in for these servers until standard input ends."""
    up, down = Bucket(), Bucket()
    servers = [await stand_in(address, up, down) for address in addresses]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode():
        word, _, rest = line.strip().partition(" ")
        if word == "limit":
            up.per_s = down.per_s = float(rest) * 1e6 / 8
        elif word == "delay":
            up.delay_s = down.delay_s = float(rest) / 1e3
        print(json.dumps({"up": up.bytes, "down": down.bytes}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
