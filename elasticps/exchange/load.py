"""Loads files into a live model: exports, and what torch saves."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.client import Client, DenseTensor, SparseTable
from elasticps.client.loading import per_weight
from elasticps.errors import ConfigError, Error, InputError, UnknownTable
from elasticps.exchange.export import BAGS, CHUNK_BYTES, MANIFEST, VERSION, Tell, both, slots_called
from elasticps.exchange.writers import FORMATS, SHARDING, stem_of
from elasticps.model.spec import TableSpec
from elasticps.system.progress import Progress, reporting

Slice = Callable[[int, int], NDArray[Any]]
_READERS = ("safetensors", "safetensors_rust", "pyarrow", "_pickle", "pickle")  # their errors say what is wrong
_BEFORE = ("embedding_bags.", "embeddings.")
_SHOWN = 8  # names of tensors, in an error
_WRAPPER = "module."  # of a DistributedDataParallel, before every name


def load(
    ps: Client, source: Path, *, names: Mapping[str, str] | None = None, with_slots: bool = False,
    tell: Tell = lambda rows: None, progress: Progress = False,
) -> dict[str, int]:  # fmt: skip
    """Loads tables and tensors from a folder that `export` wrote, or from a `.safetensors`, `.npz`, `.parquet` or
    `.pt`/`.pth` file (a state_dict; nothing but tensors is read from it), past the optimizer; returns the rows of each.

    Of an export, tables that the application has not are made as they were. Of a file a tensor `x.weight`, or
    `embedding_bags.x.weight`, is table x with keys 0, 1, …, or those of `x.keys` beside it, and any other the dense
    tensor of that name; what the application has not is left alone. names: which tensor is which table, for others.
    An .npz or .parquet file is the table of its name, with the columns `keys` and `weight`.

    Slots begin anew, or are those of an export that has them (`with_slots`). Nobody should train what is loaded
    meanwhile. tell(n) hears of each n rows; progress: True shows a bar, a function gets (rows done, rows if that is
    known). Raises ConfigError for what cannot be read, UnknownTable where nothing fits, InputError for other shapes
    than those of the tables, Timeout.
    """
    with reporting(progress, "load", "rows") as report:
        return _loaded(ps, source, names or {}, with_slots, both(tell, report.advance))


def _loaded(ps: Client, source: Path, names: Mapping[str, str], with_slots: bool, tell: Tell) -> dict[str, int]:
    loaded: dict[str, int] = {}
    try:
        if not source.is_dir():
            _check_file(source)
        if source.is_dir():
            return _load_export(ps, source, tell, with_slots)
        if with_slots:
            raise ConfigError(f"{source} is no export: only what `export` wrote has slots")
        parts = _table_file(source) if source.suffix in (".npz", ".parquet") else _state(source, ps, dict(names))
        for name, part in parts:
            loaded[name] = sum(_put(ps.open(name), keys, rows, tell) for _, keys, rows in part)
    except Error:
        raise
    except (
        OSError, ValueError, KeyError, RuntimeError, EOFError, OverflowError, MemoryError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        raise ConfigError(f"{source} cannot be read: {type(error).__name__}: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _READERS:
            raise
        raise ConfigError(f"{source} cannot be read: {error}") from error
    return loaded


def _check_file(path: Path) -> None:
    """Raises ConfigError unless the path is a regular file: a pipe would block."""
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read: {'it is no file' if path.exists() else 'it is not there'}")


Parts = Iterator[tuple[int, NDArray[np.int64], NDArray[Any]]]
"""First row, keys, rows."""


def _put(
    handle: SparseTable | DenseTensor, keys: NDArray[np.int64], rows: NDArray[Any], tell: Tell,
    slots: Mapping[str, NDArray[Any]] | None = None,
) -> int:  # fmt: skip
    values = rows.astype(np.float32, copy=False)
    if isinstance(handle, SparseTable):
        handle.load(keys, values, slots=slots)
    else:
        handle.load(values, slots=slots)
    count = len(np.atleast_1d(rows))
    tell(count)
    return count


def _load_export(ps: Client, source: Path, tell: Tell, with_slots: bool) -> dict[str, int]:
    kind, tables = _tables_of(source)
    loaded = {}
    others = {tensor for _, _, tensor in tables.values()}
    for name, (spec, count, tensor) in tables.items():
        columns = _columns(source, kind, name, spec, tensor, with_slots)
        slots = list(spec.optimizer.slot_shapes(spec.dim)) if with_slots else []
        if spec.shape is not None:
            if "weight" not in columns:
                raise ConfigError(f"{source} has no values of tensor {name!r}: its file is missing")
            for called, slot in slots_called(spec, tensor).items():
                if slot in slots and (slot not in columns or called in others):
                    raise _without(source, slot, f"tensor {name!r}")
            values = columns["weight"](0, count).astype(np.float32).reshape(spec.shape)
            states = {slot: columns[slot](0, 1 << 62) for slot in slots}
            for slot in filter(partial(per_weight, spec), slots):
                states[slot] = states[slot].reshape(spec.shape)
            handle: Any = ps.tensor(name, init=values, **_options_of(spec))
            loaded[name] = _put(handle, np.empty(0, np.int64), values, tell, states)
            continue
        handle = ps.table(name, dim=spec.dim, init=spec.init, **_options_of(spec))
        if "weight" not in columns:
            raise ConfigError(f"{source} has no rows of table {name!r}: a file of it is missing")
        loaded[name] = 0
        if missing := [slot for slot in slots if slot not in columns]:
            raise _without(source, missing[0], f"table {name!r}")
        for at, keys, rows in _cut(columns["weight"], columns.get("keys"), count, spec.dim):
            end = at + len(rows)
            if end != min(at + len(keys), count) or not len(rows):
                raise ConfigError(f"{source} has fewer rows of table {name!r} than its {MANIFEST} says: {count}")
            loaded[name] += _put(handle, keys, rows, tell, {slot: columns[slot](at, end) for slot in slots})
    return loaded


def _without(source: Path, slot: str, whose: str) -> ConfigError:
    return ConfigError(
        f"{source} has no slot {slot!r} of {whose}: was it written with them, by this version? Without --with-slots it "
        "can be imported, and slots begin anew"
    )


def _tables_of(source: Path) -> tuple[str, dict[str, tuple[TableSpec, int, str]]]:
    """The format of an export, and by table its spec, its number of rows, and its name in files."""
    _check_file(source / MANIFEST)
    manifest = json.loads((source / MANIFEST).read_text())
    try:
        if manifest.get("version") != VERSION:
            raise ConfigError(f"{source} was written by another version of elasticps: {manifest.get('version')!r}")
        tables = {
            name: (TableSpec.from_json(json.dumps(one["spec"])), int(one["rows"]), str(one.get("tensor", "")))
            for name, one in manifest["tables"].items()
        }
        for name, (spec, _, _) in tables.items():
            if name != spec.name:  # whose rules keep a file's path within the folder
                raise ConfigError(f"{source} cannot be read: its {MANIFEST} has table {spec.name!r} as {name!r}")
        if manifest["format"] not in FORMATS:
            raise ConfigError(f"{source} cannot be read: its {MANIFEST} says {manifest['format']!r:.200} for a format")
        return str(manifest["format"]), {
            name: (spec, rows, tensor or (f"{BAGS}{name}" if spec.shape is None else name))
            for name, (spec, rows, tensor) in tables.items()
        }
    except (AttributeError, TypeError, OverflowError) as error:
        raise ConfigError(f"{source} cannot be read: its {MANIFEST} is none: {error}") from error


def _options_of(spec: TableSpec) -> dict[str, Any]:
    """The options to open a table or tensor with, beside its shape and initial values."""
    return {
        "optimizer": spec.optimizer, "dtype": spec.dtype, "finite": spec.finite, "push": spec.push, "pull": spec.pull
    }  # fmt: skip


def _cut(weight: Slice, keys: Slice | None, rows: int, dim: int) -> Parts:
    step = max(1, CHUNK_BYTES // (8 + 4 * dim))
    for a in range(0, rows, step):
        b = min(a + step, rows)
        yield a, np.arange(a, b) if keys is None else keys(a, b), weight(a, b)


# --- files that are read --------------------------------------------------------------------------------------------


def _columns(
    source: Path, kind: str, table: str, spec: TableSpec, tensor: str, with_slots: bool = False
) -> dict[str, Slice]:
    """The columns of one table of an export; of a tensor `weight`, and its slots if they are wanted. tensor: how its
    files call it."""
    columns = {tensor: "weight"} | (slots_called(spec, tensor) if with_slots else {})  # of a tensor
    if kind == "safetensors":
        found: dict[str, list[tuple[int, Slice]]] = {}
        for path in source.glob("*.safetensors"):
            _check_file(path)
            firsts = _first_rows(path)
            for name, slice_ in _safetensors(path).items():
                base, _, column = name.rpartition(".")
                if base == tensor and spec.shape is None:
                    found.setdefault(column, []).append((firsts.get(name, 0), slice_))
                elif name in columns and spec.shape is not None:
                    found.setdefault(columns[name], []).append((firsts.get(name, 0), slice_))
        return {column: _joined(sorted(parts, key=lambda part: part[0])) for column, parts in found.items()}
    if kind == "npy":
        if spec.shape is None:
            stems = {name: f"{stem_of(table)}.{name}" for name in ("keys", "weight", *spec.optimizer.slot_shapes(1))}
        else:
            stems = {column: stem_of(name) for name, column in columns.items()}
        paths = {column: source / f"{stem}.npy" for column, stem in stems.items()}
        return {column: _mapped(path) for column, path in paths.items() if path.exists()}
    if spec.shape is None:
        path = source / f"{stem_of(table)}.{kind}"
        _check_file(path)
        return _arrays(path)
    of_tensor: dict[str, Slice] = {}
    for name, column in columns.items():
        path = source / f"{stem_of(name)}.{kind}"
        if column == "weight" or path.exists():
            _check_file(path)
            arrays = _arrays(path)
            if name in arrays:
                of_tensor[column] = arrays[name]
    return of_tensor


def _mapped(path: Path) -> Slice:
    """The array in a .npy file, of which only those rows are read that are asked for."""
    _check_file(path)
    return _slice({"": np.load(path, mmap_mode="r")}, "")


def _joined(parts: list[tuple[int, Slice]]) -> Slice:
    """One column from parts that begin at these rows."""

    def cut(a: int, b: int) -> NDArray[Any]:
        ends = [first for first, _ in parts[1:]] + [1 << 62]
        found = [
            part(max(a - first, 0), min(b, end) - first)
            for (first, part), end in zip(parts, ends, strict=True)
            if a < end and b > first
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    return parts[0][1] if len(parts) == 1 else cut


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Of a safetensors file, and where its tensors begin. ValueError for what is none: nothing is read that is not
    there."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if 8 + size > path.stat().st_size:
            raise ValueError(f"{path.name} was cut off, or is no safetensors file")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file")
    return header, 8 + size


def _first_rows(path: Path) -> dict[str, int]:
    """The first row of each tensor of which a file has a part."""
    header, _ = _header(path)
    try:
        offsets = json.loads(header.get("__metadata__", {}).get(SHARDING, "{}"))
        return {name: int(one["saved_offsets"][0]) for name, one in offsets.items() if one["saved_offsets"]}
    except (AttributeError, TypeError, OverflowError) as error:
        raise ValueError(f"{path.name} says wrongly which rows it has: {error}") from error


def _safetensors(path: Path) -> dict[str, Slice]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError("safetensors files need its package: pip install 'elasticps[safetensors]'") from None
    file: Any = safe_open(path, framework="numpy")

    def slice_of(name: str, a: int, b: int) -> NDArray[Any]:
        there = file.get_slice(name)
        shape = there.get_shape()
        if there.get_dtype() == "BF16":  # which NumPy has not
            return _bfloat16(path, name, shape, a, b)
        if shape and (a >= (end := min(b, shape[0])) or 0 in shape):  # which the package does not slice
            return np.empty((max(end - a, 0), *shape[1:]), np.int64 if there.get_dtype() == "I64" else np.float32)
        part: NDArray[Any] = there[a : min(b, shape[0])] if shape else file.get_tensor(name)
        return part

    return {name: partial(slice_of, name) for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _bfloat16(path: Path, name: str, shape: Sequence[int], a: int, b: int) -> NDArray[np.float32]:
    """Reads rows a … b - 1 of a tensor of this shape, or a single number."""
    header, at = _header(path)
    first = at + int(header[name]["data_offsets"][0])
    width = math.prod(shape[1:])
    rows = [max(min(b, shape[0]) - a, 0), *shape[1:]] if shape else []
    halves = np.fromfile(path, "<u2", math.prod(rows), offset=first + (2 * a * width if shape else 0))
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(rows)


def _arrays(path: Path) -> dict[str, Slice]:
    """The columns of an .npz or .parquet file, each read as a whole on first use."""
    if path.suffix == ".npz":
        archive = np.load(path)
        return {name: _slice(archive, name) for name in archive.files}
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("parquet needs pyarrow: pip install 'elasticps[parquet]'") from None
    table = parquet.read_table(path, memory_map=True).combine_chunks()

    def column(name: str) -> NDArray[Any]:
        chunk = table.column(name).combine_chunks()
        if hasattr(chunk.type, "list_size"):
            flat: NDArray[Any] = chunk.flatten().to_numpy()
            return flat.reshape(len(chunk), chunk.type.list_size)
        if hasattr(chunk.type, "value_type"):  # as lists of no floats are written
            return np.reshape(chunk.flatten().to_numpy(), (len(chunk), -1 if len(chunk.flatten()) else 0))
        whole: NDArray[Any] = chunk.to_numpy()
        return whole

    columns = {name: column(name) for name in table.column_names}
    return {name: _slice(columns, name) for name in columns}


def _slice(arrays: Any, name: str) -> Slice:
    loaded: list[NDArray[Any]] = []

    def cut(a: int, b: int) -> NDArray[Any]:
        if not loaded:
            loaded.append(arrays[name])
        return loaded[0][a:b] if loaded[0].ndim else loaded[0]

    return cut


def _table_file(source: Path) -> Iterator[tuple[str, Parts]]:
    columns = _arrays(source)
    if "weight" not in columns:
        raise ConfigError(f"{source} has no column 'weight', but {', '.join(columns)}")
    whole = columns["weight"](0, 1 << 62)
    _check_rows(source, "weight", whole)
    yield source.stem, _cut(columns["weight"], columns.get("keys"), len(whole), whole.shape[1] if whole.ndim > 1 else 1)


def _check_rows(source: Path, tensor: str, values: NDArray[Any]) -> None:
    """Raises InputError for an array without rows."""
    if values.ndim < 1:
        raise InputError(f"{source}: {tensor!r} is one number, and a table takes rows: [keys, dim]")


def _named(source: Path) -> dict[str, Callable[[], NDArray[Any]]]:
    if source.suffix != ".safetensors":
        from elasticps.torch.state import saved_tensors

        return saved_tensors(source)
    return {name: partial(part, 0, 1 << 62) for name, part in _safetensors(source).items()}


def _state(source: Path, ps: Client, names: dict[str, str]) -> Iterator[tuple[str, Parts]]:
    """The columns in a file of named tensors for the application's tables and tensors. Raises UnknownTable if none
    fit."""
    found = False
    tensors = _named(source)
    known = ps.tables()
    if all(name.startswith(_WRAPPER) for name in tensors) and not any(name.startswith(_WRAPPER) for name in known):
        names |= {name.removeprefix(_WRAPPER): table for name, table in names.items()}
        tensors = {name.removeprefix(_WRAPPER): read for name, read in tensors.items()}
    for tensor, read in tensors.items():
        base = tensor.removesuffix(".weight")
        stripped = next((base.removeprefix(before) for before in _BEFORE if base.startswith(before)), base)
        name = names.get(tensor, tensor if tensor in known else stripped if base != tensor else "")
        if name not in known:
            if tensor in names:
                raise UnknownTable(f"application {ps.app!r} has no table {name!r}")
            continue
        found, values = True, read()
        if known[name].spec.shape is not None:
            yield name, iter([(0, np.empty(0, np.int64), values)])
        else:
            _check_rows(source, tensor, values)
            keys = tensors[f"{base}.keys"]() if f"{base}.keys" in tensors else np.arange(len(values))
            yield name, _cut(_slice({"": values}, ""), _slice({"": keys}, ""), len(values), values.shape[-1])
    if not found:
        shown = ", ".join(sorted(tensors)[:_SHOWN]) + (", …" if len(tensors) > _SHOWN else "")
        raise UnknownTable(
            f"{source} has nothing for the tables of application {ps.app!r}, which are {', '.join(known) or 'none'}. "
            f"It has {shown or 'nothing'}: say which tensor is which table, by --table TABLE=TENSOR, in Python by "
            "names={tensor: table}"
        )
