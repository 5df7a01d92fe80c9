"""Update to all viewers. A viewer that reads too slowly loses what waits for it, and gets a fresh snapshot instead."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

WAITING_MAX = 64  # messages for one viewer


def encode(kind: str, content: Any) -> bytes:
    """A server-sent event. JSON escapes line ends, so that no text within can begin another event."""
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


class Viewer:
    """What waits for one viewer. stale: it needs a snapshot first, as it is new or was too slow; dropped: it has made
    room for another one."""

    def __init__(self) -> None:
        self.stale = True
        self.dropped = False
        self._waiting: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._ready.set()

    def put(self, message: bytes) -> None:
        """One more message."""
        if not self.stale:
            self._waiting.append(message)
            if len(self._waiting) > WAITING_MAX:
                self.renew()
        self._ready.set()

    def renew(self) -> None:
        """What it has counts no longer."""
        self._waiting.clear()
        self.stale = True
        self._ready.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether something is to be sent; False when `timeout_s` have passed without."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> bytes:
        """What waits, in one piece, if it is not stale."""
        found = b"".join(self._waiting)
        self._waiting.clear()
        self._ready.clear()
        return found


class Fanout:
    """All viewers that there are."""

    def __init__(self) -> None:
        self.viewers: dict[Viewer, None] = {}  # in the order in which they came

    def drop_oldest(self) -> None:
        """Ends the stream that has lasted longest; a browser opens another one by itself."""
        oldest = next(iter(self.viewers))
        del self.viewers[oldest]
        oldest.dropped = True
        oldest.renew()

    def publish(self, updates: Iterable[tuple[str, Any]]) -> None:
        """To all; encoded once."""
        for kind, content in updates:
            message = encode(kind, content)
            for viewer in self.viewers:
                viewer.put(message)

    def renew(self) -> None:
        """All get a fresh snapshot."""
        for viewer in self.viewers:
            viewer.renew()
