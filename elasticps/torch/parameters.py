"""What an Optimizer trains: dense parameters and tables, and the groups that torch shows them in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from elasticps.errors import ConfigError, SpecError
from elasticps.model.optimizers import Schedule
from elasticps.model.spec import MAX_NAME, Filter, shows
from elasticps.model.spec import Optimizer as ServerOptimizer
from elasticps.torch.embedding import Gradient, Rows, refuse_torchs
from elasticps.torch.host import Fetch, staged
from elasticps.torch.kernels.compare import differ
from elasticps.torch.kernels.merge import merged

if TYPE_CHECKING:
    from elasticps.client import Client, DenseTensor, SparseTable
    from elasticps.torch.group import GroupClient, GroupTable, GroupTensor

Groups = dict[object, dict[str, Any]]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_GROUPS = {"params", "lr", "name", "scheduled"}  # all else is fixed when a tensor or table is made


@dataclass(eq=False)
class Copy:
    """A dense parameter as the model on one device has it."""

    parameter: nn.Parameter
    _taken: Tensor | None = None  # the servers' values, as the parameter took them last
    _address: int = 0  # where the parameter lies, if it is float32 of the CPU
    _plain: bool = False  # whether its floats lie there one after another

    def take(self, values: Tensor) -> None:
        """Gives the parameter the servers' values, float32, which are kept. Under `no_grad`."""
        parameter = self.parameter
        parameter.copy_(values, non_blocking=True)
        if parameter.dtype is values.dtype and parameter.is_cpu:
            self._taken = values
            if (address := parameter.data_ptr()) != self._address:
                self._address, self._plain = address, parameter.is_contiguous() and values.is_contiguous()
        else:
            self._taken, self._address = parameter.detach().clone(), 0

    def edited(self) -> bool:
        """Whether somebody has changed the parameter here since. Torch's own count would not see changes of `.data`."""
        if self._taken is None:
            return False
        here, there = self._bits(self._taken)
        if here.is_cpu:  # torch's own would take several threads, and longer
            return not np.array_equal(here.numpy(), there.numpy())
        return not torch.equal(here, there)

    def edited_there(self) -> Tensor | None:
        """The same as a bool of a GPU, which nobody waits for; None for what is here."""
        if self._taken is None or self.parameter.is_cpu:
            return None
        here, there = self._bits(self._taken)
        return (here != there).any()

    def _bits(self, taken: Tensor) -> tuple[Tensor, Tensor]:
        """What there is and what was taken, as integers: what is not a number equals itself then."""
        now = self.parameter.detach()
        bits = _BITS[now.element_size()]
        return now.view(bits), taken.to(now.device, now.dtype).view(bits)

    @property
    def memory(self) -> tuple[int, int, int] | None:
        """A pair for `differ`: the parameter and what it took last; None for what cannot be compared like that."""
        taken = self._taken
        if taken is None or not self._plain or self.parameter.data_ptr() != self._address:
            return None
        return self._address, taken.data_ptr(), taken.numel()


@dataclass(eq=False)
class Dense:
    """One dense parameter and its tensor at the servers. copies: at least one, in the order of a group's devices."""

    name: str
    copies: list[Copy]
    tensor: DenseTensor | GroupTensor
    group: int  # index
    left: tuple[int, int] | None = None  # address and version of the gradient that has left in this step

    def __post_init__(self) -> None:
        self.parameter = self.copies[0].parameter

    def take(self, values: Tensor) -> None:
        """Gives all copies the servers' values, float32. Under `no_grad`."""
        there = staged(values, [copy.parameter.device for copy in self.copies])
        for copy in self.copies:
            copy.take(values if copy.parameter.is_cpu else there)

    def gather(self) -> None:
        """Adds the other copies' gradients to the first one's, as backward passes one after another would have; they
        have none afterwards. Under `no_grad`."""
        for copy in self.copies[1:]:
            gradient, copy.parameter.grad = copy.parameter.grad, None
            if gradient is None:
                continue
            here = gradient.detach().to(self.parameter.device)
            if self.parameter.grad is None:
                self.parameter.grad = here
            else:
                self.parameter.grad.add_(here)


def first_edited(dense: Iterable[Dense]) -> str:
    """The name of a parameter that somebody has changed here since it took the servers' values; empty if nobody has."""
    copies = [(each.name, copy) for each in dense if each.parameter.requires_grad for copy in each.copies]
    memory = [copy.memory for _, copy in copies]
    if copies and None not in memory and not differ(np.array(memory, np.int64)):  # nearly always
        return ""
    there = dict[torch.device, list[Tensor]]()
    here = list[tuple[str, Copy]]()
    for name, copy in copies:
        if (edited := copy.edited_there()) is None:
            here.append((name, copy))
        else:
            there.setdefault(edited.device, []).append(edited)
    if any(bool(torch.stack(edited).any()) for edited in there.values()):  # each GPU is waited for once
        here = copies
    return next((name for name, copy in here if copy.edited()), "")


@dataclass(eq=False)
class Sparse:
    """One table, with every module of the models that reads it: of each place in them, one for each device."""

    table: SparseTable | GroupTable
    modules: list[Rows]
    group: int  # index
    left: bool = False

    def take(self) -> list[Gradient]:
        """The gradients of its rows, which wait in the modules no longer, in the order of those and of their backward
        passes."""
        return [gradient for module in self.modules for gradient in module.take_all()]

    def take_all(self) -> Gradient | None:
        """The same as one, each row once."""
        taken = self.take()
        if len(taken) < 2:
            return taken[0] if taken else None
        keys, rows = Summed(taken).result()
        return keys, torch.from_numpy(rows)


class Summed:
    """At least one gradient of a table on its way here, to be one: (keys [n], rows [n, dim]). Each row once, added up
    in the order given, by the CPU: a GPU would do it in any order."""

    def __init__(self, given: Sequence[Gradient]) -> None:
        self._given = [(keys, Fetch(rows)) for keys, rows in given]

    def done(self) -> bool:
        return all(rows.done() for _, rows in self._given)

    def result(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Waits until all are here."""
        given = [(keys, rows.result()) for keys, rows in self._given]
        if len(given) == 1:
            return given[0]
        total = sum(len(keys) for keys, _ in given)
        keys, rows = np.empty(total, np.int64), np.empty((total, given[0][1].shape[1]), np.float32)
        count = merged(given, 0, 1, keys, rows)
        return keys[:count], rows[:count]


def values_of(parameter: nn.Parameter) -> NDArray[np.float32]:
    """As servers have them; maybe the parameter's own memory."""
    return parameter.detach().float().cpu().contiguous().numpy()


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
    ps: Client | GroupClient,
    models: Sequence[nn.Module],
    optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None,
    prefix: str,
    groups: Groups,
    push: Sequence[Filter],
    pull: Sequence[Filter],
    taken: Mapping[str, nn.Parameter],
) -> list[Dense]:
    """Opens a tensor for each dense parameter of the first model, which the others have too. Adds to the groups. taken:
    the parameters whose tensors other Optimizers train, by the tensors' names."""
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
        called = f"{prefix}.{name.replace('_orig_mod.', '')}"
        _check_called(name, called)
        if taken.get(called, parameter) is not parameter:
            raise ConfigError(
                f"the Optimizer of another model on this client trains the tensor {called!r}: both models would be "
                f"one. Give this Optimizer a prefix of its own, such as prefix='{prefix}2', or close() the other one"
            )
        specs[called], values[called] = spec, values_of(parameter)
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
    return [Dense(name, copies, tensor, group) for (name, copies, group), tensor in opened]


def _check_called(name: str, called: str) -> None:
    """SpecError if a parameter's name can be no tensor's: it comes from the names of modules, or from `prefix`."""
    if len(called) <= MAX_NAME and shows(called) and "/" not in called:
        return
    raise SpecError(
        f"parameter {name!r} would be the tensor {called!r} at the servers, and a tensor's name has at most {MAX_NAME} "
        "characters that can be printed, none of them a blank or '/'. The name comes from the model's modules and from "
        "the Optimizer's prefix=: give the module another name, such as user_id in the place of 'user id'"
    )


def tables_of(models: Sequence[nn.Module], groups: Groups) -> list[Sparse]:
    """The tables of the models' layers, which are alike. Adds to the groups."""
    tables: dict[str, Sparse] = {}
    for same in zip(*map(tables_in, models), strict=True):
        table = same[0].table
        if table.name not in tables:
            tables[table.name] = Sparse(table, [], len(groups))
            groups[table.name] = _group(table.name, table.optimizer)
        tables[table.name].modules += same
    return list(tables.values())


def tables_in(model: nn.Module) -> list[Rows]:
    """A model's layers over one table, also those of collections."""
    return [module for module in model.modules() if isinstance(module, Rows)]


def described(groups: list[tuple[Any, Any]]) -> str:
    """Of groups, each (name, scheduled), for errors."""
    return ", ".join(f"{name}{' with a schedule' * bool(scheduled)}" for name, scheduled in groups)


def fixed(group: dict[str, Any]) -> dict[str, Any]:
    """What nobody can change of a group: it is part of what servers have."""
    return {key: value for key, value in group.items() if key not in _OF_GROUPS}


def rate_of(spec: ServerOptimizer) -> float:
    """A number to show; of a schedule its start."""
    schedule = _schedule(spec)
    return float(schedule(1) if schedule is not None else getattr(spec, "lr", 0.0))


def _schedule(spec: ServerOptimizer) -> Schedule | None:
    rate = getattr(spec, "lr", 0.0)  # Assign and Accumulate have none
    return rate if isinstance(rate, Schedule) else None


def _group(name: str, spec: ServerOptimizer) -> dict[str, Any]:
    """A param group. With a schedule of elasticps' own, `lr` shows its start and is not read."""
    every = {field.name: getattr(spec, field.name) for field in fields(spec)}  # type: ignore[arg-type]
    return every | {"params": [], "lr": rate_of(spec), "name": name, "scheduled": _schedule(spec) is not None}
