"""Several tables as one layer: their ids in one batch of lists, one pull and one push for all of them.

Lists of all features of a table look up one set of rows, so each key's gradients are one sum when they get here.
Tables of the same dim and mode share one matrix of rows and one operation of torch's.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from elasticps.errors import ConfigError, InputError
from elasticps.model.caching import Cache
from elasticps.model.spec import Filter, Init
from elasticps.model.spec import Optimizer as ServerOptimizer
from elasticps.torch.embedding import MAX_PREFETCHED, Rows, Want, shares
from elasticps.torch.group.client import GroupClient
from elasticps.torch.host import moved, room, sent
from elasticps.torch.jagged import JaggedTensor, KeyedTensor, Lists, lists_of
from elasticps.torch.kernels.distinct import distinct_tables

if TYPE_CHECKING:
    from elasticps.client import Client
    from elasticps.client.pull_tables import TablesPull
    from elasticps.torch.group.several import GroupTablesRead
    from elasticps.torch.step_rows import StepRead, StepRows

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

    @property
    def feature_names(self) -> list[str]:
        """At least one."""
        return list(self.features) or [self.name]


class Table(Rows):
    """One table of a collection, which pulls its rows together with those of the others."""


class _Tables(nn.ModuleDict):
    """Tables by name, also those that are called as a method of it is."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        super().__init__()
        self._modules.update(tables)


class _Group(NamedTuple):
    """Tables of one dim and mode, one after another, and their features in that order."""

    dim: int
    mode: str
    tables: slice
    features: slice


class _Layout:
    """In which order tables and features are looked up: by dim and mode, else as they were given."""

    def __init__(self, configs: Sequence[TableConfig]) -> None:
        kinds = list(dict.fromkeys((config.dim, config.mode) for config in configs))
        self.configs = [config for kind in kinds for config in configs if (config.dim, config.mode) == kind]
        self.features = [name for config in self.configs for name in config.feature_names]
        table_of = [i for i, config in enumerate(self.configs) for _ in config.feature_names]
        self.table_of = np.array(table_of, np.int64)
        self.groups: list[_Group] = []
        for dim, mode in kinds:
            tables = [i for i, config in enumerate(self.configs) if (config.dim, config.mode) == (dim, mode)]
            features = [i for i, table in enumerate(table_of) if table in tables]
            span, named = slice(tables[0], tables[-1] + 1), slice(features[0], features[-1] + 1)
            self.groups.append(_Group(dim, mode, span, named))
        self.shown = [name for config in configs for name in config.feature_names]
        self._known: tuple[list[str], NDArray[np.int64]] = [], np.empty(0, np.int64)

    def find(self, lists: Lists) -> NDArray[np.int64]:
        """Where each feature stands among those of a batch. InputError if one is missing."""
        known = self._known  # threads may share a layer
        if lists.keys != known[0]:
            if missing := [name for name in self.features if name not in lists.keys]:
                raise InputError(f"the batch has no feature {missing[0]!r}, it has {lists.keys}")
            found = [lists.keys.index(name) for name in self.features]
            known = self._known = list(lists.keys), np.array(found, np.int64)
        return known[1]


@dataclass(eq=False)
class _Lookup:
    """Rows that a batch needs, on their way. positions: of the ids, in the order of the layout's features, which of
    `keys` each is; edges: of each feature's ids among these."""

    lists: Lists
    found: NDArray[np.int64]  # where each feature stands in the batch
    keys: NDArray[np.int64]
    ends: NDArray[np.int64]  # of each table's keys
    positions: NDArray[np.int64]
    edges: list[int]
    floats: Tensor  # rows of all tables, one after another
    wanted: dict[Any, NDArray[np.int64]]  # of each table its keys
    places: dict[Any, NDArray[np.float32]]  # of its rows
    pull: TablesPull[Any] | GroupTablesRead[Any] | StepRead | None = None
    asked_at: tuple[int, int] | None = None  # of rows that were expected: clock and changes of the tables at that time


@dataclass(eq=False)
class _Use:
    """Takes the gradient of a group's rows, of one forward pass. Lives as long as the autograd graph does."""

    owner: weakref.ref[Collection]
    trained: list[tuple[Table, NDArray[np.int64], slice]]  # its keys, and where their rows are
    uses: weakref.WeakSet[Any]  # of the group

    def __call__(self, rows: Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        owner = self.owner()
        if owner is None or gradient is None:
            return
        with owner.lock:
            self.uses.discard(self)
        for table, keys, mine in self.trained:
            table.keep((keys, gradient[mine]))
        for table, _, _ in self.trained:
            table.on_gradient()


class Collection(nn.Module):
    """What collections have in common: the tables, and the pull of all of them."""

    def __init__(
        self,
        ps: Client | GroupClient,
        tables: Sequence[TableConfig],
        *,
        optimizer: ServerOptimizer | None = None,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
    ) -> None:
        super().__init__()
        _check(tables)
        self.ps = ps
        self.on_ids: Callable[[Any], None] | None = None  # hears of what forward passes get
        self.step_rows: StepRows[Any] | None = None  # what other devices' models have asked for
        self._together = isinstance(ps, GroupClient)  # what one rank pulls, all do, if it is nothing
        self._layout = layout = _Layout(tables)
        made = {}
        for config in tables:
            chosen = config.optimizer or optimizer
            if chosen is None:
                raise ConfigError(f"table {config.name!r} has no optimizer, and the collection has none for all")
            made[config.name] = Table(
                ps, config.name, config.dim, optimizer=chosen, init=config.init, dtype=config.dtype,
                num_embeddings=config.num_embeddings, push=push if config.push is None else config.push,
                pull=pull if config.pull is None else config.pull, cache=config.cache,
            )  # fmt: skip
        self._tables = [made[config.name] for config in layout.configs]
        self._ahead: deque[_Lookup] = deque(maxlen=MAX_PREFETCHED)
        self._expected: list[_Lookup] = []  # of the next batch, to be asked for when this one's step has ended
        self.lock = threading.Lock()  # backward passes on CUDA run in torch's own threads
        for group in layout.groups:
            uses: weakref.WeakSet[Any] = weakref.WeakSet()
            for table in self._tables[group.tables]:
                table.uses = uses
        self._place(_Tables(made))

    def _place(self, tables: nn.ModuleDict) -> None:
        """Keeps the tables under the name that torchrec has for them."""
        raise NotImplementedError

    def _checked(self, given: Any) -> Lists:
        return lists_of(given)

    @property
    def features(self) -> list[str]:
        """Names of all features, table by table as they were given."""
        return list(self._layout.shown)

    @property
    def tables(self) -> Sequence[Rows]:
        """The tables, in the order in which they are looked up."""
        return self._tables

    def keys_of(self, features: Any) -> list[tuple[Rows, NDArray[np.int64]]]:
        """Of a batch, the tables that it needs and the keys of each, int64, distinct. Errors as for a forward pass."""
        lookup = self._plan(self._checked(features))
        return [(table, lookup.wanted[table.table]) for table in self._tables if table.table in lookup.wanted]

    def prefetch(self, features: Any) -> None:
        """Asks for the rows of a batch now; the forward pass that gets the same lists takes them, as new as the servers
        had them at the time of this call."""
        self._ahead.append(self._ask(self._copied(features)))

    def _copied(self, features: Any) -> Lists:
        lists = self._checked(features)
        return lists._replace(ids=lists.ids.copy(), lengths=lists.lengths.copy())  # the caller may change them

    def expect(self, *features: Any) -> None:
        """What the next forward passes will get, instead of what was said before. The Optimizer's next `step()` asks
        for these rows in the messages in which its gradients leave and the dense weights are asked for. They are as new
        as that step; passes that come after another step ask again. Errors as for a forward pass."""
        self._expected = [self._plan(self._copied(each)) for each in features]

    def wants(self) -> list[Want]:
        """What is expected, for a step that ends; nothing is, then."""
        expected, self._expected = self._expected, []
        return [Want(each.wanted, each.places, partial(self._began, each)) for each in expected if each.wanted]

    def _began(self, lookup: _Lookup, pull: TablesPull[Any]) -> None:
        lookup.pull, lookup.asked_at = pull, self._now
        self._ahead.append(lookup)

    @property
    def _now(self) -> tuple[int, int]:
        """What rows that were expected are as new as."""
        return self.ps.clock, sum(int(getattr(table.table, "changes", 0)) for table in self._tables)

    def _claim(self, lists: Lists) -> _Lookup:
        for lookup in list(self._ahead):
            if lookup.asked_at is not None and lookup.asked_at != self._now:
                with suppress(ValueError):
                    self._ahead.remove(lookup)
            elif lookup.lists.same(lists):
                with suppress(ValueError):  # else another thread has taken it
                    self._ahead.remove(lookup)
                    lookup.lists = lists  # the caller's weights, and device
                    return lookup
        return self._ask(lists, self.step_rows if shares(self, self._tables) else None)

    def _ask(self, lists: Lists, step_rows: StepRows[Any] | None = None) -> _Lookup:
        lookup = self._plan(lists)
        if step_rows is not None:
            lookup.pull = step_rows.ask(self.ps.clock, lookup.wanted, lookup.places, self.ps.pull_async)
        elif lookup.wanted:
            lookup.pull = self.ps.pull_async(lookup.wanted, lookup.places)
        return lookup

    def _plan(self, lists: Lists) -> _Lookup:
        """What is to be asked for."""
        found = self._layout.find(lists)
        n = lists.samples
        segments = np.empty((len(found), 3), np.int64)
        segments[:, 0] = self._layout.table_of
        at = found * n
        segments[:, 1], segments[:, 2] = lists.ends[at], lists.ends[at + n]
        keys, positions, ends = distinct_tables(lists.ids, segments, len(self._tables))
        edges = [0, *np.cumsum(segments[:, 2] - segments[:, 1]).tolist()]
        starts, floats = ends.tolist(), 0
        wanted: dict[Any, NDArray[np.int64]] = {}
        places: dict[Any, NDArray[np.float32]] = {}
        total = sum((b - a) * t.dim for a, b, t in zip(starts, starts[1:], self._tables, strict=False))
        floats_of_all = room(total, device=lists.values.device)
        rows = floats_of_all.numpy()
        for table, low, high in zip(self._tables, starts, starts[1:], strict=False):
            mine, size = keys[low:high], (high - low) * table.dim
            if size and table.num_embeddings is not None and not 0 <= mine.min() <= mine.max() < table.num_embeddings:
                raise InputError(f"ids of table {table.table.name!r} must be from 0 to {table.num_embeddings - 1}")
            if size or self._together:
                wanted[table.table] = mine
                places[table.table] = rows[floats : floats + size].reshape(high - low, table.dim)
            floats += size
        return _Lookup(lists, found, keys, ends, positions, edges, floats_of_all, wanted, places)

    def _pulled(self, given: Any) -> tuple[_Lookup, list[tuple[Tensor, Tensor]]]:
        """Of each group the rows of its tables, [keys, dim], ready for autograd, and positions of its ids in them."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ConfigError("a trace would keep the rows that it sees: compile the model")
        if self.on_ids is not None:
            self.on_ids(given)
        lookup = self._claim(self._checked(given))
        if lookup.pull is not None:
            lookup.pull.result()
        return lookup, list(self._groups(lookup))

    def _groups(self, lookup: _Lookup) -> Iterator[tuple[Tensor, Tensor]]:
        device, floats, starts = lookup.lists.values.device, 0, lookup.ends.tolist()
        for dim, _, tables, features in self._layout.groups:
            first, stop = starts[tables.start], starts[tables.stop]
            size = (stop - first) * dim
            rows = sent(lookup.floats[floats : floats + size].view(stop - first, dim), device)
            floats += size
            ends = starts[tables.start + 1 : tables.stop + 1]
            trained = [
                (table, lookup.keys[low:high], slice(low - first, high - first))
                for table, low, high in zip(self._tables[tables], starts[tables], ends, strict=True)
                if table.training and table.trains.requires_grad
            ]
            if trained and torch.is_grad_enabled():  # also of lists that are empty: a backward pass goes through
                use = _Use(weakref.ref(self), [each for each in trained if len(each[1])], trained[0][0].uses)
                rows.requires_grad_().register_post_accumulate_grad_hook(use)
                with self.lock:
                    use.uses.add(use)
            positions = lookup.positions[lookup.edges[features.start] : lookup.edges[features.stop]]
            if first:
                positions -= first
            yield rows, moved(torch.from_numpy(positions), device)

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
        ps: Client | GroupClient,
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

    def _place(self, tables: nn.ModuleDict) -> None:
        self.embedding_bags = tables

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on behind it
    def forward(self, features: Any) -> KeyedTensor:
        """A `Jagged`, a KeyedJaggedTensor of torchrec or {feature: ids} -> a vector for each feature and sample, of all
        features as `features` has them; on the device of the ids, of a type as `Embedding`'s."""
        lookup, groups = self._pulled(features)
        n, weights = lookup.lists.samples, self._weights(lookup)
        bags: dict[str, Tensor] = {}
        for (rows, positions), (dim, mode, _, named) in zip(groups, self._layout.groups, strict=True):
            offsets = moved(torch.from_numpy(self._offsets(lookup, named)), positions.device)
            low, high = lookup.edges[named.start], lookup.edges[named.stop]
            pooled = functional.embedding_bag(
                positions, rows, offsets, mode=mode, include_last_offset=True,
                per_sample_weights=None if weights is None else weights[low:high],
            )  # fmt: skip
            each = pooled.view(named.stop - named.start, n, dim)
            if len(groups) == 1:
                values = each.transpose(0, 1).reshape(n, len(each) * dim)
                return KeyedTensor(self.features, [dim] * len(each), values.to(self._tables[0].trains.dtype))
            bags |= dict(zip(self._layout.features[named], each, strict=True))
        shown = [bags[name] for name in self._layout.shown]
        dims = [vectors.shape[1] for vectors in shown]
        return KeyedTensor(self.features, dims, torch.cat(shown, dim=1).to(self._tables[0].trains.dtype))

    def _checked(self, given: Any) -> Lists:
        lists = super()._checked(given)
        if (lists.weights is not None) != self.weighted:
            has = "has no weights of ids" if lists.weights is None else "has weights of ids"
            raise InputError(f"the batch {has}, and the collection is built with weighted={self.weighted}")
        return lists

    @staticmethod
    def _offsets(lookup: _Lookup, named: slice) -> NDArray[np.int64]:
        """Where each list of a group's features begins, and the last one ends."""
        n, found = lookup.lists.samples, lookup.found[named]
        offsets = np.zeros(len(found) * n + 1, np.int64)
        lengths = lookup.lists.lengths.reshape(-1, n)[found] if n else np.empty(0, np.int64)
        np.cumsum(lengths.reshape(-1), out=offsets[1:])
        return offsets

    def _weights(self, lookup: _Lookup) -> Tensor | None:
        """Of the ids, in the order of the layout's features."""
        weights = lookup.lists.weights
        if weights is None:
            return None
        n, ends = lookup.lists.samples, lookup.lists.ends
        parts = [weights[ends[at * n] : ends[(at + 1) * n]] for at in lookup.found.tolist()]
        return torch.cat(parts).to(torch.float32)


class EmbeddingCollection(Collection):
    """Rows of several tables, with one pull and one push a step for all of them, as torchrec's layer of that name: as
    `EmbeddingBagCollection`, but a row for each id. `embeddings.<table>` is one table."""

    def _place(self, tables: nn.ModuleDict) -> None:
        self.embeddings = tables

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on behind it
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """A `Jagged`, a KeyedJaggedTensor of torchrec or {feature: ids} -> of each feature a vector for each id, in the
        same lists."""
        lookup, groups = self._pulled(features)
        n, shown = lookup.lists.samples, dict[str, JaggedTensor]()
        for (rows, positions), group in zip(groups, self._layout.groups, strict=True):
            vectors = functional.embedding(positions, rows).to(self._tables[0].trains.dtype)
            named, edges = group.features, lookup.edges[group.features.start : group.features.stop + 1]
            sizes = np.diff(edges).tolist()
            for i, part in zip(range(named.start, named.stop), vectors.split(sizes), strict=True):
                at = lookup.found[i]
                lengths = torch.from_numpy(lookup.lists.lengths[at * n : (at + 1) * n].copy())
                shown[self._layout.features[i]] = JaggedTensor(part, lengths)
        return {name: shown[name] for name in self._layout.shown}
