"""What a cache asks servers for: the rows of a batch, and slots of some."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elasticps.client.pull import Pull
from elasticps.client.runtime import Lock
from elasticps.errors import Error

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Where = NDArray[np.int64]
Flags = NDArray[np.bool_]
NOTHING = np.empty(0, np.int64)


@dataclass(eq=False)
class Batch:
    """A pull, or a look ahead: distinct keys, the place of each, and what is asked of servers.

    values     float32 [n, dim], where rows go; None for a look ahead
    upto       the newest step that had begun when it asked last
    often      which keys are wanted so often that slots are asked for with their rows
    asked, compared, wanted, coming
               indices of keys: asked for; compared; found changed, to be asked for; brought by other batches
    """

    number: int
    keys: Keys
    where: Where
    values: Rows | None
    any_replica: bool
    upto: int
    lock: Lock
    often: Flags
    asked: Where
    compared: Where
    coming: Where
    others: tuple[int, ...]
    digests: NDArray[np.uint64] | None = None  # of what is compared, as it was
    wanted: Where = field(default_factory=lambda: NOTHING)
    rows: Pull | None = None
    slots: Pull | None = None
    check: Pull | None = None
    due: bool = True  # nobody has been asked yet
    left: bool = False  # what it asks for is on its way
    over: bool = False
    given_up: bool = False  # over, and rows lack
    error: Error | None = None

    @property
    def come(self) -> bool:
        """Whether all of that is there, and nobody has looked at it."""
        return self.left and all(read.done() for read in self.reads)

    @property
    def reads(self) -> list[Pull]:
        """What is on its way."""
        return [read for read in (self.rows, self.slots, self.check) if read is not None]


@dataclass(eq=False)
class Slots:
    """A question for slots of rows at some places. asked: somebody sends it; begun: it has left, or will not."""

    number: int
    where: Where
    read: Pull
    asked: bool = False
    begun: bool = False
