"""Who waits for an operation that a server logs by itself."""

from __future__ import annotations

import asyncio

from replication.effects import ClocksReply, Reply


class FutureTicket:
    """An operation of this server's own, awaited: resolves to the Reply."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Reply] = loop.create_future()

    def reply(self, reply: Reply) -> None:
        """Resolves."""
        if not self.future.done():
            self.future.set_result(reply)

    def clocks(self, reply: ClocksReply) -> None:
        raise AssertionError("an operation was answered with clocks")

    def hold(self) -> None:
        """Nothing is read for it."""

    def release(self) -> None:
        """Nothing was held."""
