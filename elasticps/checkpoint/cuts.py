"""Takes a consistent cut through all ranges of a live cluster, and proves that it is one.

1. All servers have their workers hold. 2. When every worker of the roster reports that it holds, the heads log the cut,
each in its ranges. 3. Workers go on. 4. `judge` proves from what the ranges had as the cut passed whether it was
consistent; if not, the cut is given up, and taken again under the next number. Nothing depends on which process takes
it, or on whether that process dies.

Proof: each range reports how far every worker had come as the cut passed it. The cut is the state after exactly the
steps 1 … c of each worker if and only if every range has the same closed step c of it. Deletions, which are counted
under the worker's id + 2³¹, need no such proof: a worker that holds has none under way, and a deletion that was given
up halfway (its caller was told so) stays that way.

Clocks prove steps, not rows that were loaded past them. So a cut counts only if it was through all ranges before the
first worker may have gone on by itself, by the clock of the process that takes it, and if every server was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from coordinator.core import fields
from coordinator.core.keys import ROSTER, roster_of
from coordinator.core.store import Entry, Store
from coordinator.core.view import ServerInfo, View, WorkerInfo
from elasticps.admin.interface import CutState, CutTaken
from elasticps.errors import CheckpointError, Error
from elasticps.system.coordination import read_view
from elasticps.wire.headers import MAX_CUT
from replication.chain import Member
from replication.progress import MAX_CLOCK, PART_BITS

log = fields.logger(__name__)

T = TypeVar("T")

LAST = "checkpoints/last"
HOLD_S = 5.0
_MARGIN = 0.9  # of that time whoever takes a cut relies on: no two clocks run alike
ATTEMPTS = 5
_POLL_S, _POLL_MOST_S = 0.002, 0.02
_SHOWN = 5


class CutServer(Protocol):
    """A server's part in a cut, in this process or another. Calls raise `Error` if the server cannot be reached."""

    async def hold(self, cut: int, hold_s: float) -> bool:
        """Has all its workers hold; False if the hold is over, or a newer cut is being taken."""

    async def held(self, cut: int) -> Mapping[int, int]:
        """The workers that hold, and the clocks up to which they have written."""

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
            written = await self._hold(number, until, notified)
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
        verdict = judge(taken, {worker.id: worker.app for worker in roster}, written)
        if verdict.why:
            error = RoundsDiffer if verdict.rounds_torn else Inconsistent
            raise error(f"cut {number} was not consistent: {verdict.why}")
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

    async def _hold(self, number: int, until: float, notified: set[Member]) -> dict[int, int]:
        """Has all workers hold; returns the clock up to which each has written."""
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
            held: dict[int, int] = {}
            for clocks in (await self._ask(servers, lambda server: server.held(number))).values():
                held |= {worker: max(clock, held.get(worker, 0)) for worker, clock in clocks.items()}
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
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# --- the proof: pure ------------------------------------------------------------------------------------------------

_SHOWN = 5


@dataclass(frozen=True)
class Verdict:
    """The verdict on a cut. why: what is wrong, "" if the cut is consistent.

    clocks        worker id, also of deletions -> the step up to which all of its are in the cut, and none later
    left_out      the same -> range -> progress, of workers that are gone, in the midst of a step perhaps
    rounds        application -> the last round that is closed, in all ranges
    rounds_torn   the same by range, of applications without workers, the last of whom went while a round was closed;
                  in a cut that is not consistent for that alone, of the one that has some
    """

    why: str = ""
    clocks: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    rounds: Mapping[str, int] = field(default_factory=dict)
    rounds_torn: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def judge(taken: Sequence[CutTaken], present: Mapping[int, str], written: Mapping[int, int]) -> Verdict:
    """Judges a cut through all ranges. present: the application of each worker in the roster after the cut; written:
    the clock up to which each worker has reported all its steps committed."""
    clocks: dict[int, int] = {}
    left_out: dict[int, dict[int, int]] = {}
    waiting = {worker for one in taken for _, _, worker in one.waiting_shares}
    for worker in sorted({worker for one in taken for worker in one.clocks} | waiting):
        found = {one.clocks.get(worker, 0) for one in taken}
        least = min(found)
        whole = len(found) == 1 and least & ((1 << PART_BITS) - 1) == 0 and worker not in waiting
        if not whole and worker in present:
            state = "waits for its round" if worker in waiting else f"differs: {_as_steps(found)}"
            return Verdict(f"what ranges have of worker {worker} {state}")
        if not whole:
            left_out[worker] = {r: one.clocks.get(worker, 0) for one in taken for r in one.ranges}
        elif written.get(worker, MAX_CLOCK) < least >> PART_BITS:  # less is there of one that has gone on above a base
            return Verdict(f"worker {worker} holds at step {written[worker]}, and ranges have {least >> PART_BITS}")
        else:
            clocks[worker] = least >> PART_BITS
    rounds: dict[str, int] = {}
    torn: dict[str, dict[int, int]] = {}
    for app in sorted({app for one in taken for app in one.closed}):
        closed = {one.closed.get(app, 0) for one in taken}
        by_range = {r: one.closed.get(app, 0) for one in taken for r in one.ranges}
        if len(closed) == 1:
            rounds[app] = closed.pop()
        elif app in present.values():
            why = f"the rounds of {app!r} that are closed differ: {sorted(closed)}"
            return Verdict(why, rounds_torn={app: by_range})
        else:
            torn[app] = by_range
    for worker in present:
        clocks.setdefault(worker, written.get(worker, 0))
    return Verdict("", clocks, left_out, rounds, torn)


def uncovered(ranges: int, taken: Sequence[CutTaken]) -> str:
    """Why a cut does not cover each of so many ranges once; "" if it does."""
    count = [0] * ranges
    for one in taken:
        for r in one.ranges:
            count[r] += 1
    missing, twice = [r for r in range(ranges) if not count[r]], [r for r in range(ranges) if count[r] > 1]
    if missing:
        return f"{len(missing)} ranges have no server that writes them, such as {missing[0]}"
    return f"{len(twice)} ranges were cut twice, such as {twice[0]}" if twice else ""


def _as_steps(found: set[int]) -> str:
    steps = [f"{progress >> PART_BITS}" + " and a part" * bool(progress & ((1 << PART_BITS) - 1)) for progress in
            sorted(found)[:_SHOWN]]  # fmt: skip
    return "steps " + ", ".join(steps)
