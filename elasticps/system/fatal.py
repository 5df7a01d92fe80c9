"""What a server does when it cannot go on: its copy may differ from the others, or a task has ended by an error."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import NoReturn

from coordinator.core import fields

log = fields.logger(__name__)

EXIT_FATAL = 70


def end(who: object, error: Exception) -> None:
    """Ends the process at once because of an error: a replica never goes on differing."""
    _exit("ends: it can no longer vouch for its copy", error, member=who)


def watch(task: asyncio.Task[None]) -> None:
    """A task is done. If it ended by an error, something is not done from now on and nobody knows: the process ends."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _exit("ends: a task has failed", error, task=task.get_name())


def _exit(what: str, error: BaseException, **about: object) -> NoReturn:
    log.critical(what, exc_info=error, **about)
    sys.stderr.flush()
    os._exit(EXIT_FATAL)
