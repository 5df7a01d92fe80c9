"""Models of torchrec whose embedding tables live on the parameter servers.

    model = elasticps.torchrec.from_model(model, ps)     # a torchrec model, before it is sharded
    optimizer = elasticps.torch.Optimizer(ps, model, optimizer=eps.Adagrad(lr=0.01))   # of the dense weights

`from_model` replaces each `EmbeddingBagCollection` and `EmbeddingCollection` (and the fused ones) by one of the same
features, tables, poolings and optimizers: KeyedJaggedTensor in, torchrec's KeyedTensor or {feature: JaggedTensor} out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("torchrec") is None:
    raise ImportError(
        "elasticps.torchrec needs torchrec: pip install 'elasticps[torchrec]'; for CPU-only machines "
        "docs/guides/frameworks.md has the commands",
        name="torchrec",
    )

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection as PlainBags
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.embedding_modules import EmbeddingCollection as PlainRows
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

import elasticps.torch as eps_torch
from elasticps.errors import ConfigError
from elasticps.model.spec import SGD, Adagrad, Adam, AdamW, Init, RowAdagrad, ServerOptimizer, Uniform
from elasticps.torch import Jagged, TableConfig

if TYPE_CHECKING:
    from elasticps.torch.jagged import Lists
    from elasticps.torch.worker import Worker

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}
_FUSED_DEFAULTS = {"lr": 0.01, "eps": 1e-8}
"""What FBGEMM takes for settings that a fused collection was not given."""
_LOADED_BYTES = 16 << 20  # of rows that are sent to the servers at once


class _Features:
    """Brings a batch of torchrec into the form of a collection whose features are torchrec's embedding names."""

    def __init__(self, configs: Sequence[Any], *, weighted: bool) -> None:
        self.embedding_names = [name for names in get_embedding_names_by_table(configs) for name in names]
        self._lookups = [name for config in configs for name in config.feature_names]
        self._weighted = weighted

    def __call__(self, given: Any) -> Any:
        """The batch with a feature for each embedding name. A feature that several tables look up comes once for
        each; weights that the collection does not use are left out."""
        if isinstance(given, Jagged | Mapping) and not hasattr(given, "batch_size"):
            return given
        batch = maybe_td_to_kjt(given, None)
        if self.embedding_names != self._lookups:
            known = list(batch.keys())
            if not set(self._lookups) - set(known):
                batch = batch.permute([known.index(name) for name in self._lookups])
                return self._jagged(self.embedding_names, batch)
        return self._jagged(list(batch.keys()), batch)

    def _jagged(self, keys: list[str], batch: Any) -> Jagged:
        if batch.variable_stride_per_key():
            raise ConfigError("features of one batch must have the same samples: strides per key are not to be had")
        weights = batch.weights_or_none() if self._weighted else None
        return Jagged(keys, batch.values(), batch.lengths(), weights)


class RemoteEmbeddingBagCollection(eps_torch.EmbeddingBagCollection, EmbeddingBagCollectionInterface):
    """torchrec's `EmbeddingBagCollection` with its tables at the servers. `from_model` makes it."""

    def __init__(self, ps: Worker, configs: Sequence[Any], tables: Sequence[TableConfig], *, weighted: bool) -> None:
        super().__init__(ps, tables, weighted=weighted)
        self._configs = list(configs)
        self._batch = _Features(configs, weighted=weighted)

    def forward(self, features: Any) -> Any:
        """A KeyedJaggedTensor (or TensorDict, `Jagged`, {feature: ids}) -> torchrec's KeyedTensor, float32
        [samples, floats of all features]."""
        vectors = super().forward(features)
        return KeyedTensor(vectors.keys(), vectors.length_per_key(), vectors.values().float())

    def _checked(self, given: Any) -> Lists:
        return super()._checked(self._batch(given))

    def embedding_bag_configs(self) -> list[Any]:
        """torchrec's EmbeddingBagConfigs, as the replaced collection had them."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether each id has a weight."""
        return self.weighted

    @property
    def device(self) -> torch.device:
        """The CPU: rows are at the servers, results on the device of the ids."""
        return torch.device("cpu")


class RemoteEmbeddingCollection(eps_torch.EmbeddingCollection, EmbeddingCollectionInterface):
    """torchrec's `EmbeddingCollection` with its tables at the servers. `from_model` makes it."""

    def __init__(
        self, ps: Worker, configs: Sequence[Any], tables: Sequence[TableConfig], *, need_indices: bool
    ) -> None:
        super().__init__(ps, tables)
        self._configs = list(configs)
        self._need_indices = need_indices
        self._batch = _Features(configs, weighted=False)

    def forward(self, features: Any) -> Any:
        """A KeyedJaggedTensor -> {feature: torchrec's JaggedTensor}, values float32 [ids, dim]."""
        given = self._batch(features)
        vectors, indices = super().forward(given), self._indices(given)
        return {
            name: JaggedTensor(values=each.values().float(), lengths=each.lengths(), weights=indices.get(name))
            for name, each in vectors.items()
        }

    def _indices(self, given: Any) -> dict[str, Tensor]:
        """The ids of each feature, where the replaced collection gave them as weights."""
        if not self._need_indices:
            return {}
        given = Jagged.of(given) if isinstance(given, Mapping) else given
        keys, lengths = given.keys(), given.lengths()
        per_key = lengths.view(len(keys), len(lengths) // max(len(keys), 1)).sum(1).tolist()
        return dict(zip(keys, given.values().split(per_key), strict=True))

    def _checked(self, given: Any) -> Lists:
        return super()._checked(self._batch(given))

    def embedding_configs(self) -> list[Any]:
        """torchrec's EmbeddingConfigs, as the replaced collection had them."""
        return self._configs

    def embedding_dim(self) -> int:
        """Floats of a row, the same in all tables."""
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the results, table by table."""
        names: list[list[str]] = get_embedding_names_by_table(self._configs)
        return names

    def need_indices(self) -> bool:
        """Whether results have their ids as weights."""
        return self._need_indices


def from_model(
    model: nn.Module,
    ps: Worker,
    *,
    optimizer: ServerOptimizer | None = None,
    load: bool = True,
    change: Callable[[TableConfig], TableConfig] | None = None,
) -> nn.Module:
    """Replaces the embedding collections of a torchrec model by ours, in place, and returns the model.

    Tables keep names, features, dims, types, poolings and weights of ids. A table's optimizer is that which
    `_apply_optimizer_in_backward` or a fused collection has noted, as one of the servers'; optimizer: for tables
    without one. Rows begin with the model's weights: servers that have no row of an id yet are sent it, so any worker
    may convert the model at any time and undoes no training; a table with eviction or admission is sent rows only while
    it has none at all. Every rank of a group converts the same model; the weights are those of rank 0. A model on the
    meta device, or load=False: rows are drawn at the servers from the uniform distribution of their config, or filled
    by its `init_fn`.

    change: gets each `TableConfig` and returns the one to use, `dataclasses.replace(table, num_embeddings=None,
    cache=eps.Cache(…))`, say. An error leaves the model as it was.

    Raises `ConfigError` for a model without collections, one that is sharded already, two tables of one name, and an
    optimizer or a data type that servers do not have; what `ps.table` and `SparseTable.load` raise.
    """
    found: dict[nn.Module, list[str]] = {}  # collections, and where each is, maybe at several places
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _KINDS):
            found.setdefault(module, []).append(path)
    if not found:
        sharded = next((m for m in model.modules() if type(m).__name__.startswith("Sharded")), None)
        hint = "; it is sharded already: convert it before DistributedModelParallel" if sharded is not None else ""
        raise ConfigError(f"the model has no EmbeddingBagCollection or EmbeddingCollection to replace{hint}")
    tables = {module: [change(each) if change else each for each in _tables(module, optimizer)] for module in found}
    names = [table.name for each in tables.values() for table in each]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"several collections have a table {twice[0]!r}; at the servers it would be one: rename one")
    ours = {module: _converted(module, tables[module], ps, load) for module in found}
    if model in ours:
        return ours[model]
    paths = [(*path.rpartition("."), each) for module, each in ours.items() for path in found[module]]
    parents = [model.get_submodule(parent) for parent, *_ in paths]  # all of them while the model is as it was
    for parent, (_, _, name, each) in zip(parents, paths, strict=True):
        setattr(parent, name, each)
    return model


_KINDS = (PlainBags, PlainRows, FusedEmbeddingBagCollection, FusedEmbeddingCollection)


def _configs(module: Any) -> list[Any]:
    bags = isinstance(module, EmbeddingBagCollectionInterface)
    return list(module.embedding_bag_configs() if bags else module.embedding_configs())


def _weights(module: Any) -> dict[str, Tensor]:
    bags = isinstance(module, EmbeddingBagCollectionInterface)
    return {name: each.weight for name, each in (module.embedding_bags if bags else module.embeddings).items()}


def _tables(module: Any, optimizer: ServerOptimizer | None) -> list[TableConfig]:
    """Our configs of a collection's tables, in its order."""
    configs, weights = _configs(module), _weights(module)
    return [
        _table(config, features, _optimizer_of(module, config.name, weights[config.name]) or optimizer)
        for config, features in zip(configs, get_embedding_names_by_table(configs), strict=True)
    ]


def _converted(module: Any, tables: Sequence[TableConfig], ps: Worker, load: bool) -> nn.Module:
    configs, weights = _configs(module), _weights(module)
    existing = _row_counts(ps, [table.name for table in tables])
    ours: RemoteEmbeddingBagCollection | RemoteEmbeddingCollection
    if isinstance(module, EmbeddingBagCollectionInterface):
        ours = RemoteEmbeddingBagCollection(ps, configs, tables, weighted=module.is_weighted())
    else:
        ours = RemoteEmbeddingCollection(ps, configs, tables, need_indices=module.need_indices())
    ours.train(module.training)
    layers: dict[str, Any] = {table.table.name: table for table in ours.tables}
    for config, table, rows_there in zip(configs, tables, existing, strict=True):
        weight, layer = weights[config.name], layers[table.name]
        layer.requires_grad_(weight.requires_grad)
        # Of a table that gives rows up, or refuses them, nobody knows which of them were there.
        enough = 1 if table.admission or table.eviction else config.num_embeddings
        rows = _rows(config, weight, load) if rows_there < enough else None
        if rows is not None:
            _fill(layer.table, rows)
    return ours


def _row_counts(ps: Any, names: list[str]) -> list[int]:
    """How many rows tables have at the servers, 0 for one that is not there; the same at all ranks of a group."""
    if ps.collective:
        found: list[int] = ps.row_counts(names)
        return found
    there = ps.tables()
    return [there[name].rows if name in there else 0 for name in names]


def _table(config: Any, features: list[str], optimizer: ServerOptimizer | None) -> TableConfig:
    """Our config of one of torchrec's."""
    if optimizer is None:
        raise ConfigError(
            f"table {config.name!r} has no optimizer: note one with _apply_optimizer_in_backward(torch.optim.Adagrad, "
            "…), or give from_model(…, optimizer=eps.RowAdagrad(lr=…))"
        )
    if config.data_type not in _DTYPES:
        raise ConfigError(
            f"table {config.name!r} is of {config.data_type}, servers store {', '.join(_DTYPES.values())}"
        )
    pooling = getattr(config, "pooling", PoolingType.SUM)
    if pooling not in _POOLINGS:
        raise ConfigError(f"table {config.name!r} pools by {pooling}: collections of bags have SUM and MEAN")
    return TableConfig(
        config.name, config.embedding_dim, features, _POOLINGS[pooling], optimizer,
        _uniform(config), _DTYPES[config.data_type], config.num_embeddings,
    )  # fmt: skip


def _bounds(config: Any) -> tuple[float, float] | None:
    """Those of a config whose `init_fn` draws uniformly, as torchrec's default does; None for another one."""
    init = config.init_fn
    if init is None:
        return config.get_weight_init_min(), config.get_weight_init_max()
    drawn = isinstance(init, partial) and init.func is nn.init.uniform_ and not init.args
    if not drawn or not init.keywords.keys() <= {"a", "b"}:
        return None
    return init.keywords.get("a", 0.0), init.keywords.get("b", 1.0)


def _uniform(config: Any) -> Init:
    """The distribution of new rows: the config's, or torchrec's default."""
    low, high = _bounds(config) or (config.get_weight_init_min(), config.get_weight_init_max())
    return Uniform(low, high, seed=zlib.crc32(config.name.encode()))


def _rows(config: Any, weight: Tensor, load: bool) -> Tensor | None:
    """The rows that a table begins with, [num_embeddings, dim]; None for those that servers draw."""
    if load and not weight.is_meta:
        return weight.detach()
    if _bounds(config):
        return None
    rows = torch.empty(config.num_embeddings, config.embedding_dim)
    config.init_fn(rows)
    return rows


def _fill(table: Any, rows: Tensor) -> None:
    step = max(1, _LOADED_BYTES // (4 * rows.shape[1]))
    for at in range(0, len(rows), step):
        some = rows[at : at + step].float().cpu().contiguous().numpy()
        table.load(torch.arange(at, at + len(some)).numpy(), some, only_new=True)


# -- optimizers


def _optimizer_of(module: Any, table: str, weight: Tensor) -> ServerOptimizer | None:
    """The servers' optimizer for what a model notes of a table; None if it notes nothing."""
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        kind, fused = module.optimizer_type(), _FUSED_DEFAULTS | module.optimizer_kwargs()
        decoupled = kind is torch.optim.Adam and fused.get("weight_decay")  # as FBGEMM's Adam decays weights
        return server_optimizer(torch.optim.AdamW if decoupled else kind, fused, table)
    noted = getattr(weight, "_in_backward_optimizers", [])
    if not noted:
        return None
    if len(noted) > 1:
        raise ConfigError(f"table {table!r} has {len(noted)} optimizers noted: a table has one")
    settings: Mapping[str, Any] = weight._optimizer_kwargs[-1]  # type: ignore[attr-defined]
    groups = getattr(noted[-1], "param_groups", None)  # torchrec's placeholders for FBGEMM's kernels have none
    settings = {**groups[0]} if groups else _FUSED_DEFAULTS | dict(settings)
    return server_optimizer(weight._optimizer_classes[-1], settings, table)  # type: ignore[attr-defined]


_SAME: dict[str, tuple[type[ServerOptimizer], dict[str, str]]] = {
    "SGD": (SGD, {"momentum": "momentum", "weight_decay": "weight_decay", "nesterov": "nesterov"}),
    "Adagrad": (Adagrad, {
        "eps": "eps", "initial_accumulator_value": "initial_accumulator", "weight_decay": "weight_decay",
    }),
    "RowWiseAdagrad": (RowAdagrad, {"eps": "eps"}),
    "Adam": (Adam, {"betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}),
    "AdamW": (AdamW, {"betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}),
}  # fmt: skip
"""Optimizers by their name at torch and torchrec: ours, and our names of their settings."""
_WITHOUT_EFFECT = {
    "params", "lr", "learning_rate", "foreach", "fused", "capturable", "differentiable", "beta1", "beta2",
    "decoupled_weight_decay",
}  # fmt: skip


def server_optimizer(kind: type[Any], settings: Mapping[str, Any], table: str) -> ServerOptimizer:
    """The servers' optimizer that does what one of torch's or torchrec's does with these settings. ConfigError for one
    that servers do not have, or a setting that would do something else there."""
    decoupled = kind.__name__ == "Adam" and settings.get("decoupled_weight_decay")
    known = "AdamW" if decoupled else kind.__name__
    if known not in _SAME:
        raise ConfigError(
            f"table {table!r} is trained by {kind.__name__}, which servers do not have: they have {', '.join(_SAME)}, "
            "and eps.Custom (docs/guides/custom.md)"
        )
    ours, names = _SAME[known]
    given = dict(settings)
    if "beta1" in given or "beta2" in given:
        given.setdefault("betas", (given.get("beta1", 0.9), given.get("beta2", 0.999)))
    values: dict[str, Any] = {"lr": float(given["learning_rate"] if "learning_rate" in given else given["lr"])}
    for name, value in given.items():
        if name in names:
            values[names[name]] = value
        elif name not in _WITHOUT_EFFECT and value not in (None, 0, False) and not _unused(kind, name):
            raise ConfigError(f"table {table!r}: {kind.__name__}'s {name}={value!r} is not to be had at the servers")
    return ours(**values)


def _unused(kind: type[Any], name: str) -> bool:
    """Whether an optimizer never reads a setting: FBGEMM's plain SGD has no eps."""
    return (kind.__name__, name) == ("SGD", "eps")
