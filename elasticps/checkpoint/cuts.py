"""Takes a consistent cut through all ranges of a live cluster, and has it proven.

1. All servers have their workers hold. 2. When every worker of the roster reports that it holds, the heads log the cut,
each in its ranges. 3. Workers go on. 4. `prove_cut` proves the steps in the cut from the vector clocks of the ranges
(`checkpoint.core.cut_proof` says what that proves, and what not). If they differ, the cut is given up, and taken again
under the next number. Nothing depends on which process takes it, or on whether that process dies.

Initial values, loads and deletions are no steps, so no clock proves them. For these a cut relies on the hold: a worker
that holds writes nothing. So a cut counts only if every server has told its workers to hold, and if it was through all
ranges before the first worker may have gone on by itself, by the clock of the process that takes it. A deletion that
was given up halfway, as its caller was told, stays that way in the cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from coordinator.core import fields
from coordinator.core.keys import ROSTER, roster_of
from coordinator.core.store import Entry, Store
from coordinator.core.view import ServerInfo, View, WorkerInfo
from elasticps.admin.interface import CutState, WorkerHeld
from elasticps.checkpoint.core.cut_proof import Verdict, prove_cut, uncovered
from elasticps.errors import CheckpointError, Error
from elasticps.system.coordination import read_view
from elasticps.wire.headers import MAX_CUT
from replication.chain import Member

log = fields.logger(__name__)

T = TypeVar("T")

LAST = "checkpoints/last"
HOLD_S = 5.0
_MARGIN = 0.9  # of that time whoever takes a cut relies on: no two clocks run alike
ATTEMPTS = 5
_POLL_S, _POLL_MOST_S = 0.002, 0.02
_NAMES_SHOWN = 5  # of servers or workers, in a message


class CutServer(Protocol):
    """A server's part in a cut, in this process or another. Calls raise `Error` if the server cannot be reached."""

    async def hold(self, cut: int, hold_s: float) -> bool:
        """Has all its workers hold; False if the hold is over, or a newer cut is being taken."""

    async def held(self, cut: int) -> Mapping[int, WorkerHeld]:
        """The workers that hold, and what they report."""

    async def release(self, cut: int) -> None:
        """Has its workers go on."""

    async def take(self, cut: int, since: int, url: str) -> bool:
        """Logs the cut in the ranges that it heads; False: ask again."""

    async def state(self, cut: int) -> CutState:
        """The state of its ranges at the cut."""


class GivenUp(CheckpointError):
    """This cut came to nothing; the next one may succeed."""


class Inconsistent(GivenUp):
    """A worker wrote on though it had reported that it holds, or had not been notified."""


class RoundsDiffer(Inconsistent):
    """A worker died while it closed a round, and the others have not closed it yet."""


@dataclass(frozen=True)
class ConsistentCut:
    """A consistent cut. states: of the servers that logged it and write it; roster: of workers, after the cut; written:
    the clock up to which each worker had written when it held; held_s: for how long workers were held."""

    number: int
    since: int
    url: str
    view: View
    verdict: Verdict
    states: Mapping[Member, CutState]
    roster: Sequence[WorkerInfo]
    written: Mapping[int, int]
    held_s: float


class CutTaker:
    """Takes cuts of the cluster whose store this is. connect: gives the client of a server."""

    def __init__(self, store: Store, connect: Callable[[ServerInfo], CutServer], hold_s: float = HOLD_S) -> None:
        self._store = store
        self._connect = connect
        self._hold_s = hold_s
        self._servers: dict[Member, CutServer] = {}

    async def take(
        self, url: str, since: int = 0, *, floor: int = 0, foreign: Collection[int] = (), attempts: int = ATTEMPTS
    ) -> ConsistentCut:
        """Takes a consistent cut, with a number above `floor` that is not in `foreign`. Raises GivenUp with the reason
        after `attempts` failures, CheckpointError if no number is left."""
        while True:
            attempts -= 1
            try:
                return await self.attempt(url, since, floor, foreign)
            except GivenUp:
                if not attempts:
                    raise

    async def attempt(self, url: str, since: int = 0, floor: int = 0, foreign: Collection[int] = ()) -> ConsistentCut:
        """Tries once to take a cut. Raises GivenUp, StoreUnavailable."""
        number = await self._number(url, floor, foreign)
        began, notified = self._now(), set[Member]()
        try:
            until = began + _MARGIN * self._hold_s
            held = await self._hold(number, until, notified)
            view = await self._log(number, since, url, until, notified)
        finally:
            await asyncio.gather(*(self._quietly(server.release(number)) for server in self._servers.values()))
        held_s = self._now() - began
        answers = await self._ask(view.servers, lambda server: server.state(number))
        roster = await self._roster()
        states = {m: state for m, state in answers.items() if state.taken and state.incarnation == m.incarnation}
        taken = [one for state in states.values() for one in state.taken]
        if why := uncovered(view.ranges, taken):
            raise GivenUp(f"cut {number} is lost in part: {why}")
        if int(view.recovery_epoch.max()) > min((report.epoch for report in held.values()), default=view.epoch):
            raise GivenUp(f"cut {number}: ranges came back from a checkpoint, of which a worker had not heard")
        records = [record for state in states.values() for record in state.records]
        present = {worker.id: worker.app for worker in roster}
        verdict = prove_cut(taken, present, held, records, view.recovery_epoch > 0)
        if verdict.why:
            error = RoundsDiffer if verdict.rounds_torn else Inconsistent
            raise error(f"cut {number} was not consistent: {verdict.why}")
        written = {worker: report.clock for worker, report in held.items()}
        return ConsistentCut(number, since, url, view, verdict, states, roster, written, held_s)

    # --- the steps --------------------------------------------------------------------------------------------------

    async def _number(self, url: str, floor: int, foreign: Collection[int]) -> int:
        """A cut number higher than any server has seen, and than any that was ever taken. Raises CheckpointError if
        none is left."""
        known = await self._ask((await self._view()).servers, lambda server: server.state(0))
        highest = {url: floor} | {f"server {member.name}": state.newest for member, state in known.items()}
        while True:
            entry = await self._store.get(LAST)
            highest[f"the key {LAST!r} in etcd"] = _last_number(entry)
            place = max(highest, key=lambda each: highest[each])
            number = highest[place] + 1
            while number in foreign:
                number += 1
            if number > MAX_CUT:
                raise CheckpointError(
                    f"no number is left for a checkpoint: {place} has {highest[place]}, and {MAX_CUT} is the highest. "
                    "Somebody has set it: remove what has that number, and bring the cluster back from its newest "
                    "checkpoint under another name if servers have it"
                )
            expect = 0 if entry is None else entry.revision
            if await self._store.compare_and_set(LAST, str(number).encode(), expect=expect) is not None:
                return number

    async def _hold(self, number: int, until: float, notified: set[Member]) -> dict[int, WorkerHeld]:
        """Has all workers hold; returns what each reports."""
        pause_s, late = _POLL_S, "nobody was asked"
        while self._now() < until:
            servers = (await self._view()).servers
            others = [server for server in servers if server.member not in notified]
            answers = await self._ask(others, lambda server: server.hold(number, self._hold_s))
            notified.update(answers)
            if not all(answers.values()):
                raise GivenUp(f"cut {number} is not the newest any more")
            # Read after all servers were told: whoever joins later is told before it can write anything.
            roster = await self._roster()
            held: dict[int, WorkerHeld] = {}
            for reports in (await self._ask(servers, lambda server: server.held(number))).values():
                held |= {worker: max(report, held.get(worker, report)) for worker, report in reports.items()}
            deaf = [server.name for server in servers if server.member not in notified]
            missing = [worker.name for worker in roster if worker.id not in held]
            if not deaf and not missing:
                return held
            late = f"server {_some(deaf)} did not answer" if deaf else f"worker {_some(missing)} did not hold"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MOST_S)
        raise GivenUp(f"cut {number} was given up after {self._hold_s:g} s: {late}")

    async def _log(self, number: int, since: int, url: str, until: float, notified: set[Member]) -> View:
        """Has all heads log the cut; returns the view under which they did."""
        while self._now() < until:
            view = await self._view()
            heads = [view.servers[i] for i in np.unique(view.heads).tolist() if i >= 0]
            answers = await self._ask(heads, lambda server: server.take(number, since, url))
            done = len(answers) == len(heads) and all(answers.values()) and not (view.heads < 0).any()
            after = await self._view()
            if done and after.epoch == view.epoch:
                if self._now() >= until:
                    break
                if any(server.member not in notified for server in view.servers):
                    raise GivenUp(f"cut {number}: a server came that had not told its workers to hold")
                return view
            await asyncio.sleep(_POLL_S)
        raise GivenUp(f"cut {number} was not through all ranges after {self._hold_s:g} s")

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _ask(
        self, servers: Sequence[ServerInfo], question: Callable[[CutServer], Coroutine[Any, Any, T]]
    ) -> dict[Member, T]:
        """Asks all servers at once; returns their answers, without servers that cannot be reached."""
        answers: dict[Member, T] = {}

        async def ask(info: ServerInfo) -> None:
            if info.member not in self._servers:
                self._servers[info.member] = self._connect(info)
            with suppress(Error):
                answers[info.member] = await question(self._servers[info.member])

        await asyncio.gather(*(ask(info) for info in servers))
        return answers

    async def _quietly(self, call: Coroutine[object, object, None]) -> None:
        with suppress(Error):
            await call

    async def _view(self) -> View:
        return await read_view(self._store, GivenUp)

    async def _roster(self) -> Sequence[WorkerInfo]:
        entry = await self._store.get(ROSTER)
        return () if entry is None else roster_of(entry).workers

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _last_number(entry: Entry | None) -> int:
    """The number in LAST; 0 if it is not a number: servers know the cuts that were taken."""
    text = b"" if entry is None else entry.value
    if text.isdigit() and len(text) <= len(str(MAX_CUT)):
        return int(text)
    if entry is not None:
        log.warning("left out: it is no number of a cut", key=LAST, value=text[:80])
    return 0


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (
        f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    )
