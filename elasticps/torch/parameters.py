"""The parameters and tables that an Optimizer trains, and torch's param groups of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from elasticps.errors import ConfigError, SpecError
from elasticps.model.optimizers import Schedule
from elasticps.model.spec import MAX_NAME, Filter, ServerOptimizer, shows
from elasticps.torch.arguments import refuse_torchs
from elasticps.torch.embedding import TableLayer
from elasticps.torch.weights import Copy, DenseParameter, values_of

if TYPE_CHECKING:
    from elasticps.client import DenseTensor, SparseTable
    from elasticps.torch.group import GroupTable, GroupTensor
    from elasticps.torch.worker import Worker

    Target = DenseTensor | SparseTable | GroupTensor | GroupTable

Groups = dict[object, dict[str, Any]]
"""param groups by what their members have in common"""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(eq=False)
class TrainedTable:
    """One table, with every layer of the models that reads it: of each place in them, one for each device."""

    table: SparseTable | GroupTable
    layers: list[TableLayer]
    group: int  # index of its param group
    left: bool = False  # whether gradients of its rows have left in this step


NO_WRAPPER = "workers of elasticps need no (Distributed)DataParallel: train the module inside of it"


def refuse_wrapped(models: Sequence[nn.Module]) -> None:
    """Raises ConfigError if a DistributedDataParallel somewhere in this process has parameters of these models.

    One that is put around a model after its Optimizer was built (as Ray's prepare_model does) averages gradients that
    each worker sends itself. torch tells a module nothing of its wrapper, so all objects are looked through, where
    processes are joined at all; call this once, before the first gradient leaves.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    for each in gc.get_objects():
        if issubclass(type(each), nn.parallel.DistributedDataParallel) and any(
            id(parameter) in ours for parameter in each.parameters()
        ):
            raise ConfigError(
                f"DistributedDataParallel was put around this model after its Optimizer was built: {NO_WRAPPER}. It"
                " averages gradients, which each worker sends to the servers itself. Nothing of this step was sent."
                " With Ray Train, leave out prepare_model"
            )


def plain(model: object) -> nn.Module:
    """Without what torch.compile puts around it, so that parameters have one name with it and without."""
    if not isinstance(model, nn.Module):
        one = ": take one of its models" * hasattr(model, "models")
        raise ConfigError(f"this takes a whole model, an nn.Module, not a {type(model).__name__}{one}")
    inside: nn.Module = getattr(model, "_orig_mod", model)
    return inside


def dense_of(
    ps: Worker,
    models: Sequence[nn.Module],
    optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None,
    prefix: str,
    groups: Groups,
    push: Sequence[Filter],
    pull: Sequence[Filter],
    trained: Mapping[str, nn.Parameter],
) -> list[DenseParameter]:
    """Opens a tensor for each dense parameter of the first model, which the others have too. Adds to the groups.

    trained: the parameters whose tensors other Optimizers train, by the tensors' names. ConfigError and SpecError for a
    parameter that can be none of the servers'.
    """
    dense = list[tuple[str, list[Copy], int]]()
    specs, values = dict[str, ServerOptimizer](), dict[str, object]()
    others = [dict(model.named_parameters()) for model in models[1:]]
    for name, parameter in models[0].named_parameters():  # a shared parameter comes once, under its first name
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet: run one batch through the model first")
        if parameter.dtype not in _DTYPES:
            raise SpecError(f"parameter {name!r} is {parameter.dtype}, servers compute in float32: call model.float()")
        if parameter.numel() == 0:
            continue
        spec = optimizer(name, parameter) if callable(optimizer) else optimizer
        refuse_torchs(spec)
        if spec is None:
            raise ConfigError(f"parameter {name!r} is dense: the Optimizer needs optimizer=, e.g. Adam(lr=1e-3)")
        tensor_name = f"{prefix}.{name.replace('_orig_mod.', '')}"
        _check_tensor_name(name, tensor_name)
        if trained.get(tensor_name, parameter) is not parameter:
            raise ConfigError(
                f"the Optimizer of another model on this client trains the tensor {tensor_name!r}: both models would "
                f"be one. Give this Optimizer a prefix of its own, such as prefix='{prefix}2', or close() the other one"
            )
        specs[tensor_name], values[tensor_name] = spec, values_of(parameter)
        schedule = _schedule(spec)
        # Schedules compare equal, whatever their function.
        same = (spec, schedule and id(schedule.function))
        groups.setdefault(same, _group(f"dense{len(groups)}", spec))["params"].append(parameter)
        copies = [Copy(parameter), *(Copy(other[name]) for other in others)]
        dense.append((name, copies, list(groups).index(same)))
    tensors: Mapping[str, DenseTensor | GroupTensor] = {}
    if values:
        tensors = ps.tensors(values, optimizer=specs.__getitem__, push=push, pull=pull)
    opened = zip(dense, tensors.values(), strict=True)
    return [DenseParameter(name, copies, tensor, group) for (name, copies, group), tensor in opened]


def _check_tensor_name(name: str, tensor_name: str) -> None:
    """SpecError if a parameter's name can be no tensor's: it comes from the names of modules, or from `prefix`."""
    if len(tensor_name) <= MAX_NAME and shows(tensor_name) and "/" not in tensor_name:
        return
    raise SpecError(
        f"parameter {name!r} would be the tensor {tensor_name!r} at the servers, and a tensor's name has at most "
        f"{MAX_NAME} characters that can be printed, none of them a blank or '/'. The name comes from the model's "
        "modules and from the Optimizer's prefix=: give the module another name, such as user_id in the place of "
        "'user id'"
    )


def tables_of(models: Sequence[nn.Module], groups: Groups) -> list[TrainedTable]:
    """The tables of the models' layers, which are alike. Adds to the groups."""
    tables: dict[str, TrainedTable] = {}
    for same in zip(*map(table_layers_of, models), strict=True):
        table = same[0].table
        if table.name not in tables:
            tables[table.name] = TrainedTable(table, [], len(groups))
            groups[table.name] = _group(table.name, table.optimizer)
        tables[table.name].layers += same
    return list(tables.values())


def table_layers_of(model: nn.Module) -> list[TableLayer]:
    """A model's layers over one table, also those inside of collections."""
    return [module for module in model.modules() if isinstance(module, TableLayer)]


def described(groups: list[tuple[Any, Any]]) -> str:
    """Param groups in words, for errors; each is given as (name, scheduled)."""
    return ", ".join(f"{name}{' with a schedule' * bool(scheduled)}" for name, scheduled in groups)


def rate_of(spec: ServerOptimizer) -> float:
    """The learning rate to show for an optimizer; of a schedule its start."""
    schedule = _schedule(spec)
    return float(schedule(1) if schedule is not None else getattr(spec, "lr", 0.0))


def _schedule(spec: ServerOptimizer) -> Schedule | None:
    rate = getattr(spec, "lr", 0.0)  # Assign and Accumulate have none
    return rate if isinstance(rate, Schedule) else None


def _group(name: str, spec: ServerOptimizer) -> dict[str, Any]:
    """A new param group. With a schedule of elasticps' own, `lr` shows its start and is not read."""
    every = {field.name: getattr(spec, field.name) for field in fields(spec)}  # type: ignore[arg-type]
    return every | {"params": [], "lr": rate_of(spec), "name": name, "scheduled": _schedule(spec) is not None}
