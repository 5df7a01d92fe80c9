"""A pull that leaves in one message with a step, and shows what that has made of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.pull_tables import TablesPull, in_groups
from elasticps.client.pulls import ArrayRead, RowsToCome
from elasticps.client.reads import Reads
from elasticps.client.tables import DenseTensor, SparseTable
from elasticps.errors import Error

T = TypeVar("T")  # a table or tensor


class PullBehind(Generic[T]):
    """Everything is checked here, before anything is sent. Who sends the step's last part calls `then` right behind it,
    under the same lock, and `begun` when it has left. In rounds, which close in between, `then` is None."""

    def __init__(
        self, reads: Reads, handles: Sequence[T], keys: Mapping[T, object], out: Mapping[T, NDArray[np.float32]],
        read: str, exact: bool,
    ) -> None:  # fmt: skip
        self._reads = reads
        self._handles = list(handles)
        self._begin: dict[T, Callable[[], RowsToCome]] = {}  # of tables that keep rows: these take the step in first
        self._asked: dict[T, ArrayRead] = {}
        for handle in handles:
            if isinstance(handle, SparseTable) and handle.cache is not None and not exact:
                array, rows = handle.checked(keys[handle], out.get(handle), read)
                self._begin[handle] = partial(handle.begin_kept, array.copy(), rows, read)
            else:
                assert isinstance(handle, SparseTable | DenseTensor)
                asked = handle.begin(keys[handle], out.get(handle), read, exact)
                assert isinstance(asked, ArrayRead)
                self._asked[handle] = asked
        self._groups = in_groups(reads.finish, list(self._asked.values()))
        self.then = None if reads.in_rounds else partial(reads.start_behind, self._groups)

    def begun(self) -> TablesPull[T]:
        """The pull, now that the step has left: what is raised here its `result` raises, for whoever calls again would
        push again."""
        give_up = self._reads.give_up
        try:
            if self.then is None:
                self._reads.start_all(self._groups)
            started = [self._asked[h] if h in self._asked else self._begin[h]() for h in self._handles]
        except Error as error:
            give_up(self._groups)
            return TablesPull(self._handles, [], [], give_up, error)
        return TablesPull(self._handles, started, self._groups, give_up)
