"""Bugs in pulls that leave behind the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import elasticps.client.pull
from elasticps.client.pull import ServerPull
from elasticps.client.reads import Reads


def ask_as_if_nothing_had_been_pushed(patch: pytest.MonkeyPatch) -> None:
    """The push goes to heads, the pull to tails."""

    start_with_step = Reads.start_with_step

    def start(self: Reads, pulls: Sequence[ServerPull]) -> None:
        with patch.context() as here:
            here.setattr(elasticps.client.pull, "read_clock", lambda unread: 0)
            here.setattr(elasticps.client.pull, "read_after", lambda unread, frames, routes, readers: frames)
            start_with_step(self, pulls)

    patch.setattr(Reads, "start_with_step", start)
