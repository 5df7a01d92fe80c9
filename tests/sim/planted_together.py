"""Bugs in pulls that leave behind the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elasticps.client.pulls import Read
from elasticps.client.reads import Reads


def ask_as_if_nothing_had_been_pushed(patch: pytest.MonkeyPatch) -> None:
    """The push goes to heads, the pull to tails."""

    def start(self: Reads, reads: Sequence[Read]) -> None:
        for read in reads:
            read.clock = 0
        self._dispatcher.start_reads(reads, self._bound, self._wait_ms)

    patch.setattr(Reads, "start_behind", start)
