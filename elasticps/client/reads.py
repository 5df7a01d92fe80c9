"""How a caller's pulls begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Ask, Questions
from elasticps.client.core.routing import Routes
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.pull_tables import PartRead, TablesPull, in_groups, small_together
from elasticps.client.pulls import ArrayRead, Read, RowsToCome
from elasticps.client.runtime import Lock
from elasticps.client.short_keys import Short
from elasticps.errors import Timeout

T = TypeVar("T")
AnyRead = TypeVar("AnyRead", bound=Read)
BOUND_GRACE_S = 1.0


class Reads:
    """Starts reads and waits for them; asks for all else that comes behind this worker's own steps. `prepare()` sees to
    whatever a read has to wait for, and gives the clock that it reads at; bound: of the delay, None for none; settle:
    as `Steps.settle_own_steps`."""

    def __init__(
        self, dispatcher: Dispatcher, prepare: Callable[[], int], bound: int | None, timeout_s: float,
        settle: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cluster = dispatcher.cluster
        self.worker = dispatcher.worker
        self._dispatcher = dispatcher
        self._prepare = prepare
        self._bound = bound
        self._timeout_s = timeout_s
        self._wait_ms = int(timeout_s * 1000)
        self._settle = settle
        self._deleting = dispatcher.runtime.lock()
        self._deletions = 0

    @property
    def bound(self) -> int | None:
        """Of the delay, None for none."""
        return self._bound

    @property
    def in_rounds(self) -> bool:
        """Whether workers train in synchronous rounds."""
        return self._dispatcher.pushes.round

    @property
    def begun(self) -> int:
        """The newest step that has begun, be it open."""
        return self._dispatcher.session.clock

    def clock(self) -> int:
        """That at which a read that begins now would read. Raises what has ended the client, if anything has."""
        self._dispatcher.check()
        return self._prepare()

    @property
    def pushing(self) -> Lock:
        """What is held while a push is made."""
        return self._dispatcher.lock

    def lock(self) -> Lock:
        """A new one, which a thread must not take twice."""
        return self._dispatcher.runtime.lock()

    def start(self, read: AnyRead, kept: int = 0) -> AnyRead:
        """Asks for what is to be read. kept: of the delay, how many steps of it are for those that rows are kept."""
        read.clock = self._prepare()
        bound = None if self._bound is None else self._bound - kept
        self._dispatcher.start_reads((read,), bound, self._wait_ms)
        return read

    def start_all(self, reads: Sequence[Read]) -> None:
        """Asks for what is to be read by any of them, each server once."""
        clock = self._prepare()
        for read in reads:
            read.clock = clock
        self._dispatcher.start_reads(reads, self._bound, self._wait_ms)

    def start_behind(self, reads: Sequence[Read]) -> None:
        """The same right behind a part of a step, which the caller has sent under the lock; not in rounds, that would
        have to be waited for."""
        session = self._dispatcher.session
        for read in reads:
            read.clock = session.clock - session.open
        self._dispatcher.start_reads(reads, self._bound, self._wait_ms)

    def pulled(self, read: ArrayRead) -> NDArray[np.float32]:
        """Asks for what is to be read, and what came; if that ends with an exception, be it between two lines of ours,
        its memory is the caller's alone from now on."""
        try:
            return self.start(read).result()
        except BaseException:
            self._dispatcher.forget_read(read, Timeout("nobody waits for it"))
            raise

    def start_tensors(self, reads: Sequence[ArrayRead]) -> list[ArrayRead | PartRead]:
        """Asks for several arrays, each server once for all that are small."""
        groups, parts = small_together(self.finish, reads)
        self.start_all(groups)
        return parts

    def start_tables(self, tables: Sequence[T], reads: Sequence[ArrayRead | RowsToCome]) -> TablesPull[T]:
        """Asks for rows of several tables, and tensors, each server once."""
        groups = in_groups(self.finish, reads)
        self.start_all(groups)
        return TablesPull(tables, reads, groups, self.give_up)

    def pulled_tables(
        self, tables: Sequence[T], reads: Sequence[ArrayRead | RowsToCome]
    ) -> dict[T, NDArray[np.float32]]:
        """The same, and what came; as `pulled`."""
        groups = in_groups(self.finish, reads)
        try:
            self.start_all(groups)
            return TablesPull(tables, reads, groups, self.give_up).result()
        except BaseException:
            self.give_up(groups)
            raise

    def give_up(self, reads: Sequence[Read]) -> None:
        """Nobody waits any more for what has not come of these."""
        for read in reads:
            if not read.done():
                self._dispatcher.forget_read(read, Timeout("nobody waits for it"))

    def behind_own_steps(self) -> Ask:
        """Waits until this worker's own steps so far are committed and their rounds closed, but for one that is still
        open; what it returns asks servers behind these."""
        self._settle("")
        return lambda questions, what: self._dispatcher.ask_all(questions, self._timeout_s, what)

    def change(self, questions: Questions, doing: str) -> None:
        """Has servers change rows past the optimizer, behind all of this worker's own steps: InputError if one is still
        open."""
        self._settle(doing)
        self._dispatcher.ask_all(questions, self._timeout_s, doing, writes=True)

    def delete(self, questions: Callable[[int], Questions], doing: str) -> None:
        """The same for a deletion, this worker's of the number that `questions` is given. One at a time: servers take a
        lower number than the last for one that was given up."""
        with self._deleting:
            self._settle(doing)
            self._deletions += 1
            self._dispatcher.ask_all(questions(self._deletions), self._timeout_s, doing, writes=True)

    def settle(self, doing: str) -> None:
        """Waits as `change` does, for a change that is written elsewhere first."""
        self._settle(doing)

    def shorten(self, table: int, short: Short) -> None:
        """The keys of pushes to a table are to be made shorter."""
        self._dispatcher.pushes.short[table] = short

    @property
    def routes(self) -> Routes:
        """The newest."""
        return self._dispatcher.routes

    def finish(self, read: Read, timeout: float | None) -> None:
        """Waits until all of it has arrived; gives it up if that takes too long."""
        try:
            self.wait(read, timeout)
        except Timeout as error:
            self._dispatcher.forget_read(read, error)
            raise
        if read.error is not None:
            raise read.error

    def wait(self, read: Read, timeout: float | None) -> None:
        """Waits until all of it has arrived, or it has ended with an error; `Timeout` if that takes too long."""
        timeout = self._timeout_s if timeout is None else timeout
        if self._bound is not None:  # the servers, who know whom it waits for, give up first
            timeout += BOUND_GRACE_S
        self._dispatcher.wait(read.done, timeout, f"a pull of {read.name!r}")
