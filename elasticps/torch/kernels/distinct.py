"""The distinct ids of a batch, and the index of each id among them: one pass, where `torch.unique` sorts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import njit
from elasticps.kernels.hashing import mix64

_FREE = np.int32(-1)
_PADDING = np.int64(-1)


def distinct(ids: NDArray[np.int64], padding: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Finds the distinct ones among ids int64 [n]; returns (keys, positions, padded).

    keys: int64, in the order of their first appearance, without `padding`; positions: int64 [n], ids[i] ==
    keys[positions[i]], and len(keys) for padding; padded: whether padding occurs.
    """
    keys, positions = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    slots = np.full(1 << (2 * len(ids)).bit_length(), _FREE, np.int32)  # at most half of them are taken
    found, padded = _find(ids, 0 if padding is None else padding, padding is not None, keys, positions, slots)
    return keys[:found], positions, bool(padded)


def _fill(ids: Any, padding: int, pads: bool, keys: Any, positions: Any, slots: Any) -> Any:
    """Open addressing: a slot has the number of its key."""
    mask = np.uint64(slots.shape[0] - 1)
    found, padded = np.int64(0), False
    for i in range(ids.shape[0]):
        key = ids[i]
        if pads and key == padding:
            positions[i] = _PADDING
            padded = True
            continue
        at = mix64(np.uint64(key)) & mask
        number = np.int64(slots[at])
        while number >= 0 and keys[number] != key:
            at = (at + np.uint64(1)) & mask
            number = np.int64(slots[at])
        if number < 0:
            number = found
            slots[at] = np.int32(found)
            keys[found] = key
            found += 1
        positions[i] = number
    if padded:
        for i in range(ids.shape[0]):
            if positions[i] < 0:
                positions[i] = found
    return found, padded


def distinct_tables(
    ids: NDArray[np.int64], segments: NDArray[np.int64], limits: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Finds the distinct ids of each of several tables; returns (keys, positions, ends, wrong).

    ids: int64 [n]; segments: int64 [m, 3], ordered by table: a table, and the start and stop of ids that belong to it.
    limits: int64 [tables]: ids of a table are from 0 to below its limit; -1: any.
    keys: int64, distinct in each table, table after table; ends: int64 [tables + 1], where each table's keys begin, and
    their number; positions: int64, for the ids of all segments, one after another, the index in `keys`; wrong: the
    first table with an id beyond its limit, -1 if there is none.
    """
    sizes = segments[:, 2] - segments[:, 1]
    keys, positions = np.empty(total := int(sizes.sum()), np.int64), np.empty(total, np.int64)
    slots, ends = np.empty(1 << (2 * total).bit_length(), np.int32), np.empty(len(limits) + 1, np.int64)
    wrong = _find_tables(ids, segments, limits, keys, positions, slots, ends)
    return keys[: ends[-1]], positions, ends, wrong


def _fill_tables(ids: Any, segments: Any, limits: Any, keys: Any, positions: Any, slots: Any, ends: Any) -> Any:
    ends[0], wrong = 0, np.int64(-1)
    s = out = 0
    found = np.int64(0)
    for table in range(ends.shape[0] - 1):
        stop, size = s, 0
        while stop < segments.shape[0] and segments[stop, 0] == table:
            size += segments[stop, 2] - segments[stop, 1]
            stop += 1
        room = 2
        while room < 2 * size:
            room *= 2
        slots[:room] = -1
        mask = np.uint64(room - 1)
        for each in range(s, stop):
            for i in range(segments[each, 1], segments[each, 2]):
                key = ids[i]
                at = mix64(np.uint64(key)) & mask
                number = np.int64(slots[at])
                while number >= 0 and keys[number] != key:
                    at = (at + np.uint64(1)) & mask
                    number = np.int64(slots[at])
                if number < 0:
                    if wrong < 0 <= limits[table] and not 0 <= key < limits[table]:
                        wrong = np.int64(table)
                    number = found
                    slots[at] = np.int32(found)
                    keys[found] = key
                    found += 1
                positions[out] = number
                out += 1
        s = stop
        ends[table + 1] = found
    return wrong


_SIGNATURE = "(int64[::1], int64, boolean, int64[::1], int64[::1], int32[::1])"
_find: Any = njit(_SIGNATURE, nogil=True, cache=True)(_fill)
_SIGNATURE_TABLES = "int64(int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], int32[::1], int64[::1])"
_find_tables: Any = njit(_SIGNATURE_TABLES, nogil=True, cache=True)(_fill_tables)
