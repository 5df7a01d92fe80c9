"""Checks of layers' arguments. Errors for arguments of torch's layers say what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import elasticps.model.spec
from elasticps.errors import ConfigError, InputError
from elasticps.model.spec import ServerOptimizer

_NOT_OURS = {
    "sparse": "leave it out: gradients of rows are always sparse",
    "scale_grad_by_freq": "divide the loss of a sample by its ids' frequency, or choose an optimizer such as "
    "elasticps.Adagrad, that slows down for frequent rows",
    "device": "leave it out: rows are at the servers, and what a pass gives is on the device of its ids",
    "norm_type": "leave it out, as max_norm: use weight decay",
    "_weight": "load the rows: layer.table.load(keys, rows)",
    "_freeze": "call layer.requires_grad_(False)",
    "embedding_dim": "write dim=",
}


def refuse_arguments(layer: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """ConfigError for arguments that torch's layer takes, in torch's order or under torch's names."""
    if args and isinstance(args[0], int):
        dim = f" {args[1]}," if len(args) > 1 and isinstance(args[1], int) else " dim,"
        raise ConfigError(
            f"{layer} takes a client and a table's name first, and not a number: write {layer}(ps, 'name',{dim} "
            f"num_embeddings={args[0]}, optimizer=elasticps.Adagrad(lr=0.1)); num_embeddings may be left out"
        )
    for name, instead in _NOT_OURS.items():
        if name in options:
            raise ConfigError(f"{layer} has no {name}=: {instead}")


def check_ids(table: str, ids: Any) -> None:
    """InputError unless `ids` is a tensor of ids."""
    what = f"ids of table {table!r} must be int64 or int32"
    if not isinstance(ids, Tensor):
        raise InputError(
            f"{what}, got {type(ids).__name__}: write torch.tensor(ids); lists of different lengths are for an "
            "EmbeddingBag with offsets, or a collection with elasticps.torch.Jagged"
        )
    if ids.is_nested:
        raise InputError(
            f"{what}, got a nested one: an EmbeddingBag takes ids.values() and ids.offsets(), a collection "
            "elasticps.torch.Jagged"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        hint = ": write ids.long(), before they are rounded" if ids.is_floating_point() else ": write ids.long()"
        raise InputError(f"{what}, got {ids.dtype}{hint}")


def refuse_torchs(optimizer: object) -> None:
    """ConfigError for an optimizer of torch's, which would run in this process, and for a class instead of an
    object."""
    kind = getattr(optimizer, "func", optimizer)  # of a functools.partial
    kind = kind if isinstance(kind, type) else type(kind)
    if issubclass(kind, torch.optim.Optimizer):
        ours = getattr(elasticps.model.spec, kind.__name__, None)
        instead = f"elasticps.{kind.__name__}(lr=…)" if ours else "one of elasticps' own, such as elasticps.Adam(lr=…)"
        raise ConfigError(f"the servers run the optimizer, which cannot be torch's {kind.__name__}: take {instead}")
    if isinstance(optimizer, type) and issubclass(optimizer, ServerOptimizer):
        raise ConfigError(f"the optimizer is a class: make it one, elasticps.{optimizer.__name__}(lr=…)")
