"""How a worker takes part: where it starts, where it goes on after a pause, what its predecessor has left behind.

A worker starts at the lowest clock of the active workers, so that it neither waits for others nor lets them wait. One
that is started again under its name also starts above every clock that its predecessor may have used; by then every
server has fenced that one, for a server lets a worker in only when its roster has the new incarnation instead.

The coordination store keeps, by name, who took part last and where it started (`Past`): a predecessor that died before
its first push has left nothing at the servers. It is written before the worker says anywhere that it takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from elasticps.client.barrier import Barrier
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.protocol.join import Past, Resume, Starting, first_past, past_again
from elasticps.client.registry import Registry
from elasticps.errors import Closed, ClusterUnreachable, ServerError, Timeout

log = logging.getLogger(__name__)


class Joining:
    """A worker's part in its application. `active`: it has joined and has not paused since."""

    def __init__(self, dispatcher: Dispatcher, registry: Registry, barrier: Barrier | None, timeout_s: float) -> None:
        self.active = False
        self._dispatcher = dispatcher
        self._registry = registry
        self._session = dispatcher.session
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._starting = Starting(dispatcher.worker.id, "" if barrier is None else barrier.app, timeout_s)
        self._lock = dispatcher.runtime.lock()
        self._resume: Resume | None = None
        self._past = Past(0, 0, 0, 0, 0)

    def enter(self) -> Resume:
        """Takes part from now on; no effect if the worker does already. What is returned is of the first time."""
        with self._lock:
            if not self.active:
                if self._resume is None:
                    self._resume = self._first()
                else:
                    self._again()
                self.active = True
            assert self._resume is not None
            return self._resume

    def pause(self) -> None:
        """Holds nobody back from now on; nothing may be outstanding."""
        with self._lock:
            if self.active:
                if self._barrier is not None:
                    self._barrier.leave(self._timeout_s)
                self._dispatcher.pause(self._timeout_s)
                self.active = False

    # --- the first time ---------------------------------------------------------------------------------------------

    def _first(self) -> Resume:
        me, name = self._dispatcher.worker.id, self._dispatcher.worker.name
        while True:
            past = self._registry.past(self._timeout_s)
            if past is not None and past.id > me:
                raise Closed(f"worker {name!r} was started again; this is the older incarnation")
            found = self._dispatcher.carry_out(self._starting.first(past))
            if self._keep(first_past(me, found, past)):
                break
        self._dispatcher.join(found.clock, self._timeout_s)
        return found

    def _keep(self, past: Past) -> bool:
        revision = self._registry.keep(past, self._timeout_s)
        if revision is None:
            return False
        self._past = past._replace(revision=revision)
        return True

    # --- after a pause ----------------------------------------------------------------------------------------------

    def _again(self) -> None:
        own, past = self._session.clock, self._past
        start = max(own, self._dispatcher.carry_out(self._starting.lowest()))
        if start > own:
            try:
                if not self._keep(past_again(past, own, start)):
                    raise Closed(f"worker {self._dispatcher.worker.name!r} was started again; this is the older one")
            except (Timeout, ClusterUnreachable) as error:
                if self._barrier is not None:
                    raise
                log.warning("this worker goes on at clock %d instead of %d: %s", own, start, error)
                start = own
        self._dispatcher.join(start, self._timeout_s)

    # --- after a round that was closed without this worker ------------------------------------------------------------

    def later(self, push_again: Callable[[], None]) -> None:
        """Goes on after the last round, with the newest step, which was in none: `push_again()` begins it anew."""
        with self._lock:
            lost, name = self._session.clock, self._dispatcher.worker.name
            start = self._dispatcher.carry_out(self._starting.lowest())
            if start < lost:
                raise ServerError(f"worker {name!r} is in round {lost}, its application only after round {start}")
            if not self._keep(past_again(self._past, lost - 1, start)):
                raise Closed(f"worker {name!r} was started again; this is the older one")
            log.warning("round %d was closed without worker %s, which goes on after round %d", lost, name, start)
            self._dispatcher.join(start, self._timeout_s, push_again)
