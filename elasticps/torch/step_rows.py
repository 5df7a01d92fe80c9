"""Rows that models on several devices need in one step: the first to need a row asks the servers, others copy it.

Only `pull`, which the caller gives, does I/O. Threads may share a `StepRows`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.kernels.distinct import distinct

if TYPE_CHECKING:
    from elasticps.torch.worker import PendingPull

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
TableT = TypeVar("TableT")
MAX_PULLS = 64  # of a table in one step, whose rows are held here; then all are dropped
_NONE: Keys = np.empty(0, np.int64)


class _SharedPull:
    """One pull, for which several threads may wait."""

    def __init__(self, read: PendingPull) -> None:
        self._read: PendingPull | None = read
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._read is not None:
                self._read.result()
                self._read = None


@dataclass
class _Block:
    """Rows that one pull brings, float32 [n, dim]: of the table's keys number `start` … `start` + n - 1."""

    start: int
    rows: Floats
    pull: _SharedPull


@dataclass
class _Known:
    """The keys of one table, distinct, that were asked for at one moment, `at`: clock, and changes of the table."""

    at: tuple[int, int]
    keys: Keys = field(default_factory=lambda: _NONE)
    blocks: list[_Block] = field(default_factory=list)


@dataclass
class _Piece:
    """The rows that one reader needs of a block: rows[take] go to out[put]."""

    block: _Block
    take: Keys
    out: Floats
    put: Keys


class StepRead:
    """Rows that one model has asked for: some by a pull of its own, others by pulls of models before it."""

    def __init__(self, pulls: list[_SharedPull], parts: list[_Piece], failed: Callable[[], None]) -> None:
        self._pulls, self._parts, self._failed = pulls, parts, failed

    def result(self, timeout: float | None = None) -> None:
        """Waits until all rows are where they belong. Raises what a pull raises, each time it is called."""
        try:
            for pull in self._pulls:
                pull.wait()
        except BaseException:
            self._failed()
            raise
        for part in self._parts:
            part.out[part.put] = part.block.rows[part.take]
        self._parts = []


class StepRows(Generic[TableT]):
    """The rows that a group's models have asked for in the step that is trained now."""

    def __init__(self) -> None:
        self._known: dict[TableT, _Known] = {}
        self._lock = threading.Lock()

    def ask(
        self, clock: int, keys_of: Mapping[TableT, Keys], out_of: Mapping[TableT, Floats],
        pull: Callable[[dict[TableT, Any], dict[TableT, Any]], PendingPull],
    ) -> StepRead:  # fmt: skip
        """Asks for rows of tables. keys_of: int64 [n] each, distinct; out_of: where their rows go, float32 [n, dim].
        clock: rows that were asked for at another clock are not used. pull: asks the servers, and is called at most
        once, for the rows that no model has asked for."""
        with self._lock:
            new: dict[TableT, Keys] = {}
            rooms: dict[TableT, Floats] = {}
            parts: list[_Piece] = []
            fresh: list[tuple[TableT, Floats, Keys, Keys]] = []
            for table, keys in keys_of.items():
                known = self._of(table, clock)
                union, positions, _ = distinct(np.concatenate([known.keys, keys]), None)
                where, missing, out = positions[len(known.keys) :], union[len(known.keys) :], out_of[table]
                for block in known.blocks:
                    put = np.flatnonzero((where >= block.start) & (where < block.start + len(block.rows)))
                    if len(put):
                        parts.append(_Piece(block, where[put] - block.start, out, put))
                if len(missing):
                    put = np.flatnonzero(where >= len(known.keys))
                    whole = len(missing) == len(keys)  # distinct ones keep their order
                    new[table] = missing
                    rooms[table] = out if whole else np.empty((len(missing), out.shape[1]), np.float32)
                    fresh.append((table, out, _NONE if whole else put, union))
            pulls = list({id(part.block.pull): part.block.pull for part in parts}.values())
            if new:
                made = _SharedPull(pull(new, rooms))
                pulls.append(made)
                for table, out, put, union in fresh:
                    known = self._known[table]
                    block = _Block(len(known.keys), rooms[table], made)
                    known.keys = union
                    known.blocks.append(block)
                    if len(put):
                        parts.append(_Piece(block, np.arange(len(put)), out, put))
            return StepRead(pulls, parts, self._forget)

    def _of(self, table: TableT, clock: int) -> _Known:
        at = clock, int(getattr(table, "changes", 0))
        known = self._known.get(table)
        if known is None or known.at != at or len(known.blocks) >= MAX_PULLS:
            known = self._known[table] = _Known(at)
        return known

    def _forget(self) -> None:
        with self._lock:
            self._known.clear()
