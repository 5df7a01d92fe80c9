"""The log of a replica whose youngest entries the compiled path keeps.

In each lane they are younger than those that Python keeps: before Python adds an entry, or looks at them, it takes all
of them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from replication.chain import Ranges
from replication.log import Entry, Frame, Log
from replication.messages import Seqs
from replication.progress import Progress


class Young(Protocol):
    """The entries that the compiled path keeps."""

    @property
    def nbytes(self) -> int:
        """Bytes of their frames."""

    @property
    def count(self) -> int:
        """How many there are."""

    def take(self) -> Iterator[tuple[int, Frame, Ranges, Seqs, int]]:
        """Hands all of them over, oldest first, as the arguments of `Log.add`."""

    def release(self, lane: int) -> bool:
        """Drops those of a lane that are acknowledged and answers their frames; False if Python has to take them over
        for that, because answers of its own would come out of turn."""


class YoungLog(Log):
    """`young` is set by whoever has it."""

    __slots__ = ("young",)

    def __init__(self) -> None:
        super().__init__()
        self.young: Young | None = None

    @property
    def nbytes(self) -> int:
        return self._nbytes + (0 if self.young is None else self.young.nbytes)

    @property
    def old_bytes(self) -> int:
        """Of the entries that Python keeps."""
        return self._nbytes

    def old(self) -> dict[int, int]:
        """By lane, how many entries Python keeps."""
        return {lane: len(entries) for lane, entries in self._lanes.items() if entries}

    def __len__(self) -> int:
        return super().__len__() + (0 if self.young is None else self.young.count)

    def _take_over(self) -> None:
        if self.young is not None and self.young.count:
            for lane, frame, ranges, seqs, before in self.young.take():
                super().add(lane, frame, ranges, seqs, before)

    def add(self, lane: int, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress) -> None:
        self._take_over()
        super().add(lane, frame, ranges, seqs, before)

    def release(self, lane: int, acked: Seqs) -> list[Frame]:
        done = super().release(lane, acked)
        young = self.young
        if young is not None and young.count and not self._lanes.get(lane) and not young.release(lane):
            self._take_over()
            done += super().release(lane, acked)
        return done

    def lane(self, lane: int) -> Iterator[Entry]:
        self._take_over()
        return super().lane(lane)

    def entries(self) -> list[Entry]:
        self._take_over()
        return super().entries()

    def rebuild(self, split: Callable[[Entry], list[tuple[int, Entry]]]) -> list[Frame]:
        self._take_over()
        return super().rebuild(split)
