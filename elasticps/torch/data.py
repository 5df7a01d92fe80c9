"""Data that is handed out in shards: every worker trains some of it, and what a lost one had goes to the others.

    batches = DataLoader(ShardedDataset(ps, len(data), 64, epochs=3, shuffle_seed=1, dataset=data), batch_size=None)
    for inputs, labels in batches:       # one batch is one shard, and what one step trains
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()

or, where a DataLoader should fetch and collate:

    for inputs, labels in DataLoader(data, batch_sampler=ShardSampler(ps, len(data), 64)): …

Both take `num_workers=0` only: a shard belongs to the next step that begins, so nobody may ask for shards ahead of the
training loop, least of all a process that has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info

from elasticps.errors import ConfigError, InputError
from elasticps.model.sharding import checked_spec

if TYPE_CHECKING:
    from elasticps.client import Shard
    from elasticps.torch.worker import Worker

_ALONE = (
    "shards are handed out to the process that trains them: use a DataLoader with num_workers=0, not {count} (a shard "
    "that was fetched ahead would be taken for the one that the next step trains)"
)


class Items(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """One item."""


class Sharded:
    """How data is cut into shards; each iteration goes on with the shards that are left."""

    def __init__(
        self,
        ps: Worker,
        num_samples: int,
        shard_size: int,
        epochs: int,
        name: str,
        shuffle_seed: int | None,
    ) -> None:
        self.spec = checked_spec(num_samples, shard_size, epochs, shuffle_seed)
        self.name = name
        self._ps = ps

    def shards(self) -> Iterator[Shard]:
        """The shards of this worker. A shard that was not trained is given back when the iteration ends, also early."""
        spec = self.spec
        shards = self._ps.shards(spec.samples, spec.size, spec.epochs, name=self.name, shuffle_seed=spec.seed)
        try:
            for shard in shards:
                yield shard
                if shards.passed_over:
                    raise InputError(
                        f"shard {shard.index} of epoch {shard.epoch} was not trained before the next one was asked "
                        "for: make one step of each batch (ps.push({}) for one that is left out), and use a "
                        "DataLoader with num_workers=0"
                    )
        finally:
            shards.close()

    def __getstate__(self) -> None:
        raise ConfigError(_ALONE.format(count="several"))


class ShardedDataset(Sharded, IterableDataset[Any]):
    """One batch per shard: of `dataset`'s items, put together by `collate` (default: torch's), or, without a dataset,
    the indices themselves, int64 [n]. For a DataLoader with `batch_size=None`, or to iterate over directly.

    Arguments and errors as for `Client.shards`; `ConfigError` when it is used by a DataLoader's worker processes.
    """

    def __init__(
        self,
        ps: Worker,
        num_samples: int,
        shard_size: int,
        epochs: int = 1,
        *,
        name: str = "train",
        shuffle_seed: int | None = None,
        dataset: Items | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        super().__init__(ps, num_samples, shard_size, epochs, name, shuffle_seed)
        self._dataset = dataset
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            raise ConfigError(_ALONE.format(count=info.num_workers))
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for shard in self.shards():
            if self._dataset is None:
                yield torch.from_numpy(shard.indices)
            else:
                yield self._collate([self._dataset[i] for i in shard.indices.tolist()])


class ShardSampler(Sharded, Sampler[list[int]]):
    """The indices of one shard after another, as a DataLoader's `batch_sampler`. Arguments and errors as for
    `Client.shards`. It has no length: how many shards this worker gets is not known beforehand."""

    def __init__(
        self,
        ps: Worker,
        num_samples: int,
        shard_size: int,
        epochs: int = 1,
        *,
        name: str = "train",
        shuffle_seed: int | None = None,
    ) -> None:
        super().__init__(ps, num_samples, shard_size, epochs, name, shuffle_seed)

    def __iter__(self) -> Iterator[list[int]]:
        for shard in self.shards():
            yield shard.indices.tolist()
