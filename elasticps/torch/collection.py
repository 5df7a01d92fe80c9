"""Layers over several tables: the ids of all tables come in one batch of lists, and one pull brings all rows.

All features of a table look up one set of rows, so autograd has added up the gradients of a key when they get here.
Tables of the same dim and mode share one matrix of rows and one operation of torch's.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from elasticps.errors import ConfigError, InputError
from elasticps.model.caching import Cache
from elasticps.model.policies import Admission, Eviction
from elasticps.model.spec import Filter, Init, ServerOptimizer
from elasticps.torch.embedding import MAX_PREFETCHED, ExpectedRows, TableLayer, may_share_rows, take_gradients
from elasticps.torch.host import moved, room, sent
from elasticps.torch.jagged import JaggedTensor, KeyedTensor, Lists, lists_of
from elasticps.torch.kernels.distinct import distinct_tables
from elasticps.torch.pooling import Bags, pooled

if TYPE_CHECKING:
    from elasticps.torch.step_rows import StepRows
    from elasticps.torch.worker import PendingPull, Worker

MODES = ("sum", "mean")


@dataclass(frozen=True)
class TableConfig:
    """One table of a collection. features: names of those that look their ids up in it, by default one of the table's
    name; mode: of bags, "sum" or "mean". What is None is the collection's. All else as for `Embedding`."""

    name: str
    dim: int
    features: Sequence[str] = ()
    mode: str = "sum"
    optimizer: ServerOptimizer | None = None
    init: Init | None = None
    dtype: str = "float32"
    num_embeddings: int | None = None
    push: Sequence[Filter] | None = None
    pull: Sequence[Filter] | None = None
    cache: Cache | None = None
    admission: Admission | None = None
    eviction: Eviction | Sequence[Eviction] = ()
    usage: str = ""

    @property
    def feature_names(self) -> list[str]:
        """At least one."""
        return list(self.features) or [self.name]


class CollectionTable(TableLayer):
    """One table of a collection, which pulls the rows of all its tables together."""


class _Tables(nn.ModuleDict):
    """Tables by name, which may also be the name of one of the dictionary's own methods."""

    def __init__(self, tables: Mapping[str, CollectionTable]) -> None:
        super().__init__()
        self._modules.update(tables)


class _SameShape(NamedTuple):
    """Tables of one dim and mode, which stand side by side in the layout, as do their features."""

    dim: int
    mode: str
    tables: slice
    features: slice


class _Layout:
    """The order in which tables and features are looked up: by dim and mode, else as they were given.

    configs, features: of all tables, and names, in this order; table_of: int64, of each feature the index of its table;
    limits: int64, of each table how many ids it has, -1 if any is one;
    groups: tables of the same dim and mode; shown: names of features in the order in which tables were given; dims: of
    these; columns: int64, where a feature's floats begin when they stand side by side in that order.
    """

    def __init__(self, configs: Sequence[TableConfig]) -> None:
        kinds = list(dict.fromkeys((config.dim, config.mode) for config in configs))
        self.configs = [config for kind in kinds for config in configs if (config.dim, config.mode) == kind]
        self.features = [name for config in self.configs for name in config.feature_names]
        table_of = [i for i, config in enumerate(self.configs) for _ in config.feature_names]
        self.table_of = np.array(table_of, np.int64)
        self.limits = np.array([-1 if (n := config.num_embeddings) is None else n for config in self.configs], np.int64)
        self.groups: list[_SameShape] = []
        for dim, mode in kinds:
            tables = [i for i, config in enumerate(self.configs) if (config.dim, config.mode) == (dim, mode)]
            features = [i for i, table in enumerate(table_of) if table in tables]
            span, named = slice(tables[0], tables[-1] + 1), slice(features[0], features[-1] + 1)
            self.groups.append(_SameShape(dim, mode, span, named))
        self.shown = [name for config in configs for name in config.feature_names]
        self.dims = [config.dim for config in configs for _ in config.feature_names]
        column_of = dict(zip(self.shown, accumulate(self.dims, initial=0), strict=False))
        self.columns = np.array([column_of[name] for name in self.features], np.int64)
        self._known: tuple[list[str], NDArray[np.int64]] = [], np.empty(0, np.int64)

    def find(self, lists: Lists) -> NDArray[np.int64]:
        """The index of each feature, int64, among those of a batch. InputError if one is missing."""
        known = self._known  # threads may share a layer
        if lists.keys != known[0]:
            if missing := [name for name in self.features if name not in lists.keys]:
                raise InputError(f"the batch has no feature {missing[0]!r}, it has {lists.keys}")
            found = [lists.keys.index(name) for name in self.features]
            known = self._known = list(lists.keys), np.array(found, np.int64)
        return known[1]


@dataclass(eq=False)
class _BatchLookup:
    """The rows of all tables that one batch of lists needs."""

    lists: Lists
    found: NDArray[np.int64]  # the index in the batch of each of the layout's features
    keys: NDArray[np.int64]  # distinct in each table, table after table
    ends: NDArray[np.int64]  # [tables + 1]: where each table's keys begin, and their number
    positions: NDArray[np.int64]  # of the ids, feature after feature as in the layout: index into `keys`
    edges: list[int]  # where each feature's ids begin among these, and their number
    floats: Tensor  # rows of all tables, one after another
    table_keys: dict[Any, NDArray[np.int64]]  # the keys of each table that is to be asked
    table_rows: dict[Any, NDArray[np.float32]]  # where their rows go, views of `floats`
    pull: PendingPull | None = None
    moment: tuple[int, int] | None = None  # for expected rows: clock and changes of the tables when they were pulled


@dataclass(eq=False)
class _CollectionPass:
    """Takes the gradient of the rows of one forward pass, of tables of one dim and mode. Lives as long as the autograd
    graph does. trained: each table that has rows, their keys, and where the rows are."""

    collection: weakref.ref[Collection]
    trained: list[tuple[CollectionTable, NDArray[np.int64], slice]]
    passes: weakref.WeakSet[Any]  # which all these tables share

    def __call__(self, rows: Tensor) -> None:
        """The hook of autograd, when the gradient of `rows` is complete."""
        gradient, rows.grad = rows.grad, None
        collection = self.collection()
        if collection is None or gradient is None:
            return
        with collection.lock:
            self.passes.discard(self)
        take_gradients([(table, keys, gradient[mine]) for table, keys, mine in self.trained])


class Collection(nn.Module):
    """A layer over several tables, with one pull for all of them; its subclasses say what becomes of the rows."""

    def __init__(
        self,
        ps: Worker,
        tables: Sequence[TableConfig],
        *,
        optimizer: ServerOptimizer | None = None,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
    ) -> None:
        super().__init__()
        _check(tables)
        self.ps = ps
        self.on_ids: Callable[[Any], None] | None = None  # called with what a forward pass gets
        self.step_rows: StepRows[Any] | None = None  # shared by a group's devices: rows that one of them has pulled
        self._layout = layout = _Layout(tables)
        made = {}
        for config in tables:
            chosen = config.optimizer or optimizer
            if chosen is None:
                raise ConfigError(f"table {config.name!r} has no optimizer, and the collection has none for all")
            made[config.name] = CollectionTable(
                ps, config.name, config.dim, optimizer=chosen, init=config.init, dtype=config.dtype,
                num_embeddings=config.num_embeddings, push=push if config.push is None else config.push,
                pull=pull if config.pull is None else config.pull, cache=config.cache,
                admission=config.admission, eviction=config.eviction, usage=config.usage,
            )  # fmt: skip
        self._tables = [made[config.name] for config in layout.configs]
        self._prefetched: deque[_BatchLookup] = deque(maxlen=MAX_PREFETCHED)
        self._expected: list[_BatchLookup] = []  # of the next batch, to be pulled when this one's step ends
        self.lock = threading.Lock()  # backward passes on CUDA run in torch's own threads
        for group in layout.groups:
            passes: weakref.WeakSet[Any] = weakref.WeakSet()
            for table in self._tables[group.tables]:
                table.passes = passes
        self._register(_Tables(made))

    def _register(self, tables: nn.ModuleDict) -> None:
        """Keeps the tables as a module, under the name that torchrec has for them."""
        raise NotImplementedError

    @property
    def _dtype(self) -> torch.dtype:
        """The type of results: float32, or what `half()` or the like made of the model."""
        return self._tables[0]._parameters["trains"].dtype  # type: ignore[union-attr]

    def _checked(self, given: Any) -> Lists:
        """The lists of ids of a batch. InputError for unusable ones."""
        return lists_of(given)

    @property
    def features(self) -> list[str]:
        """Names of all features, table by table as they were given."""
        return list(self._layout.shown)

    @property
    def tables(self) -> Sequence[TableLayer]:
        """The tables, in the order in which they are looked up."""
        return self._tables

    def keys_of(self, features: Any) -> list[tuple[TableLayer, NDArray[np.int64]]]:
        """The tables that a batch needs, and the keys of each, int64, distinct. Errors as for a forward pass."""
        lookup = self._plan(self._checked(features))
        return [(table, lookup.table_keys[table.table]) for table in self._tables if table.table in lookup.table_keys]

    def prefetch(self, features: Any) -> None:
        """Asks for the rows of a batch now; the forward pass that gets the same lists takes them, as new as the servers
        had them at the time of this call."""
        self._prefetched.append(self._ask(self._copied(features)))

    def _copied(self, features: Any) -> Lists:
        lists = self._checked(features)
        return lists._replace(ids=lists.ids.copy(), lengths=lists.lengths.copy())  # the caller may change them

    def expect(self, *features: Any) -> None:
        """Announces the batches of the next forward passes, instead of those announced before. The Optimizer's next
        `step()` asks for these rows in the messages in which its gradients leave and the dense weights are asked for.
        They are as new as that step; passes that come after another step ask again. Errors as for a forward pass."""
        self._expected = [self._plan(self._copied(each)) for each in features]

    def take_expected(self) -> list[ExpectedRows]:
        """Hands over the rows that are expected, to a step that ends; then none are."""
        expected, self._expected = self._expected, []
        return [
            ExpectedRows(each.table_keys, each.table_rows, partial(self._began, each))
            for each in expected
            if each.table_keys
        ]

    def _began(self, lookup: _BatchLookup, pull: PendingPull) -> None:
        lookup.pull, lookup.moment = pull, self._moment
        self._prefetched.append(lookup)

    @property
    def _moment(self) -> tuple[int, int]:
        """The clock, and how often rows of the tables were changed past steps."""
        return self.ps.clock, sum(int(getattr(table.table, "changes", 0)) for table in self._tables)

    def _claim(self, lists: Lists) -> _BatchLookup:
        """The rows of a batch: those asked for before, if they are new enough, or a new pull."""
        for lookup in list(self._prefetched):
            if lookup.moment is not None and lookup.moment != self._moment:
                with suppress(ValueError):
                    self._prefetched.remove(lookup)
            elif lookup.lists.same(lists):
                with suppress(ValueError):  # else another thread has taken it
                    self._prefetched.remove(lookup)
                    lookup.lists = lists  # the caller's weights, and device
                    return lookup
        step_rows = self.step_rows
        return self._ask(lists, step_rows if step_rows is not None and may_share_rows(self, self._tables) else None)

    def _ask(self, lists: Lists, step_rows: StepRows[Any] | None = None) -> _BatchLookup:
        lookup = self._plan(lists)
        if step_rows is not None:
            lookup.pull = step_rows.ask(self.ps.clock, lookup.table_keys, lookup.table_rows, self.ps.pull_async)
        elif lookup.table_keys:
            lookup.pull = self.ps.pull_async(lookup.table_keys, lookup.table_rows)
        return lookup

    def _plan(self, lists: Lists) -> _BatchLookup:
        """Finds the keys of each table and allocates memory for their rows."""
        found = self._layout.find(lists)
        n = lists.samples
        segments = np.empty((len(found), 3), np.int64)
        segments[:, 0] = self._layout.table_of
        at = found * n
        segments[:, 1], segments[:, 2] = lists.ends[at], lists.ends[at + n]
        keys, positions, ends, wrong = distinct_tables(lists.ids, segments, self._layout.limits)
        if wrong >= 0:
            table, count = self._tables[wrong], self._layout.limits[wrong]
            raise InputError(f"ids of table {table.table.name!r} must be from 0 to {count - 1}")
        edges = [0, *np.cumsum(segments[:, 2] - segments[:, 1]).tolist()]
        starts = ends.tolist()
        total = 0
        for number, table in enumerate(self._tables):
            total += (starts[number + 1] - starts[number]) * table.dim
        memory = room(total, device=lists.values.device)
        rows, end = memory.numpy(), 0
        table_keys: dict[Any, NDArray[np.int64]] = {}
        table_rows: dict[Any, NDArray[np.float32]] = {}
        for table, low, high in zip(self._tables, starts, starts[1:], strict=False):
            mine, begin = keys[low:high], end
            end += (high - low) * table.dim
            if low < high or self.ps.collective:
                table_keys[table.table] = mine
                table_rows[table.table] = rows[begin:end].reshape(high - low, table.dim)
        return _BatchLookup(lists, found, keys, ends, positions, edges, memory, table_keys, table_rows)

    def _pulled(self, given: Any) -> tuple[_BatchLookup, list[tuple[Tensor, Tensor]]]:
        """Pulls what a batch needs. For each group of the layout: the rows of its tables, float32 [keys, dim], ready
        for autograd, and positions of the ids in them, int64; both on the device of the ids."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ConfigError("a trace would keep the rows that it sees: compile the model")
        if self.on_ids is not None:
            self.on_ids(given)
        lookup = self._claim(self._checked(given))
        if lookup.pull is not None:
            lookup.pull.result()
        device, floats, starts = lookup.lists.values.device, 0, lookup.ends.tolist()
        pulled: list[tuple[Tensor, Tensor]] = []
        for dim, _, tables, features in self._layout.groups:
            first, stop = starts[tables.start], starts[tables.stop]
            size = (stop - first) * dim
            rows = sent(lookup.floats[floats : floats + size].view(stop - first, dim), device)
            floats += size
            ends = starts[tables.start + 1 : tables.stop + 1]
            trained = [
                (table, lookup.keys[low:high], slice(low - first, high - first))
                for table, low, high in zip(self._tables[tables], starts[tables], ends, strict=True)
                if table.training and table._parameters["trains"].requires_grad  # type: ignore[union-attr]
            ]
            if trained and torch.is_grad_enabled():  # also of lists that are empty: a backward pass goes through
                passes = trained[0][0].passes
                forward = _CollectionPass(weakref.ref(self), [each for each in trained if len(each[1])], passes)
                rows.requires_grad_().register_post_accumulate_grad_hook(forward)
                with self.lock:
                    passes.add(forward)
            positions = lookup.positions[lookup.edges[features.start] : lookup.edges[features.stop]]
            if first:
                positions -= first
            pulled.append((rows, moved(torch.from_numpy(positions), device)))
        return lookup, pulled

    def extra_repr(self) -> str:
        return f"features={self.features}"


def _check(tables: Sequence[TableConfig]) -> None:
    if not tables:
        raise ConfigError("a collection has at least one table")
    names = [config.name for config in tables]
    features = [name for config in tables for name in config.feature_names]
    for what, found in (("tables", names), ("features", features)):
        if len(set(found)) < len(found):
            raise ConfigError(f"{what} of a collection must have different names, got {found}")
    for config in tables:
        if "." in config.name:
            raise ConfigError(
                f"table {config.name!r}: names of modules have no dots, so a collection's tables have none"
            )
        if config.mode not in MODES:
            raise ConfigError(
                f"table {config.name!r}: a collection's mode must be 'sum' or 'mean', got {config.mode!r}"
            )


class EmbeddingBagCollection(Collection):
    """Bags over several tables, with one pull and one push a step for all of them, as torchrec's layer of that name.

    Each table is opened as an `EmbeddingBag` of its name would be; several features may share one. `optimizer`, `push`
    and `pull` are for tables that bring none. weighted: each id has a weight; then all modes must be "sum". Rows are
    trained as those of `Embedding`; `embedding_bags.<table>` freezes one table alone, and names it in
    `full_state_dict`.
    """

    def __init__(
        self,
        ps: Worker,
        tables: Sequence[TableConfig],
        *,
        optimizer: ServerOptimizer | None = None,
        weighted: bool = False,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
    ) -> None:
        if weighted and any(config.mode != "sum" for config in tables):
            raise ConfigError("weights of ids are for mode 'sum', as torch has them")
        super().__init__(ps, tables, optimizer=optimizer, push=push, pull=pull)
        self.weighted = weighted

    def _register(self, tables: nn.ModuleDict) -> None:
        self.embedding_bags = tables

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on after it
    def forward(self, features: Any) -> KeyedTensor:
        """A `Jagged`, a KeyedJaggedTensor of torchrec or {feature: ids} -> a vector for each feature and sample, of all
        features as `features` has them; on the device of the ids, of a type as `Embedding`'s."""
        lookup, groups = self._pulled(features)
        layout, weights = self._layout, self._weights(lookup)
        bags = []
        for (rows, positions), (_, mode, _, named) in zip(groups, layout.groups, strict=True):
            low, high = lookup.edges[named.start], lookup.edges[named.stop]
            where = np.empty((named.stop - named.start, 3), np.int64)
            where[:, 0], where[:, 1] = lookup.found[named], lookup.edges[named]
            where[:, 1] -= low
            where[:, 2] = layout.columns[named]
            bags.append(Bags(rows, positions, where, mode, None if weights is None else weights[low:high]))
        values = pooled(bags, lookup.lists.ends, lookup.lists.samples, sum(layout.dims))
        return KeyedTensor(layout.shown, layout.dims, values.to(self._dtype))

    def _checked(self, given: Any) -> Lists:
        lists = super()._checked(given)
        if (lists.weights is not None) != self.weighted:
            has = "has no weights of ids" if lists.weights is None else "has weights of ids"
            raise InputError(f"the batch {has}, and the collection is built with weighted={self.weighted}")
        return lists

    def _weights(self, lookup: _BatchLookup) -> Tensor | None:
        """The weights of the ids, float32, in the order of the layout's features; None if they have none."""
        weights = lookup.lists.weights
        if weights is None:
            return None
        n, ends = lookup.lists.samples, lookup.lists.ends
        parts = [weights[ends[at * n] : ends[(at + 1) * n]] for at in lookup.found.tolist()]
        return torch.cat(parts).to(torch.float32)


class EmbeddingCollection(Collection):
    """Rows of several tables, with one pull and one push a step for all of them, as torchrec's layer of that name: as
    `EmbeddingBagCollection`, but a row for each id. `embeddings.<table>` is one table."""

    def _register(self, tables: nn.ModuleDict) -> None:
        self.embeddings = tables

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on after it
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """A `Jagged`, a KeyedJaggedTensor of torchrec or {feature: ids} -> of each feature a vector for each id, in the
        same lists."""
        lookup, groups = self._pulled(features)
        n, shown = lookup.lists.samples, dict[str, JaggedTensor]()
        for (rows, positions), group in zip(groups, self._layout.groups, strict=True):
            vectors = functional.embedding(positions, rows).to(self._dtype)
            named, edges = group.features, lookup.edges[group.features.start : group.features.stop + 1]
            sizes = np.diff(edges).tolist()
            for i, part in zip(range(named.start, named.stop), vectors.split(sizes), strict=True):
                at = lookup.found[i]
                lengths = torch.from_numpy(lookup.lists.lengths[at * n : (at + 1) * n].copy())
                shown[self._layout.features[i]] = JaggedTensor(part, lengths)
        return {name: shown[name] for name in self._layout.shown}
