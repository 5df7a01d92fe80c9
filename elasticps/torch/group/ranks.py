"""Operations that rank 0 does with the client for all ranks of a group, which get its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticps.torch.group.links import NOTHING, Links, Words
from elasticps.torch.group.reads import PullSlots

if TYPE_CHECKING:
    from elasticps.client import Client


class Ranks:
    """The ranks of a group, as one of them. client: the real one, at rank 0, and None elsewhere; is_alone: whether rank
    0 does something by itself, inside `GroupClient.alone`."""

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
        """Waits for the answers that rank 0 still owes for earlier operations."""

    def together(self, operation: str, does: Callable[[], None]) -> None:
        """Has rank 0 do something for all ranks; they wait for it, and raise what it raises."""

        def done(_: Client) -> Words:
            does()
            return NOTHING

        self.at_rank_0(operation, done)

    def at_rank_0(self, operation: str, does: Callable[[Client], Any]) -> Words:
        """Has rank 0 do something for all ranks; returns its result, int64 [n], at all of them."""
        if self.client is not None and self.is_alone:
            return np.array(does(self.client), np.int64)
        self.settle()
        number, _ = self.links.ask(operation)
        with self.links.leading(number):
            words = NOTHING if self.client is None else np.array(does(self.client), np.int64)
            return self.links.answer(number, words)
