"""Several devices of one process that are one worker: a model on each, one push for all of them.

group = DeviceGroup(lambda: Net(ps), ["cuda:0", "cuda:1"])
optimizer = Optimizer(ps, group, optimizer=eps.Adam(lr=1e-3))
for batches in loader:                          # one for each device
    optimizer.zero_grad()
    losses = group.run(train, batches)          # train(model, device, batch): forward and backward pass
    optimizer.step()                            # one step: gradients of all devices leave as one
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elasticps.errors import ConfigError, InputError
from elasticps.torch.parameters import plain, table_layers_of
from elasticps.torch.step_rows import StepRows
from elasticps.torch.weights import layers_of

MOST_DEVICES = 64
Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")
_running = threading.local()


class DeviceGroup(Generic[Model]):
    """A model on each of some devices, which one process trains as one worker; made for an `Optimizer`.

    build: makes a new model for each device. devices: as torch has them; one may come several times. All models
    begin as the first, and have the servers' dense weights after each step. ConfigError for models that differ in
    parameters, buffers or tables, InputError for devices that there are not.

    models, devices: in this order. What is not trained, such as evaluation, `save` and `load`, is done with
    `models[0]`.
    """

    def __init__(self, build: Callable[[], Model], devices: Sequence[torch.device | str | int]) -> None:
        self.devices = _checked(devices)
        self.models: list[Model] = []
        for device in self.devices:
            model = build()
            if not isinstance(model, nn.Module):
                raise ConfigError(f"build gives a model, an nn.Module, not a {type(model).__name__}")
            self.models.append(model.to(device))
        _check_alike(self.models)
        with torch.no_grad():
            for model in self.models[1:]:
                for buffer, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                    buffer.copy_(first)
        layers = [layer for model in self.models for layer in layers_of(plain(model))]
        self._of_ranks = any(layer.ps.collective for layer in layers)
        if not self._of_ranks and len(self.models) > 1:
            rows = StepRows[Any]()
            for layer in layers:
                layer.step_rows = rows
        self._threads: list[ThreadPoolExecutor] = []

    def __len__(self) -> int:
        """How many devices there are."""
        return len(self.models)

    def __repr__(self) -> str:
        return f"<DeviceGroup of {type(self.models[0]).__name__} on {', '.join(map(str, self.devices))}>"

    def __getstate__(self) -> NoReturn:
        raise ConfigError("a DeviceGroup cannot be copied or pickled: save its models[0], build it again")

    def run(self, does: Callable[[Model, torch.device, Batch], Result], batches: Iterable[Batch]) -> list[Result]:
        """Runs `does(model, device, batch)` for all devices at once, each in a thread of its own; returns the results.

        batches: one for each device, or fewer; the last devices have nothing to do then. Threads have the caller's grad
        mode, autocast and CUDA streams, and a device always the same one. If one raises, this raises the first device's
        error when all have ended, and has dropped all gradients: the next step is clean.
        InputError for too many batches, ConfigError inside of `does`, and for a group whose models belong to a rank of
        a LocalGroup.
        """
        given = list(batches)
        if len(given) > len(self.models):
            raise InputError(f"there are {len(given)} batches for {len(self.models)} devices: give each one at most")
        if getattr(_running, "group", None) == id(self):
            raise ConfigError("a device computes already: what `run` calls cannot call it again")
        if self._of_ranks and len(self.models) > 1:
            raise ConfigError(
                "ranks of a LocalGroup pull in the same order, which threads do not have: train the models one after "
                "another, for model, device, batch in zip(group.models, group.devices, batches)"
            )
        if not self._threads:
            self._threads = [ThreadPoolExecutor(1, f"elasticps-{device}") for device in self.devices]
        context = _Context(self.devices)
        running: list[Future[Result]] = []
        for model, device, batch, thread in zip(self.models, self.devices, given, self._threads, strict=False):
            running.append(thread.submit(context.run, id(self), device, does, model, batch))
        wait(running)
        for number, each in enumerate(running):
            if (error := each.exception()) is not None:
                for model in self.models:
                    model.zero_grad()
                error.add_note(f"It was raised for models[{number}] of a DeviceGroup, on {self.devices[number]}.")
                raise error
        return [each.result() for each in running]


class _Context:
    """The state of torch in the calling thread, for another one: grad mode, autocast, CUDA streams."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", *(device.type for device in devices)}
        }
        # Of all devices: the first that needs the new weights copies them to the others, too.
        self._streams = {gpu: torch.cuda.current_stream(gpu) for gpu in devices if gpu.type == "cuda"}

    def run(
        self,
        group: int,
        device: torch.device,
        does: Callable[..., Result],
        model: nn.Module,
        batch: object,
    ) -> Result:
        _running.group = group  # its id, of one group for good: the thread must not keep it
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, (dtype, enabled, cached) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            if device in self._streams:
                stack.enter_context(torch.cuda.device(device))
            return does(model, device, batch)


def models_of(model: nn.Module | DeviceGroup[Any]) -> list[nn.Module]:
    """The model on each device, without what torch.compile puts around it. ConfigError for anything else."""
    return [plain(each) for each in model.models] if isinstance(model, DeviceGroup) else [plain(model)]


def _checked(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    if isinstance(devices, str) or not 1 <= len(devices) <= MOST_DEVICES:
        raise ConfigError(f"a DeviceGroup takes a list of 1 to {MOST_DEVICES} devices, got {devices!r}")
    try:
        found = [torch.device(device) for device in devices]
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{devices!r} are no devices of torch: {str(error).splitlines()[0]}") from None
    for device in found:
        if device.type == "meta":
            raise InputError("the device meta has no memory, and cannot train")
        if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
            raise InputError(f"there is no device {device}: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def _check_alike(models: Sequence[nn.Module]) -> None:
    """ConfigError unless all models have parameters, buffers and tables of the same kind, and none in common."""
    known = set[int]()
    for model in models:
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ConfigError(f"parameter {name!r} has no shape yet: have build run one batch through the model")
            if id(parameter) in known:
                raise ConfigError(f"build gave models that share {name!r}: it is to make a new model for each device")
        known |= set(map(id, model.parameters()))
    first = _described(models[0])
    for number, model in enumerate(models[1:], start=1):
        if (other := _described(model)) == first:
            continue
        has = next(pair for pair in zip_longest(first, other, fillvalue="nothing more") if pair[0] != pair[1])
        raise ConfigError(f"build made different models: where the first has {has[0]}, number {number} has {has[1]}")


def _described(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [f"{name!r}, {tensor.dtype} {list(tensor.shape)}" for name, tensor in named]
    return tensors + [f"a layer over table {layer.table.name!r}" for layer in table_layers_of(model)]
