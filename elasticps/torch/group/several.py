"""Rows of several tables that rank 0 pulls for all: asked for at once, and with one pull."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.links import Links, Words
from elasticps.torch.group.reads import Floats, Pending, Slots, Ticket
from elasticps.torch.kernels.distinct import distinct

if TYPE_CHECKING:
    from elasticps.torch.group.tables import GroupTable

_LINE = 64
Keys = NDArray[np.int64]
TableT = TypeVar("TableT")


class GroupTablesRead(Generic[TableT]):
    """Rows that this rank has asked for, as `Client.pull_async` gives them."""

    def __init__(self, links: Links, ticket: Ticket, outs: Mapping[TableT, Floats]) -> None:
        self._links = links
        self._ticket: Ticket | None = ticket
        self._outs = dict(outs)

    def done(self) -> bool:
        """Whether `result` would return at once, if rank 0 knows."""
        return self._ticket is None or self._ticket.done()

    def result(self, timeout: float | None = None) -> dict[TableT, Floats]:
        """Waits for the rows, of each table float32 [n, dim] in the order of its keys."""
        if self._ticket is not None:
            words = self._ticket.wait(timeout)
            memory, size = self._links.memory(self._ticket.slot), 2 + 2 * self._links.size
            for out, told in zip(self._outs.values(), words[1:].reshape(-1, size), strict=True):
                count, start = int(told[0]), int(told[1])
                at, mine = (int(word) for word in told[2 + 2 * self._links.rank :][:2])
                if mine:
                    rows = memory.floats(start, count * out.shape[1]).reshape(count, out.shape[1])
                    np.take(rows, memory.words(at, mine), axis=0, out=out, mode="clip")
            self._ticket = None
        return self._outs


def ask_tables(
    links: Links, slots: Slots, operation: str, keys: Mapping[GroupTable, Keys], outs: Mapping[GroupTable, Floats],
    pull: Callable[[Sequence[GroupTable], list[Keys], list[Floats]], Pending] | None,
) -> GroupTablesRead[GroupTable]:  # fmt: skip
    """Asks for rows of several tables, the same at all ranks; at rank 0 `pull` asks the servers for those of all."""
    tables, numbers = list(keys), [table.number for table in keys]
    counts = [len(some) for some in keys.values()]
    ticket = Ticket(links, slots)

    def start(said: list[Words]) -> tuple[int, Sequence[Pending], Sequence[int]]:
        assert pull is not None
        found = [_united(lists) for lists in _by_table(said, len(tables))]
        end, starts = slots.start, []
        for table, (union, _, _) in zip(tables, found, strict=True):
            starts.append(end)
            end += -(-4 * table.dim * len(union) // _LINE) * _LINE
        first = end
        slot = slots.take(end + sum(8 * len(where) for _, where, _ in found) - slots.start)
        memory, words, rows = links.memory(slot), list[int](), list[Floats]()
        for table, begin, (union, where, sizes) in zip(tables, starts, found, strict=True):
            memory.words(first, len(where))[:] = where
            words += [len(union), begin]
            for size in sizes:
                words += [first, size]
                first += 8 * size
            rows.append(memory.floats(begin, table.dim * len(union)).reshape(-1, table.dim))
        unions = [union for union, _, _ in found]
        return slot, slots.asked(slot, lambda: [pull(tables, unions, rows)]), words

    def heard(said: list[Words]) -> None:
        links.agree([each[: len(tables)] for each in said], "tables")
        ticket.begin(partial(start, said))

    asked = np.concatenate([np.array([*numbers, *counts], np.int64), *keys.values()])
    return GroupTablesRead(links, ticket.asked(links.ask_later(operation, asked, heard)), outs)


def _by_table(said: Sequence[Words], tables: int) -> list[list[Keys]]:
    """Of each table the keys of each rank."""
    parts = [np.split(each[2 * tables :], np.cumsum(each[tables : 2 * tables])[:-1]) for each in said]
    return [[each[table] for each in parts] for table in range(tables)]


def _united(lists: Sequence[Keys]) -> tuple[Keys, Words, list[int]]:
    """All keys once, which of them each rank's are, and how many it has."""
    union, where, _ = distinct(np.concatenate(lists), None)
    return union, where, [len(each) for each in lists]
