"""Who cancelled: gRPC raises CancelledError in whoever waits for an answer on a channel that is closed, too."""

from __future__ import annotations

import asyncio


def ourselves() -> bool:
    """Whether it is the task that runs which was cancelled, and not a call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
