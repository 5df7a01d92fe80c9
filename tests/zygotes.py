"""Zygotes that outlive a cluster: to begin one takes more CPU time than many a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from elasticps.local import supervisor
from elasticps.local.zygote import Zygote

_OF_A_TEST = {"PYTEST_CURRENT_TEST", "XDG_RUNTIME_DIR"}  # variables that no import looks at

_begun: dict[object, Zygote] = {}


class Shared(Zygote):
    """In place of a cluster's own: one for all that have one environment."""

    folder: Path  # of their logs

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        kind = frozenset(item for item in environment.items() if item[0] not in _OF_A_TEST)
        if kind in _begun and supervisor.started_at(_begun[kind].pid) is None:  # a test has killed it
            _begun.pop(kind).close()
        if kind not in _begun:
            _begun[kind] = Zygote(self.folder / "zygotes.log", environment)
        self.__dict__ |= _begun[kind].__dict__

    def entrust(self, watch: Callable[[int, str], None]) -> None:
        """To nobody: it ends with this process."""

    def close(self) -> None:
        """Later, with the run."""


def end() -> None:
    """Ends them all."""
    while _begun:
        _begun.popitem()[1].close()
