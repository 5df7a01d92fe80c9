"""Frames made shorter as they leave a worker: keys that a server has are left out, others go as differences, and bodies
are compressed.

What a server has of a connection is decided here alone, and in the order in which frames leave; it ends with the
connection. So no server is ever asked for a list that it lacks, and what is sent again is sent with its keys.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from elasticps.kernels import njit
from elasticps.model.filters import Filter, KeyDeltas, KeysOnce, Zstd
from elasticps.wire.frames import (
    ALL_RANGES,
    BLOCK_BYTES,
    HEADER_BYTES,
    PACKED,
    SHORT,
    Buffer,
    Header,
    Kind,
    unpack_header,
)
from elasticps.wire.packing import DELTA, KEEP, KNOWN, LIST_KEYS, pack, says

MOST_KEYS = LIST_KEYS // 4  # of a list that is kept
LEAST_KEYS = 8  # shorter lists are sent as they are
MOST_BLOCKS = 256
PAYS = 0.9  # what is made shorter is sent so where it takes at most this part of the bytes
MOST_PAUSE = 64  # pushes between two that are tried
_BLOCK = struct.Struct("<IIIHHQ")
_WORD = struct.Struct("<Q")


class Saved(NamedTuple):
    """Bytes: as they are, and as they were sent."""

    whole: int
    sent: int


NOTHING = Saved(0, 0)


@dataclass
class Short:
    """What a table asks for, and what came of it."""

    once: bool = False
    deltas: bool = False
    zstd: bool = False
    keys: Saved = NOTHING
    bodies: Saved = NOTHING
    skip: int = 0  # pushes that are not compressed until one is tried again, after others did not pay
    pause: int = 1

    @property
    def shortens_keys(self) -> bool:
        return self.once or self.deltas

    @classmethod
    def of(cls, filters: Sequence[Filter]) -> Short | None:
        """What these filters ask for, None for nothing."""
        once, deltas, zstd = (any(isinstance(each, kind) for each in filters) for kind in (KeysOnce, KeyDeltas, Zstd))
        return cls(once, deltas, zstd) if once or deltas or zstd else None

    def pack(self, buffers: list[Buffer]) -> bytes | None:
        """A body compressed, None if that does not pay."""
        if self.skip:
            self.skip -= 1
            return None
        size, packed = sum(map(len, buffers)), pack(buffers)
        pays = len(packed) <= PAYS * size
        self.pause = 1 if pays else min(2 * self.pause, MOST_PAUSE)
        self.skip = 0 if pays else self.pause
        self.bodies = Saved(self.bodies.whole + size, self.bodies.sent + (len(packed) if pays else size))
        return packed if pays else None


class KeyLists:
    """The lists that a server keeps of one connection, in the order in which their memory is used again."""

    def __init__(self) -> None:
        self._offsets: dict[bytes, int] = {}  # by digest
        self._lists: deque[tuple[int, int, bytes]] = deque()  # place, keys, digest
        self._next = 0

    def find(self, digest: bytes) -> int | None:
        """Where the server has a list, None if it has it no more."""
        return self._offsets.get(digest)

    def keep(self, digest: bytes, n: int) -> int:
        """Where it is to keep this one; what it had there is forgotten."""
        lists, place = self._lists, self._next
        if place + n > LIST_KEYS:
            while lists and lists[0][0] >= place:
                self._forget()
            place = 0
        while lists and place <= lists[0][0] < place + n:
            self._forget()
        self._next = place + n
        self._offsets[digest] = place
        lists.append((place, n, digest))
        return place

    def _forget(self) -> None:
        place, _, digest = self._lists.popleft()
        if self._offsets.get(digest) == place:
            del self._offsets[digest]


class ShortKeys:
    """Shortens the keys of frames for one server."""

    def __init__(self) -> None:
        self._lists = KeyLists()

    def connected(self) -> None:
        """On a new connection, of which the server has no lists."""
        self._lists = KeyLists()

    def pull(self, frame: memoryview, short: Short) -> list[Buffer]:
        """A PULL frame, made shorter."""
        keys = frame[HEADER_BYTES:]
        if len(keys) < 8 * LEAST_KEYS:
            return [frame]
        [(coded_lists, buffer)] = self._code([(keys, short)])
        if not coded_lists:
            return [frame]
        fields = unpack_header(frame)
        header = fields._replace(flags=fields.flags | SHORT, body=8 + len(buffer))
        return [header.pack() + _WORD.pack(coded_lists), buffer]

    def push(self, frame: memoryview, tables: dict[int, Short], record: Sequence[Buffer] = ()) -> list[Buffer]:
        """A PUSH frame, of whose blocks those of `tables` are made shorter. record: of its step, which
        ends the body."""
        header = unpack_header(frame)
        blocks = _blocks(frame, header, tables)
        header, buffers = self._shortened(frame, header, blocks, tables)
        buffers += record
        zstd = next((tables[table] for _, _, _, table in blocks if tables[table].zstd), None)
        if zstd is not None and (packed := zstd.pack(buffers)) is not None:
            return [header._replace(flags=header.flags | PACKED, body=len(packed)).pack(), packed]
        return [header.pack(), *buffers] if header.flags & SHORT else [frame, *record]

    def pull_tables(self, frame: memoryview, tables: dict[int, Short]) -> list[Buffer]:
        """A PULL frame of several tables, of which `tables` are made shorter."""
        header = unpack_header(frame)
        header, buffers = self._shortened(frame, header, _blocks(frame, header, tables), tables)
        return [header.pack(), *buffers] if header.flags & SHORT else [frame]

    def _shortened(
        self, frame: memoryview, header: Header, blocks: list[tuple[int, int, int, int]], tables: dict[int, Short]
    ) -> tuple[Header, list[Buffer]]:
        """Header and body of a frame, with the keys of these blocks as short as they get."""
        found = [block for block in blocks if block[2] >= LEAST_KEYS and tables[block[3]].shortens_keys]
        coded_lists = self._code([(frame[keys : keys + 8 * rows], tables[table]) for _, keys, rows, table in found])
        buffers, at, saved = list[Buffer](), HEADER_BYTES, 0
        for (head, keys, rows, _), (word, buffer) in zip(found, coded_lists, strict=True):
            if word:
                buffers += [frame[at : head + 16], _WORD.pack(word), frame[head + BLOCK_BYTES : keys], buffer]
                at = keys + 8 * rows
                saved += 8 * rows - len(buffer)
        if buffers:
            header = header._replace(flags=header.flags | SHORT, body=header.body - saved)
        buffers.append(frame[at:])
        return header, buffers

    def _code(self, lists: list[tuple[memoryview, Short]]) -> list[tuple[int, Buffer]]:
        """Of each list of a frame the word before it, 0 for none, and what stands for it. What is kept of a frame is
        known in the next one only, so all are looked up first."""
        digests = [xxh3_128_digest(keys) if short.once else b"" for keys, short in lists]
        offsets = [self._lists.find(digest) for digest in digests]
        coded_lists: list[tuple[int, Buffer]] = []
        for (keys, short), digest, known in zip(lists, digests, offsets, strict=True):
            how, place, coded, buffer, n = 0, 0, 0, keys, len(keys) // 8
            if known is not None:
                how, place, buffer = KNOWN, known, keys[:0]
            else:
                if short.once and n <= MOST_KEYS and digest not in digests[: len(coded_lists)]:
                    how, place = KEEP, self._lists.keep(digest, n)
                if short.deltas and (shorter := differences(np.frombuffer(keys, np.int64))) is not None:
                    how, coded, buffer = how | DELTA, shorter.coded, shorter.buffer
            coded_lists.append((says(how, place, coded) if how else 0, buffer))
            short.keys = Saved(short.keys.whole + 8 * n, short.keys.sent + len(buffer))
        return coded_lists


def _blocks(frame: memoryview, header: Header, tables: dict[int, Short]) -> list[tuple[int, int, int, int]]:
    """Where blocks of `tables` begin in a frame, where their keys do, how many they are, and the table; none of a frame
    of too many blocks."""
    return list(_found(frame, header, tables)) if header.items <= MOST_BLOCKS else []


def _found(frame: memoryview, header: Header, tables: dict[int, Short]) -> Iterator[tuple[int, int, int, int]]:
    at = HEADER_BYTES
    if header.kind != Kind.PULL and not header.flags & ALL_RANGES:
        at += (8 + 4 * int(_WORD.unpack_from(frame, at)[0]) + 7) & ~7
    for _ in range(header.items):
        table, rows, dim, values, _, _ = _BLOCK.unpack_from(frame, at)
        keys = at + BLOCK_BYTES + ((4 * values + 7) & ~7)
        if table in tables:
            yield at, keys, rows, table
        at = (keys + 8 * rows + 4 * rows * dim + 7) & ~7


class Differences(NamedTuple):
    """Keys as differences: `coded` bytes, and zeros up to a multiple of 8."""

    buffer: memoryview
    coded: int


def differences(keys: NDArray[np.int64]) -> Differences | None:
    """Keys int64 [n] as differences, None where that does not pay."""
    out = np.empty(8 * len(keys), np.uint8)
    coded = _write(keys, out)
    size = (coded + 7) & ~7
    if not 0 <= size <= PAYS * len(out):
        return None
    out[coded:size] = 0
    return Differences(out.data[:size], coded)


def _differ(keys: Any, out: Any) -> Any:
    """How many bytes are written; -8 if there is no room, or a difference takes more than 8."""
    at, before = 0, np.uint64(0)
    for i in range(keys.shape[0]):
        key = np.uint64(keys[i])
        step = np.int64(key - before)
        value = np.uint64(step << 1) ^ np.uint64(step >> 63)
        if value >> np.uint64(56) or at + 8 > out.shape[0]:
            return -8
        while value > np.uint64(127):
            out[at] = np.uint8(value & np.uint64(127) | np.uint64(128))
            value >>= np.uint64(7)
            at += 1
        out[at] = np.uint8(value)
        at += 1
        before = key
    return at


_SIGNATURE = "int64(Array(int64, 1, 'C', readonly=True), uint8[::1])"
_write: Any = njit(_SIGNATURE, nogil=True, cache=True)(_differ)
