"""What a server does again and again beside its work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.core import fields

log = fields.logger(__name__)

TELL_S = 10.0  # between two lines about the same trouble


async def keep_doing(what: str, every_s: float, work: Callable[[], None]) -> None:
    """Does `work` every `every_s`. What the system refuses, such as a file descriptor or memory, is logged and tried
    again: that passes, while a server that ends for it may take the last copy of a range along."""
    loop = asyncio.get_running_loop()
    told_at, failures = float("-inf"), 0
    while True:
        await asyncio.sleep(every_s)
        try:
            work()
        except (OSError, MemoryError) as error:
            failures += 1
            if loop.time() - told_at >= TELL_S:
                log.error("the system refuses something, tried again", what=what, error=error, failures=failures)
                told_at = loop.time()
        else:
            if failures:
                log.info("the system refuses nothing more", what=what, failures=failures)
            told_at, failures = float("-inf"), 0
