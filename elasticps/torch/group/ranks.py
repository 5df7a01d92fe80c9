"""What the ranks of a group do as one: rank 0 does it with the client, and all hear what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticps.torch.group.links import NOTHING, Links, Words
from elasticps.torch.group.reads import PullSlots

if TYPE_CHECKING:
    from elasticps.client import Client


class Ranks:
    """`client` is the real one, at rank 0, and None elsewhere; is_alone: rank 0 does something by itself."""

    def __init__(self, links: Links, client: Client | None) -> None:
        self.links = links
        self.client = client
        self.slots = PullSlots(links)
        self.is_alone = False

    @property
    def rank(self) -> int:
        """This process among those of the group, from 0 on."""
        return self.links.rank

    @property
    def size(self) -> int:
        """How many processes are in the group."""
        return self.links.size

    def settle(self) -> None:
        """Hears what rank 0 has still to tell of earlier."""

    def together(self, operation: str, does: Callable[[], None]) -> None:
        """Rank 0 does something for all, who wait for it, and raise what it raises."""

        def done(_: Client) -> Words:
            does()
            return NOTHING

        self.asked(operation, done)

    def asked(self, operation: str, does: Callable[[Client], Any]) -> Words:
        """The same, and what it gives, int64 [n], at all ranks."""
        if self.client is not None and self.is_alone:
            return np.array(does(self.client), np.int64)
        self.settle()
        number, _ = self.links.ask(operation)
        with self.links.leading(number):
            words = NOTHING if self.client is None else np.array(does(self.client), np.int64)
            return self.links.answer(number, words)
