"""Values that readers take and give: what to follow, what was applied, how old it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError, InputError
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.model.spec import TableSpec

READER_DTYPES = ("float32", "float16", "bfloat16", "int8")
LEAST_EVERY_S, MOST_EVERY_S = 0.001, 60.0


@dataclass(frozen=True)
class ReaderSpec:
    """What a reader follows. Raises ConfigError for what cannot be.

    tables       names; None: all tables and tensors of the application, also those that are made later
    dtype        how rows travel and are kept: "float32", "float16", "bfloat16", "int8" (with scales in each row); None:
                 as the servers have them
    every        seconds from one window of changes to the next, from 0.001 to 60; busy servers take up to three
                 times as long
    application  whose tables
    share        of the keys of tables, as (2, 8) is the second of eight; tensors are whole in each
    buffer_bytes  windows that are kept while the reader holds; beyond that servers send no more until it is released
    """

    tables: tuple[str, ...] | None = None
    dtype: str | None = None
    every: float = 0.02
    application: str = "default"
    buffer_bytes: int = 256 << 20
    share: KeyShare = ALL_KEYS

    def __post_init__(self) -> None:
        names: object = self.tables
        if names is not None and not (isinstance(names, tuple) and all(isinstance(one, str) and one for one in names)):
            raise ConfigError(f"tables= is a list of names, or None for all tables, got {self.tables!r}")
        if self.dtype is not None and self.dtype not in READER_DTYPES:
            raise ConfigError(f"dtype= is one of {', '.join(READER_DTYPES)}, or None, got {self.dtype!r}")
        given: object = self.every
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ConfigError(f"every= is a number of seconds, got {given!r}")
        if not LEAST_EVERY_S <= self.every <= MOST_EVERY_S:
            raise ConfigError(f"every= is from {LEAST_EVERY_S} to {MOST_EVERY_S:.0f} seconds, got {self.every}")
        KeyShare.checked(self.share)
        if self.buffer_bytes < 1 << 20:
            raise ConfigError(f"buffer_bytes= is at least {1 << 20}, got {self.buffer_bytes}")


@dataclass(frozen=True)
class AsOf:
    """How far a reader has come. Each range is at a state of its own that was committed, unless the reader holds.

    time_s: seconds since 1970 of the oldest range's state, by the clocks of the servers; epoch: of the view that the
    reader follows; positions: int64 [P], sequence number of each range's newest state, -1 where the reader has none
    yet; clocks: by worker id, int64 [P], the step up to which the worker's pushes are in each range (a step that ticks
    some ranges only leaves the others at an earlier one); held: whether all ranges show one moment, the same steps of
    each worker.
    """

    time_s: float
    epoch: int
    positions: NDArray[np.int64]
    clocks: Mapping[int, NDArray[np.int64]]
    held: bool = False

    @property
    def steps(self) -> dict[int, int]:
        """Worker id -> its newest step that is in some range; of a reader that holds, in all that it ticks."""
        return {worker: int(of.max(initial=0)) for worker, of in self.clocks.items()}


def check_names_keys(keys: object) -> None:
    """Raises InputError for what is no mapping from names of tables to keys."""
    if type(keys) is not dict and not isinstance(keys, Mapping):
        raise InputError(f"pull takes a mapping from names of tables to keys, got {type(keys).__name__}")


class TableChange(NamedTuple):
    """What changed in one table, to be done in the order of the fields.

    dropped: the table is gone for good, and the name is free; nothing else is said then. new: a table that was not
    there before, `spec` is its. deleted: int64 [k], keys whose rows are gone: deleted, evicted, cleared, or not there
    any more after a range was read again. keys: int64 [n], each once, and rows: float32 [n, dim], their newest values.
    """

    table: str
    spec: TableSpec
    new: bool
    dropped: bool
    deleted: NDArray[np.int64]
    keys: NDArray[np.int64]
    rows: NDArray[np.float32]


class AppliedWindow(NamedTuple):
    """A window of changes that a reader has applied. listing: rows of the first full listing of a listener, and not a
    change; complete: the last part of that listing, or any other window."""

    changes: Sequence[TableChange]
    as_of: AsOf
    listing: bool = False
    complete: bool = True


Listener: TypeAlias = Callable[[AppliedWindow], None]


@dataclass(frozen=True)
class ReaderStats:
    """What a reader has, and has done. rows, bytes: held now, by all tables; windows, window_bytes: received; changed:
    rows that these brought, as often as they came; filled: rows that came because a range was read again; fills: ranges
    that were; fill_bytes: of these rows, and of the digests by which others were left out; pulls, pulled: calls, and
    their rows; age_s: of the oldest range; ages_s: p50 and p99 of the time from a window's making to its being readable
    here, of the last thousand."""

    rows: int
    bytes: int
    windows: int
    window_bytes: int
    changed: int
    filled: int
    fills: int
    fill_bytes: int
    pulls: int
    pulled: int
    age_s: float
    ages_s: tuple[float, float]
