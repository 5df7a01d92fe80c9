"""A whole model as a dictionary or file: the dense weights, as in `state_dict()`, and the rows of tables."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  # for its error
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.errors import ConfigError, InputError
from elasticps.system import temporary
from elasticps.torch.embedding import INCOMPLETE, TableLayer
from elasticps.torch.optimizer import Optimizer
from elasticps.torch.parameters import plain

CHUNK_BYTES = 16 << 20  # of rows that are asked for, or loaded, at once
_WRAPPER = "module."  # before every name in the state of a DistributedDataParallel
Room = Callable[[int, int], Tensor]
"""allocates memory for n rows of dim float32: (n, dim) -> [n, dim]"""


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, and of each layer over a table `<layer>.keys`, int64 [n] in ascending order, and
    `<layer>.weight`, float32 [n, dim]. A layer with `num_embeddings` has no keys, but a row for each id, as a layer of
    torch's. Layers that share a table share the tensors.

    All steps of this worker so far are in it. Others may train meanwhile, but then rows are of different moments. Needs
    memory for all of it, once. Optimizers' slots are not in it. Raises `Timeout`.
    """
    return _full(model, torch.empty)


def save(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes `full_state_dict(model)` as `torch.save` does, in memory for the keys of a table: rows wait beside the
    file, in as much disk space again. The file is there when all of it is. OSError names it, where the disk is full,
    say; then nothing is left, and an older file stays."""
    path = Path(os.path.abspath(file))
    with temporary.naming(path), temporary.new_folder(path.parent) as folder:

        def room(rows: int, dim: int) -> Tensor:
            if not rows:
                return torch.empty(0, dim)
            with temporary.create(part := temporary.new_path(folder)) as handle:
                temporary.reserve(handle.fileno(), 4 * rows * dim)
            return torch.from_file(str(part), shared=True, size=rows * dim).view(rows, dim)

        with temporary.create(part := folder / "all") as whole:
            _save(_full(model, room), whole)
            whole.flush()
            os.fsync(whole.fileno())
        part.replace(path)


def _save(state: dict[str, Tensor], file: IO[bytes]) -> None:
    """`torch.save`, but a failing disk raises its OSError: torch would end its archive first, and report that error."""
    errors: list[OSError] = []
    write = file.write

    class Out:
        def write(self, data: bytes) -> int:
            try:
                return write(data)
            except OSError as error:
                errors.append(error)
                raise

        def flush(self) -> None:
            """Done by the caller."""

    try:
        torch.save(state, Out())  # type: ignore[arg-type]  # it asks for no more of a file
    except RuntimeError:
        if errors:
            raise errors[0] from None
        raise


def load(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """`load_full_state_dict` of what `save` wrote, or of another state_dict that `torch.save` did, read as it is
    needed. Nothing else that is in the file is run. Raises ConfigError for what cannot be read too."""
    state = loaded(file)
    if not isinstance(state, Mapping):
        raise ConfigError(f"{os.fspath(file)} has a {type(state).__name__}, not the state_dict of a model")
    load_full_state_dict(model, state)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives the tables of a model, at the servers, the rows of `full_state_dict`, and the model its weights. Servers
    take those now if the model has an `Optimizer`, else when it gets one. Optimizers' slots are new then.

    Afterwards a table has these rows and no others. A layer without keys in the state has rows 0 … n - 1, as torch's
    layers do. A "module." before all names, as DistributedDataParallel puts it there, is left out. One worker does
    this, while none trains. Raises ConfigError if a table is not in it, `InputError` if rows do not fit, such as more
    or fewer than the layer's `num_embeddings`, and what `nn.Module.load_state_dict` raises for the rest.
    """
    model = plain(model)
    rest = _unwrapped(model, state)
    given: dict[str, tuple[TableLayer, Tensor, Tensor]] = {}
    for prefix, layer in _layers(model):
        keys, weight = rest.pop(f"{prefix}keys", None), rest.pop(f"{prefix}weight", None)
        if weight is None:
            raise ConfigError(
                f"the state has no {prefix}weight, the rows of table {layer.table.name!r}: it was made by "
                "state_dict(), or of another model; full_state_dict(model) has them"
            )
        whole = keys is None
        keys = torch.arange(len(weight)) if keys is None else keys
        if weight.ndim != 2 or weight.shape != (len(keys), layer.dim) or len(keys.unique()) < len(keys):
            raise InputError(
                f"{prefix}weight must have a row of {layer.dim} floats for each of {len(keys)} keys of table "
                f"{layer.table.name!r}, got {list(weight.shape)}"
            )
        _check_count(f"{prefix}weight", layer, keys, weight, whole=whole)
        given[layer.table.name] = layer, keys, weight
    model.load_state_dict(rest)
    for layer, keys, weight in given.values():
        _load_rows(layer, keys, weight)
    Optimizer.loaded.add(model)
    for optimizer in Optimizer.of(model):
        optimizer.upload()


def _unwrapped(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state by the model's own names."""
    wrapped = all(name.startswith(_WRAPPER) for name in state) and not hasattr(model, _WRAPPER.removesuffix("."))
    return {name.removeprefix(_WRAPPER) if wrapped else name: tensor for name, tensor in state.items()}


def _check_count(name: str, layer: TableLayer, keys: Tensor, weight: Tensor, *, whole: bool) -> None:
    """InputError for rows that a layer with `num_embeddings` has not. whole: the state has a row for each id."""
    count = layer.num_embeddings
    if count is None:
        return
    if whole and len(weight) != count:
        raise InputError(
            f"size mismatch for {name}: the state has the shape {list(weight.shape)}, the layer over table "
            f"{layer.table.name!r} has {[count, layer.dim]}"
        )
    if len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < count:
        raise InputError(
            f"size mismatch for {name}: the state has keys from {int(keys.min())} to {int(keys.max())}, the layer over "
            f"table {layer.table.name!r} has num_embeddings={count}"
        )


def _load_rows(layer: TableLayer, keys: Tensor, weight: Tensor) -> None:
    layer.table.drop_feedback()  # of rows, too, that were never sent: afterwards there are those of the state, alone
    step = max(1, CHUNK_BYTES // (4 * layer.dim))
    for at in range(0, len(keys), step):
        some = slice(at, at + step)
        layer.table.load(keys[some].cpu().numpy(), weight[some].detach().float().cpu().numpy())
    layer.table.delete(np.setdiff1d(_keys(layer), keys.cpu().numpy(), assume_unique=True))


def _full(model: nn.Module, room: Room) -> dict[str, Tensor]:
    model = plain(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(INCOMPLETE))
        state = dict(model.state_dict())
    known: dict[tuple[str, int | None, int | None], dict[str, Tensor]] = {}
    for prefix, layer in _layers(model):
        same = layer.table.name, layer.num_embeddings, layer.padding_idx if layer.num_embeddings else None
        if same not in known:
            known[same] = _rows(layer, room)
        state |= {f"{prefix}{name}": tensor for name, tensor in known[same].items()}
    return state


def _layers(model: nn.Module) -> Iterator[tuple[str, TableLayer]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TableLayer):
            yield f"{path}." if path else "", module


def _keys(layer: TableLayer) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *layer.table.keys()])


def _rows(layer: TableLayer, room: Room) -> dict[str, Tensor]:
    if layer.num_embeddings is None:
        keys = np.sort(_keys(layer))
    else:
        keys = np.arange(layer.num_embeddings)
    weight = room(len(keys), layer.dim)
    step = max(1, CHUNK_BYTES // (4 * layer.dim))
    for at in range(0, len(keys), step):
        layer.table.pull(keys[at : at + step], out=weight[at : at + step].numpy(), exact=True)
    if layer.num_embeddings is None:
        return {"keys": torch.from_numpy(keys), "weight": weight}
    if layer.padding_idx is not None:
        weight[layer.padding_idx] = 0.0
    return {"weight": weight}


# -- files of torch.save


def saved_tensors(path: Path) -> dict[str, Callable[[], NDArray[Any]]]:
    """The tensors of a state_dict in a file that `torch.save` wrote, each read when its function is called. No code in
    it is run. ValueError for a file without names, ConfigError for an unreadable one."""
    state = loaded(path)
    if not isinstance(state, Mapping):
        raise ValueError(f"it has a {type(state).__name__}, not the state_dict of a model")
    return {
        name: _reader(value) for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def loaded(path: str | os.PathLike[str]) -> Any:
    """The content of a file that `torch.save` wrote. Tensors are read when they are needed; in files of torch before
    1.6 at once. No code in it is run. ConfigError for an unreadable file, OSError."""
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
