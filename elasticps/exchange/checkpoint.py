"""Exports the model in a checkpoint to files, as `export` does for a live cluster, but without one."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents, RangeRows
from elasticps.checkpoint.storage import Storage
from elasticps.client import loading
from elasticps.errors import ConfigError, UnknownTable
from elasticps.exchange.export import CHUNK_BYTES, Tell, both, called, write_tables
from elasticps.exchange.usage import UsageFilter, UsedRows, check_usage
from elasticps.exchange.writers import Columns, cast
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout
from elasticps.system import temporary
from elasticps.system.progress import Progress, reporting


def export_checkpoint(
    source: str,
    to: Path,
    *,
    cut: int | None = None,
    app: str = "default",
    tables: Collection[str] = (),
    kind: str = "safetensors",
    with_slots: bool = False,
    dtype: str = "float32",
    rows: Mapping[str, int] | None = None,
    strip_prefix: str = "",
    modules: Mapping[str, str] | None = None,
    with_usage: bool = False,
    chosen_by: UsageFilter | None = None,
    tell: Tell = lambda rows: None,
    progress: Progress = False,
) -> dict[str, int]:
    """`elasticps.exchange.export.export` of the checkpoint of a cut (the newest, if none is named) at the URL `source`;
    all rows are of one moment. A table of `rows` takes as much disk again while it is put in order. Raises
    CheckpointError too.

    with_usage: also the columns last_use (int64, seconds since 1970), count and, where it is kept, score (float32);
    chosen_by: only the rows of tables that it chooses. Tensors are written whole. ConfigError for a table that keeps no
    usage, or is one of `rows`."""
    by = (chosen_by or UsageFilter()).checked()
    storage = Storage(source)
    contents = Contents(storage, catalog.chain(storage, cut))
    prefix = f"{app}/"
    there = {n.removeprefix(prefix): one for n, one in contents.manifest.tables.items() if n.startswith(prefix)}
    if missing := sorted(set(tables) - there.keys()):
        raise UnknownTable(f"checkpoint {contents.manifest.cut} has no table {missing[0]!r} of application {app!r}")
    chosen, counts = {name: there[name] for name in (tables or there)}, dict(rows or {})

    def columns(name: str, part: Path) -> Generator[Columns, None, None]:
        table, spec = chosen[name]
        used = None
        if spec.shape is None and (by or with_usage):
            used = UsedRows(spec, table, int(contents.times([table]).max()))
        rows = _rows(contents, table, used, by)
        pieces = (
            (each.keys, weights(spec, each.rows), _beside(spec, each.rows, with_slots, used if with_usage else None))
            for each in rows
        )
        return _columns(spec, pieces, counts.get(name), with_slots, dtype, part, used if with_usage else None)

    for name, (_, spec) in chosen.items():
        if spec.shape is None and (by or with_usage):
            check_usage(name, spec)
            if name in counts:
                raise ConfigError(f"table {name!r} is written whole and in order: leave --rows out, or bounds of usage")
    specs = {name: spec for name, (_, spec) in chosen.items()}
    names = called(specs, strip_prefix, modules, with_slots)
    with reporting(progress, "export", "rows") as report:
        return write_tables(to, specs, columns, kind, dtype, counts, both(tell, report.advance), names)


def _rows(contents: Contents, table: int, used: UsedRows | None, by: UsageFilter) -> Iterator[RangeRows]:
    """The rows of a table that are exported."""

    def every() -> Iterator[RangeRows]:
        return (rows for unit in contents.units(table) for rows in contents.read(unit))

    if used is None or not by:
        yield from every()
        return
    if by.top is not None:
        used.find_top(every(), by)
    for rows in every():
        chosen = used.choose(rows.keys, rows.rows, by)
        yield RangeRows(rows.range, rows.keys[chosen], rows.rows[chosen], rows.stamps[chosen])


def _beside(
    spec: TableSpec, rows: NDArray[np.uint8], with_slots: bool, used: UsedRows | None
) -> dict[str, NDArray[Any]]:
    """The columns beside keys and weights."""
    return (slots(spec, rows) if with_slots else {}) | ({} if used is None else used.columns(rows))


def _columns(
    spec: TableSpec, pieces: Iterator[Any], count: int | None, with_slots: bool, dtype: str, part: Path,
    used: UsedRows | None,
) -> Generator[Columns, None, None]:  # fmt: skip
    if spec.shape is not None:
        floats = spec.optimizer.slot_floats(spec.dim) if with_slots else 0
        try:
            whole = np.zeros((spec.blocks, spec.dim), np.float32)
            beside = np.full((spec.blocks, floats), spec.optimizer.slot_fill, np.float32)
        except MemoryError:
            raise ConfigError(
                f"tensor {spec.name!r} of shape {list(spec.shape)} has {4 * (spec.size + spec.blocks * floats):,} "
                "bytes, which this machine's memory does not hold"
            ) from None
        for keys, weight, slot_columns in pieces:
            whole[keys] = weight
            if slot_columns:
                beside[keys] = np.concatenate(list(slot_columns.values()), axis=1)
        values = cast(whole.ravel()[: spec.size].reshape(spec.shape), dtype, spec.name)
        yield {"weight": values, **(loading.of_blocks(spec, beside) if with_slots else {})}
    elif count is None:
        nothing = np.empty((0, RowLayout.of(spec).stride), np.uint8)
        empty = np.empty(0, np.int64), weights(spec, nothing), _beside(spec, nothing, with_slots, used)
        for keys, weight, slot_columns in chain([empty], pieces):  # so that a table without rows has its columns too
            yield {"keys": keys, "weight": cast(weight, dtype, spec.name), **slot_columns}
    else:
        yield from _in_order(spec, count, pieces, with_slots, dtype, part)


def _in_order(
    spec: TableSpec, count: int, pieces: Iterator[Any], with_slots: bool, dtype: str, part: Path
) -> Generator[Columns, None, None]:
    """Rows of the keys 0 … count - 1: of those that are not there initial values, and slots of new rows."""
    from elasticps.store.store import initial_rows  # compiles kernels

    step = max(1, CHUNK_BYTES // (8 + 4 * spec.dim))
    with tempfile.TemporaryDirectory(dir=part) as folder:
        shapes = {"weight": spec.dim} | (spec.optimizer.slot_shapes(spec.dim) if with_slots else {})
        ordered = {
            name: _mapped(Path(folder) / f"{number}", dtype if name == "weight" else "float32", (count, width))
            for number, (name, width) in enumerate(shapes.items())
        }
        for at in range(0, count, step):
            keys = np.arange(at, min(at + step, count), dtype=np.int64)
            for name, column in ordered.items():
                new = initial_rows(spec.init, keys, spec.dim, spec.dtype) if name == "weight" else None
                column[at : at + step] = spec.optimizer.slot_fill if new is None else cast(new, dtype, spec.name)
        for keys, weight, slot_columns in pieces:
            inside = (keys >= 0) & (keys < count)
            for name, values in {"weight": cast(weight, dtype, spec.name), **slot_columns}.items():
                ordered[name][keys[inside]] = values[inside]
        for at in range(0, count, step):
            yield {name: np.array(column[at : at + step]) for name, column in ordered.items()}


def _mapped(path: Path, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    """An array in a new file whose room on the disk is reserved. Raises OSError."""
    if not (nbytes := np.dtype(dtype).itemsize * shape[0] * shape[1]):
        return np.empty(shape, dtype)
    with temporary.create(path) as file:
        temporary.reserve(file.fileno(), nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype).reshape(shape)


def weights(spec: TableSpec, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of whole rows uint8 [n, stride]: float32 [n, dim]."""
    packed = np.ascontiguousarray(rows[:, : RowLayout.of(spec).weight_bytes])
    if spec.dtype == "bfloat16":
        return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return packed.view(spec.dtype).astype(np.float32)


def slots(spec: TableSpec, rows: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
    """The slots of whole rows, by name: float32 [n, floats]."""
    at, found = RowLayout.of(spec).slots_at, {}
    for name, floats in spec.optimizer.slot_shapes(spec.dim).items():
        found[name] = np.ascontiguousarray(rows[:, at : at + 4 * floats]).view(np.float32)
        at += 4 * floats
    return found
