"""Digests of ranges at places of their logs, which `elasticps audit` compares between replicas.

Replicas of a range never have the same content at the same moment while pushes go on, but they have at the same
sequence number. So a mark travels in the log like any operation, and each replica takes its digest when it applies it.
A large range is marked in several parts, intervals of its hashes, one after the other: the digest of a part is taken at
the part's own place of the log, so what comes in between waits for one part at most, one or two milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

import numpy as np

from elasticps.admin.interface import MarkedRange
from elasticps.server.core.operations import AuditMark
from elasticps.store import Table
from replication.chain import Ranges

MARKS_RETAINED = 4
PART_BYTES = 1 << 20  # of rows: half a millisecond, and as long again for each 90,000 rows that the range has in all


class Marks:
    """Digests at the newest marks: id -> range -> digest, once all parts of the range have passed."""

    def __init__(self) -> None:
        self._marks: OrderedDict[int, dict[int, MarkedRange]] = OrderedDict()
        self._parts: dict[tuple[int, int], list[bytes]] = {}  # of ranges of which some parts have passed

    def note(self, mark: AuditMark, r: int, found: MarkedRange) -> None:
        """Keeps what was found at one part; the oldest mark is forgotten when there are more than MARKS_RETAINED. Of a
        range that was not here for all parts nothing is kept."""
        passed = self._marks.setdefault(mark.id, {})
        while len(self._marks) > MARKS_RETAINED:
            self._forget(self._marks.popitem(last=False)[0])
        parts = self._parts.pop((mark.id, r), [])
        if len(parts) != mark.part:
            return
        parts.append(found.digest)
        if len(parts) < mark.parts:
            self._parts[mark.id, r] = parts
            return
        digest = blake2b(b"".join(parts), digest_size=16).digest()
        passed[r] = found._replace(digest=digest)

    def _forget(self, mark: int) -> None:
        for key in [key for key in self._parts if key[0] == mark]:
            del self._parts[key]

    def of(self, mark: int) -> dict[int, MarkedRange]:
        """Digests at a mark, by range; empty if it never passed here."""
        return self._marks.get(mark, {})


def slices(tables: Mapping[int, Table], ranges: Ranges, mark: int) -> Iterator[tuple[Ranges, AuditMark]]:
    """What to mark one after the other: as many small ranges together as make a part, or a part of a large one."""
    small: list[int] = []
    waiting = 0
    for r in ranges.tolist():
        nbytes = sum(table.count_range(r) * table.stride for table in tables.values())
        if small and waiting + nbytes > PART_BYTES:
            yield np.array(small, np.int64), AuditMark(mark)
            small, waiting = [], 0
        parts = -(-nbytes // PART_BYTES)
        if parts > 1:
            yield from ((np.array([r], np.int64), AuditMark(mark, part, parts)) for part in range(parts))
        else:
            small.append(r)
            waiting += nbytes
    if small:
        yield np.array(small, np.int64), AuditMark(mark)


def digest(tables: Mapping[int, Table], r: int, mark: AuditMark, words: Iterable[int]) -> bytes:
    """16 bytes that stand for every row of a part of a range: keys, weights and slots, bit for bit; and, with the first
    part, for `words`."""
    whole = blake2b(digest_size=16)
    if mark.part == 0:
        whole.update(np.fromiter(words, np.int64).tobytes())
    for number in sorted(tables):
        if tables[number].count_range(r):
            found = tables[number].digest_range(r, mark.part, mark.parts)
            whole.update(number.to_bytes(4, "little") + found.to_bytes(8, "little"))
    return whole.digest()
