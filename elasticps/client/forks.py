"""What a forked child does with the clients of its parent: nothing of them goes on there."""

from __future__ import annotations

import gc
import logging
import os
from typing import Protocol
from weakref import WeakSet

from coordinator import GRPC_HANDLES_FORKS

log = logging.getLogger(__name__)


class Disowned(Protocol):
    """What belongs to the process that made it."""

    disowned: bool

    def disown(self) -> None:
        """In a forked child: ends here, and leaves what the parent does alone."""


owned: WeakSet[Disowned] = WeakSet()
_warned = False


def _warn() -> None:
    """Once, where a child may crash before any code of ours runs in it."""
    global _warned
    if GRPC_HANDLES_FORKS and not _warned and any(not each.disowned for each in list(owned)):
        _warned = True
        log.warning(
            "grpc was imported before elasticps, with its handling of forks, so a child of this process may crash as it"
            " begins (a DataLoader's worker, say): import elasticps first, or set GRPC_ENABLE_FORK_SUPPORT=0"
        )


def _disown_all() -> None:
    gc.freeze()  # what the parent left to its collector is not finalised here: gRPC's objects do not bear it
    for each in list(owned):
        each.disown()


os.register_at_fork(before=_warn, after_in_child=_disown_all)
