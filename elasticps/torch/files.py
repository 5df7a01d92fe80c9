"""What torch saves, for those who do not know torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def saved_tensors(path: Path) -> dict[str, Callable[[], NDArray[Any]]]:
    """The tensors of a file that `torch.save` wrote, a state_dict, each read when it is asked for. Nothing else that is
    in it is run. ValueError for what has no names."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"it has a {type(state).__name__}, not the state_dict of a model")
    return {
        name: _reader(value) for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def _reader(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    return lambda: (tensor.detach().float() if tensor.is_floating_point() else tensor).numpy()
