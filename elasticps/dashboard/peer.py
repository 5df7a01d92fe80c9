"""A kept connection to one incarnation of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from coordinator import cancelled
from elasticps.admin import admin_pb2_grpc
from elasticps.admin.client import generation_of, open_channel

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials


class Peer:
    """asked: a question waits for its answer; silent: the last one had none."""

    def __init__(
        self, name: str, incarnation: int, admin: str, credentials: Credentials | None, broken: Callable[[Peer], None]
    ) -> None:
        self.name, self.incarnation, self.admin = name, incarnation, admin
        self.asked = False
        self.silent = True
        self._credentials = credentials
        self._generation = generation_of(credentials)
        self._channel = open_channel(admin, credentials)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._watch = asyncio.create_task(self._watching(broken), name=f"connection to {name}")

    @property
    def outdated(self) -> bool:
        """Whether it is to be made anew, with newer certificates."""
        return generation_of(self._credentials) != self._generation

    async def ask(self, method: str, request: Any, timeout_s: float) -> Any:
        """The server's answer; grpc.aio.AioRpcError if it gives none, grpc.aio.UsageError if closed meanwhile."""
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except asyncio.CancelledError:
            if cancelled.ourselves():
                raise
            raise grpc.aio.UsageError(f"the connection to {self.admin} was closed") from None

    async def _watching(self, broken: Callable[[Peer], None]) -> None:
        state = self._channel.get_state(try_to_connect=True)
        while True:
            await self._channel.wait_for_state_change(state)
            before, state = state, self._channel.get_state(try_to_connect=True)
            if before is grpc.ChannelConnectivity.READY and not self.silent:
                broken(self)

    async def close(self) -> None:
        """Watches it no more."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close(None)
