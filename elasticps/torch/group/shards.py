"""Shards of data for a group: rank 0 gets a shard, and each rank trains its part of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elasticps.client import Shard, Shards
from elasticps.torch.group.links import NOTHING, Links
from elasticps.torch.kernels.merge import share

_END = -1


class GroupShards:
    """An iterator of this rank's parts of the shards that the group is to train, as `elasticps.client.Shards`."""

    def __init__(self, links: Links, shards: Shards | None, pushes: Callable[[], int]) -> None:
        self._links, self._shards = links, shards
        self._pushes = pushes  # the number of pushes so far
        self._before: int | None = None  # the number of pushes when a shard was handed out; None before the first

    @property
    def passed_over(self) -> bool:
        """Whether the shard handed out last has no step yet."""
        return self._pushes() == self._before

    def __iter__(self) -> GroupShards:
        return self

    def __next__(self) -> Shard:
        number, _ = self._links.ask("next shard")
        words = NOTHING
        with self._links.leading(number):
            if self._shards is not None:
                words = np.array(self._next(self._shards), np.int64)
            epoch, index, start, stop, samples, seeded, seed = self._links.answer(number, words).tolist()
        if epoch == _END:
            self._before = None
            raise StopIteration
        self._before = self._pushes()
        low, high = share(stop - start, self._links.rank, self._links.size)
        return Shard(epoch, index, start + low, start + high, samples, seed if seeded else None)

    def _next(self, shards: Shards) -> list[int]:
        shard = next(shards, None)
        if shard is None:
            return [_END, *[0] * 6]
        seed = shard.seed
        return [shard.epoch, shard.index, shard.start, shard.stop, shard.samples, seed is not None, seed or 0]

    def close(self) -> None:
        """As the client's; every rank calls it."""
        number, _ = self._links.ask("end of shards")
        with self._links.leading(number):
            if self._shards is not None:
                self._shards.close()
            self._links.answer(number)
