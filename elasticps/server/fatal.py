"""What a server does when it cannot go on: its copy may differ from the others, or a task has ended by an error."""

from __future__ import annotations

import asyncio
import os
import sys

from coordinator import fields

log = fields.logger(__name__)

EXIT_FATAL = 70


def end(who: object, error: Exception) -> None:
    """Ends the process at once because of an error: a replica never goes on differing."""
    log.critical("ends: it can no longer vouch for its copy", member=who, exc_info=error)
    sys.stderr.flush()
    os._exit(EXIT_FATAL)


def watch(task: asyncio.Task[None]) -> None:
    """A task is done. If it ended by an error, something is not done from now on and nobody knows: the process ends."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("ends: a task has failed", task=task.get_name(), exc_info=error)
        sys.stderr.flush()
        os._exit(EXIT_FATAL)
