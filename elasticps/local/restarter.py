"""When dead processes of a local cluster are started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticps.local.process import Process

_LOOK_EVERY_S = 0.1
_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # before one that keeps dying is started again
_STEADY_S = 30.0  # one that has run for so long is not held to have kept dying


def deaths_of(process: Process) -> int:
    """How many of its name have died now, one soon after the other; 0 while it is too early to start it again."""
    lived = time.monotonic() - process.started
    deaths = 1 if lived > _STEADY_S else process.deaths + 1
    return deaths if lived >= _PAUSES_S[min(deaths, len(_PAUSES_S)) - 1] else 0


class Restarter:
    """Looks for dead processes until stopped, in a thread of its own. look: raises nothing, or it was the last one."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticps-restarter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._look()
