"""What operations carry in the simulator, and the tiny store that they change: small numbers, in which every update,
its order and its place show. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.server.protocol.barrier_state import RangeRounds
from elasticps.server.protocol.data_shards_state import RangeShards, ShardMark
from elasticps.wire.frames import Block
from replication.chain import Ranges
from replication.messages import OperationKind

KEYS_PER_RANGE = 12
"""Keys of range r are r * 1000 + 0 … 11; the number within the range stands for the key's hash."""

KEYS_PER_ID = 1000
"""Key k belongs to range k // 1000."""

MODULUS = (1 << 61) - 1
TABLE = 1

Update = tuple[int, int]

Done = tuple[int, int]
"""An operation as observers know it. A part of a step: worker, and the progress that it leaves. Another: minus its
kind, and its number."""

Means = dict[int, tuple[float, int]]
"""What the close of a round applies: by key, the workers' mean and the rate of the step."""


def updated(values: dict[int, int], key: int, value: int) -> int:
    """The tiny store's optimizer: the order of updates shows in the value."""
    return (values.get(key, 0) * 3 + value) % MODULUS


def averaged(values: dict[int, int], key: int, mean: float, rate: int) -> int:
    """The same for a round's mean, of which every bit counts."""
    return updated(values, key, int(np.float32(mean).view(np.int32)) * 8 + rate)


class Content:
    """Updates (key, value) per range, as lists that belong to the caller or as a private copy.

    round: the synchronous round that they are a worker's share of, 0 for none; rate: a property of the step; mark: the
    shard that the step trains, said by its last part.
    """

    def __init__(
        self, updates: dict[int, list[Update]], round: int = 0, rate: int = 0, mark: ShardMark | None = None
    ) -> None:
        self.updates = updates
        self.round = round
        self.rate = rate
        self.mark = mark

    def private_copy(self) -> Content:
        """What the session keeps."""
        return Content({r: list(u) for r, u in self.updates.items()}, self.round, self.rate, self.mark)

    def exact_copy(self) -> Content:
        """What the checks keep, whatever the session does."""
        return Content({r: list(u) for r, u in self.updates.items()}, self.round, self.rate, self.mark)

    def touches(self, ranges: Ranges) -> bool:
        """Whether it holds anything for these ranges."""
        return any(self.updates.get(r) for r in ranges.tolist())

    def cut(self, ranges: Ranges) -> Content:
        """The part that belongs to some ranges."""
        updates = {r: self.updates[r] for r in ranges.tolist() if r in self.updates}
        return Content(updates, self.round, self.rate, self.mark)

    def blocks(self, bounds: dict[int, int]) -> list[Block]:
        """The updates as servers keep them for a round: those of some ranges, in each below a bound."""
        found = [u for r, bound in bounds.items() for u in self.updates.get(r, ()) if u[0] % KEYS_PER_ID < bound]
        if not found:
            return []
        keys = np.array([key for key, _ in found], np.int64)
        grads = np.array([[value] for _, value in found], np.float32)
        return [Block(TABLE, keys, grads, np.array([self.rate], np.float32))]


class Keys:
    """The table's keys, as far as rounds look at them."""

    def select(self, keys: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the keys whose number within the range is below the range's bound."""
        return np.flatnonzero(keys % KEYS_PER_ID < bounds[keys // KEYS_PER_ID]).astype(np.int64)


TABLES = {TABLE: Keys()}


def means_of(blocks: Iterable[Block]) -> Means:
    """Rows that a round applies, by key. No key comes twice."""
    found: Means = {}
    for _, keys, grads, rates in blocks:
        assert not found.keys() & set(keys.tolist())
        found.update({k: (float(g), int(rates[0])) for k, g in zip(keys.tolist(), grads[:, 0], strict=True)})
    return found


class Control(NamedTuple):
    """The payload of an operation that is no push: its kind and number are all that there is to apply."""

    kind: OperationKind
    number: int

    @property
    def done(self) -> Done:
        """What observers call it."""
        return (-self.kind, self.number)

    def initial(self, r: int) -> Update:
        """An INIT puts this where nothing is yet."""
        return (r * KEYS_PER_ID + self.number % KEYS_PER_RANGE, -self.number)


class ChunkContent(NamedTuple):
    """What a piece of a range carries: values, what is kept for rounds and of shards, and the history that the checks
    follow. closed: the last round that the checks saw closed."""

    values: dict[int, int]
    rounds: RangeRounds
    shards: RangeShards
    hashes: list[int]
    history: list[tuple[Done, ...]]
    done: dict[Done, None]
    reached: dict[int, int]
    closed: int
