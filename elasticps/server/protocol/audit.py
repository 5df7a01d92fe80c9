"""Digests of ranges at one place of their logs: what `elasticps audit` compares between replicas.

Replicas of a range never have the same content at the same moment while pushes go on, but they have at the same
sequence number. So a mark travels in the log like any operation, and each replica takes its digest when it applies it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from elasticps.admin.subject import MarkedRange
from elasticps.store import Table

MARKS_KEPT = 4


class Marks:
    """The newest marks that passed here: id -> range -> what was found."""

    def __init__(self) -> None:
        self._marks: OrderedDict[int, dict[int, MarkedRange]] = OrderedDict()

    def note(self, mark: int, r: int, found: MarkedRange) -> None:
        """Keeps what was found; the oldest mark is forgotten when there are more than MARKS_KEPT."""
        self._marks.setdefault(mark, {})[r] = found
        while len(self._marks) > MARKS_KEPT:
            self._marks.popitem(last=False)

    def of(self, mark: int) -> dict[int, MarkedRange]:
        """What was found at a mark, by range; empty if it never passed here."""
        return self._marks.get(mark, {})


def digest(tables: Mapping[int, Table], r: int, words: Iterable[int]) -> bytes:
    """16 bytes that stand for `words` and every row of a range: keys, weights and slots, bit for bit."""
    whole = blake2b(digest_size=16)
    for word in words:
        whole.update(word.to_bytes(8, "little"))
    for number in sorted(tables):
        if tables[number].count_range(r):
            whole.update(number.to_bytes(4, "little") + tables[number].digest_range(r).to_bytes(8, "little"))
    return whole.digest()
