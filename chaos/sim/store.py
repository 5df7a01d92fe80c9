"""The coordination store as a process of its own: each call travels, may be lost, and may come too late."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from random import Random
from typing import Any, TypeVar

from chaos.sim.loop import Loop
from chaos.sim.network import Network
from coordinator.core.errors import LeaseLost, StoreUnavailable
from coordinator.core.store import Change, Entry, Guard, Listing
from coordinator.memory import MemoryStore

T = TypeVar("T")
AGAIN_S = 0.1  # how soon a lost message is sent again
LATE = 0.5
LOOK_S = 0.05  # how soon a watch goes on after an outage


class StoreProcess:
    """The store's process, with its data. up: whether it answers."""

    def __init__(self, loop: Loop, network: Network, cluster: str) -> None:
        self.loop = loop
        self.network = network
        self.data = MemoryStore(cluster)
        self.up = True
        self.written: Callable[[], None] = lambda: None  # called after each call that may have written

    def client(self, host: str, timeout_s: float) -> VirtualStore:
        """Makes a client for a process on a host."""
        return VirtualStore(self, host, timeout_s)

    def hears(self, host: str) -> bool:
        """Whether what a host sends reaches a store that works."""
        return self.up and self.network.reaches(host, self.loop.process.host)

    def answers(self, host: str) -> bool:
        """Whether what the store sends reaches a host."""
        return self.up and self.network.reaches(self.loop.process.host, host)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs one call to its end: calls of a memory store never wait. Leases run on the store's own loop."""
        before = events._get_running_loop()
        events._set_running_loop(self.loop)
        try:
            call.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            events._set_running_loop(before)
            call.close()
        raise AssertionError("a call of a memory store waited")


class VirtualStore:
    """A `Store`: see there."""

    def __init__(self, server: StoreProcess, host: str, timeout_s: float) -> None:
        self._server = server
        self._host = host
        self._timeout_s = timeout_s
        self._data = server.data.client()
        self._random: Random = server.network.clock.chance(f"store calls of {host}")

    @property
    def cluster(self) -> str:
        return self._data.cluster

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        return await self._ask(lambda: self._server.data.get(key), timeout_s=timeout_s)

    async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
        return await self._ask(lambda: self._server.data.list(prefix), timeout_s=timeout_s)

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        return await self._ask(lambda: self._server.data.put(key, value, lease=lease), writes=True)

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
        return await self._ask(
            lambda: self._server.data.compare_and_set(key, value, expect=expect, lease=lease, guard=guard),
            writes=True,
            timeout_s=timeout_s,
        )

    async def compare_and_set_all(
        self,
        writes: Mapping[str, tuple[bytes, int | None]],
        *,
        unchanged: Entry | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        return await self._ask(
            lambda: self._server.data.compare_and_set_all(writes, unchanged=unchanged, guard=guard),
            writes=True,
            timeout_s=timeout_s,
        )

    async def delete(self, key: str, *, expect: int | None = None, guard: Guard | None = None) -> bool:
        return await self._ask(lambda: self._server.data.delete(key, expect=expect, guard=guard), writes=True)

    async def grant(self, ttl_s: float) -> int:
        return await self._ask(lambda: self._server.data.grant(ttl_s), writes=True)

    async def keep_alive(self, lease: int) -> float:
        return await self._ask(lambda: self._server.data.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._ask(lambda: self._server.data.revoke(lease), writes=True)

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """Changes come in order, each in its time, and not while the store is away."""
        changes = self._data.watch(prefix, after=after)
        try:
            async for change in changes:
                await asyncio.sleep(self._server.network.delay(self._random))
                while not self._server.answers(self._host):  # noqa: ASYNC110  # the end of an outage is no event
                    await asyncio.sleep(LOOK_S * self._random.uniform(0.5, 1))
                yield change
        finally:
            await changes.aclose()

    async def close(self) -> None:
        await self._data.close()

    async def _ask(
        self, make: Callable[[], Coroutine[Any, Any, T]], *, writes: bool = False, timeout_s: float = 0.0
    ) -> T:
        server, clock = self._server, self._server.network.clock
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        late = self._random.random() < LATE  # a call that timed out may still arrive

        def arrive() -> None:
            if answer.done() and not late:
                return
            if not server.hears(self._host):
                clock.after(AGAIN_S, arrive)
                return
            back: Callable[[], None]
            try:
                back = partial(answer.set_result, server.run(make()))
                if writes:
                    server.written()
            except (LeaseLost, ValueError) as error:
                back = partial(answer.set_exception, error)
            clock.after(server.network.delay(self._random), reply, back)

        def reply(back: Callable[[], None]) -> None:
            if not answer.done():
                if server.answers(self._host):
                    back()
                else:
                    clock.after(AGAIN_S, reply, back)

        clock.after(server.network.delay(self._random), arrive)
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                return await answer
        except TimeoutError:
            text = f"the store gave {self._host} no answer for {timeout_s or self._timeout_s:g} s"
            raise StoreUnavailable(text, indefinite=writes) from None
