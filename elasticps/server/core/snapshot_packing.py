"""Cuts what a piece of a range holds into several of bounded size, all of one instant. Pure."""

from __future__ import annotations

from elasticps.server.core.barrier_state import RangeRounds
from elasticps.server.core.operations import ChunkContent, TableRows
from elasticps.store.deletions import NO_NOTES
from elasticps.wire.frames import Block

_ENTRY_BYTES = 40  # a shard in a worker's hands; a member of a round takes less


def size_of(content: ChunkContent) -> int:
    """About so many bytes on the wire."""
    rounds, sets = content.rounds, [one for named in content.shards.values() for one in named.values()]
    entries = sum(len(h.members) + len(h.workers) + len(h.last) for h in rounds.groups.values())
    entries += sum(len(s.returned) + sum(map(len, s.doing.values())) for s in sets)
    return sum(map(_name_bytes, content.tables)) + size_by_place(content) + _ENTRY_BYTES * entries


def size_by_place(content: ChunkContent) -> int:
    """So many of them are of single rows: a shorter interval has fewer."""
    kept = sum(_block_bytes(block) for *_, blocks in content.rounds.kept for block in blocks)
    return kept + sum(map(_rows_bytes, content.tables))


def pack(content: ChunkContent, most_bytes: int) -> list[ChunkContent]:
    """The content as one or several of about `most_bytes` at most, unless a single row is larger. Loaded one after the
    other they give what it would have given at once."""
    if size_of(content) <= most_bytes:
        return [content]
    packer = _Packer(content, most_bytes)
    for table in content.tables:
        packer.add_table(table)
    for app, clock, worker, blocks in content.rounds.kept:
        for block in blocks:
            packer.add_kept(app, clock, worker, block)
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
                part = part._replace(notes=NO_NOTES)
            self.room(_table_bytes(part)).tables.append(part)

    def add_kept(self, app: str, clock: int, worker: int, block: Block) -> None:
        rows = max(1, self._most // (8 + 4 * block.grads.shape[1]))
        for at in range(0, len(block.keys), rows):
            part = block._replace(keys=block.keys[at : at + rows], grads=block.grads[at : at + rows])
            self.room(_block_bytes(part)).rounds.kept.append((app, clock, worker, [part]))


def _table_bytes(table: TableRows) -> int:
    return _name_bytes(table) + _rows_bytes(table)


def _name_bytes(table: TableRows) -> int:
    return 80 + len(table.spec)


def _rows_bytes(table: TableRows) -> int:
    return sum(array.nbytes for array in (table.keys, table.rows, table.stamps, table.notes))


def _block_bytes(block: Block) -> int:
    return 64 + block.keys.nbytes + block.grads.nbytes + block.step_values.nbytes
