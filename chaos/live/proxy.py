"""A user-space network for machines where namespaces cannot be made: servers and etcd are reached through this proxy.

Run as `python -m chaos.live.proxy` it is a process that takes a JSON object per line on standard input and ends when
that closes; `Proxy` is the other side. Every connection is known by who dialled it (found in /proc by its port) and
whom, so each direction between two processes can be cut, delayed, made lossy and slow by itself. What is cut is held
back, as TCP would send it again later. Loss is a delay of one retransmission for everything behind a lost packet.

While a process is dead its port here is closed too: whoever dials is refused, as without a proxy.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from chaos.live.network import Shape
from elasticps.errors import Error

_HOSTS = "127.0.77"  # a process that listens on 127.0.0.1 is found under an address of its own in here
CHUNK = 256 << 10
QUEUE_BYTES = 1 << 20  # on the way in one direction; then the sender waits
PACKET = 1448
RETRANSMISSION_S = 0.2
DYING_S = 0.005
LOOK_EVERY_S = 0.02  # for processes that have come back


class Proxy:
    """A `ProcessNetwork` by a proxy process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "chaos.live.proxy"]
        self._hosts: dict[str, str] = {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def join(self, name: str) -> str:
        return "127.0.0.1"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def publish(self, name: str, host: str, port: int) -> str:
        public = self._hosts.setdefault(name, f"{_HOSTS}.{len(self._hosts) + 1}")
        self._tell(node=[name, public, host, port])
        return f"{public}:{port}"

    def started(self, name: str, pid: int) -> None:
        self._tell(pid=[name, pid])

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._tell(cut=pairs)

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._tell(mend=pairs)

    def shape(self, name: str, shape: Shape) -> None:
        self._tell(shape=[name, asdict(shape)])

    def close(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):  # what a proxy that has ended did not read
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            if self._process.stdout.readline():
                return
        except OSError:
            pass
        raise Error(f"the proxy has ended with exit code {self._process.wait()}; its error is above")


class Fabric:
    """The disturbances that the proxy makes now: which processes are cut off from which, and how slow each is."""

    def __init__(self, chance: random.Random) -> None:
        self.cuts: set[tuple[str, str]] = set()
        self.shapes: dict[str, Shape] = {}
        self.changed = asyncio.Event()
        self._chance = chance

    def order(self, cut: Any = (), mend: Any = (), shape: Any = None) -> None:
        """Carries out an order of the other side."""
        self.cuts |= {(a, b) for a, b in cut}
        self.cuts -= {(a, b) for a, b in mend}
        if shape is not None:
            self.shapes[shape[0]] = Shape(**shape[1])
        self.changed.set()
        self.changed = asyncio.Event()

    async def passable(self, sender: str, receiver: str) -> None:
        """Waits until the sender is not cut off from the receiver."""
        while (sender, receiver) in self.cuts:
            await self.changed.wait()

    def due(self, now: float, last: float, size: int, sender: str, receiver: str) -> float:
        """Returns when bytes that are sent now arrive, if those before them arrive at `last`."""
        at = now
        for name in (sender, receiver):
            shape = self.shapes.get(name)
            if shape is None:
                continue
            at += max(0.0, shape.ms + self._chance.uniform(-shape.jitter, shape.jitter)) / 1e3
            if shape.percent and self._chance.random() > (1 - shape.percent / 100) ** max(1, size // PACKET):
                at += RETRANSMISSION_S
            if shape.mbit:
                at = max(at, last) + size * 8 / (shape.mbit * 1e6)
        return max(at, last)


class _Direction:
    """One direction of a connection."""

    def __init__(
        self, fabric: Fabric, sender: str, receiver: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._fabric = fabric
        self._names = sender, receiver
        self._source = source
        self._sink = sink
        self._queue: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self) -> bool:
        """Forwards until the source has ended and all bytes have arrived. Returns whether it ended in order, not by a
        reset."""
        reading = asyncio.create_task(self._read())
        try:
            return await self._write()
        finally:
            reading.cancel()

    async def _read(self) -> None:
        loop, last, data = asyncio.get_running_loop(), 0.0, b"-"
        while data:
            try:
                data = await self._source.read(CHUNK)
            except OSError:
                self._queue.append((last, b"reset"))
                break
            last = self._fabric.due(loop.time(), last, len(data), *self._names)
            self._queue.append((last, data))
            self._bytes += len(data)
            self._changed.set()
            if self._bytes > QUEUE_BYTES:
                self._room.clear()
                await self._room.wait()
        self._queue.append((last, b""))
        self._changed.set()

    async def _write(self) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._queue.popleft()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            await self._fabric.passable(*self._names)
            if not data or data == b"reset":
                return not data
            self._sink.write(data)
            self._bytes -= len(data)
            if self._bytes <= QUEUE_BYTES:
                self._room.set()
            await self._sink.drain()


class _Node:
    """A process that is reached through the proxy, by a port that is open as long as the process's own port is."""

    def __init__(self, fabric: Fabric, pids: dict[int, str], name: str, public: str, host: str, port: int) -> None:
        self._fabric, self._pids = fabric, pids
        self._name, self._public, self._host, self._port = name, public, host, port
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Opens the port whenever the process listens."""
        while True:
            if self._listener is None and await self._alive():
                self._listener = await asyncio.start_server(self._accept, self._public, self._port, limit=CHUNK)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _alive(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return False
        writer.transport.abort()
        return True

    async def _look(self) -> None:
        """Closes the port of a process that is dead, before anybody learns that a connection was lost. A dying process
        loses its connections a moment before its port, so a process that seems alive is checked twice."""
        for pause in (0.0, DYING_S):
            await asyncio.sleep(pause)
            if not await self._alive():
                if self._listener is not None:
                    self._listener.close()
                    self._listener = None
                return

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialler = owner_of(writer.get_extra_info("peername")[1], self._port, self._pids)
        try:
            await self._fabric.passable(dialler, self._name)
            inner_reader, inner_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            await self._look()
            writer.transport.abort()
            return
        directions = [
            asyncio.create_task(_Direction(self._fabric, dialler, self._name, reader, inner_writer).run()),
            asyncio.create_task(_Direction(self._fabric, self._name, dialler, inner_reader, writer).run()),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            if directions[1].done():
                await self._look()
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            for side in (inner_writer, writer):
                with suppress(OSError):
                    side.close()


def owner_of(port: int, to: int, pids: dict[int, str]) -> str:
    """Returns which of these processes has the loopback connection from `port` to `to`; "" if none has."""
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[2].endswith(f":{to:04X}"):
            expected = f"socket:[{fields[9]}]"
            return next((name for pid, name in reversed(pids.items()) if _holds(pid, expected)), "")
    return ""


def _holds(pid: int, expected: str) -> bool:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(entry.path) == expected:
                    return True
    return False


async def serve(reader: asyncio.StreamReader, fabric: Fabric) -> None:
    """Carries out orders until standard input ends."""
    pids: dict[int, str] = {}
    tasks = []
    while line := await reader.readline():
        order = json.loads(line)
        if "node" in order:
            tasks.append(asyncio.create_task(_Node(fabric, pids, *order["node"]).run()))
        elif "pid" in order:
            name, pid = order["pid"]
            pids[pid] = name
        else:
            fabric.order(**order)
        sys.stdout.write("ok\n")
        sys.stdout.flush()
    for task in tasks:
        task.cancel()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(reader, Fabric(random.Random(0)))


if __name__ == "__main__":
    uvloop.run(_main())
