"""Exports a live model to files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core import fields
from elasticps.client import Client, DenseTensor, SparseTable
from elasticps.client.tables import CHUNK
from elasticps.errors import ConfigError
from elasticps.exchange.writers import Columns, Writer, cast, check_format, writer
from elasticps.model.spec import MAX_NAME, TableSpec
from elasticps.system import temporary
from elasticps.system.progress import Progress, reporting

log = fields.logger(__name__)

MANIFEST = "elasticps.json"
VERSION = 1
USAGE_COLUMNS = ("last_use", "count", "score")
BAGS = "embedding_bags."  # before a table's name in a file
CHUNK_BYTES = 16 << 20
Tell = Callable[[int], None]


def export(
    ps: Client,
    to: Path,
    *,
    tables: Collection[str] = (),
    kind: str = "safetensors",
    with_slots: bool = False,
    dtype: str = "float32",
    rows: Mapping[str, int] | None = None,
    strip_prefix: str = "",
    modules: Mapping[str, str] | None = None,
    tell: Tell = lambda rows: None,
    progress: Progress = False,
) -> dict[str, int]:
    """Writes tables and tensors of the client's application (all, if none are named) into the folder `to`, which must
    not exist or be empty; returns the rows of each. `docs/reference/export.md` says what lies there.

    rows: of tables whose keys are 0 … n - 1, n by name: all of these are written, in order, those never pushed with
    their initial values, as `nn.Embedding` has them. Every other table has its keys in a column beside. dtype: of
    weights, float32 or float16. strip_prefix: left out of the names of tensors that begin with it, such as "model." of
    an Optimizer. modules: of tables, the path of the module that has their rows in a model of plain torch: its rows are
    `<path>.weight` then, and not `embedding_bags.<table>.weight`. tell(n) hears of each n rows; progress: True shows a
    bar, a function gets (rows done, rows).

    Training may go on meanwhile, but then rows are of different moments. Memory for one chunk is enough, and for one
    tensor. Raises UnknownTable, ConfigError for arguments and folders that cannot be, or weights that float16 cannot
    hold, Timeout, OSError when the disk is full, say. There is all or nothing.
    """
    counts = dict(rows or {})
    handles = {name: ps.open(name) for name in (tables or ps.tables())}
    specs = {name: handle.spec for name, handle in handles.items()}

    def columns(name: str, part: Path) -> Generator[Columns, None, None]:
        return _columns(ps, handles[name], counts.get(name), with_slots, dtype)

    names = called(specs, strip_prefix, modules, with_slots)
    total = sum(counts.get(n, one.rows) for n, one in ps.tables().items() if n in handles) if progress else None
    with reporting(progress, "export", "rows", total) as report:
        return write_tables(to, specs, columns, kind, dtype, counts, both(tell, report.advance), names)


def both(tell: Tell, advance: Tell) -> Tell:
    """Tells the two of them of rows."""

    def heard(rows: int) -> None:
        tell(rows)
        advance(rows)

    return heard


def called(
    specs: Mapping[str, TableSpec],
    strip_prefix: str = "",
    modules: Mapping[str, str] | None = None,
    with_slots: bool = False,
) -> dict[str, str]:
    """Of each table and tensor what stands in its files: of a tensor its name there, of a table what comes before
    `.weight`. with_slots: slots of tensors have names there, too. ConfigError for what names nothing, or two the
    same."""
    paths = dict(modules or {})
    sparse = {name for name, spec in specs.items() if spec.shape is None}
    if strangers := sorted(paths.keys() - sparse):
        raise ConfigError(f"a module's path is given for {strangers[0]!r}, which is no table that is exported")
    found = {
        name: paths.get(name, f"{BAGS}{name}") if name in sparse else name.removeprefix(strip_prefix) for name in specs
    }
    if strip_prefix and all(found[name] == name for name in specs.keys() - sparse):
        raise ConfigError(f"no tensor that is exported has a name that begins with {strip_prefix!r}")
    before: dict[str, str] = {}
    for name, path in found.items():
        if not 0 < len(path) <= MAX_NAME + len(BAGS) or not path.isprintable() or "/" in path:
            raise ConfigError(f"{path!r} can be no name of {name!r} in a file")
        inside = next((table for table, module in paths.items() if path.rpartition(".")[0] == module), name)
        if (other := before.setdefault(path, inside)) != name:
            raise ConfigError(f"{other!r} and {name!r} would both be {path!r} in the files")
    if with_slots:
        for name in specs.keys() - sparse:
            for slot in slots_called(specs[name], found[name]):
                if slot in before or slot in specs:
                    raise ConfigError(
                        f"a slot of tensor {name!r} would be {slot!r} in the files, and so is another tensor or table: "
                        "export the two into different folders"
                    )
    return found


def slots_called(spec: TableSpec, path: str) -> dict[str, str]:
    """The slots of a tensor that files call `path`, by their names in files."""
    return {f"{path}.{slot}": slot for slot in spec.optimizer.slot_shapes(spec.dim)}


def write_tables(
    to: Path,
    specs: Mapping[str, TableSpec],
    columns_of: Callable[[str, Path], Generator[Columns, None, None]],
    kind: str,
    dtype: str,
    counts: Mapping[str, int],
    tell: Tell,
    names: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Writes a folder as `export` does, of tables whose columns come from anywhere: `columns_of` gets the table's name,
    and where it may put files for a while. Of a tensor it gives `weight` and slots, once. names: see `called`."""
    names = called(specs) if names is None else names
    if strangers := counts.keys() - {name for name, spec in specs.items() if spec.shape is None}:
        raise ConfigError(f"rows of {sorted(strangers)[0]!r} are given, which is no table that is exported")
    if kind == "npy":
        _check_files(specs, names)
    written: dict[str, int] = {}
    described: dict[str, dict[str, object]] = {}
    with _written_folder(to, kind, dtype, described) as part:
        for name, spec in specs.items():
            with closing(columns_of(name, part)) as parts:  # after an error, too, what waits in files is removed
                if spec.shape is None:
                    written[name] = _write(writer(kind, part, name, names[name]), parts, tell)
                else:
                    whole = next(parts)
                    written[name] = _write_tensor(kind, part, names[name], whole["weight"], tell)
                    for path, slot in slots_called(spec, names[name]).items():
                        if slot in whole:
                            _write_tensor(kind, part, path, whole[slot], lambda rows: None)
            keys = spec.shape is None and name not in counts
            described[name] = {"spec": json.loads(spec.to_json()), "rows": written[name], "keys": keys}
            if names[name] not in (name, f"{BAGS}{name}"):
                described[name]["tensor"] = names[name]
    return written


def _check_files(specs: Mapping[str, TableSpec], names: Mapping[str, str]) -> None:
    """ConfigError if a tensor's file would be called as that of a table's column, where each column has a file."""
    tensors = {names[name] for name, spec in specs.items() if spec.shape is not None}
    for name, spec in specs.items():
        columns = ("keys", "weight", *USAGE_COLUMNS, *spec.optimizer.slot_shapes(spec.dim))
        if spec.shape is None and (taken := tensors & {f"{name}.{column}" for column in columns}):
            raise ConfigError(f"table {name!r} and tensor {min(taken)!r} have a file of one name: export them apart")


def _write_tensor(kind: str, part: Path, path: str, values: NDArray[Any], tell: Tell) -> int:
    """Writes one tensor, or one slot of it, to a file of its own."""
    return _write(writer(kind, part, path, ""), [{path: np.atleast_1d(values)}], tell)


def _write(out: Writer, parts: Iterable[Columns], tell: Tell) -> int:
    """Writes all columns; returns the number of rows."""
    written = 0
    try:
        for columns in parts:
            out.write(columns)
            count = len(next(iter(columns.values())))
            written += count
            tell(count)
        out.close()
    except BaseException:
        out.give_up()
        raise
    return written


@contextmanager
def _written_folder(to: Path, kind: str, dtype: str, described: Mapping[str, object]) -> Iterator[Path]:
    """A folder to write into. It becomes `to` at the end, with the manifest of all tables; after an error nothing
    does."""
    check_format(kind)  # of nothing, too: the manifest says it
    if dtype not in ("float32", "float16"):
        raise ConfigError(f"dtype must be float32 or float16, got {dtype!r}")
    to = Path(os.path.abspath(to))  # "." has no name
    if to.is_symlink():
        raise ConfigError(f"{to} is a link: name the folder itself")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} exists, and is not an empty folder")
    with ExitStack() as stack:
        part, folder = _begin(to, stack)
        with temporary.naming(to):
            yield part
            manifest = {"version": VERSION, "format": kind, "dtype": dtype, "tables": described}
            with temporary.create(part / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
        _publish(part, folder, to)


def _begin(to: Path, stack: ExitStack) -> tuple[Path, int]:
    """A new folder beside `to`, and its descriptor, which is locked: so another export to the same place can tell that
    this one is under way. The folder of an export that has died stays, and a warning names it: nobody can prove whose
    it is."""
    mark = f"{hashlib.blake2b(os.fsencode(to.name), digest_size=4).hexdigest()}-"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        for other in temporary.paths_with(to.parent, mark):
            if _locked(other):
                raise ConfigError(f"{to} is being written by another export")
            log.warning("an export that died has left its folder: delete it", folder=other)
        part = stack.enter_context(temporary.new_folder(to.parent, mark, 0o777))
        folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "its parent is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"{to} cannot be made: {why}") from error
    return part, folder


def _locked(other: Path) -> bool:
    """Whether another process has locked the folder."""
    try:
        folder = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False  # a link, say, or it has gone
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(folder)


def _publish(part: Path, folder: int, to: Path) -> None:
    """Gives the written folder its name. Raises ConfigError if that is taken by now."""
    if not part.is_dir() or not os.path.samestat(os.fstat(folder), part.lstat()):
        raise ConfigError(f"{to} cannot be made: somebody has replaced {part}, which was to become it")
    try:
        part.rename(to)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ConfigError(f"{to} was made by somebody else meanwhile, and is not an empty folder") from error


def _columns(
    ps: Client, handle: SparseTable | DenseTensor, count: int | None, with_slots: bool, dtype: str
) -> Generator[Columns, None, None]:
    if isinstance(handle, DenseTensor):
        slots = handle.slots() if with_slots else {}
        yield {"weight": cast(handle.pull(exact=True), dtype, handle.name), **slots}
        return
    step = max(1, min(CHUNK, CHUNK_BYTES // (8 + 4 * handle.dim)))
    parts = handle.keys(step) if count is None else (np.arange(a, min(a + step, count)) for a in range(0, count, step))
    for keys in chain([np.empty(0, np.int64)], parts):  # a table without rows has its columns, too
        yield _of(handle, keys, count is None, with_slots, dtype)


def _of(handle: SparseTable, keys: np.ndarray, with_keys: bool, with_slots: bool, dtype: str) -> Columns:
    columns = {"keys": keys} if with_keys else {}
    slots = handle.slots(keys) if with_slots else {}
    return columns | {"weight": cast(handle.pull(keys, exact=True), dtype, handle.name)} | slots
