"""A whole model in one dictionary: what `state_dict()` has, and the rows of its tables, which are at the servers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from elasticps.errors import ConfigError
from elasticps.torch.embedding import Rows


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, and of each layer over a table `<layer>.keys`, int64 [n] in ascending order, and
    `<layer>.weight`, float32 [n, dim]. Layers that share a table share the tensors.

    Training may go on meanwhile, but then rows are of different moments. Needs memory for all of it. Optimizers' slots
    are not in it. Raises `Timeout`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"state_dict\(\) has not the rows", category=UserWarning)
        state = dict(model.state_dict())
    known: dict[str, tuple[Tensor, Tensor]] = {}
    for prefix, layer in _layers(model):
        if layer.table.name not in known:
            known[layer.table.name] = _rows(layer)
        state[f"{prefix}keys"], state[f"{prefix}weight"] = known[layer.table.name]
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives the tables of a model, at the servers, the rows that `full_state_dict` found, and the model its weights.

    Rows that are not in it stay what they are. One worker does this, while nobody trains: before the `Optimizer` is
    built, or call its `upload()` afterwards. Raises ConfigError if a table is not in it, `InputError` if rows do not
    fit, and what `nn.Module.load_state_dict` raises for the rest.
    """
    rest = dict(state)
    given: dict[str, tuple[Rows, Tensor, Tensor]] = {}
    for prefix, layer in _layers(model):
        keys, weight = rest.pop(f"{prefix}keys", None), rest.pop(f"{prefix}weight", None)
        if keys is None or weight is None:
            raise ConfigError(
                f"the state has no {prefix}keys or no {prefix}weight, the rows of table {layer.table.name!r}: it was "
                "made by state_dict(), or of another model; full_state_dict(model) has them"
            )
        given[layer.table.name] = layer, keys, weight
    model.load_state_dict(rest)
    for layer, keys, weight in given.values():
        layer.table.load(keys.cpu().numpy(), weight.detach().float().cpu().numpy())


def _layers(model: nn.Module) -> Iterator[tuple[str, Rows]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Rows):
            yield f"{path}." if path else "", module


def _rows(layer: Rows) -> tuple[Tensor, Tensor]:
    parts = list(layer.table.items())
    keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in parts)])
    rows = np.concatenate([np.empty((0, layer.dim), np.float32), *(rows for _, rows in parts)])
    order = np.argsort(keys)
    return torch.from_numpy(keys[order]), torch.from_numpy(rows[order])
