"""Frames between a reader and servers whose tails it follows: what it wants, and windows of changes."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Any, NamedTuple

import numpy as np

from elasticps.errors import ConfigError
from elasticps.kernels.windows import BLOCK, FIRST_BLOCK, RECORDS, RUNS, RUNS_AT, locate
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.wire.frames import (
    HEADER,
    LAST,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_DIM,
    MAX_RANGES,
    VERSION,
    Buffer,
    FrameError,
    Header,
    Kind,
    json_body,
    padded,
    text,
    whole,
)
from elasticps.wire.row_blocks import (
    BLOCK_HEAD,
    Blocks,
    BodyReader,
    Bytes,
    Ints,
    LocatedBlocks,
    read_block,
    write_block,
)
from replication.step_records import StepRecord, record_bytes

MAX_TABLES = 4096  # that a reader names
MOST_STRETCH = 3  # times `every` is what passes at most from window to window of a busy server
MAX_RUNS = 1 << 20
DTYPES = ("", "float32", "float16", "bfloat16", "int8")
"""How rows travel, by number; "": as the table has them."""
FINE = 2
"""Flag of SUBSCRIBE: a window after each change, for `clock` milliseconds, so that moments can be compared."""

_WINDOW = int(Kind.WINDOW)
_RUN = 4  # worker, first range, last range, progress


def _body(parts: Sequence[Buffer]) -> int:
    return sum(len(memoryview(part).cast("B")) for part in parts)


def framed(header: Header, parts: list[Buffer]) -> list[Buffer]:
    """A frame of these parts: the header says how long they are together."""
    return [header._replace(body=_body(parts)).pack(), *parts]


def _int64(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


class Subscribe(NamedTuple):
    """SUBSCRIBE: follow these ranges from now on, and no others. ranges int64 [n], each once; positions int64 [n]: the
    sequence number up to which the reader has each, -1 for none; origins int64 [n]: the epoch in which their content
    began anew. tables: names, None for all; dtype: see DTYPES. every_ms: from window to window. fine_ms: see FINE.
    share: of tables' keys. number: of the answer."""

    number: int
    epoch: int
    ranges: Ints
    positions: Ints
    origins: Ints
    tables: tuple[str, ...] | None
    dtype: str
    every_ms: int
    fine_ms: int = 0
    share: KeyShare = ALL_KEYS

    def frame(self) -> list[Buffer]:
        """As it is sent."""
        document = {"tables": None if self.tables is None else list(self.tables)}
        names = dumps(document if self.share.whole else document | {"share": list(self.share)}).encode()
        flags = FINE if self.fine_ms else 0
        header = Header(
            Kind.SUBSCRIBE, flags, request=self.number, epoch=self.epoch, clock=self.fine_ms,
            table=DTYPES.index(self.dtype),
            items=len(self.ranges), bound=len(names), wait_ms=self.every_ms,
        )  # fmt: skip
        numbers = np.concatenate([self.ranges, self.positions, self.origins]).astype(np.int64)
        return framed(header, [numbers.tobytes(), padded(names)])

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> Subscribe:
        """The inverse; FrameError for what cannot be."""
        n = header.items
        if n > ranges or header.table >= len(DTYPES) or not 1 <= header.wait_ms <= 60_000 or header.clock > 60_000:
            raise FrameError(f"a SUBSCRIBE of {n} ranges, type {header.table}, every {header.wait_ms} ms")
        reader = BodyReader(body)
        found = reader.take(3 * n, np.int64).reshape(3, n).copy()
        document = json_body(reader.take(header.bound).tobytes() if header.bound else b"{}")
        reader.end()
        if n and (found[0].min() < 0 or found[0].max() >= ranges or len(np.unique(found[0])) != n):
            raise FrameError("a SUBSCRIBE names ranges that there are not, or twice")
        names = document.get("tables")
        if names is not None and (not isinstance(names, list) or len(names) > MAX_TABLES):
            raise FrameError(f"a SUBSCRIBE names a list of up to {MAX_TABLES} tables, or none")
        tables = None if names is None else tuple(text(name, 4096) for name in names)
        fine = header.clock if header.flags & FINE else 0
        try:
            share = KeyShare.checked(document.get("share"))
        except ConfigError as error:
            raise FrameError(f"a SUBSCRIBE names what is no share: {error}") from None
        return cls(
            header.request,
            header.epoch,
            found[0],
            found[1],
            found[2],
            tables,
            DTYPES[header.table],
            header.wait_ms,
            fine,
            share,
        )


class Subscribed(NamedTuple):
    """SUBSCRIBED: these ranges go on from the reader's positions; those are to be read. Others are not answered for
    here. number: of the SUBSCRIBE; 0: the reader was too slow for what it followed."""

    number: int
    epoch: int
    continued: Ints
    unknown: Ints

    def frame(self) -> list[Buffer]:
        """As it is sent."""
        header = Header(
            Kind.SUBSCRIBED, request=self.number, epoch=self.epoch, items=len(self.continued), table=len(self.unknown)
        )
        return framed(header, [np.concatenate([self.continued, self.unknown]).astype(np.int64).tobytes()])

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> Subscribed:
        """The inverse; FrameError."""
        if header.items + header.table > ranges:
            raise FrameError(f"a SUBSCRIBED of {header.items} and {header.table} ranges")
        reader = BodyReader(body)
        continued, unknown = (reader.take(n, np.int64).copy() for n in (header.items, header.table))
        reader.end()
        for each in (continued, unknown):
            if len(each) and (each.min() < 0 or each.max() >= ranges):
                raise FrameError("a SUBSCRIBED names a range that there is not")
        return cls(header.request, header.epoch, continued, unknown)


class Progresses(NamedTuple):
    """Progress of workers that has changed, by ranges: int64 [k, 4], each worker, first range, last range, progress."""

    runs: Ints

    @classmethod
    def between(cls, workers: Ints, ranges: Ints, before: Ints, now: Ints) -> Progresses:
        """What differs between two tables of progress [workers, ranges]; ranges ascending."""
        w, at = np.nonzero(before != now)
        if not len(w):
            return cls(np.empty((0, _RUN), np.int64))
        values = now[w, at]
        # A run ends where the worker, or the progress, is another one, or a range is left out that is not the same.
        begins = np.ones(len(w), np.bool_)
        begins[1:] = (np.diff(w) != 0) | (np.diff(values) != 0) | (np.diff(ranges[at]) != 1)
        first = np.flatnonzero(begins)
        last = np.append(first[1:] - 1, len(w) - 1)
        return cls(np.stack([workers[w[first]], ranges[at[first]], ranges[at[last]], values[first]], axis=1))


def write_records(records: Sequence[tuple[int, StepRecord]]) -> bytes:
    """Records of workers' steps, as they are sent."""
    return b"".join([_int64(worker, one.clock, one.committed) + one.bits for worker, one in records])


class WindowState(NamedTuple):
    """What a complete window says of ranges and workers: of how many ranges, and all of it as it is sent."""

    ranges: int
    written: bytes

    @classmethod
    def of(
        cls, ranges: Ints, positions: Ints, progress: Progresses, records: Sequence[tuple[int, StepRecord]]
    ) -> WindowState:
        """Of ranges [n] and their sequence numbers [n], see `WindowFrame`."""
        runs = progress.runs
        words = np.concatenate([ranges, positions, [len(runs)], runs.ravel(), [len(records)]])
        return cls(len(ranges), words.tobytes() + write_records(records))


def window_frame(
    epoch: int, number: int, time_us: int, state: WindowState | None, blocks: int, written: Buffer,
    tables: Sequence[tuple[int, str]], dropped: Sequence[int],
) -> list[Buffer]:  # fmt: skip
    """A WINDOW of so many blocks, which are written already; see `WindowFrame`. state: None if it is not complete."""
    names = dumps({"tables": tables, "dropped": dropped}).encode() if tables or dropped else b""
    ranges, stated = (0, b"") if state is None else state
    front = padded(names) + stated
    header = HEADER.pack(
        MAGIC, VERSION, _WINDOW, 0 if state is None else LAST, len(front) + len(written), 0, epoch, number,
        time_us >> 32, 0, 0, ranges, blocks, len(names), time_us & 0xFFFFFFFF,
    )  # fmt: skip
    return [header + front, written]


class WindowFrame(NamedTuple):
    """WINDOW: what changed at a server since the window before. number: counts the connection's windows from 1;
    time_us: when it was read, microseconds since 1970. complete: with it the reader has the state of that moment;
    else more of the same window follow. ranges, positions: int64 [n] each, sequence numbers of those that changed;
    progress and records of steps, the same; tables: ids and specs of tables that are new here; dropped: ids."""

    epoch: int
    number: int
    time_us: int
    complete: bool
    blocks: Blocks = ()
    ranges: Ints = np.empty(0, np.int64)
    positions: Ints = np.empty(0, np.int64)
    progress: Progresses = Progresses(np.empty((0, _RUN), np.int64))
    records: Sequence[tuple[int, StepRecord]] = ()
    tables: Sequence[tuple[int, str]] = ()
    dropped: Sequence[int] = ()

    def frame(self) -> list[Buffer]:
        """As it is sent. Whoever feeds readers has a journal write the blocks: the same in compiled code."""
        state = WindowState.of(self.ranges, self.positions, self.progress, self.records) if self.complete else None
        written = b"".join(memoryview(part).cast("B") for block in self.blocks for part in write_block(block))
        return window_frame(
            self.epoch, self.number, self.time_us, state, len(self.blocks), written, self.tables, self.dropped
        )

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> WindowFrame:
        """The inverse, views of the body; FrameError."""
        complete, count = bool(header.flags & LAST), header.items
        if header.bound or len(body) & 7 or BLOCK_HEAD.size * count > len(body):
            return cls.parse(header, body, ranges)
        found, words = np.empty(FIRST_BLOCK + BLOCK * count, np.int64), body.view(np.int64)
        named = header.table if complete else -1
        well_formed = locate(
            words, 0, named, count, ranges, MAX_RUNS, MAX_BODY_BYTES // 4, MAX_DIM, found
        )  # fmt: skip
        if not well_formed or found[RECORDS]:
            return cls.parse(header, body, ranges)
        runs_at, runs = found[RUNS_AT].item(), found[RUNS].item()
        named = max(named, 0)
        return cls(
            header.epoch, header.clock, _time_us(header), complete,
            LocatedBlocks(body, found[FIRST_BLOCK:].reshape(-1, BLOCK)),
            words[:named], words[named : 2 * named],
            Progresses(words[runs_at : runs_at + _RUN * runs].reshape(-1, _RUN)),
        )  # fmt: skip

    @classmethod
    def parse(cls, header: Header, body: Bytes, ranges: int) -> WindowFrame:
        """The same, part by part."""
        reader, complete = BodyReader(body), bool(header.flags & LAST)
        tables, dropped = list[tuple[int, str]](), list[int]()
        if header.bound:
            document = json_body(reader.take(header.bound).tobytes(), MAX_BODY_BYTES)
            tables, dropped = _tables_in(document)
        time_us = _time_us(header)
        if header.table > ranges or header.items > len(body):
            raise FrameError(f"a WINDOW of {header.table} ranges and {header.items} blocks")
        named = positions = np.empty(0, np.int64)
        runs, records = np.empty((0, _RUN), np.int64), list[tuple[int, StepRecord]]()
        if complete:
            named, positions = reader.take(2 * header.table, np.int64).reshape(2, -1).copy()
            runs = reader.take(_RUN * reader.count(MAX_RUNS), np.int64).reshape(-1, _RUN).copy()
            size = record_bytes(ranges) - 8
            for _ in range(reader.count(MAX_RUNS)):
                worker, clock, committed = reader.take(3, np.int64).tolist()
                records.append((worker, StepRecord(clock, committed, reader.take(size).tobytes())))
            for first, last in ((named, named), (runs[:, 1], runs[:, 2])):
                if len(first) and not (first.min() >= 0 and last.max() < ranges and (first <= last).all()):
                    raise FrameError("a WINDOW names a range that there is not")
        blocks = [read_block(reader, ranges) for _ in range(header.items)]
        reader.end()
        return cls(
            header.epoch, header.clock, time_us, complete, blocks, named, positions,
            Progresses(runs), records, tables, dropped,
        )  # fmt: skip


def _time_us(header: Header) -> int:
    if (time_us := header.worker << 32 | header.wait_ms) >= 1 << 62:
        raise FrameError(f"a WINDOW that was read at {time_us} us")
    return time_us


def _tables_in(document: dict[str, Any]) -> tuple[list[tuple[int, str]], list[int]]:
    tables, dropped = document.get("tables", []), document.get("dropped", [])
    if not isinstance(tables, list) or not isinstance(dropped, list):
        raise FrameError("a WINDOW lists tables, and those that were dropped")
    found = list[tuple[int, str]]()
    for one in tables:
        if not isinstance(one, list) or len(one) != 2:
            raise FrameError("a table in a WINDOW has an id and a spec")
        found.append((whole(one[0], 1 << 31), text(one[1], 1 << 16)))
    return found, [whole(one, 1 << 31) for one in dropped]


def window_ack(number: int) -> bytes:
    """WINDOW_ACK: the reader has applied all windows up to this one."""
    return Header(Kind.WINDOW_ACK, clock=number).pack()


assert MAX_RANGES
