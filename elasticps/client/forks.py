"""What a forked child does with the clients of its parent: nothing of them goes on there."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from weakref import WeakMethod

from coordinator import GRPC_HANDLES_FORKS

log = logging.getLogger(__name__)

_disowns: set[WeakMethod[Callable[[], None]]] = set()
_warned = False


def at_fork(disown: Callable[[], None]) -> None:
    """Has this method of a living object called in each child that is forked from now on."""
    _disowns.add(WeakMethod(disown, _disowns.discard))


def _warn() -> None:
    """Once, where a child may crash before any code of ours runs in it."""
    global _warned
    if GRPC_HANDLES_FORKS and _disowns and not _warned:
        _warned = True
        log.warning(
            "grpc was imported before elasticps, with its handling of forks, so a child of this process may crash as it"
            " begins (a DataLoader's worker, say): import elasticps first, or set GRPC_ENABLE_FORK_SUPPORT=0"
        )


def _disown_all() -> None:
    gc.freeze()  # what the parent left to its collector is not finalised here: gRPC's objects do not bear it
    for method in list(_disowns):
        if (disown := method()) is not None:
            disown()


os.register_at_fork(before=_warn, after_in_child=_disown_all)
