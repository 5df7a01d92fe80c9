"""Between this host's memory and GPUs: copies through pinned memory, which GPUs make by themselves and in the order of
their current streams. PyTorch keeps pinned memory for the next copy, and gives none of it away while one reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def room(*shape: int, device: torch.device) -> Tensor:
    """Memory of this host for float32 that go to a device. Parts of it must stay tensors, not become NumPy's, until
    they are `sent`: PyTorch would not know whose they are."""
    return torch.empty(shape, pin_memory=device.type == "cuda")


def sent(here: Tensor, device: torch.device) -> Tensor:
    """A copy on a device of what lies in a `room`; for the CPU the same memory, as a tensor that is no view."""
    return torch.from_numpy(here.numpy()) if device.type == "cpu" else here.to(device, non_blocking=True)


def staged(values: Tensor, devices: Sequence[torch.device]) -> Tensor:
    """Floats of the CPU where GPUs among the devices read them without anybody waiting."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return values if gpu is None else room(*values.shape, device=gpu).copy_(values)


def fetched(tensors: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Tensors of any device as float32 here, contiguous; maybe their own memory. What GPUs have is waited for once."""
    found, gpus = list[Tensor](), set[torch.device]()
    for tensor in tensors:
        plain = tensor.detach()
        if plain.is_cuda:
            gpus.add(plain.device)
            plain = room(*plain.shape, device=plain.device).copy_(plain, non_blocking=True)
        elif plain.dtype is not torch.float32 or not plain.is_cpu or not plain.is_contiguous():
            plain = plain.float().cpu().contiguous()
        found.append(plain)
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return [plain.numpy() for plain in found]
