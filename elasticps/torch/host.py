"""Copies between this host's memory and GPUs, on streams of their own beside what the GPU computes meanwhile.

Written against what torch's modules of devices have in common: `torch.cuda`, the stubs of `torch.cpu`, and the tests'
own, whose copies are made as late as the waits allow. Three rules make it right:

- a copy down waits for what the current stream computes until it begins, and its event is waited for before the
  copy is read. Until then the caller holds the source: the compute stream would use its memory again;
- what a copy up brings lies in memory of the side stream, so that it begins without a wait; the current stream waits
  for it, and the memory is marked as used there, or its next owner would write it too early;
- pinned memory is not used again before the copies that read or write it are made: torch sees to that, of any stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CPU = torch.device("cpu")


class DeviceEvent(Protocol):
    """A point in a device's stream; it has happened once the device has come there."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class SideStreams:
    """A device's side streams, one for each direction. module: what torch has for devices of this type."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._down, self._up = module.Stream(device), module.Stream(device)

    def fetch(self, there: Tensor, here: Tensor) -> DeviceEvent:
        """Begins to copy a tensor of the device, as it is once the current stream has come here, into pinned memory of
        its shape. The caller holds both tensors until the event has happened."""
        self._down.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._down):
            # The device converts: for other types torch would copy through memory that is not pinned, and wait.
            here.copy_(there.to(here.dtype), non_blocking=True)
            done: DeviceEvent = self._module.Event()
            done.record(self._down)  # type: ignore[attr-defined]
        return done

    def send(self, here: Tensor) -> Tensor:
        """A copy of pinned memory on the device, as the current stream has it from now on."""
        with self._module.stream(self._up):
            there = here.to(self._device, non_blocking=True)
        compute = self._module.current_stream(self._device)
        compute.wait_stream(self._up)
        there.record_stream(compute)
        return there


_side_streams: dict[torch.device, SideStreams] = {}


def side_streams_of(device: torch.device) -> SideStreams | None:
    """The side streams of a GPU; None for a device that has none."""
    if device == _CPU or device.type != "cuda":  # the first is quicker
        return None
    streams = _side_streams.get(device)
    if streams is None:
        streams = _side_streams.setdefault(device, SideStreams(device, torch.get_device_module(device)))
    return streams


def room(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocates memory of this host for values that go to `device`; pinned if that is a GPU. Parts of it must stay
    tensors, not become NumPy's, until they are `sent`: PyTorch would not know whose they are."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def sent(here: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor that lies in a `room`; for the CPU the same memory, as a tensor that is no
    view."""
    streams = side_streams_of(device)
    if streams is not None:
        return streams.send(here)
    return torch.from_numpy(here.numpy()) if device.type == "cpu" else here.to(device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the CPU, of any type, to `device`; for the CPU returns the tensor itself."""
    return values if device.type == "cpu" else sent(staged(values, [device]), device)


def staged(values: Tensor, devices: Sequence[torch.device]) -> Tensor:
    """Copies a tensor of the CPU to pinned memory if there is a GPU among the devices, so that no thread waits while it
    reads them; else returns the tensor itself."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return values if gpu is None else room(*values.shape, device=gpu, dtype=values.dtype).copy_(values)


class Fetch:
    """A tensor of any device on its way to this host, in the order of the device's current stream. Until it has
    arrived the tensor must not be written; it lives as long as this does."""

    __slots__ = ("_event", "_here", "_there", "array")

    def __init__(self, tensor: Tensor) -> None:
        self.array: NDArray[np.float32] | None = None  # the values, contiguous, once their arrival is known
        here = tensor.detach() if tensor.requires_grad else tensor
        if (streams := side_streams_of(here.device)) is not None:
            self._there = here
            self._here = room(*here.shape, device=here.device)
            self._event = streams.fetch(here, self._here)
            return
        if here.dtype is not torch.float32 or not here.is_cpu or not here.is_contiguous():
            here = here.float().cpu().contiguous()
        self.array = here.numpy()

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.array is not None or self._event.query()

    def result(self) -> NDArray[np.float32]:
        """Waits for the values: float32, contiguous; maybe the tensor's own memory."""
        if self.array is None:
            self._event.synchronize()
            self.array = self._here.numpy()
            del self._there
        return self.array


def fetch_all(tensors: Iterable[Tensor]) -> list[Fetch]:
    """Begins to bring tensors of any device to this host."""
    return [Fetch(tensor) for tensor in tensors]


def fetched(tensors: Iterable[Tensor]) -> list[NDArray[np.float32]]:
    """Tensors of any device as float32 of this host, contiguous; maybe their own memory."""
    return [each.result() for each in fetch_all(tensors)]
