"""Bugs in pulls that leave behind the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elasticps.client.pull import ServerPull
from elasticps.client.reads import Reads


def ask_as_if_nothing_had_been_pushed(patch: pytest.MonkeyPatch) -> None:
    """The push goes to heads, the pull to tails."""

    def start(self: Reads, pulls: Sequence[ServerPull]) -> None:
        for pull in pulls:
            pull.clock = 0
        self._dispatcher.start_pulls(pulls, self._bound, self._wait_ms)

    patch.setattr(Reads, "start_with_step", start)
