"""How a worker takes part: where it starts, where it goes on after a pause, what its predecessor has left behind.

A worker starts at the lowest clock of the active workers, so that it neither waits for others nor lets them wait. One
that is started again under its name also starts above every clock that its predecessor may have used; by then every
server has fenced that one, for a server lets a worker in only when its roster has the new incarnation instead.

The coordination store keeps, by name, who took part last and where it started (`Past`): a predecessor that died before
its first push has left nothing at the servers. It is written before the worker says anywhere that it takes part.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np

from elasticps.client.control import Control, Past
from elasticps.client.network import Network
from elasticps.client.routing import Routes
from elasticps.client.session import Session, resume
from elasticps.client.synchronous import SyncRounds
from elasticps.errors import Closed, ClusterUnreachable, Timeout
from elasticps.wire.frames import Buffer, Header, Kind, read_clocks
from replication.chain import Member
from replication.progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resume:
    """Where a worker starts.

    clock        it starts above this one
    trained      the last clock whose samples need not be trained again: everything up to it is committed, once
    begun        the last clock of which any server has seen anything. The samples of steps `trained` + 1 … `begun`
                 are to be trained again: what came of them is in each range by itself, once or not
    steps        how many steps of all incarnations of this name are committed: where each step trains the next batch
                 of a fixed order, the next batch is number `steps`, counted from 0
    predecessor  whether there was one; without, `trained` and `begun` are `clock`
    """

    clock: int
    trained: int
    begun: int
    steps: int
    predecessor: bool


class Joining:
    """A worker's part in its application. `active`: it has joined and has not paused since."""

    def __init__(
        self, network: Network, control: Control, session: Session, sync: SyncRounds | None, timeout_s: float
    ) -> None:
        self.active = False
        self._network = network
        self._control = control
        self._session = session
        self._sync = sync
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
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
                if self._sync is not None:
                    self._sync.leave(self._timeout_s)
                self._network.pause(self._timeout_s)
                self.active = False

    # --- the first time ---------------------------------------------------------------------------------------------

    def _first(self) -> Resume:
        me = self._network.worker.id
        while True:
            past = self._control.past(self._timeout_s)
            if past is not None and past.id > me:
                raise Closed(f"worker {self._network.worker.name!r} was started again; this is the older incarnation")
            found = self._after(past)
            new = Past(me, found.clock, found.trained, found.steps, 0 if past is None else past.revision)
            if self._keep(new):
                break
        self._network.join(found.clock, self._timeout_s)
        return found

    def _after(self, past: Past | None) -> Resume:
        if past is None:
            start = self._least() if self._sync is None else self._sync.enter(0, self._timeout_s)[0]
            return Resume(start, start, start, 0, False)
        begun, trained = resume(*clocks_of(self._network, past.id, self._timeout_s), past.base)
        if self._sync is None:
            start = max(begun, self._least())
        else:  # what counts is the round, not that its share has arrived
            start, last = self._sync.enter(past.id, self._timeout_s)
            trained = max(past.base, last)
        steps = past.steps + trained - past.base
        return Resume(start, trained if trained > past.base else past.trained, begun, steps, True)

    def _least(self) -> int:
        """The lowest clock of the active workers, 0 if there is none."""
        answers = self._network.ask_heads(lambda routes: Header(Kind.JOIN), b"", self._timeout_s, "joining")
        return max(answer.header.clock for answer in answers)

    def _keep(self, past: Past) -> bool:
        revision = self._control.keep(past, self._timeout_s)
        if revision is None:
            return False
        self._past = past._replace(revision=revision)
        return True

    # --- after a pause ----------------------------------------------------------------------------------------------

    def _again(self) -> None:
        own, past = self._session.clock, self._past
        start = max(own, self._least()) if self._sync is None else self._sync.enter(0, self._timeout_s)[0]
        if start > own:
            new = past._replace(base=start, trained=own, steps=past.steps + own - past.base)
            try:
                if not self._keep(new):
                    raise Closed(f"worker {self._network.worker.name!r} was started again; this is the older one")
            except (Timeout, ClusterUnreachable) as error:
                if self._sync is not None:
                    raise
                log.warning("this worker goes on at clock %d instead of %d: %s", own, start, error)
                start = own
        self._network.join(start, self._timeout_s)


def clocks_of(network: Network, worker: int, timeout_s: float) -> tuple[Progress, Progress]:
    """How far a worker's pushes are in every range, as their heads say: (applied, committed), int64 [P] each."""
    head = Header(Kind.ASK, worker=worker)

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        if (routes.view.heads < 0).any():  # nobody can say it for all ranges now
            return []
        return [(routes.members[s], head._replace(epoch=routes.epoch), []) for s in routes.share_of]

    answers = network.ask_all(questions, timeout_s, f"asking for the clocks of worker {worker}")
    applied, committed = (np.zeros(network.routes.view.ranges, np.int64) for _ in range(2))
    for answer in answers:
        ranges, has, safe = read_clocks(answer.header, np.frombuffer(answer.body, np.uint8))
        applied[ranges], committed[ranges] = has, safe
    return applied, committed
