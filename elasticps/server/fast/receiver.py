"""What the compiled path's Python side knows of a connection."""

from __future__ import annotations

from typing import Protocol

from elasticps.server.core.asker import Asker
from elasticps.wire.frames import Header
from elasticps.wire.pool import Bytes


class Receiver(Asker, Protocol):
    """A connection, as far as its bytes are concerned. slot: where the path has it."""

    slot: int

    def frame(self, header: Header, body: Bytes, answered: int) -> None:
        """One frame that is not usual. `answered`: of a pull, the rows that have been sent."""

    def leave(self) -> None:
        """What has come stays as it is until more is read."""

    def rest(self) -> None:
        """Others have their turn."""
