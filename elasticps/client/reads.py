"""How a caller's pulls begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Ask, Questions
from elasticps.client.core.routing import Routes
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.pull import ServerPull, in_groups
from elasticps.client.runtime import Lock
from elasticps.client.short_keys import Short
from elasticps.errors import Timeout

T = TypeVar("T")
BOUND_EXTRA_S = 1.0


class Reads:
    """Starts pulls and waits for them; asks for all else that comes behind this worker's own steps. `prepare()` sees to
    whatever a pull has to wait for, and gives the clock that it pulls at; bound: of the delay, None for none; settle:
    as `Steps.settle_own_steps`."""

    def __init__(
        self, dispatcher: Dispatcher, prepare: Callable[[], int], bound: int | None, timeout_s: float,
        settle: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cluster = dispatcher.cluster
        self.worker = dispatcher.worker
        self.in_rounds = dispatcher.pushes.round  # whether workers train in synchronous rounds
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
    def begun(self) -> int:
        """The newest step that has begun, be it open."""
        return self._dispatcher.session.clock

    def clock(self) -> int:
        """The clock that a pull which begins now reads at. Raises what has ended the client, if anything has."""
        self._dispatcher.check()
        return self._prepare()

    @property
    def pushing(self) -> Lock:
        """What is held while a push is made."""
        return self._dispatcher.lock

    def lock(self) -> Lock:
        """A new one, which a thread must not take twice."""
        return self._dispatcher.runtime.lock()

    def start(self, pull: ServerPull, cache_age: int = 0) -> ServerPull:
        """Sends a pull. cache_age: steps of the delay that are left to a cache, which may show the rows for so long."""
        pull.clock = self._prepare()
        bound = None if self._bound is None else self._bound - cache_age
        self._dispatcher.start_pulls((pull,), bound, self._wait_ms)
        return pull

    def start_all(self, pulls: Sequence[ServerPull]) -> None:
        """Sends pulls, to each server in one message."""
        clock = self._prepare()
        for pull in pulls:
            pull.clock = clock
        self._dispatcher.start_pulls(pulls, self._bound, self._wait_ms)

    def start_with_step(self, pulls: Sequence[ServerPull]) -> None:
        """The same right behind a part of a step, which the caller has sent under the lock; not in rounds, that would
        have to be waited for."""
        session = self._dispatcher.session
        for pull in pulls:
            pull.clock = session.clock - session.open
        self._dispatcher.start_pulls(pulls, self._bound, self._wait_ms)

    def pulled(self, pull: ServerPull) -> NDArray[np.float32]:
        """Sends a pull, and returns what came; if that ends with an exception, be it between two lines of ours,
        its memory is the caller's alone from now on."""
        try:
            return self.start(pull).result()
        except BaseException:
            self._dispatcher.forget_pull(pull, Timeout("nobody waits for it"))
            raise

    def start_tensors(self, pulls: Sequence[ServerPull]) -> list[ServerPull]:
        """Asks for several tensors, each server once for all that are small. Each of these knows the pull that brings
        it."""
        groups = in_groups(self.finish, pulls)
        for group in groups:
            for pull in group.members:
                pull.group = group
        self.start_all(groups)
        return list(pulls)

    def give_up(self, pulls: Sequence[ServerPull]) -> None:
        """Nobody waits any more for what has not come of these."""
        for pull in pulls:
            if not pull.done():
                self._dispatcher.forget_pull(pull, Timeout("nobody waits for it"))

    def after_own_steps(self) -> Ask:
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

    def finish(self, pull: ServerPull, timeout: float | None) -> None:
        """Waits until all of it has arrived; gives it up if that takes too long."""
        try:
            self.wait(pull, timeout)
        except Timeout as error:
            self._dispatcher.forget_pull(pull, error)
            raise
        if pull.error is not None:
            raise pull.error

    def wait(self, pull: ServerPull, timeout: float | None) -> None:
        """Waits until all of it has arrived, or it has ended with an error; `Timeout` if that takes too long."""
        timeout = self._timeout_s if timeout is None else timeout
        if self._bound is not None:  # the servers, who know whom it waits for, give up first
            timeout += BOUND_EXTRA_S
        self._dispatcher.wait(pull.done, timeout, f"a pull of {pull.query.name!r}")
