"""Rows of several tables in one pull: one frame for each server that answers for some of them.

Keys, and rows of the answer, are numbered one table after another; a server answers those that it has in that order.
Else it is a pull like others: each part of it is asked again by itself when servers change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import Readers, Routes
from elasticps.client.pull import AnswerTarget, Finish, PendingRows, Positions, PullLayout, PullPart, Query, ServerPull
from elasticps.client.pull_batch import (
    T_FIELDS,
    T_FIRST,
    T_SALT,
    T_WORDS,
    cut_tables,
    place_several,
)
from elasticps.client.pulls import PULL_FRAME_KEYS
from elasticps.client.push_batch import address
from elasticps.client.short_keys import MOST_BLOCKS, ShortKeys
from elasticps.errors import Error
from elasticps.kernels import njit
from elasticps.kernels.hashing import hash_key
from elasticps.wire.frames import BLOCK_BYTES, HEADER_BYTES, TABLES, Buffer, table_block
from elasticps.wire.headers import PullHeader

T = TypeVar("T")  # whatever tables are known by

SMALL_PULL_BYTES = 64 << 10  # tensors above that are asked for by themselves
_NOTHING = np.empty(0, np.float32)
_ALL = np.empty(0, np.int64)
_NO_SALT = np.uint64(0)


@njit(nogil=True, cache=True)
def _readers_of(keys, tables, shift, reader_of, positions):  # type: ignore[no-untyped-def]
    """Who answers for the keys at some positions, int32 [n]."""
    readers, s, t = np.empty(len(positions), np.int32), np.uint64(shift), 0
    for i in range(len(positions)):
        while positions[i] >= tables[t + 1, T_FIRST]:
            t += 1
        readers[i] = reader_of[hash_key(keys[positions[i]], np.uint64(tables[t, T_SALT])) >> s]
    return readers


class SeveralTables(PullLayout):
    """Rows of several tables, or blocks of tensors: of each those that one of `members` asks for. The members
    themselves are not sent."""

    def __init__(self, members: Sequence[ServerPull]) -> None:
        self.members = members
        tables: list[int | np.int64] = []
        at = 0
        for pull in members:
            flat, query = pull.flat, pull.query
            tables += (at, query.dim, address(flat), query.salt.view(np.int64), query.table_id, len(flat))
            at += len(pull.keys)
        self._tables = np.array([*tables, at, 0, 0, 0, 0, 0], np.int64).reshape(-1, T_FIELDS)

    def frame_bytes(self, pull: ServerPull, keys: int, servers: int) -> int:
        return 8 * keys + (HEADER_BYTES + BLOCK_BYTES * len(self.members)) * (servers + 1)

    def cut(
        self, pull: ServerPull, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        count: int = cut_tables(
            keys, self._tables, routes.shift, readers.of, readers.only, order, cuts, memory, slots, small, request,
            TABLES | pull.query.flags, routes.epoch, pull.clock, worker, 0 if pull.bound is None else pull.bound + 1,
            pull.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, pull: ServerPull, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        return keys_of.pull_tables(frame, {m.query.table_id: m.short for m in self.members if m.short is not None})

    def frame(self, part: PullPart, epoch: int, worker: int) -> list[Buffer]:
        pull, keys, buffers, blocks = part.pull, part.keys, list[Buffer](), 0
        for number, (low, high) in enumerate(itertools.pairwise(self._edges(part.positions))):
            if low < high:
                table = self.members[number].query.table_id
                buffers += [table_block(table, high - low), keys[low:high].data.cast("B")]
                blocks += 1
        header = PullHeader(
            part.request, epoch, pull.clock, worker, 0, 0, pull.bound, pull.wait_ms, pull.query.any_replica,
            coded=pull.query.coded, blocks=blocks,
        )  # fmt: skip
        return [header.header(sum(map(len, buffers))).pack(), *buffers]

    def _edges(self, positions: Positions) -> list[int]:
        """Which of the rows at some positions is the first of each table; and how many they are."""
        firsts = self._tables[:, T_FIRST]
        edges: list[int] = (firsts if positions is None else np.searchsorted(positions, firsts)).tolist()
        return edges

    def floats(self, pull: ServerPull, positions: Positions, offset: int, count: int) -> int:
        found = place_several(0, _ALL if positions is None else positions, self._tables, offset, count)
        return int(found) // 4

    def plan(
        self, pull: ServerPull, part: PullPart, routes: Routes, readers: Readers
    ) -> list[tuple[int, NDArray[np.int64]]]:
        positions = np.arange(len(pull.keys)) if part.positions is None else part.positions
        of = _readers_of(pull.keys, self._tables, routes.shift, readers.of, positions)
        return [(server, np.flatnonzero(of == server)) for server in np.unique(of).tolist()]

    def target(self, pull: ServerPull, positions: Positions, run: bool) -> AnswerTarget:
        return _Whole(self.members) if positions is None else self.private(pull, positions)

    def private(self, pull: ServerPull, positions: NDArray[np.int64]) -> AnswerTarget:
        words = np.repeat(self._tables[:-1, T_WORDS], np.diff(self._edges(positions)))
        ends = np.concatenate([[0], np.cumsum(words)])
        rows = np.empty(int(ends[-1]), np.float32)
        pull.separate(rows, positions)
        return _Private(rows, ends)

    def place(self, pull: ServerPull, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        place_several(address(rows), positions, self._tables, 0, len(positions))


def joined(finish: Finish, members: Sequence[ServerPull]) -> ServerPull:
    """One pull that asks for the rows of several, which are not sent themselves."""
    coded, keys = any(pull.query.coded for pull in members), np.concatenate([pull.keys for pull in members])
    name = ", ".join([pull.query.name for pull in members])
    query = Query(0, _NO_SALT, 0, name, members[0].query.any_replica, coded=coded)
    whole = ServerPull(finish, query, keys, _NOTHING, SeveralTables(members))
    whole.short = next((pull.short for pull in members if pull.short is not None), None)
    return whole


class TablesPull(Generic[T]):
    """A pull of several tables and tensors in flight: `pulls`, one for each of `tables`; those of tables without a
    cache are sent as `groups`. failed: why nobody could be asked."""

    def __init__(
        self, tables: Sequence[T], pulls: Sequence[PendingRows], groups: Sequence[ServerPull],
        give_up: Callable[[Sequence[ServerPull]], None], failed: Error | None = None,
    ) -> None:  # fmt: skip
        self._give_up = give_up  # what is still on its way: its memory is the caller's again
        self._failed = failed
        self._tables = tables
        self._pulls = pulls
        self._groups = groups
        self._rows: dict[T, NDArray[np.float32]] | None = None  # when they have come: each layer asks for its own

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        cached = [pull.done() for pull in self._pulls if not isinstance(pull, ServerPull)]
        return all(pull.done() for pull in self._groups) and all(cached)

    def result(self, timeout: float | None = None) -> dict[T, NDArray[np.float32]]:
        """Waits for the rows, float32 [n, dim] of each table, in the order of its keys, and float32 of the shape of
        each tensor; `Timeout` after `timeout` seconds (default: the client's) for each server's part."""
        if self._failed is not None:
            raise self._failed
        if self._rows is None:
            try:
                for group in self._groups:
                    group.wait(timeout)
                self._rows = {
                    table: pull.arrived() if isinstance(pull, ServerPull) else pull.result(timeout)
                    for table, pull in zip(self._tables, self._pulls, strict=True)
                }
            except Error:
                self._give_up(self._groups)
                raise
        return self._rows


def in_groups(finish: Finish, pulls: Sequence[PendingRows]) -> list[ServerPull]:
    """The pulls to send for all of these that are not sent yet: tables and small tensors together."""
    plain = [pull for pull in pulls if isinstance(pull, ServerPull)]
    large = [pull for pull in plain if pull.of_tensor and pull.flat.nbytes > SMALL_PULL_BYTES]
    return [*together(finish, [pull for pull in plain if pull not in large] if large else plain), *large]


def small_together(finish: Finish, pulls: Sequence[ServerPull]) -> list[ServerPull]:
    """The pulls to send for these, small ones together; each of them knows the one that brings its rows."""
    small = [pull for pull in pulls if pull.flat.nbytes <= SMALL_PULL_BYTES]
    groups = together(finish, small)
    for group in groups:
        if isinstance(group.layout, SeveralTables):
            for pull in group.layout.members:
                pull.group = group
    return [*groups, *(pull for pull in pulls if pull.flat.nbytes > SMALL_PULL_BYTES)]


def together(finish: Finish, pulls: Sequence[ServerPull]) -> list[ServerPull]:
    """The pulls that bring the rows of these in as few frames as it takes: of more than MOST_BLOCKS tables, or
    PULL_FRAME_KEYS keys, several."""
    groups: list[ServerPull] = []
    group: list[ServerPull] = []
    keys = 0
    for pull in [*pulls, None]:
        n = 0 if pull is None else len(pull.keys)
        if group and (pull is None or len(group) == MOST_BLOCKS or keys + n > PULL_FRAME_KEYS):
            groups.append(joined(finish, group) if len(group) > 1 else group[0])
            group, keys = [], 0
        if pull is not None:
            group.append(pull)
            keys += n
    return groups


class _Whole:
    """All rows, of one server: where they belong."""

    def __init__(self, members: Sequence[ServerPull]) -> None:
        self._members = members

    def views(self, offset: int, count: int) -> list[memoryview]:
        views, first = [], 0
        for pull in self._members:
            low, high = max(offset - first, 0), min(offset + count - first, len(pull.keys))
            if low < high:
                views += pull.layout.target(pull, None, True).views(low, high - low)
            first += len(pull.keys)
        return views


class _Private:
    """Rows one after another, and where each of them ends."""

    def __init__(self, rows: NDArray[np.float32], ends: NDArray[np.int64]) -> None:
        self._rows = rows
        self._ends = ends

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self._rows[self._ends[offset] : self._ends[offset + count]]
        return [part.data.cast("B")] if count else []
