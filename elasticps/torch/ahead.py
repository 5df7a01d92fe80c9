"""Rows of the next batches, asked for while this one is trained.

    for ids, labels in prefetch(loader, model, ahead=4):
        optimizer.zero_grad()
        loss(model(ids), labels).backward()
        optimizer.step()

After Agarwal et al., "BagPipe: Accelerating Deep Recommendation Model Training" (SOSP 2023): what a batch will ask for
stands in the data. Rows that come are kept in a `Cache` of the table, which applies what this worker pushes meanwhile;
keys that are there, or on their way, are not asked for again.

In synchronous rounds a row is known only when the round is over, whoever has trained it. There the rows of the next
batch are asked for as soon as it is, together with the dense weights: bit for bit what would be asked for later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.caching import Cache
from elasticps.client import SparseTable
from elasticps.errors import ConfigError
from elasticps.spec import BSP
from elasticps.torch.collection import Table
from elasticps.torch.data import ShardedDataset, ShardSampler
from elasticps.torch.embedding import Rows
from elasticps.torch.group.client import GroupClient
from elasticps.torch.parameters import plain

CACHE_BYTES = 256 << 20  # of a table that has no cache of its own
PLACE_BYTES = 120
KEPT = 2  # steps that rows are kept there, by steps ahead: with 1, what is wanted often is asked for in each step
MOST_AHEAD = 64
Batch = TypeVar("Batch")
Ids = Mapping[Rows, Tensor] | Iterable[tuple[Rows, Tensor]]
Path = tuple[Any, ...]


class _Wanted(NamedTuple):
    """Of one batch: keys of a layer, distinct; and the ids."""

    layer: Rows
    keys: NDArray[np.int64]
    ids: Tensor


def prefetch(
    loader: Iterable[Batch], model: nn.Module, ahead: int = 2, *, ids: Callable[[Batch], Ids] | None = None
) -> Ahead[Batch]:
    """The batches of `loader`, with rows of the next `ahead` on their way while one is trained.

    A row may be twice `ahead` of this worker's steps old when it is used, or as old as its table's `Cache` says; own
    pushes are in it. Under `SSP` the bound holds, so that `ahead` counts up to it. Under `BSP` results are those
    without: the next batch's rows are asked for as a step ends.
    ids: of a batch, the ids that layers will get, {layer: tensor} or pairs of them; of tables of collections too, for
    which nothing is asked as steps end. None: those tensors of a batch that layers got of the first one.
    ConfigError for a model without elasticps embeddings, one of a group, for data in shards, which belong to the step
    that begins next, and when what layers get is not in a batch.
    """
    return Ahead(loader, model, ahead, ids)


class Ahead(Generic[Batch]):
    """Made by `prefetch`; each iteration goes through the loader once."""

    def __init__(
        self, loader: Iterable[Batch], model: nn.Module, ahead: int, ids: Callable[[Batch], Ids] | None
    ) -> None:
        given: object = ahead
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= ahead <= MOST_AHEAD:
            raise ConfigError(f"ahead must be a number of batches from 1 to {MOST_AHEAD}, got {ahead!r}")
        parts = (loader, getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None))
        if any(isinstance(part, ShardedDataset | ShardSampler) for part in parts):
            raise ConfigError(
                "a shard belongs to the step that begins next, so its data cannot be looked at ahead: use a loader "
                "without shards, or no prefetch"
            )
        self._layers = [module for module in plain(model).modules() if isinstance(module, Rows)]
        if not self._layers:
            raise ConfigError("the model has no elasticps embedding whose rows could be asked for ahead")
        if any(isinstance(layer.ps, GroupClient) for layer in self._layers):
            raise ConfigError("ranks of a group ask for rows together, and look ahead at nothing: leave out prefetch")
        if ids is None and any(isinstance(layer, Table) for layer in self._layers):
            raise ConfigError(
                "what tables of a collection get stands in lists: tell prefetch, ids=lambda batch: {table: ids of all "
                "its features}, where tables are model.….embedding_bags[name], or embeddings[name]"
            )
        self._loader = loader
        self._ahead = ahead
        self._ids = ids
        self._paths: list[tuple[Rows, Path]] = []  # where the ids of layers stand in a batch

    def __len__(self) -> int:
        """Batches, if the loader knows."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no len()")
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        made = self._open_caches()
        try:
            yield from self._batches(iter(self._loader))
        finally:
            for layer in self._layers:
                layer.on_ids, layer.expected = None, []
            for table in made:
                table.keep(None)

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while self._ids is None and not self._paths:
            try:
                batch = next(batches)
            except StopIteration:
                return
            got = self._watch()
            yield batch
            self._learn(batch, got)
        coming: deque[tuple[Batch, list[_Wanted]]] = deque()
        while True:
            while len(coming) <= self._ahead:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                coming.append((batch, self._wanted(batch)))
                self._fetch(coming[-1][1], len(coming) - 1)
            if not coming:
                return
            batch, _ = coming.popleft()
            for layer in self._layers:
                layer.expected = []
            for one in coming[0][1] if coming else ():
                if not self._reach(one.layer) and not isinstance(one.layer, Table):
                    one.layer.expected.append(one.ids)
            if len(coming) > 1:  # what gave way meanwhile, or was pushed to without slots
                self._fetch(coming[len(coming) // 2][1], len(coming) // 2 + 1)
            yield batch

    def _open_caches(self) -> list[SparseTable]:
        """Gives those tables a cache that have none; returns them."""
        made = []
        for layer in self._layers:
            table = layer.table
            if isinstance(table, SparseTable) and table.cache is None and (steps := self._allowed(layer)):
                spec = table.spec
                row = PLACE_BYTES + 4 * (spec.dim + spec.optimizer.slot_floats(spec.dim))
                table.keep(Cache(rows=max(1, CACHE_BYTES // row), staleness=steps))
                made.append(table)
        return made

    def _allowed(self, layer: Rows) -> int:
        """Steps that a row may be old for being asked for ahead."""
        assert not isinstance(layer.ps, GroupClient)
        consistency = layer.ps.consistency
        if isinstance(consistency, BSP):
            return 0
        steps = KEPT * self._ahead
        return steps if consistency.bound is None else min(steps, consistency.bound)

    def _reach(self, layer: Rows) -> int:
        """Batches ahead for which rows are asked for; 0: only as a step ends."""
        table = layer.table
        return (
            0 if not isinstance(table, SparseTable) or table.cache is None else min(self._ahead, table.cache.staleness)
        )

    def _fetch(self, wanted: list[_Wanted], ahead: int) -> None:
        for layer, keys, _ in wanted:
            if 0 < ahead <= self._reach(layer):
                assert isinstance(layer.table, SparseTable)
                layer.table.fetch(keys, ahead)

    # -- which part of a batch is whose

    def _wanted(self, batch: Batch) -> list[_Wanted]:
        if self._ids is None:
            pairs: Iterable[tuple[Rows, Tensor]] = [(layer, _at(batch, path)) for layer, path in self._paths]
        else:
            given = self._ids(batch)
            pairs = given.items() if isinstance(given, Mapping) else given
        wanted = []
        for layer, ids in pairs:
            if layer not in self._layers or not isinstance(ids, Tensor):
                raise ConfigError(
                    "ids gives, of a batch, {layer: tensor} or pairs of them, for embeddings of the model; got "
                    f"{type(layer).__name__}: {type(ids).__name__}"
                )
            wanted.append(_Wanted(layer, layer.keys_of(ids)[0], ids))
        return wanted

    def _watch(self) -> list[tuple[Rows, Tensor]]:
        """What layers get from now on."""
        got: list[tuple[Rows, Tensor]] = []
        for layer in self._layers:
            layer.on_ids = partial(_note, got, layer)
        return got

    def _learn(self, batch: Batch, got: list[tuple[Rows, Tensor]]) -> None:
        """Finds in a batch what layers got of it."""
        for layer in self._layers:
            layer.on_ids = None
        leaves = list(_leaves(batch, ()))
        for layer, ids in got:
            path = next((path for path, leaf in leaves if _same(leaf, ids)), None)
            if path is None:
                raise ConfigError(
                    f"what the layer of table {layer.table.name!r} gets is no tensor of a batch: tell prefetch what it "
                    "gets, ids=lambda batch: {layer: tensor}"
                )
            if (layer, path) not in self._paths:
                self._paths.append((layer, path))


def _note(got: list[tuple[Rows, Tensor]], layer: Rows, ids: Tensor) -> None:
    got.append((layer, ids))


def _leaves(part: object, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in lists, tuples and mappings, and where they stand."""
    if isinstance(part, Tensor):
        yield path, part
    elif isinstance(part, Mapping):
        for key, inner in part.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(part, list | tuple):
        for i, inner in enumerate(part):
            yield from _leaves(inner, (*path, i))


def _at(batch: Any, path: Path) -> Tensor:
    for step in path:
        batch = batch[step]
    return cast(Tensor, batch)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors look at the same numbers in the same way."""
    if one is other:
        return True
    views = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return views[0] == views[1] and one.numel() > 0
