"""One step of all ranks: sums their gradients, which rank 0 pushes.

A rank writes its gradients into its own region of shared memory (`layout.py`); then all ranks exchange how large theirs
are. If a region is too small, all get larger ones and write again. Dense gradients pass in chunks: while the ranks sum
one chunk, each its share of it, the next one is copied. Rows are summed by key, each rank a part of the keys. All sums
go by rank, so that they are, bit for bit, those of one process that adds up the gradients in this order.

Small steps rank 0 sums alone, as soon as it has the requests of all ranks: no other rank has to wait. A rank whose
gradients do not fit its region then sends them in its request, and learns the new size of regions with the answer to
the push.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.layout import (
    ABSENT,
    CHUNK,
    GradientSize,
    Layout,
    Region,
    copy_range,
    fits,
    layout,
    region,
    room_for,
    tensors_of,
)
from elasticps.torch.group.links import Links
from elasticps.torch.group.memory import SharedMemory
from elasticps.torch.group.tables import Handle
from elasticps.torch.kernels.merge import added, merged, share

GRADIENTS = 0  # the number of their memory
LITTLE = 2 << 20  # bytes of a rank's room
Has = NDArray[np.int64]


_NONE: Has = np.empty(0, np.int64)


class Sums(NamedTuple):
    """The sums that rank 0 pushes. Arrays of tensors, float32 of their shape, lie in shared memory until the next
    step."""

    number: int  # of the operation that waits for the push
    values: dict[Handle, Any]


class Summing:
    """Sums gradients, step by step. handles: all open tables and tensors, by number; mean: divide sums by the number of
    ranks; little: rank 0 sums alone while a rank's region has at most so many bytes."""

    def __init__(
        self, links: Links, handles: Sequence[Handle], mean: bool, chunk: int = CHUNK, little: int = LITTLE
    ) -> None:
        self._links, self._handles, self._mean, self._chunk, self._little = links, handles, mean, chunk, little
        self._room = 0  # bytes of each rank's region, the same at all ranks
        self._next = 0  # the same from when all ranks hear of a push, which may fail

    def sums(self, values: Mapping[Handle, object]) -> Sums:
        """Sums the gradients of all ranks; returns the sums at rank 0, elsewhere none. InputError for unusable
        gradients, before other ranks are involved."""
        mine = {handle.number: handle.checked(value) for handle, value in values.items()}
        if 0 < self._room <= self._little:
            return self._sums_alone(mine)
        plan = self._given(mine)
        counts = np.zeros(len(plan.sums), np.int64)
        if plan.nbytes:
            memory = self._links.memory(GRADIENTS)
            self._add_all(plan, memory, mine)
            for i, number in enumerate(plan.sums):
                counts[i] = self._merge(plan, memory, number)
        number, requests = self._links.ask("push of the sums", counts)
        if self._links.rank:
            return Sums(number, {})
        with self._links.leading(number):
            return Sums(number, dict(self._values(plan, requests)))

    @property
    def room(self) -> int:
        """The size of regions from the next step on. Rank 0 sends it with the answer to a push, and all ranks set
        it."""
        return self._next

    @room.setter
    def room(self, room: int) -> None:
        self._room = self._next = room

    # -- small steps

    def _sums_alone(self, mine: Mapping[int, Any]) -> Sums:
        targets, links = [handle.target for handle in self._handles], self._links
        has = self._has(mine)
        own, tensors, floats = self._region(targets, has, links.rank)
        fits_room = own.end <= (links.rank + 1) * self._room
        if fits_room:
            self._give(own, tensors, mine, floats)
        requests = [len(has), fits_room], has, _NONE if fits_room else _packed(mine)
        number, heard = links.ask("step", np.concatenate(requests))
        if links.rank:
            return Sums(number, {})
        with links.leading(number):
            links.agree([each[:1] for each in heard], "tables")
            given = [self._taken(targets, rank, each) for rank, each in enumerate(heard)]
            values = dict(self._added(targets, given))
            if not all(each[1] for each in heard):
                sizes = [each[2 : 2 + len(has)] for each in heard]
                self._next = room_for(targets, sizes, self._chunk)
                links.share(GRADIENTS, layout(targets, sizes, self._chunk, self._next).nbytes)
            return Sums(number, values)

    def _region(self, targets: Sequence[GradientSize], has: Has, rank: int) -> tuple[Region, Sequence[int], int]:
        """The region of a rank, the numbers of the tensors that it has gradients of, and how many floats these have."""
        tensors = tensors_of(targets, has)
        floats = sum(targets[number].floats for number in tensors)
        return region(targets, has, floats, rank * self._room), tensors, floats

    def _taken(self, targets: Sequence[GradientSize], rank: int, heard: Has) -> dict[int, Any]:
        """The gradients of a rank, by number: keys and rows of tables, flat floats of tensors."""
        has = heard[2 : 2 + len(targets)]
        if not heard[1]:
            return _unpacked(targets, has, heard[2 + len(targets) :])
        own, tensors, floats = self._region(targets, has, rank)
        memory = self._links.memory(GRADIENTS)
        found: dict[int, Any] = {number: memory.rows(place) for number, place in own.tables.items()}
        at, row = 0, memory.floats(own.slots[0], floats)
        for number in tensors:
            found[number] = row[at : at + targets[number].floats]
            at += targets[number].floats
        nothing = [number for number, target in enumerate(targets) if target.dim and has[number] == 0]
        return found | {number: (_NONE, np.empty((0, targets[number].dim), np.float32)) for number in nothing}

    def _added(
        self, targets: Sequence[GradientSize], given: Sequence[Mapping[int, Any]]
    ) -> Iterator[tuple[Handle, Any]]:
        for number, each_handle in enumerate(self._handles):
            handle: Any = each_handle
            some = [each[number] for each in given if number in each]
            if not some:
                continue
            if not targets[number].dim:
                zeros = np.zeros(targets[number].floats if len(some) < len(given) else 0, np.float32)
                total = np.empty(targets[number].floats, np.float32)
                added([each.get(number, zeros) for each in given], total, self._mean)
                yield handle, total.reshape(handle.shape)
                continue
            most = sum(len(keys) for keys, _ in some)
            keys, rows = np.empty(most, np.int64), np.empty((most, targets[number].dim), np.float32)
            count = merged(some, 0, 1, keys, rows)
            if self._mean:
                rows[:count] /= np.float32(len(given))
            yield handle, (keys[:count], rows[:count])

    # -- giving

    def _has(self, mine: Mapping[int, Any]) -> Has:
        """This rank's gradients by number, int64: the keys of a table, 0 for a tensor, ABSENT for none."""
        has = np.full(len(self._handles), ABSENT, np.int64)
        for number, value in mine.items():
            has[number] = len(value[0]) if isinstance(value, tuple) else 0
        return has

    def _given(self, mine: Mapping[int, Any]) -> Layout:
        """Has all ranks write their rows and first chunks; the layout in which these lie."""
        targets = [handle.target for handle in self._handles]
        has = self._has(mine)
        early = self._give_early(targets, has, mine)
        requests = self._links.exchange("step", np.append(has, early))
        given = [each[:-1] for each in requests]
        plan = layout(targets, given, self._chunk, self._room)
        same = all(tensors_of(targets, each) == plan.tensors for each in given)
        if all(each[-1] for each in requests) and same and fits(plan, self._room, self._nbytes):
            return plan
        self.room = room_for(targets, given, self._chunk)
        plan = layout(targets, given, self._chunk, self._room)
        if plan.nbytes:
            number, _ = self._links.ask("memory")
            with self._links.leading(number):
                if self._links.rank == 0:
                    self._links.share(GRADIENTS, plan.nbytes)
                self._links.answer(number)
            self._give(plan.regions[self._links.rank], plan.tensors, mine, plan.chunk)
            self._wait()
        return plan

    def _give_early(self, targets: Sequence[GradientSize], has: Has, mine: Mapping[int, Any]) -> bool:
        """Writes this rank's gradients early if they fit; returns whether it did."""
        tensors = tensors_of(targets, has)
        chunk = min(self._chunk, sum(targets[number].floats for number in tensors))
        start = self._links.rank * self._room
        own = region(targets, has, chunk, start)
        if not self._nbytes or own.end > start + self._room:
            return False
        self._give(own, tensors, mine, chunk)
        return True

    def _give(self, own: Region, tensors: Sequence[int], mine: Mapping[int, Any], floats: int) -> None:
        memory = self._links.memory(GRADIENTS)
        for number, place in own.tables.items():
            keys, rows = memory.rows(place)
            keys[:], rows[:] = mine[number]
        self._give_chunk(memory.floats(own.slots[0], floats), tensors, mine, 0, floats)

    def _give_chunk(self, out: Any, tensors: Sequence[int], mine: Mapping[int, Any], start: int, stop: int) -> None:
        sizes = [self._handles[number].target.floats for number in tensors]
        copy_range([mine.get(number) for number in tensors], sizes, start, stop, out)

    @property
    def _nbytes(self) -> int:
        return self._links.shared(GRADIENTS)

    def _wait(self) -> None:
        """Waits until every rank has come here."""
        number, _ = self._links.ask("sum")
        self._links.answer(number)

    # -- adding up

    def _add_all(self, plan: Layout, memory: SharedMemory, mine: Mapping[int, Any]) -> None:
        rank, size = self._links.rank, self._links.size
        for turn, (start, stop) in enumerate(plan.chunks()):
            slot = turn % 2
            if turn:
                own = memory.floats(plan.regions[rank].slots[slot], stop - start)
                self._give_chunk(own, plan.tensors, mine, start, stop)
                self._wait()
            low, high = share(stop - start, rank, size)
            if low < high:
                given = [memory.floats(each.slots[slot] + 4 * low, high - low) for each in plan.regions]
                added(given, memory.floats(plan.result + 4 * (start + low), high - low), self._mean)

    def _merge(self, plan: Layout, memory: SharedMemory, number: int) -> int:
        """Sums this rank's part of a table's keys; how many they are."""
        rank, size = self._links.rank, self._links.size
        given = [memory.rows(each.tables[number]) for each in plan.regions if number in each.tables]
        keys, rows = memory.rows(plan.sums[number][rank])
        count = merged(given, rank, size, keys, rows)
        if self._mean:
            rows[:count] /= np.float32(size)
        return count

    def _values(self, plan: Layout, requests: Sequence[NDArray[np.int64]]) -> Iterator[tuple[Handle, Any]]:
        for number, start in zip(plan.tensors, plan.starts, strict=True):
            tensor: Any = self._handles[number]
            floats = self._links.memory(GRADIENTS).floats(plan.result + 4 * start, tensor.target.floats)
            yield tensor, floats.reshape(tensor.shape)
        for i, (number, shares) in enumerate(plan.sums.items()):
            table: Any = self._handles[number]
            if not shares[0].n:
                yield table, (np.empty(0, np.int64), np.empty((0, table.target.dim), np.float32))
                continue
            memory = self._links.memory(GRADIENTS)
            parts = [memory.rows(place, int(each[i])) for place, each in zip(shares, requests, strict=True)]
            yield table, (np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts]))


def _packed(mine: Mapping[int, Any]) -> Has:
    """A rank's gradients as int64 [n]: by number, of a table its keys and then its rows; floats in pairs."""
    parts = list[Has]()
    for _, value in sorted(mine.items()):
        keys, floats = value if isinstance(value, tuple) else (_NONE, value)
        flat = np.zeros(floats.size + floats.size % 2, np.float32)
        flat[: floats.size] = floats.reshape(-1)
        parts += [np.asarray(keys, np.int64), flat.view(np.int64)]
    return np.concatenate([_NONE, *parts])


def _unpacked(targets: Sequence[GradientSize], has: Has, words: Has) -> dict[int, Any]:
    """The gradients that `_packed` was given."""
    found: dict[int, Any] = {}
    for number, (target, count) in enumerate(zip(targets, has.tolist(), strict=True)):
        if count == ABSENT:
            continue
        floats = target.floats or count * target.dim
        keys, words = words[:count], words[count:]
        flat, words = words[: -(-floats // 2)].view(np.float32)[:floats], words[-(-floats // 2) :]
        found[number] = (keys, flat.reshape(count, target.dim)) if target.dim else flat
    return found
