"""Between this host's memory and GPUs: copies through pinned memory, on side streams (`streams.py`), so that neither
this host nor what a GPU computes waits for them. PyTorch keeps pinned memory for the next copy, and gives none of it
away while one reads or writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elasticps.torch.streams import Lane

_CPU = torch.device("cpu")
_lanes: dict[torch.device, Lane] = {}


def lane_of(device: torch.device) -> Lane | None:
    """The side streams of a device; None for one that has none."""
    if device == _CPU or device.type != "cuda":  # the first is quicker
        return None
    lane = _lanes.get(device)
    return _lanes.setdefault(device, Lane(device, torch.get_device_module(device))) if lane is None else lane


def room(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory of this host for what goes to a device. Parts of it must stay tensors, not become NumPy's, until they are
    `sent`: PyTorch would not know whose they are."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def sent(here: Tensor, device: torch.device) -> Tensor:
    """A copy on a device of what lies in a `room`; for the CPU the same memory, as a tensor that is no view."""
    lane = lane_of(device)
    if lane is not None:
        return lane.send(here)
    return torch.from_numpy(here.numpy()) if device.type == "cpu" else here.to(device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU, of any type, on a device; for the CPU themselves."""
    return values if device.type == "cpu" else sent(staged(values, [device]), device)


def staged(values: Tensor, devices: Sequence[torch.device]) -> Tensor:
    """Values of the CPU where GPUs among the devices read them without anybody waiting."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return values if gpu is None else room(*values.shape, device=gpu, dtype=values.dtype).copy_(values)


class Fetch:
    """A tensor of any device on its way here, in the order of the device's current stream. Until `result` the tensor
    must not be written, and lives as long as this does."""

    __slots__ = ("_event", "_here", "_there")

    def __init__(self, tensor: Tensor) -> None:
        here, event = tensor.detach(), None
        if (lane := lane_of(here.device)) is not None:
            self._there = here
            here = room(*here.shape, device=here.device)
            event = lane.fetch(self._there, here)
        elif here.dtype is not torch.float32 or not here.is_cpu or not here.is_contiguous():
            here = here.float().cpu().contiguous()
        self._here, self._event = here, event

    def done(self) -> bool:
        """Whether `result` would wait for nothing."""
        return self._event is None or self._event.query()

    def result(self) -> NDArray[np.float32]:
        """Waits until it is here: as float32, contiguous; maybe the tensor's own memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            del self._there
        return self._here.numpy()


def fetched(tensors: Iterable[Tensor]) -> list[NDArray[np.float32]]:
    """Tensors of any device as float32 here, contiguous; maybe their own memory."""
    coming = [Fetch(tensor) for tensor in tensors]
    return [each.result() for each in coming]
