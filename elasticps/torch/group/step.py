"""One step of all ranks: their gradients become one, which rank 0 pushes.

First all say what they have, so that all know where it lies (`layout.py`). Dense gradients pass in chunks: while the
ranks sum one, each its share of it, the next one is copied. Rows are summed by key, each rank a part of the keys. All
sums go by rank, so that they are, bit for bit, those of one process that adds up the gradients in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.layout import ABSENT, CHUNK, Layout, copy_range, layout
from elasticps.torch.group.links import Links
from elasticps.torch.group.memory import Shared
from elasticps.torch.group.merge import added, merged, share
from elasticps.torch.group.tables import GroupTable, GroupTensor, Handle

GRADIENTS = 0  # the number of their memory
Floats = NDArray[np.float32]


class Sums(NamedTuple):
    """At rank 0: what is to be pushed. Arrays of tensors, float32 of their shape, lie in shared memory until the next
    step."""

    number: int  # of the operation that waits for the push
    values: dict[Handle, Any]


class Step:
    """A step of the ranks of `links`. handles: all that are open, by number; mean: divide sums by the ranks."""

    def __init__(self, links: Links, handles: Sequence[Handle], mean: bool, chunk: int = CHUNK) -> None:
        self._links, self._handles, self._mean, self._chunk = links, handles, mean, chunk

    def sums(self, values: Mapping[Handle, object]) -> Sums:
        """Adds up what the ranks have; InputError before anybody hears of it. Elsewhere than at rank 0 nothing."""
        mine = {handle.number: handle.checked(value) for handle, value in values.items()}
        plan = self._plan(mine)
        memory = self._links.memory(GRADIENTS) if plan.nbytes else None
        counts = np.zeros(len(plan.tables), np.int64)
        if memory is not None:
            self._give_rows(plan, memory, mine)
            tensors: list[Any] = [mine.get(number) for number in plan.tensors]
            before: tuple[int, int, int] | None = None
            for turn, (start, stop) in enumerate(plan.chunks()):
                own = memory.floats(plan.slots[turn % 2][self._links.rank], stop - start)
                copy_range(tensors, plan, start, stop, own)
                self._wait()
                before = turn % 2, start, stop
                self._add(plan, memory, *before)
            if before is None:
                self._wait()
            for i, table in enumerate(plan.tables):
                counts[i] = self._merge(memory, table)
        number, said = self._links.ask("push of the sums", counts)
        if self._links.rank:
            return Sums(number, {})
        with self._links.leading(number):
            return Sums(number, {} if memory is None else dict(self._values(plan, memory, said)))

    def _plan(self, mine: Mapping[int, Any]) -> Layout:
        """The same at all ranks; there is memory for it."""
        links, targets = self._links, [handle.target for handle in self._handles]
        has = np.full(len(targets), ABSENT, np.int64)
        for number, value in mine.items():
            has[number] = len(value[0]) if isinstance(value, tuple) else 0
        number, said = links.ask("step", has)
        with links.leading(number):
            if links.rank == 0:
                links.agree([np.array([len(each)]) for each in said], "tables")
                plan = layout(targets, said, self._chunk)
                if plan.nbytes:
                    links.share(GRADIENTS, plan.nbytes)
                links.answer(number, np.concatenate(said))
                return plan
        return layout(targets, list(links.answer(number).reshape(links.size, -1)), self._chunk)

    def _wait(self) -> None:
        """Until every rank is here."""
        number, _ = self._links.ask("sum")
        self._links.answer(number)

    def _give_rows(self, plan: Layout, memory: Shared, mine: Mapping[int, Any]) -> None:
        for table in plan.tables:
            if table.number in mine:
                keys, rows = memory.rows(table.given[self._links.rank])
                keys[:], rows[:] = mine[table.number]

    def _add(self, plan: Layout, memory: Shared, slot: int, start: int, stop: int) -> None:
        """This rank's share of a chunk."""
        low, high = share(stop - start, self._links.rank, self._links.size)
        if low < high:
            given = [memory.floats(at + 4 * low, high - low) for at in plan.slots[slot]]
            added(given, memory.floats(plan.result + 4 * (start + low), high - low), self._mean)

    def _merge(self, memory: Shared, table: Any) -> int:
        """This rank's part of a table's keys; how many they are."""
        links = self._links
        keys, rows = memory.rows(table.sums[links.rank])
        count = merged([memory.rows(place) for place in table.given], links.rank, links.size, keys, rows)
        if self._mean:
            rows[:count] /= np.float32(links.size)
        return count

    def _values(self, plan: Layout, memory: Shared, said: Sequence[NDArray[np.int64]]) -> Any:
        for number, start in zip(plan.tensors, plan.starts, strict=True):
            tensor = self._handles[number]
            assert isinstance(tensor, GroupTensor)
            floats = memory.floats(plan.result + 4 * start, tensor.target.floats)
            yield tensor, floats.reshape(tensor.shape)
        for i, table in enumerate(plan.tables):
            handle = self._handles[table.number]
            assert isinstance(handle, GroupTable)
            parts = [memory.rows(place, int(each[i])) for place, each in zip(table.sums, said, strict=True)]
            yield handle, (np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts]))
