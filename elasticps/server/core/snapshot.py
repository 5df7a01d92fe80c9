"""Pieces of a range: their layout in bytes, and how one is split into several of bounded size, all of one instant.

After the rows of each table comes one section of state, all of it numbers beside a list of names, so that tens of
thousands of workers and shards are written and read as arrays; then the gradients retained for open rounds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.model.sharding import ShardSpec
from elasticps.server.core.barrier_state import BarrierGroup, RangeRounds
from elasticps.server.core.data_shards import Doing, RangeShards, ShardSet, Used
from elasticps.server.core.operations import ChunkContent, TableRows, WaitingKeys
from elasticps.server.core.sweeps import predicate_of
from elasticps.store.cuts import NO_NOTES
from elasticps.store.eviction import Sweep
from elasticps.wire.frames import Block, Buffer, FrameError, block_head, grads_padding, padded, read_blocks

_TABLE = struct.Struct("<IIQQqQ")  # id, bytes of the spec, rows, stride, first cut with all deletions, how many
_WAITING_BIT = 1 << 31  # beside the bytes of the spec: a section of waiting keys follows
_WAITING = struct.Struct("<QQQQQ")  # candidates, first hash of the sketch's blocks, how many, their width, sweeps
_SWEEP_WORDS = 9  # cut, low, high, the predicate's five numbers, the bits of its decay
_STATE = struct.Struct("<IIIIIIqq")  # names, closed rounds, retained shares, groups, sets, whether the piece before
# goes on, what stamps count from, the range's time
_MAX_STRIDE = 1 << 26
_MAX_ROWS = 1 << 40

Bytes = NDArray[np.uint8]
flat = chain.from_iterable


# --- writing --------------------------------------------------------------------------------------------------------


def encode_content(content: ChunkContent) -> list[Buffer]:
    """The content as buffers; rows are not copied."""
    parts: list[Buffer] = []
    for table, spec, keys, values, stamps, notes, floor, waiting in content.tables:
        text = spec.encode()
        size = len(text) | (_WAITING_BIT if waiting is not None else 0)
        parts.append(padded(_TABLE.pack(table, size, *values.shape, floor, len(notes)) + text))
        if len(keys):
            parts += [keys.data.cast("B"), values.data.cast("B"), padded(stamps.tobytes())]
        if len(notes):
            parts.append(notes.tobytes())
        if waiting is not None:
            parts.append(_encode_waiting(waiting))
    parts.append(_encode_state(content))
    for _, _, _, blocks in content.rounds.retained:
        for block in blocks:
            parts += block_buffers(block)
    return parts


def _encode_waiting(waiting: WaitingKeys) -> bytes:
    sweeps = [
        (cut, low, high, *predicate[:5], struct.unpack("<q", struct.pack("<d", predicate.decay))[0])
        for cut, predicate, low, high in waiting.sweeps
    ]
    head = _WAITING.pack(len(waiting.keys), waiting.low, *waiting.blocks.shape, len(sweeps))
    blocks = padded(waiting.blocks.tobytes())
    return b"".join((head, waiting.keys.tobytes(), waiting.words.tobytes(), blocks, _int64(flat(sweeps))))


def _read_waiting(body: Bytes, at: int) -> tuple[WaitingKeys, int]:
    reader = _Reader(body, at)
    candidates, low, count, width, sweeps = _WAITING.unpack(reader.take(_WAITING.size).tobytes())
    if max(candidates, count, width, sweeps) > len(body) or low > HASH_END:
        raise FrameError(f"a SNAPSHOT_CHUNK of {candidates} candidates does not fit in {len(body)} bytes")
    keys, words = (reader.take(8 * candidates).view(np.int64) for _ in range(2))
    blocks = reader.take(count * width).reshape(count, width)
    reader.take(-(count * width) % 8)
    found = []
    for cut, first, end, *numbers, bits in reader.rows(sweeps, _SWEEP_WORDS):
        predicate = predicate_of([*numbers, struct.unpack("<d", struct.pack("<q", bits))[0]])
        found.append(Sweep(cut, predicate, first, end))
    return WaitingKeys(keys, words, low, blocks, found), reader.at


def block_buffers(block: Block) -> list[Buffer]:
    """A block as it stands in a body."""
    rows, dim = block.grads.shape
    parts: list[Buffer] = [block_head(block.table, rows, dim, block.step_values)]
    if rows:
        parts.append(block.keys.data.cast("B"))
        if dim:
            parts.append(block.grads.data.cast("B"))
        if padding := grads_padding(rows, dim):
            parts.append(b"\0" * padding)
    return parts


def _encode_state(content: ChunkContent) -> bytes:
    rounds, shards = content.rounds, content.shards
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    closed = [(number(app), clock) for app, clock in rounds.closed.items()]
    retained = [(number(app), clock, worker, len(blocks)) for app, clock, worker, blocks in rounds.retained]
    groups = [_encode_group(number(app), group) for app, group in rounds.groups.items()]
    sets = [_encode_set(number(app), number(name), one) for app, of in shards.items() for name, one in of.items()]
    texts = [name.encode() for name in names]
    head = _STATE.pack(
        len(names), len(closed), len(retained), len(groups), len(sets), rounds.more, content.base, content.time
    )
    written = padded(b"".join(len(text).to_bytes(2, "little") + text for text in texts))
    return b"".join((head, written, _int64(flat(closed)), _int64(flat(retained)), *groups, *sets))


def _encode_group(app: int, group: BarrierGroup) -> bytes:
    head = app, group.decided, group.roster, group.bounded, len(group.members), len(group.workers), len(group.last)
    return _int64(flat((head, flat(group.members.items()), group.workers, flat(group.last.items()))))


def _encode_set(app: int, name: int, one: ShardSet) -> bytes:
    samples, size, epochs, seed = one.spec
    bits = 0 if seed is None else seed - (seed >> 63 << 64)
    returned = [(shard, *before) for shard, before in one.returned.items()]
    doing = [(w, s, d.clock, *d.before) for w, mine in one.doing.items() for s, d in mine.items()]
    head = (
        app, name, one.id, samples, size, epochs, seed is not None, bits, one.upcoming, one.done, len(returned),
        len(doing),
    )  # fmt: skip
    return _int64(flat((head, flat(returned), flat(doing))))


def _int64(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, np.int64).tobytes()


# --- reading --------------------------------------------------------------------------------------------------------


def decode_content(tables: int, body: Bytes, at: int) -> ChunkContent:
    """What `encode_content` wrote of so many tables, in a body from byte `at` to its end; rows are views. Raises
    `FrameError`."""
    rows: list[TableRows] = []
    for _ in range(tables):
        one, at = _read_rows(body, at)
        rows.append(one)
    reader = _Reader(body, at)
    try:
        rounds, shards, base, time = _decode_state(reader)
    except (IndexError, ValueError) as error:
        raise FrameError(f"a SNAPSHOT_CHUNK's rounds or shards cannot be read: {error}") from None
    return ChunkContent(rows, rounds, shards, base=base, time=time)


class _Reader:
    """Reads a body from byte `at` on, never beyond its end."""

    def __init__(self, body: Bytes, at: int) -> None:
        self.body = body
        self.at = at

    def take(self, count: int) -> Bytes:
        """The next ones."""
        if count > len(self.body) - self.at:
            raise FrameError(f"{count} bytes at {self.at} do not fit in a body of {len(self.body)}")
        self.at += count
        return self.body[self.at - count : self.at]

    def rows(self, count: int, width: int) -> list[list[int]]:
        """So many rows of so many numbers."""
        if min(count, width) < 0:
            raise FrameError(f"{count} rows of {width} numbers")
        return self.take(8 * count * width).view(np.int64).reshape(count, width).tolist()

    def pairs(self, count: int) -> dict[int, int]:
        """So many pairs of numbers."""
        pairs = np.array(self.rows(count, 2), np.int64).reshape(count, 2)
        return dict(zip(pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True))

    def texts(self, count: int) -> list[str]:
        """So many names, and the padding behind them."""
        start, found = self.at, []
        for _ in range(count):
            size = int.from_bytes(self.take(2).tobytes(), "little")
            found.append(self.take(size).tobytes().decode())
        self.take((start - self.at) & 7)
        return found


def _decode_state(reader: _Reader) -> tuple[RangeRounds, RangeShards, int, int]:
    names, closed, retained, groups, sets, more, base, time = _STATE.unpack(reader.take(_STATE.size).tobytes())
    name = dict(enumerate(reader.texts(names)))
    try:
        rounds = RangeRounds({name[app]: clock for app, clock in reader.rows(closed, 2)}, {}, [], bool(more))
        owners = reader.rows(retained, 4)
        for _ in range(groups):
            app, group = _decode_group(reader)
            rounds.groups[name[app]] = group
        shards: RangeShards = {}
        for _ in range(sets):
            app, called, one = _decode_set(reader)
            shards.setdefault(name[app], {})[name[called]] = one
        if min((row[3] for row in owners), default=0) < 0:
            raise FrameError("a share of fewer than no blocks")
        blocks = iter(read_blocks(sum(row[3] for row in owners), reader.body, reader.at, limit=len(reader.body)))
        rounds.retained.extend((name[app], clock, worker, list(islice(blocks, n))) for app, clock, worker, n in owners)
    except KeyError as error:
        raise FrameError(f"there is no name {error} among {names}") from None
    return rounds, shards, base, time


def _decode_group(reader: _Reader) -> tuple[int, BarrierGroup]:
    ((app, decided, roster, bounded, members, workers, last),) = reader.rows(1, 7)
    above = reader.pairs(members)
    chosen = tuple(worker for (worker,) in reader.rows(workers, 1))
    return app, BarrierGroup(above, decided, chosen, reader.pairs(last), roster, bool(bounded))


def _decode_set(reader: _Reader) -> tuple[int, int, ShardSet]:
    ((app, name, number, samples, size, epochs, seeded, bits, upcoming, done, returned, doing),) = reader.rows(1, 12)
    spec = ShardSpec(samples, size, epochs, bits & (1 << 64) - 1 if seeded else None)
    if not spec.possible:
        raise FrameError(f"there can be no shards like {spec}")
    one = ShardSet(number, spec, upcoming, done)
    one.returned = {shard: Used(worker, clock) for shard, worker, clock in reader.rows(returned, 3)}
    for worker, shard, clock, before, at in reader.rows(doing, 5):
        one.doing.setdefault(worker, {})[shard] = Doing(clock, Used(before, at))
    return app, name, one


def _read_rows(body: Bytes, at: int) -> tuple[TableRows, int]:
    if at + _TABLE.size > len(body):
        raise FrameError("a SNAPSHOT_CHUNK ends inside a table's header")
    table, text, rows, stride, floor, notes = _TABLE.unpack_from(body.data, at)
    waits, text = bool(text & _WAITING_BIT), text & ~_WAITING_BIT
    keys_at = (at + _TABLE.size + text + 7) & ~7
    rows_at = keys_at + 8 * rows
    stamps_at = rows_at + rows * stride
    notes_at = (stamps_at + 2 * rows + 7) & ~7
    end = notes_at + 16 * notes
    if max(rows, notes) > _MAX_ROWS or stride > _MAX_STRIDE or end > len(body):
        raise FrameError(f"a SNAPSHOT_CHUNK of {rows} rows of {stride} bytes does not fit in {len(body)} bytes")
    spec = body[at + _TABLE.size : at + _TABLE.size + text].tobytes().decode(errors="replace")
    keys = body[keys_at:rows_at].view(np.int64)
    values = body[rows_at:stamps_at].reshape(rows, stride)
    stamps = body[stamps_at : stamps_at + 2 * rows].view(np.uint16)
    notes_found = body[notes_at:end].view(np.int64).reshape(-1, 2)
    waiting = None
    if waits:
        waiting, end = _read_waiting(body, end)
    return TableRows(table, spec, keys, values, stamps, notes_found, floor, waiting), end


_ENTRY_BYTES = 40  # a shard in a worker's hands; a member of a round takes less


def size_of(content: ChunkContent) -> int:
    """About so many bytes on the wire."""
    rounds, sets = content.rounds, [one for named in content.shards.values() for one in named.values()]
    entries = sum(len(h.members) + len(h.workers) + len(h.last) for h in rounds.groups.values())
    entries += sum(len(s.returned) + sum(map(len, s.doing.values())) for s in sets)
    return sum(map(_name_bytes, content.tables)) + size_by_place(content) + _ENTRY_BYTES * entries


def size_by_place(content: ChunkContent) -> int:
    """So many of them are of single rows: a shorter interval has fewer."""
    retained = sum(_block_bytes(block) for *_, blocks in content.rounds.retained for block in blocks)
    return retained + sum(map(_rows_bytes, content.tables))


def pack(content: ChunkContent, most_bytes: int) -> list[ChunkContent]:
    """The content as one or several of about `most_bytes` at most, unless a single row is larger. Loaded one after the
    other they give what it would have given at once."""
    if size_of(content) <= most_bytes:
        return [content]
    packer = _Packer(content, most_bytes)
    for table in content.tables:
        packer.add_table(table)
    for app, clock, worker, blocks in content.rounds.retained:
        for block in blocks:
            packer.add_retained(app, clock, worker, block)
    entries = max(1, most_bytes // (2 * _ENTRY_BYTES))  # a group or set may give as many of each of two kinds
    for app, group in content.rounds.groups.items():
        for part in group.parts(entries):
            packer.room(2 * _ENTRY_BYTES * entries).rounds.groups[app] = part
    for app, named in content.shards.items():
        for name, one in named.items():
            for shards in one.parts(entries):
                packer.room(2 * _ENTRY_BYTES * entries).shards.setdefault(app, {})[name] = shards
    return packer.contents


class _Packer:
    def __init__(self, content: ChunkContent, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self.contents = [
            content._replace(
                tables=[], rounds=RangeRounds(content.rounds.closed, {}, [], content.rounds.more), shards={}
            )
        ]

    def room(self, nbytes: int) -> ChunkContent:
        """The content to which so many bytes are to be added."""
        if self._size and self._size + nbytes > self._most:
            following = self.contents[0]._replace(tables=[], rounds=RangeRounds({}, {}, [], more=True), shards={})
            self.contents.append(following)
            self._size = 0
        self._size += nbytes
        return self.contents[-1]

    def add_table(self, table: TableRows) -> None:
        rows = max(1, self._most // (8 + table.rows.shape[1]))
        for at in range(0, max(1, len(table.keys)), rows):
            to = at + rows
            part = table._replace(keys=table.keys[at:to], rows=table.rows[at:to], stamps=table.stamps[at:to])
            if at:
                part = part._replace(notes=NO_NOTES, waiting=None)
            self.room(_table_bytes(part)).tables.append(part)

    def add_retained(self, app: str, clock: int, worker: int, block: Block) -> None:
        rows = max(1, self._most // (8 + 4 * block.grads.shape[1]))
        for at in range(0, len(block.keys), rows):
            part = block._replace(keys=block.keys[at : at + rows], grads=block.grads[at : at + rows])
            self.room(_block_bytes(part)).rounds.retained.append((app, clock, worker, [part]))


def _table_bytes(table: TableRows) -> int:
    return _name_bytes(table) + _rows_bytes(table)


def _name_bytes(table: TableRows) -> int:
    return 80 + len(table.spec)


def _rows_bytes(table: TableRows) -> int:
    waiting = table.waiting
    more = waiting.keys.nbytes + waiting.words.nbytes + waiting.blocks.nbytes if waiting is not None else 0
    return sum(array.nbytes for array in (table.keys, table.rows, table.stamps, table.notes)) + more


def _block_bytes(block: Block) -> int:
    return 64 + block.keys.nbytes + block.grads.nbytes + block.step_values.nbytes
