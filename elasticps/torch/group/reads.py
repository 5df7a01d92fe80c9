"""Rows and weights that rank 0 pulls for all: once, into memory from which each rank takes what it wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.links import NOTHING, Links, Words
from elasticps.torch.group.memory import Held
from elasticps.torch.kernels.distinct import distinct

if TYPE_CHECKING:
    pass

Floats = NDArray[np.float32]
_LINE = 64


class Pending(Protocol):
    """What rank 0 waits for."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> object: ...


class Slots:
    """Pieces of shared memory for what is pulled, numbered from 1. Each begins with a word for each rank, which is 0
    when the rank needs it no longer; so only rank 0 decides, and nobody waits. What ranks keep is not used again."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._left: dict[int, Sequence[Pending]] = {}  # slots that nobody wants, but whose rows may still arrive
        self._made = 0
        self._process = os.getpid()
        self.start = -(-8 * links.size // _LINE) * _LINE  # where there is room

    def take(self, nbytes: int) -> int:
        """At rank 0: one with room for so many bytes from `start` on, in use by all ranks."""
        number = next((n for n in range(1, self._made + 1) if self._free(n)), 0)
        if not number:
            number = self._made = self._made + 1
        self._left.pop(number, None)
        self._links.share(number, self.start + nbytes)
        self._flags(number)[:] = 1
        return number

    def leave(self, number: int) -> None:
        """This rank needs it no longer."""
        if os.getpid() == self._process:  # not a forked child that collects its parent's garbage
            self._flags(number)[self._links.rank] = 0

    def drop(self, number: int, arriving: Sequence[Pending]) -> None:
        """At rank 0: nobody was told of it, and nobody will be."""
        if os.getpid() != self._process:
            return
        self._left[number] = arriving
        self._flags(number)[:] = 0

    def asked(self, number: int, ask: Callable[[], Sequence[Pending]]) -> Sequence[Pending]:
        """At rank 0: what `ask` gives, which arrives there. When it raises nobody is told of the slot, and other memory
        takes its place: whatever of it was sent may still be answered."""
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
    """One thing that all ranks have asked rank 0 for. slot: where it arrives; elsewhere than at rank 0, and until
    rank 0 has heard of all ranks, 0."""

    def __init__(self, links: Links, slots: Slots) -> None:
        self._links, self._slots = links, slots
        self.slot = 0
        self._number = 0  # of the operation
        self._arriving: Sequence[Pending] = ()
        self._words = NOTHING
        self._error: Exception | None = None
        self._told = self._over = False

    def asked(self, number: int) -> Ticket:
        """It is operation `number`."""
        self._number = number
        return self

    def begin(self, start: Callable[[], tuple[int, Sequence[Pending], Sequence[int]]]) -> None:
        """At rank 0: `start` gives the slot, what arrives there, and what others are to know. What it raises, all ranks
        raise when they wait."""
        try:
            self.slot, self._arriving, words = start()
            self._words = np.array([self.slot, *words], np.int64)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether `wait` would return at once; at rank 0, elsewhere nobody knows before."""
        return self._told or (self._links.rank == 0 and bool(self.slot) and all(e.done() for e in self._arriving))

    def wait(self, timeout: float | None) -> Words:
        """Until all of it has arrived; what rank 0 says of it: the slot, and more."""
        if not self._told:
            self._links.catch_up()
            self._over = True
            with self._links.leading(self._number):
                if self._error is not None:
                    raise self._error
                for each in self._arriving:
                    each.result(timeout)
            self._words = self._links.answer(self._number, self._words)
            self._told, self.slot = True, int(self._words[0])
        return self._words

    def __del__(self) -> None:
        if self._told:
            self._slots.leave(self.slot)
        elif self._links.rank == 0 and self.slot:
            self._slots.drop(self.slot, self._arriving)
        elif self._links.rank and self._number and not self._over:
            self._links.forget(self._number, self._unwanted)

    def _unwanted(self, words: Words) -> None:
        self._slots.leave(int(words[0]))


class GroupRead:
    """Rows that this rank has asked for, as `SparseTable.pull_async` gives it."""

    def __init__(self, links: Links, ticket: Ticket, dim: int, out: Floats) -> None:
        self._links = links
        self._ticket: Ticket | None = ticket
        self._dim, self._out = dim, out

    def done(self) -> bool:
        """Whether `result` would return at once, if rank 0 knows."""
        return self._ticket is None or self._ticket.done()

    def result(self, timeout: float | None = None) -> Floats:
        """Waits for the rows, float32 [n, dim] in the order of the keys."""
        if self._ticket is not None:
            words = self._ticket.wait(timeout)
            memory = self._links.memory(self._ticket.slot)
            count, start = int(words[1]), int(words[2])
            at, mine = (int(word) for word in words[3 + 2 * self._links.rank :][:2])
            rows = memory.floats(start, count * self._dim).reshape(count, self._dim)
            if mine:
                np.take(rows, memory.words(at, mine), axis=0, out=self._out, mode="clip")
            self._ticket = None
        return self._out


def ask_rows(
    links: Links, slots: Slots, operation: str, keys: NDArray[np.int64], dim: int, out: Floats,
    pull: Callable[[NDArray[np.int64], Floats], Pending] | None,
) -> GroupRead:  # fmt: skip
    """Asks for the rows of `keys`, int64 [n], into `out`; at rank 0 `pull` asks the servers for those of all ranks."""
    ticket = Ticket(links, slots)

    def start(said: list[Words]) -> tuple[int, Sequence[Pending], Sequence[int]]:
        assert pull is not None
        union, where, _ = distinct(np.concatenate(said), None)
        begin = slots.start
        at = begin + -(-4 * dim * len(union) // _LINE) * _LINE
        slot = slots.take(at - begin + 8 * len(where))
        memory = links.memory(slot)
        memory.words(at, len(where))[:] = where
        words, rows = [len(union), begin], memory.floats(begin, dim * len(union)).reshape(-1, dim)
        for each in said:
            words += [at, len(each)]
            at += 8 * len(each)
        return slot, slots.asked(slot, lambda: [pull(union, rows)] if len(union) else []), words

    number = links.ask_later(operation, keys.copy(), lambda said: ticket.begin(partial(start, said)))
    return GroupRead(links, ticket.asked(number), dim, out)


class WeightsRead:
    """A tensor that all ranks have asked for. What `result` gives is the memory that all of them see, the same for as
    long as anybody looks at it: not to be changed."""

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
    links: Links, slots: Slots, shapes: Sequence[tuple[int, ...]], numbers: Words,
    pull: Callable[[list[Floats]], Sequence[Pending]] | None,
) -> list[WeightsRead]:  # fmt: skip
    """Asks for tensors of these shapes and numbers; at rank 0 `pull` asks the servers for them, into given arrays."""
    places, end = [], slots.start
    for shape in shapes:
        places.append(end)
        end += -(-4 * int(np.prod(shape, dtype=np.int64)) // _LINE) * _LINE
    ticket = Ticket(links, slots)

    def start() -> tuple[int, Sequence[Pending], Sequence[int]]:
        assert pull is not None
        slot = slots.take(end - slots.start)
        memory = links.memory(slot)
        counts = (int(np.prod(shape, dtype=np.int64)) for shape in shapes)
        floats = [memory.floats(at, count) for at, count in zip(places, counts, strict=True)]
        outs = [each.reshape(shape) for each, shape in zip(floats, shapes, strict=True)]
        return slot, slots.asked(slot, lambda: pull(outs)), []

    links.catch_up()
    number = links.ask_later(f"pull of {len(shapes)} tensors", numbers, lambda said: links.agree(said, "tensors"))
    if pull is not None:
        ticket.begin(start)
    return [WeightsRead(links, ticket.asked(number), at, shape) for at, shape in zip(places, shapes, strict=True)]
