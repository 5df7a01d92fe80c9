"""Blocks of a Ray Dataset, handed out by `ps.shards`. Each block is trained once; only a block that a lost worker was
training may be trained twice.

A streaming split of Ray Train gives each worker a part of the data, once; what a lost worker had read is lost, or read
again from the start. Here a block belongs to the step that trains it: it counts as trained when that step is committed
at the servers, and goes to another worker if it never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray

from elasticps.errors import ConfigError, InputError


class ShardedBlocks:
    """The blocks of `dataset`, for the training loops of all workers; pass it to them as any other value.

    dataset  a `ray.data.Dataset`, which is executed here and now; its blocks stay in Ray's object store
    rows     cut it into blocks of so many rows, the last one may have fewer; None: its blocks as they are
    name     of the set of shards, as for `Client.shards`

    Raises ConfigError for a dataset without rows.
    """

    def __init__(self, dataset: Any, rows: int | None = None, *, name: str = "train") -> None:
        self.name = name
        cut = dataset if rows is None else dataset.repartition(target_num_rows_per_block=rows, strict=True)
        executed = cut.materialize()
        self._blocks = executed.to_numpy_refs()
        if not executed.count():
            raise ConfigError("the dataset has no rows, so there is nothing to hand out")

    def __len__(self) -> int:
        return len(self._blocks)

    def batches(self, ps: Any, epochs: int = 1, *, shuffle_seed: int | None = None) -> Iterator[dict[str, Any]]:
        """One block after the other, as arrays by column, [rows, …]; each belongs to the next step of `ps`.

        All workers give the same `epochs` and `shuffle_seed`, which orders the blocks of each epoch. The iteration ends
        when all blocks have been trained, by whomever. InputError if a block was not trained before the next is asked
        for (`ps.push({})` leaves one out).
        """
        shards = ps.shards(len(self._blocks), 1, epochs, name=self.name, shuffle_seed=shuffle_seed)
        try:
            for shard in shards:
                batch = ray.get(self._blocks[int(shard.indices[0])])
                if any(map(len, batch.values())):
                    yield batch
                else:  # a filter has left no row of it
                    ps.push({})
                if shards.passed_over:
                    raise InputError(
                        f"block {int(shard.indices[0])} of epoch {shard.epoch} was not trained before the next one was "
                        "asked for: make one step of each block (ps.push({}) for one that is left out)"
                    )
        finally:
            shards.close()
