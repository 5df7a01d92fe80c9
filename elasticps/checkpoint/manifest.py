"""What a checkpoint is: one JSON document, written last. Reading is strict: what is not understood is refused. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from coordinator.core.names import check_name
from elasticps.checkpoint.rows import MOST_HEADER, Encoded, checksum
from elasticps.errors import CheckpointError, SpecError
from elasticps.model.spec import TableSpec
from elasticps.wire.headers import MAX_CUT
from replication.progress import ERASER, MAX_CLOCK

VERSION = 2
USAGE_VERSION = 3  # with a table that keeps the usage of its rows: a version that knows none refuses it
READ = (1, VERSION, USAGE_VERSION)  # in version 1 Adam's rows had no number of updates, see `RowReader`
NAME = "manifest.json"
MAX_ID = (1 << 32) - 1  # of a table or worker; of deletions too
MAX_PROGRESS = (1 << 63) - 1  # of a worker in a range: its clock, and a part


SparseStep = tuple[int, int, int, tuple[int, ...]]
"""The record of a step as JSON has it: (worker, clock, clock up to which its worker knew all to be committed, ranges
that it ticks)."""


@dataclass(frozen=True)
class FileEntry:
    """A file of rows. path: below the checkpoint's folder; table: the id; header: bytes of its header, of which
    `blake2b` is the sum (the header has sums of all else); ranges: of which it has something, ascending."""

    path: str
    table: int
    bytes: int
    header: int
    rows: int
    blake2b: str
    ranges: tuple[int, ...]

    @classmethod
    def of(cls, path: str, table: int, encoded: Encoded) -> FileEntry:
        """That of a file which is written to `path`."""
        ranges = tuple(segment.range for segment in encoded.segments)
        return cls(path, table, encoded.nbytes, len(encoded.header), encoded.rows, encoded.sum, ranges)


@dataclass(frozen=True)
class WorkerEntry:
    """A worker at the cut, by its name in the cluster. clock: all its steps up to there are in the checkpoint, none
    after; the rest as etcd has it under `last-worker/`."""

    id: int
    app: str
    clock: int
    base: int = 0
    trained: int = 0
    steps: int = 0

    def checked(self) -> WorkerEntry:
        """Itself. ValueError for what no worker is."""
        _whole(self.id, MAX_ID), _text(self.app)
        for clock in (self.clock, self.base, self.trained, self.steps):
            _whole(clock, MAX_CLOCK - 1)
        return self


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    since      the cut of the checkpoint that it adds to; 0: it is full
    tables     by "application/name"
    former     clocks of ids that are no worker's any more, by id; those of deletions too (id + 2^31)
    left_out   of workers that were lost as the cut was taken: progress per range, by id
    closed     each application's last synchronous round
    groups     of rounds, as servers keep them; shards: the same of sets of shards
    settings   what was set for tables beside their specs, as etcd has it, by key: `rates/…`, `on-loss/…`
    records    of the steps of workers in `left_out` that tick some ranges
    """

    cluster: str
    cut: int
    since: int
    ranges: int
    time: float
    tables: Mapping[str, tuple[int, TableSpec]]
    files: tuple[FileEntry, ...]
    workers: Mapping[str, WorkerEntry] = field(default_factory=dict)
    former: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    closed: Mapping[str, int] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    shards: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    records: tuple[SparseStep, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of its files."""
        return sum(file.bytes for file in self.files)

    @property
    def rows(self) -> int:
        """In its files."""
        return sum(file.rows for file in self.files)

    @property
    def folder(self) -> str:
        """Where it lies below the URL."""
        return folder_of(self.cut)

    @property
    def newest_id(self) -> int:
        """The highest id of a worker or table that it speaks of."""
        ids = [id_ for id_, _ in self.tables.values()] + [worker.id for worker in self.workers.values()]
        return max([*ids, *(id_ & 0x7FFFFFFF for id_ in (*self.former, *self.left_out)), 0])

    @property
    def newest_clock(self) -> int:
        """The highest clock of a worker at the cut."""
        former = (clock for id_, clock in self.former.items() if id_ < ERASER)
        return max([*(worker.clock for worker in self.workers.values()), *former, 0])

    def spec(self, table: int) -> TableSpec:
        """Of the table with that id."""
        return next(spec for id_, spec in self.tables.values() if id_ == table)

    def encode(self) -> bytes:
        """The document."""
        document = {name: getattr(self, name) for name in (field.name for field in fields(self))} | {
            "version": USAGE_VERSION if any(spec.usage for _, spec in self.tables.values()) else VERSION,
            "tables": {
                name: {"id": id_, "spec": json.loads(spec.to_json())} for name, (id_, spec) in self.tables.items()
            },
            "files": [asdict(file) for file in self.files],
            "workers": {name: asdict(worker) for name, worker in self.workers.items()},
        }
        document = json.loads(json.dumps(document))  # as a reader has it: keys are texts
        return json.dumps(
            {"version": document.pop("version"), "blake2b": _sum(document), **document}, indent=1
        ).encode()

    @classmethod
    def decode(cls, data: bytes, where: str = "it") -> Manifest:
        """The inverse. `where` is how errors call it."""
        try:
            document = json.loads(data)
            if not isinstance(document, dict) or "version" not in document or "cut" not in document:
                raise CheckpointError(f"{where} is no manifest of a checkpoint")
            if document.pop("version") not in READ:
                raise CheckpointError(
                    f"{where} was written by a newer elasticps: this one reads versions up to {USAGE_VERSION}"
                )
            if document.pop("blake2b") != _sum(document):
                raise CheckpointError(f"{where} was altered: its sum is another")
            return _checked(document)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, SpecError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where} is no manifest of a checkpoint, or was cut off: {error!r}") from error


def folder_of(cut: int) -> str:
    """The folder of a checkpoint."""
    return f"{cut:06d}"


def path_of(cut: int) -> str:
    """Its manifest."""
    return f"{folder_of(cut)}/{NAME}"


def folder_of_table(spec: TableSpec, table: int) -> str:
    """Where a table's files lie, below its checkpoint's folder: every storage takes that name."""
    return f"{re.sub('[^A-Za-z0-9_-]', '_', spec.name)}-{table}"


def check_table(name: str, spec: TableSpec) -> None:
    """ValueError if a table of that spec cannot be "application/name": an export calls files by it."""
    if name != f"{check_name('app', name.partition('/')[0])}/{spec.name}":
        raise ValueError(f"table {name} is called {spec.name!r}")


def cut_of(folder: str) -> int | None:
    """The inverse of `folder_of`; None for a folder that no checkpoint has."""
    if not folder.isdecimal() or len(folder) > len(str(MAX_CUT)) or not 0 < int(folder) <= MAX_CUT:
        return None
    return int(folder) if folder_of(int(folder)) == folder else None


def _sum(document: Mapping[str, Any]) -> str:
    return checksum([json.dumps(document, sort_keys=True, separators=(",", ":")).encode()])


def _checked(document: dict[str, Any]) -> Manifest:
    """Beyond the sum: a document of our version that is not what we write is somebody's mistake, and says so here
    instead of somewhere in a restore."""
    numbers = {
        name: _whole(document[name], most) for name, most in (("cut", MAX_CUT), ("since", MAX_CUT), ("ranges", 1 << 16))
    }
    ranges = numbers["ranges"]
    if not numbers["since"] < numbers["cut"] or ranges < 2 or ranges & (ranges - 1):
        raise ValueError(f"cut {numbers['cut']} since {numbers['since']} with {ranges} ranges")
    tables = {}
    for name, one in document["tables"].items():
        spec = TableSpec.from_json(json.dumps(one["spec"]))
        check_table(name, spec)
        tables[name] = _whole(one["id"], MAX_ID), spec
    ids = {id_ for id_, _ in tables.values()}
    files = tuple(FileEntry(**one | {"ranges": tuple(one["ranges"])}) for one in document["files"])
    for file in files:
        if file.table not in ids or not all(0 <= r < ranges for r in file.ranges) or ".." in file.path.split("/"):
            raise ValueError(f"file {file.path}")
        _whole(file.bytes, 1 << 62), _whole(file.rows, 1 << 62)
        _whole(file.header, min(file.bytes, MOST_HEADER + 8))  # which is read at once
        _text(file.blake2b), [_whole(r, ranges - 1) for r in file.ranges]
    workers = {name: WorkerEntry(**one).checked() for name, one in document["workers"].items()}
    former = {_whole(int(id_), MAX_ID): _whole(clock, MAX_CLOCK) for id_, clock in document["former"].items()}
    left_out = {
        _whole(int(id_), MAX_ID): tuple(_whole(each, MAX_PROGRESS) for each in progress)
        for id_, progress in document["left_out"].items()
    }
    records = tuple(_record(one, ranges) for one in document.get("records", ()))  # which the first ones did not have
    closed = {_text(app): _whole(clock, MAX_PROGRESS) for app, clock in document["closed"].items()}
    settings = document.get("settings", {})  # which the first ones did not have
    if not all(isinstance(each, dict) for each in (*document["groups"], *document["shards"], *settings.values())):
        raise ValueError("groups, shards and settings are objects")
    if not math.isfinite(time := float(document["time"])):
        raise ValueError(f"its time is {time}")
    if any(len(progress) != ranges for progress in left_out.values()) or len(ids) != len(tables):
        raise ValueError("it contradicts itself")
    return Manifest(
        _text(document["cluster"]), **numbers, time=time, tables=tables, files=files, workers=workers, former=former,
        left_out=left_out, closed=closed, groups=tuple(document["groups"]),
        shards=tuple(document["shards"]), settings=dict(settings), records=records,
    )  # fmt: skip


def _record(one: Any, ranges: int) -> SparseStep:
    id_, clock, committed, ticked = one
    if _whole(committed, MAX_CLOCK - 1) >= _whole(clock, MAX_CLOCK - 1):
        raise ValueError(f"step {clock} of worker {id_} says that all up to step {committed} are committed")
    return _whole(id_, MAX_ID), clock, committed, tuple(_whole(r, ranges - 1) for r in ticked)


def _whole(number: object, most: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        raise ValueError(f"{number!r} is no number from 0 to {most}")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value
