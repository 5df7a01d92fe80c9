"""Writes columns of a table to files as rows come, when their number is known only at the end.

What is in memory is what `write` is given. A column is an array [rows, …]; all columns of a table are equally long.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError
from elasticps.system import temporary

if TYPE_CHECKING:
    import pyarrow

Columns = Mapping[str, NDArray[Any]]
FORMATS = ("safetensors", "npz", "npy", "parquet")
DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}
PART_BYTES = 512 << 20  # of a safetensors file, and at most one chunk more
SHARDING = "DCP_SHARDING_INFO"
_HEADER_BYTES = 4096  # room for the header of a file of one tensor, whose name has at most some 200 letters, twice
_STEM_BYTES = 200  # of a file's name, which has at most 255 with a column, a number and what says the format


def stem_of(name: str) -> str:
    """The prefix of a table's or tensor's files: its name, or the part that a file's name can hold, and a digest."""
    encoded = name.encode()
    if len(encoded) <= _STEM_BYTES and name.strip(".") and "/" not in name:
        return name
    digest = hashlib.blake2b(encoded, digest_size=6).hexdigest()
    return f"{encoded[: _STEM_BYTES - 20].decode(errors='ignore').replace('/', '_').lstrip('.')}~{digest}"


def cast(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
    """Casts weights to another type. Raises ConfigError if one is too large: it would become infinite."""
    if dtype == values.dtype.name:
        return values
    with np.errstate(over="ignore"):
        found: NDArray[Any] = values.astype(dtype)
    if (np.isinf(found) & np.isfinite(values)).any():
        most = float(np.finfo(found.dtype).max)
        raise ConfigError(f"table {name!r} has weights above {most:g}, which {dtype} cannot hold: export it as float32")
    return found


class Writer(Protocol):
    """Writes the files of one table."""

    def write(self, columns: Columns) -> None:
        """Writes the next rows. All calls have the same columns."""

    def close(self) -> None:
        """Completes the files."""

    def give_up(self) -> None:
        """Closes the files as they are, to be deleted."""


class SafetensorsWriter:
    """A file for each column: `<table>.<column>.safetensors`, with one tensor called `<prefix>.<column>`; without a
    prefix `<table>.safetensors` with the only column. Behind PART_BYTES the next rows go into a file with `-00001`
    behind the column's name, and so on; each says at which row it begins, as `torch.distributed.checkpoint` does
    (`HuggingFaceStorageReader` puts them together). Readers go by the tensors' names: where a file's name is taken it
    has a `_` more.

    The header, at the front, has the shape: it is written last, into room that was left, and padded with blanks.
    """

    def __init__(self, directory: Path, table: str, prefix: str) -> None:
        self._path = directory / stem_of(table)
        self._prefix = prefix
        self._parts: dict[str, _FilePart] = {}

    def write(self, columns: Columns) -> None:
        for name, array in columns.items():
            part = self._parts.get(name)
            if part is None or part.file.tell() >= PART_BYTES:
                if part is not None:
                    self._finish(name, part, several=True)
                self._parts[name] = part = self._begin(name, array, part)
            part.rows += len(array)
            part.file.write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        for name, part in self._parts.items():
            self._finish(name, part, several=part.number > 0)

    def give_up(self) -> None:
        _close(part.file for part in self._parts.values())

    def _begin(self, name: str, array: NDArray[Any], before: _FilePart | None) -> _FilePart:
        number = 0 if before is None else before.number + 1
        stem = f"{self._path}.{name}" if self._prefix else str(self._path)
        part = f"-{number:05d}" if number else ""
        while (path := Path(f"{stem}{part}.safetensors")).exists():  # a tensor may be called as a table's column is
            stem += "_"
        file = temporary.create(path)  # until it is finished
        file.write(b" " * _HEADER_BYTES)
        first = 0 if before is None else before.first + before.rows
        return _FilePart(file, number, first, DTYPES[array.dtype.name], list(array.shape[1:]))

    def _finish(self, name: str, part: _FilePart, *, several: bool) -> None:
        tensor = f"{self._prefix}.{name}" if self._prefix else name
        shape = [part.rows, *part.shape]
        with part.file as file:
            described = {"dtype": part.dtype, "shape": shape, "data_offsets": [0, file.tell() - _HEADER_BYTES]}
            header: dict[str, Any] = {tensor: described}
            if several:
                offsets = {tensor: {"saved_offsets": [part.first, *(0 for _ in part.shape)]}}
                header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", SHARDING: _json(offsets)}
            file.seek(0)
            file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + _json(header).encode().ljust(_HEADER_BYTES - 8))


def _json(document: object) -> str:
    """JSON with letters as they are: escaped, a name takes six times its length."""
    return json.dumps(document, ensure_ascii=False)


@dataclass
class _FilePart:
    """A file that is being written: which one of its column, and its first row."""

    file: IO[bytes]
    number: int
    first: int
    dtype: str
    shape: list[int]
    rows: int = 0


class NpyWriter:
    """A file for each column, at `path_of` its name: what `np.load(…, mmap_mode="r")` reads without memory, and
    hnswlib, faiss and others take as it is.

    The header, at the front, has the shape: it is written last, and is as long as before, since NumPy leaves room in it
    for the largest number of rows.
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of
        self._files: dict[str, IO[bytes]] = {}
        self._like: dict[str, NDArray[Any]] = {}
        self._rows = 0

    def write(self, columns: Columns) -> None:
        for name, array in columns.items():
            if name not in self._files:
                self._files[name], self._like[name] = temporary.create(self._path_of(name)), array[:0].copy()
                self._head(name, 0)
            self._files[name].write(np.ascontiguousarray(array).data)
        self._rows += len(next(iter(columns.values())))

    def close(self) -> None:
        for name, file in self._files.items():
            with file:
                file.seek(0)
                self._head(name, self._rows)

    def give_up(self) -> None:
        _close(self._files.values())

    @property
    def names(self) -> list[str]:
        """The columns so far."""
        return list(self._files)

    def _head(self, name: str, rows: int) -> None:
        like = self._like[name]
        shape = (rows, *like.shape[1:])
        described = {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._files[name], described)


class NpzWriter:
    """`<table>.npz` with an array for each column; they lie beside it, uncompressed, until all is there."""

    def __init__(self, directory: Path, table: str) -> None:
        self._path = directory / f"{stem_of(table)}.npz"
        self._columns = NpyWriter(self._part)

    def write(self, columns: Columns) -> None:
        self._columns.write(columns)

    def close(self) -> None:
        self._columns.close()
        with temporary.create(self._path) as whole, zipfile.ZipFile(whole, "w") as archive:
            for name in self._columns.names:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member, open(self._part(name), "rb") as part:
                    shutil.copyfileobj(part, member, 1 << 20)
                self._part(name).unlink()

    def give_up(self) -> None:
        self._columns.give_up()

    def _part(self, name: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{name}")


class ParquetWriter:
    """`<table>.parquet`: a row for each key, what has several floats as lists of that length."""

    def __init__(self, directory: Path, table: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise ConfigError("parquet needs pyarrow: pip install 'elasticps[parquet]'") from None
        self._arrow = pyarrow
        self._path = directory / f"{stem_of(table)}.parquet"
        self._out: IO[bytes] | None = None
        self._file: pyarrow.parquet.ParquetWriter | None = None

    def write(self, columns: Columns) -> None:
        batch = self._arrow.table({name: self._column(array) for name, array in columns.items()})
        if self._file is None:
            self._out = temporary.create(self._path)
            self._file = self._arrow.parquet.ParquetWriter(self._out, batch.schema)
        self._file.write_table(batch)

    def close(self) -> None:
        if self._file is not None and self._out is not None:
            self._file.close()
            self._out.close()

    def give_up(self) -> None:
        _close(file for file in (self._file, self._out) if file is not None)

    def _column(self, array: NDArray[Any]) -> pyarrow.Array:
        flat = self._arrow.array(array.reshape(-1))
        width = int(np.prod(array.shape[1:]))
        if array.ndim > 1 and not width:  # of which Parquet has no fixed size
            return self._arrow.ListArray.from_arrays(np.zeros(len(array) + 1, np.int32), flat)
        return flat if array.ndim == 1 else self._arrow.FixedSizeListArray.from_arrays(flat, width)


def _close(files: Iterable[Any]) -> None:
    for file in files:
        with suppress(OSError):  # a full disk is told already
            file.close()


def writer(kind: str, directory: Path, table: str, prefix: str) -> Writer:
    """The writer for a format. Raises ConfigError if unsupported."""
    check_format(kind)
    if kind == "safetensors":
        return SafetensorsWriter(directory, table, prefix)
    if kind == "npz":
        return NpzWriter(directory, table)
    if kind == "npy":  # of a tensor the only column has no name
        stem = directory / stem_of(table)
        return NpyWriter(lambda column: Path(f"{stem}.{column}.npy" if prefix else f"{stem}.npy"))
    return ParquetWriter(directory, table)


def check_format(kind: str) -> None:
    """Raises ConfigError for an unsupported format."""
    if kind not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {kind!r}")
