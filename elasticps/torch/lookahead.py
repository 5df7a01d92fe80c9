"""Prefetching: asks for rows of the next batches while this one is trained.

    for ids, labels in prefetch(loader, model, ahead=4):
        optimizer.zero_grad()
        loss(model(ids), labels).backward()
        optimizer.step()

After Agarwal et al., "BagPipe: Accelerating Deep Recommendation Model Training" (SOSP 2023): the data says which rows
a batch will need. Rows that come are held by a `Cache` of the table, which applies what this worker pushes meanwhile;
keys that are there, or on their way, are not asked for again.

In synchronous rounds a row is known only when the round is over, as any worker may train it. There the rows of the next
batch are asked for as soon as it is, together with the dense weights: bit for bit what would be asked for later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.client import SparseTable
from elasticps.errors import ConfigError
from elasticps.model.caching import Cache
from elasticps.model.spec import BSP
from elasticps.torch.collection import Collection, CollectionTable
from elasticps.torch.data import ShardedDataset, ShardSampler
from elasticps.torch.devices import DeviceGroup, models_of
from elasticps.torch.embedding import TableLayer
from elasticps.torch.weights import layers_of

CACHE_BYTES = 256 << 20  # of a table that has no cache of its own
ROW_OVERHEAD_BYTES = 120  # of a row in a cache, beside its floats
STALENESS_STEPS = 2  # how old rows of such a cache may be, per batch ahead; with 1, each step pulls hot rows again
MAX_DEPTH = 64
Batch = TypeVar("Batch")
Layer = TableLayer | Collection
Ids = Mapping[Layer, Any] | Iterable[tuple[Layer, Any]]
Path = tuple[Any, ...]


class _LayerInput(NamedTuple):
    """What a layer gets of one batch, and the keys that its table, or the tables of the collection, need."""

    layer: Layer
    keys: list[tuple[TableLayer, NDArray[np.int64]]]
    given: Any


def prefetch(
    loader: Iterable[Batch],
    model: nn.Module | DeviceGroup[Any],
    ahead: int = 2,
    *,
    ids: Callable[[Batch], Ids] | None = None,
) -> Ahead[Batch]:
    """The batches of `loader`, with rows of the next `ahead` on their way while one is trained.

    A row may be twice `ahead` of this worker's steps old when it is used, or as old as its table's `Cache` says; own
    pushes are in it. Under `SSP` the bound holds, so that `ahead` counts up to it. Under `BSP` results are those
    without: the next batch's rows are asked for as a step ends.
    ids: of a batch, what layers will get: {layer: ids} or pairs of them, of a collection its lists of ids. None: those
    parts of a batch that layers got of the first one. Of a DeviceGroup a batch is a list, one for each device.
    ConfigError for a model without elasticps embeddings, one of a group, for data in shards, which belong to the step
    that begins next, and when what layers get is not in a batch.
    """
    return Ahead(loader, model, ahead, ids)


class Ahead(Generic[Batch]):
    """The batches of a loader, with rows of the next ones on their way; made by `prefetch`. Each iteration goes through
    the loader once."""

    def __init__(
        self, loader: Iterable[Batch], model: nn.Module | DeviceGroup[Any], depth: int,
        ids: Callable[[Batch], Ids] | None,
    ) -> None:  # fmt: skip
        given: object = depth
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= depth <= MAX_DEPTH:
            raise ConfigError(f"ahead must be a number of batches from 1 to {MAX_DEPTH}, got {depth!r}")
        parts = (loader, getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None))
        if any(isinstance(part, ShardedDataset | ShardSampler) for part in parts):
            raise ConfigError(
                "a shard belongs to the step that begins next, so its data cannot be looked at ahead: use a loader "
                "without shards, or no prefetch"
            )
        self._layers = [layer for each in models_of(model) for layer in layers_of(each)]
        if not self._layers:
            raise ConfigError("the model has no elasticps embedding whose rows could be asked for ahead")
        if any(layer.ps.collective for layer in self._layers):
            raise ConfigError("ranks of a group ask for rows together, and look ahead at nothing: leave out prefetch")
        self._tables = [table for layer in self._layers for table in _tables(layer)]
        self._loader = loader
        self._depth = depth  # batches
        self._ids = ids
        self._paths: list[tuple[Layer, Path]] = []  # where what layers get stands in a batch

    def __len__(self) -> int:
        """The number of batches. TypeError if the loader does not know it."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no len()")
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        made = self._open_caches()
        try:
            yield from self._batches(iter(self._loader))
        finally:
            for layer in self._layers:
                layer.on_ids = None
                layer.expect()
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
        coming: deque[tuple[Batch, list[_LayerInput]]] = deque()
        while True:
            while len(coming) <= self._depth:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                coming.append((batch, self._inputs_of(batch)))
                self._fetch(coming[-1][1], len(coming) - 1)
            if not coming:
                return
            batch, _ = coming.popleft()
            self._expect(coming[0][1] if coming else [])
            if len(coming) > 1:  # what gave way meanwhile, or was pushed to without slots
                self._fetch(coming[len(coming) // 2][1], len(coming) // 2 + 1)
            yield batch

    def _expect(self, inputs: list[_LayerInput]) -> None:
        """Has layers whose tables have no cache ask for the rows of the next batch as this step ends."""
        for layer in self._layers:
            layer.expect(*(
                one.given for one in inputs
                if one.layer is layer and not any(self._reach(table) for table in _tables(layer))
            ))  # fmt: skip

    def _open_caches(self) -> list[SparseTable]:
        """Gives a cache to each table that has none and may show older rows; returns these tables."""
        made = []
        for layer in self._tables:
            table = layer.table
            if isinstance(table, SparseTable) and table.cache is None and (steps := self._allowed(layer)):
                spec = table.spec
                row = ROW_OVERHEAD_BYTES + 4 * (spec.dim + spec.optimizer.slot_floats(spec.dim))
                table.keep(Cache(rows=max(1, CACHE_BYTES // row), staleness=steps))
                made.append(table)
        return made

    def _allowed(self, layer: TableLayer) -> int:
        """How many steps old a row may be when it is used; 0 in synchronous rounds."""
        client: Any = layer.ps  # no group's: __init__ refuses these
        consistency = client.consistency
        if isinstance(consistency, BSP):
            return 0
        steps = STALENESS_STEPS * self._depth
        return steps if consistency.bound is None else min(steps, consistency.bound)

    def _reach(self, layer: TableLayer) -> int:
        """How many batches ahead rows of a table are asked for; 0: only as a step ends."""
        table = layer.table
        return (
            0 if not isinstance(table, SparseTable) or table.cache is None else min(self._depth, table.cache.staleness)
        )

    def _fetch(self, inputs: list[_LayerInput], distance: int) -> None:
        """Has caches fetch the rows of a batch that is so many steps away."""
        for one in inputs:
            for layer, keys in one.keys:
                if 0 < distance <= self._reach(layer):
                    assert isinstance(layer.table, SparseTable)
                    layer.table.fetch(keys, distance)

    # -- which part of a batch is whose

    def _inputs_of(self, batch: Batch) -> list[_LayerInput]:
        """What layers get of a batch. ConfigError if `ids` gives something else."""
        if self._ids is None:
            found = [(layer, _at(batch, path)) for layer, path in self._paths]
            pairs: Iterable[tuple[Layer, Any]] = [(layer, given) for layer, given in found if given is not None]
        else:
            given = self._ids(batch)
            pairs = given.items() if isinstance(given, Mapping) else given
        inputs = []
        for layer, ids in pairs:
            known = layer in self._layers or (isinstance(layer, CollectionTable) and layer in self._tables)
            if not known or not (isinstance(layer, Collection) or isinstance(ids, Tensor)):
                raise ConfigError(
                    "ids gives, of a batch, {layer: what it gets} or pairs of them, for embeddings and collections of "
                    f"the model; got {type(layer).__name__}: {type(ids).__name__}"
                )
            keys = layer.keys_of(ids) if isinstance(layer, Collection) else [(layer, layer.keys_of(ids)[0])]
            inputs.append(_LayerInput(layer, keys, ids))
        return inputs

    def _watch(self) -> list[tuple[Layer, Any]]:
        """Records what layers get from now on."""
        got: list[tuple[Layer, Any]] = []
        for layer in self._layers:
            layer.on_ids = partial(_note, got, layer)
        return got

    def _learn(self, batch: Batch, got: list[tuple[Layer, Any]]) -> None:
        """Finds the places in a batch where what layers got stands. ConfigError for an input that is in none."""
        for layer in self._layers:
            layer.on_ids = None
        leaves = list(_leaves(batch, ()))
        for layer, given in got:
            path = next((path for path, leaf in leaves if _same(leaf, given)), None)
            if path is None:
                raise ConfigError(
                    f"what the layer of {_named(layer)} gets is no part of a batch: tell prefetch what it gets, "
                    "ids=lambda batch: {layer: ids}, of a collection its lists of ids"
                )
            if (layer, path) not in self._paths:
                self._paths.append((layer, path))


def _tables(layer: Layer) -> list[TableLayer]:
    return list(layer.tables) if isinstance(layer, Collection) else [layer]


def _named(layer: Layer) -> str:
    return "table " + ", ".join(repr(table.table.name) for table in _tables(layer))


def _note(got: list[tuple[Layer, Any]], layer: Layer, given: Any) -> None:
    got.append((layer, given))


def _leaves(part: object, path: Path) -> Iterator[tuple[Path, Any]]:
    """All parts of a batch with their paths: itself, and what stands in its lists, tuples and mappings."""
    yield path, part
    if isinstance(part, Mapping):
        for key, inner in part.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(part, list | tuple):
        for i, inner in enumerate(part):
            yield from _leaves(inner, (*path, i))


def _at(batch: Any, path: Path) -> Any:
    """The part of a batch at a path; None where the last step of a group has no batch for a device."""
    for step in path:
        if isinstance(batch, list | tuple) and step >= len(batch):
            return None
        batch = batch[step]
    return batch


def _same(one: Any, other: Any) -> bool:
    """Whether two parts are one object, or views of the same numbers."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        views = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
        return views[0] == views[1] and one.numel() > 0
    return (
        isinstance(one, Mapping) and isinstance(other, Mapping) and len(one) > 0 and one.keys() == other.keys()
        and all(_same(one[key], other[key]) for key in one)
    )  # fmt: skip
