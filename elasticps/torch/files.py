"""What torch saves, for those who do not know torch."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  # for its error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from elasticps.errors import ConfigError


def saved_tensors(path: Path) -> dict[str, Callable[[], NDArray[Any]]]:
    """The tensors of a file that `torch.save` wrote, a state_dict, each read when it is asked for. Nothing else that is
    in it is run. ValueError for what has no names."""
    state = loaded(path)
    if not isinstance(state, Mapping):
        raise ValueError(f"it has a {type(state).__name__}, not the state_dict of a model")
    return {
        name: _reader(value) for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def loaded(path: str | os.PathLike[str]) -> Any:
    """What `torch.save` wrote, its tensors read as they are needed; files of torch before 1.6 at once. Nothing else
    that is in it is run. ConfigError for what cannot be read, OSError."""
    if not os.path.isfile(path):
        why = "it is no file" if os.path.exists(path) else "it is not there"
        raise ConfigError(f"{os.fspath(path)} cannot be read: {why}")
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError, pickle.UnpicklingError) as error:
        text = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise ConfigError(
            f"{os.fspath(path)} cannot be read: it was cut off, has other things than tensors in it, or torch.save did "
            f"not write it ({text})"
        ) from error


def _reader(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    return lambda: (tensor.detach().float() if tensor.is_floating_point() else tensor).numpy()
