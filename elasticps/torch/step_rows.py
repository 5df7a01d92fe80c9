"""Rows that models on several devices ask for in one step: the first asks the servers, others take them from it.

Which rows they are is pure; what waits for them, `pull` gives. Threads may share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.kernels.distinct import distinct

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
TableT = TypeVar("TableT")
MOST_PULLS = 64  # of which rows are kept: they are dropped at the latest by the next step
_NONE: Keys = np.empty(0, np.int64)


class Pending(Protocol):
    """Rows on their way."""

    def result(self, timeout: float | None = None) -> object: ...


class _Pull:
    """One pull, for which several threads may wait."""

    def __init__(self, read: Pending) -> None:
        self._read: Pending | None = read
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._read is not None:
                self._read.result()
                self._read = None


@dataclass
class _Block:
    """Rows that one pull brings, float32 [n, dim]; keys numbered `start` … `start` + n - 1 of the table's."""

    start: int
    rows: Floats
    pull: _Pull


@dataclass
class _Known:
    """Of one table what has been asked for since the clock and the changes `at`; keys distinct."""

    at: tuple[int, int]
    keys: Keys = field(default_factory=lambda: _NONE)
    blocks: list[_Block] = field(default_factory=list)


@dataclass
class _Part:
    """Of one block the rows that are wanted: rows[take] go to out[put]."""

    block: _Block
    take: Keys
    out: Floats
    put: Keys


class StepRead:
    """Rows of which the servers were asked for those that nobody had asked for yet."""

    def __init__(self, pulls: list[_Pull], parts: list[_Part], failed: Callable[[], None]) -> None:
        self._pulls, self._parts, self._failed = pulls, parts, failed

    def result(self, timeout: float | None = None) -> None:
        """Waits until all of them are where they belong. Raises what a pull does, as often as it is called."""
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
    """What a group's models have asked for in the step that is trained now."""

    def __init__(self) -> None:
        self._known: dict[TableT, _Known] = {}
        self._lock = threading.Lock()

    def ask(
        self, clock: int, wanted: Mapping[TableT, Keys], places: Mapping[TableT, Floats],
        pull: Callable[[dict[TableT, Any], dict[TableT, Any]], Pending],
    ) -> StepRead:  # fmt: skip
        """Asks for rows: of each table keys int64 [n], distinct, and where their rows go, float32 [n, dim]. clock: of
        the steps; rows that were asked for at another one are not used. pull: asks the servers for some of them."""
        with self._lock:
            new: dict[TableT, Keys] = {}
            rooms: dict[TableT, Floats] = {}
            parts: list[_Part] = []
            fresh: list[tuple[TableT, Floats, Keys, Keys]] = []
            for table, keys in wanted.items():
                known = self._of(table, clock)
                union, positions, _ = distinct(np.concatenate([known.keys, keys]), None)
                where, missing, out = positions[len(known.keys) :], union[len(known.keys) :], places[table]
                for block in known.blocks:
                    put = np.flatnonzero((where >= block.start) & (where < block.start + len(block.rows)))
                    if len(put):
                        parts.append(_Part(block, where[put] - block.start, out, put))
                if len(missing):
                    put = np.flatnonzero(where >= len(known.keys))
                    whole = len(missing) == len(keys)  # distinct ones keep their order
                    new[table] = missing
                    rooms[table] = out if whole else np.empty((len(missing), out.shape[1]), np.float32)
                    fresh.append((table, out, _NONE if whole else put, union))
            pulls = list({id(part.block.pull): part.block.pull for part in parts}.values())
            if new:
                made = _Pull(pull(new, rooms))
                pulls.append(made)
                for table, out, put, union in fresh:
                    known = self._known[table]
                    block = _Block(len(known.keys), rooms[table], made)
                    known.keys = union
                    known.blocks.append(block)
                    if len(put):
                        parts.append(_Part(block, np.arange(len(put)), out, put))
            return StepRead(pulls, parts, self._forget)

    def _of(self, table: TableT, clock: int) -> _Known:
        at = clock, int(getattr(table, "changes", 0))
        known = self._known.get(table)
        if known is None or known.at != at or len(known.blocks) >= MOST_PULLS:
            known = self._known[table] = _Known(at)
        return known

    def _forget(self) -> None:
        with self._lock:
            self._known.clear()
