"""One event loop for all control traffic of a process, in a thread of its own.

Shared, and never closed before the process ends, because gRPC's asyncio side keeps every loop that it has once seen
and calls into it for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class _Loop:
    def __init__(self) -> None:
        self.pid = os.getpid()  # a forked child has no thread, and needs a loop of its own
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="elasticps-control", daemon=True)
        self.thread.start()
        atexit.register(self._stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _stop(self) -> None:
        if self.pid == os.getpid():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=5.0)


_lock = threading.Lock()
_current: _Loop | None = None


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Runs a coroutine in the control loop and waits for it. TimeoutError, and the coroutine cancelled, if it takes
    longer than `timeout_s`. Not to be called from the control loop itself."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = _Loop()
    future = asyncio.run_coroutine_threadsafe(coroutine, _current.loop)
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done():  # the coroutine itself raised it
            raise
        future.cancel()
        raise TimeoutError(f"no answer within {timeout_s} s") from None
    except KeyboardInterrupt:
        future.cancel()
        with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
            future.result(1.0)
        raise
