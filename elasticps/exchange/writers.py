"""Columns of a table as files, written as rows come: how many there will be is known at the end only.

What is in memory is what `write` is given. A column is an array [rows, …]; all columns of a table are equally long.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

Columns = Mapping[str, NDArray[Any]]
FORMATS = ("safetensors", "npz", "parquet")
DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}
_HEADER_BYTES = 4096  # room for the header of a file of one tensor, whose name has at most some 200 letters


class Writer(Protocol):
    """One table's."""

    def write(self, columns: Columns) -> None:
        """The next rows. All calls have the same columns."""

    def close(self) -> None:
        """Makes the files whole."""


class SafetensorsWriter:
    """A file for each column: `<table>.<column>.safetensors`, with one tensor called `<prefix>.<column>`; without a
    prefix `<table>.safetensors` with the only column.

    The header, at the front, has the shape: it is written last, into room that was left, and padded with blanks.
    """

    def __init__(self, directory: Path, table: str, prefix: str) -> None:
        self._path = directory / table
        self._prefix = prefix
        self._files: dict[str, IO[bytes]] = {}
        self._shapes: dict[str, tuple[str, list[int]]] = {}

    def write(self, columns: Columns) -> None:
        for name, array in columns.items():
            if name not in self._files:
                path = f"{self._path}.{name}.safetensors" if self._prefix else f"{self._path}.safetensors"
                self._files[name] = file = open(path, "wb")  # noqa: SIM115  # until close
                file.write(b" " * _HEADER_BYTES)
                self._shapes[name] = DTYPES[array.dtype.name], [0, *array.shape[1:]]
            self._shapes[name][1][0] += len(array)
            self._files[name].write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        for name, file in self._files.items():
            with file:
                dtype, shape = self._shapes[name]
                said = {"dtype": dtype, "shape": shape, "data_offsets": [0, file.tell() - _HEADER_BYTES]}
                header = json.dumps({f"{self._prefix}.{name}" if self._prefix else name: said}).encode()
                file.seek(0)
                file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(_HEADER_BYTES - 8))


class NpzWriter:
    """`<table>.npz` with an array for each column; they lie beside it, uncompressed, until all is there."""

    def __init__(self, directory: Path, table: str) -> None:
        self._path = directory / f"{table}.npz"
        self._files: dict[str, IO[bytes]] = {}
        self._like: dict[str, NDArray[Any]] = {}
        self._rows = 0

    def write(self, columns: Columns) -> None:
        for name, array in columns.items():
            if name not in self._files:
                self._files[name] = open(self._part(name), "wb")  # noqa: SIM115  # until close
                self._like[name] = array[:0].copy()
            self._files[name].write(np.ascontiguousarray(array).data)
        self._rows += len(next(iter(columns.values())))

    def close(self) -> None:
        with zipfile.ZipFile(self._path, "w") as archive:
            for name, file in self._files.items():
                file.close()
                like = self._like[name]
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member, open(self._part(name), "rb") as part:
                    said = {
                        "descr": np.lib.format.dtype_to_descr(like.dtype),
                        "fortran_order": False,
                        "shape": (self._rows, *like.shape[1:]),
                    }
                    np.lib.format.write_array_header_1_0(member, said)
                    shutil.copyfileobj(part, member, 1 << 20)
                self._part(name).unlink()

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
        self._path = directory / f"{table}.parquet"
        self._file: pyarrow.parquet.ParquetWriter | None = None

    def write(self, columns: Columns) -> None:
        batch = self._arrow.table({name: self._column(array) for name, array in columns.items()})
        if self._file is None:
            self._file = self._arrow.parquet.ParquetWriter(self._path, batch.schema)
        self._file.write_table(batch)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _column(self, array: NDArray[Any]) -> pyarrow.Array:
        flat = self._arrow.array(array.reshape(-1))
        width = int(np.prod(array.shape[1:]))
        return flat if array.ndim == 1 else self._arrow.FixedSizeListArray.from_arrays(flat, width)


def writer(kind: str, directory: Path, table: str, prefix: str) -> Writer:
    """That of a format. ConfigError for one that there is none of."""
    if kind == "safetensors":
        return SafetensorsWriter(directory, table, prefix)
    if kind == "npz":
        return NpzWriter(directory, table)
    if kind == "parquet":
        return ParquetWriter(directory, table)
    raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {kind!r}")
