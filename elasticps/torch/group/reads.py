"""Rows and weights that rank 0 pulls for all ranks: once, into shared memory from which each rank copies its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.links import NOTHING, Links, Words
from elasticps.torch.group.memory import Held
from elasticps.torch.kernels.distinct import distinct

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]
_LINE = 64


class ClientRead(Protocol):
    """A read of the client, for which rank 0 waits."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> object: ...


class PulledTable(Protocol):
    """What a pull has to know of a table of the group."""

    @property
    def number(self) -> int: ...
    @property
    def dim(self) -> int: ...


class PulledHandle(Protocol):
    """A table or tensor of the group, and the client's own, at rank 0."""

    @property
    def real(self) -> Any: ...


Table = TypeVar("Table", bound=PulledTable)


class PullSlots:
    """Pieces of shared memory for rows and weights that are pulled, numbered from 1. Each begins with a word for each
    rank, which is 0 when the rank needs it no longer; so only rank 0 decides, and nobody waits. A slot is not used
    again while a rank needs it."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._left: dict[int, Sequence[ClientRead]] = {}  # slots that no rank needs, but whose rows may still arrive
        self._made = 0
        self._process = os.getpid()
        self.start = -(-8 * links.size // _LINE) * _LINE  # where there is room

    def take(self, nbytes: int) -> int:
        """At rank 0: the number of a free slot with room for so many bytes from `start` on; all ranks use it now."""
        number = next((n for n in range(1, self._made + 1) if self._free(n)), 0)
        if not number:
            number = self._made = self._made + 1
        self._left.pop(number, None)
        self._links.share(number, self.start + nbytes)
        self._flags(number)[:] = 1
        return number

    def leave(self, number: int) -> None:
        """Notes that this rank needs a slot no longer."""
        if os.getpid() == self._process:  # not a forked child that collects its parent's garbage
            self._flags(number)[self._links.rank] = 0

    def drop(self, number: int, arriving: Sequence[ClientRead]) -> None:
        """At rank 0: frees a slot that no other rank has heard of, once what arrives there has arrived."""
        if os.getpid() != self._process:
            return
        self._left[number] = arriving
        self._flags(number)[:] = 0

    def fill(self, number: int, ask: Callable[[], Sequence[ClientRead]]) -> Sequence[ClientRead]:
        """At rank 0: calls `ask`, whose reads arrive in a slot, and returns them. When it raises no rank hears of the
        slot, and other memory takes its place: a part that was sent may still be answered."""
        try:
            return ask()
        except BaseException:
            self._links.unshare(number)
            raise

    def _free(self, number: int) -> bool:
        if not self._links.shared(number):
            return True
        return not self._flags(number).any() and all(each.done() for each in self._left.get(number, ()))

    def _flags(self, number: int) -> Words:
        return self._links.memory(number).words(0, self._links.size)


class Ticket:
    """An operation in which all ranks ask rank 0 for rows or weights. slot: where these arrive; 0 until rank 0 has
    heard of all ranks, and at other ranks until `wait` has returned."""

    def __init__(self, links: Links, slots: PullSlots) -> None:
        self._links, self._slots = links, slots
        self.slot = 0
        self._number = 0  # of the operation
        self._arriving: Sequence[ClientRead] = ()
        self._words = NOTHING
        self._error: Exception | None = None
        self._answered = self._over = False

    def of(self, number: int) -> Ticket:
        """Sets the number of the operation; returns this ticket."""
        self._number = number
        return self

    def begin(self, start: Callable[[], tuple[int, Sequence[ClientRead], Sequence[int]]]) -> None:
        """At rank 0: `start` returns the slot, the reads that arrive there, and words for the other ranks. An error
        that it raises is raised by all ranks when they wait."""
        try:
            self.slot, self._arriving, words = start()
            self._words = np.array([self.slot, *words], np.int64)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether `wait` would return at once. Other ranks than rank 0 do not know before they have waited."""
        return self._answered or (self._links.rank == 0 and bool(self.slot) and all(e.done() for e in self._arriving))

    def wait(self, timeout: float | None) -> Words:
        """Waits until everything has arrived. Rank 0's words, int64 [n]: the slot, and the words that `start`
        returned."""
        if not self._answered:
            self._links.catch_up()
            self._over = True
            with self._links.leading(self._number):
                if self._error is not None:
                    raise self._error
                for each in self._arriving:
                    each.result(timeout)
            self._words = self._links.answer(self._number, self._words)
            self._answered, self.slot = True, int(self._words[0])
        return self._words

    def __del__(self) -> None:
        if self._answered:
            self._slots.leave(self.slot)
        elif self._links.rank == 0 and self.slot:
            self._slots.drop(self.slot, self._arriving)
        elif self._links.rank and self._number and not self._over:
            self._links.forget(self._number, self._free_slot)

    def _free_slot(self, words: Words) -> None:
        self._slots.leave(int(words[0]))


class GroupPull:
    """Rows and tensors that this rank has asked for together with all other ranks, as `Client.pull_async` gives them.

    ticket: for the rows of all tables, which go to `outs`; weights: the tensors, each with what waits for it.
    """

    def __init__(
        self, links: Links, ticket: Ticket | None, outs: Mapping[Any, Floats], weights: Mapping[Any, WeightsRead]
    ) -> None:
        self._links, self._ticket = links, ticket
        self._outs, self._weights = dict(outs), weights
        self._values: dict[Any, Floats] | None = None

    def done(self) -> bool:
        """Whether `result` would return at once, if rank 0 knows."""
        arrived = self._ticket is None or self._ticket.done()
        return self._values is not None or (arrived and all(read.done() for read in self._weights.values()))

    def result(self, timeout: float | None = None) -> dict[Any, Floats]:
        """Waits for all of it: of each table float32 [n, dim] in the order of its keys, each tensor float32 of its
        shape, in memory that all ranks see."""
        if self._values is None:
            weights = {tensor: read.result(timeout) for tensor, read in self._weights.items()}
            if self._ticket is not None:
                self._take_rows(self._ticket.wait(timeout)[1:], self._ticket.slot)
                self._ticket = None
            self._values, self._weights = weights | self._outs, {}
        return self._values

    def _take_rows(self, words: Words, slot: int) -> None:
        memory, size = self._links.memory(slot), 2 + 2 * self._links.size
        for out, parts in zip(self._outs.values(), words.reshape(-1, size), strict=True):
            count, start = int(parts[0]), int(parts[1])
            at, mine = (int(word) for word in parts[2 + 2 * self._links.rank :][:2])
            if mine:
                rows = memory.floats(start, count * out.shape[1]).reshape(count, out.shape[1])
                np.take(rows, memory.words(at, mine), axis=0, out=out, mode="clip")


class GroupRead:
    """The rows of one table out of a pull, as `SparseTable.pull_async` gives them."""

    def __init__(self, pull: GroupPull, table: PulledTable) -> None:
        self._pull, self._table = pull, table

    def done(self) -> bool:
        """Whether `result` would return at once, if rank 0 knows."""
        return self._pull.done()

    def result(self, timeout: float | None = None) -> Floats:
        """Waits for the rows, float32 [n, dim] in the order of the keys."""
        return self._pull.result(timeout)[self._table]


class AlonePull:
    """A pull that rank 0 makes by itself with its client; its values are those of the group's handles."""

    def __init__(self, pull: ClientRead, handles: Sequence[PulledHandle]) -> None:
        self._pull, self._handles = pull, handles

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._pull.done()

    def result(self, timeout: float | None = None) -> dict[Any, Floats]:
        """Waits for all of it, as `GroupPull.result` does."""
        values: Any = self._pull.result(timeout)
        return {handle: values[handle.real] for handle in self._handles}


def ask_rows(
    links: Links, slots: PullSlots, operation: str, keys: Mapping[Table, Keys], outs: Mapping[Table, Floats],
    pull: Callable[[Sequence[Table], list[Keys], list[Floats]], ClientRead] | None,
) -> Ticket:  # fmt: skip
    """Asks for rows of tables, the same at all ranks: `keys` int64 [n] of each; for a `GroupPull` into `outs`. At rank
    0 `pull` asks the servers for the keys of all ranks, each once."""
    tables, numbers = list(keys), [table.number for table in keys]
    counts = [len(some) for some in keys.values()]
    ticket = Ticket(links, slots)

    def start(requests: list[Words]) -> tuple[int, Sequence[ClientRead], Sequence[int]]:
        assert pull is not None
        found = [_united(lists) for lists in _by_table(requests, len(tables))]
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
        is_empty = not any(map(len, unions))
        return slot, slots.fill(slot, lambda: [] if is_empty else [pull(tables, unions, rows)]), words

    def heard(requests: list[Words]) -> None:
        links.agree([each[: len(tables)] for each in requests], "tables")
        ticket.begin(partial(start, requests))

    request = np.concatenate([np.array([*numbers, *counts], np.int64), *keys.values()])
    return ticket.of(links.ask_later(operation, request, heard))


def _by_table(requests: Sequence[Words], tables: int) -> list[list[Keys]]:
    """The keys of each rank, table by table."""
    parts = [np.split(each[2 * tables :], np.cumsum(each[tables : 2 * tables])[:-1]) for each in requests]
    return [[each[table] for each in parts] for table in range(tables)]


def _united(lists: Sequence[Keys]) -> tuple[Keys, Words, list[int]]:
    """The keys of all ranks, each once; the index in these of each rank's keys, rank after rank; how many each has."""
    union, where, _ = distinct(np.concatenate(lists), None)
    return union, where, [len(each) for each in lists]


class WeightsRead:
    """A tensor that all ranks have asked for. `result` gives memory that all of them see: not to be changed. It stays
    as it is while an array of this rank refers to it."""

    def __init__(self, links: Links, ticket: Ticket, at: int, shape: tuple[int, ...]) -> None:
        self._links, self._ticket = links, ticket
        self._at, self._shape = at, shape

    def done(self) -> bool:
        """Whether `result` would return at once, if rank 0 knows."""
        return self._ticket.done()

    def result(self, timeout: float | None = None) -> Floats:
        """Waits for the weights, float32 of the tensor's shape."""
        self._ticket.wait(timeout)
        count = int(np.prod(self._shape, dtype=np.int64))
        values = self._links.memory(self._ticket.slot).floats(self._at, count).reshape(self._shape)
        return Held(values, self._ticket).view()


def ask_weights(
    links: Links, slots: PullSlots, shapes: Sequence[tuple[int, ...]], numbers: Words,
    pull: Callable[[list[Floats]], Sequence[ClientRead]] | None,
) -> list[WeightsRead]:  # fmt: skip
    """Asks for tensors of these shapes and numbers; at rank 0 `pull` asks the servers for them, into given arrays."""
    starts, end = [], slots.start
    for shape in shapes:
        starts.append(end)
        end += -(-4 * int(np.prod(shape, dtype=np.int64)) // _LINE) * _LINE
    ticket = Ticket(links, slots)

    def start() -> tuple[int, Sequence[ClientRead], Sequence[int]]:
        assert pull is not None
        slot = slots.take(end - slots.start)
        memory = links.memory(slot)
        counts = (int(np.prod(shape, dtype=np.int64)) for shape in shapes)
        floats = [memory.floats(at, count) for at, count in zip(starts, counts, strict=True)]
        outs = [each.reshape(shape) for each, shape in zip(floats, shapes, strict=True)]
        return slot, slots.fill(slot, lambda: pull(outs)), []

    links.catch_up()
    number = links.ask_later(
        f"pull of {len(shapes)} tensors", numbers, lambda requests: links.agree(requests, "tensors")
    )
    if pull is not None:
        ticket.begin(start)
    return [WeightsRead(links, ticket.of(number), at, shape) for at, shape in zip(starts, shapes, strict=True)]
