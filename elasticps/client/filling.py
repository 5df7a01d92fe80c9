"""Values that go into a table as they are, past its optimizer: a tensor's initial ones, and what a user loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from elasticps.client.protocol.fan_out import Questions
from elasticps.client.protocol.routing import Routes, plan_push
from elasticps.client.writes import Part, Write
from elasticps.wire.frames import Buffer, Header
from elasticps.wire.headers import InitHeader
from replication.chain import Member

NO_STEP_VALUES = np.empty(0, np.float32)


class GivenRows:
    """Rows of keys int64 [n], each key once, with values float32 [n, dim], in the order of a view's ranks."""

    def __init__(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self.keys, self.dim = keys, values.shape[1]
        self._bytes, self._row = values.data.cast("B") if values.size else memoryview(b""), 4 * values.shape[1]

    def gradients(self, start: int, stop: int) -> list[Buffer]:
        return [self._bytes[start * self._row : stop * self._row]]

    def complete(self) -> None:
        pass


def rows(table: int, salt: np.uint64, keys: NDArray[np.int64], values: NDArray[np.float32], routes: Routes) -> Write:
    """Distinct keys int64 [n] of a table and their rows float32 [n, dim]."""
    plan = plan_push(keys, salt, routes)
    return Write(table, GivenRows(keys[plan.order], values[plan.order]), plan.offsets, NO_STEP_VALUES)


def fill(write: Callable[[Routes], Write], worker: int, *, replace: bool) -> Questions:
    """Sends what `write` gives to the heads. replace: also for rows that there are; their slots begin anew."""

    def questions(routes: Routes) -> Iterator[tuple[Member, Header, list[Buffer]]]:
        part = Part([write(routes)], routes)
        for server in routes.share_of:
            for cut in part.whole(server, routes):
                said = InitHeader(routes.epoch, worker, cut.items, cut.ranges is None, replace)
                yield routes.members[server], said.header(sum(map(len, cut.buffers))), cut.buffers

    return questions
