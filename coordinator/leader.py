"""The leader: plans, writes views and the roster, and steps down; standbys wait to lead.

Every write of the leader is a compare-and-set over the revision that it planned from, guarded by the fencing token of
its office: a deposed leader cannot write, however late its message arrives. So the leader needs no clock to be safe,
and stays in office during an outage of the store.

A leader remembers nothing that its successor needs: decisions are in the view, and servers report to every coordinator.
So a standby, which has lines to the servers as well, goes on at once in the middle of a repair.
A leader puts back what the store loses while servers live, see `lost_keys`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np

from coordinator.cluster_tracker import ClusterTracker, Impact
from coordinator.core import fields
from coordinator.core.differences import change_of
from coordinator.core.errors import Fenced, StoreUnavailable, TooLarge, WritesRefused
from coordinator.core.health import TICK_S, Dial
from coordinator.core.keys import CONFIG, ROSTER, VIEW
from coordinator.core.lost_keys import REMEDY, UNHEARD, LastGood, is_outdated, put_back
from coordinator.core.names import check_name
from coordinator.core.patience import LeaseGrace, Pace
from coordinator.core.planner import Health, Members, Plan, RosterPlan, UnsafePlan, plan, plan_roster
from coordinator.core.reasons import names
from coordinator.core.repair import Limits
from coordinator.core.store import Guard, Listing, Store
from coordinator.core.view import ClusterConfig, Roster, View, WorkerInfo
from coordinator.leadership import campaign, first_of, keep_leadership
from coordinator.membership import farewell
from coordinator.server_links import ServerLinks
from coordinator.sparing import Sparing

log = fields.logger(__name__)

WhileLeading = Callable[[], Coroutine[Any, Any, None]]
OnFailover = Callable[[int, float, float], None]

_SPARING = Sparing(2, 60.0)  # limits the lines of one outage of the store, which is identified by
_ERROR_PREFIX = 20  # so many first characters of its error
_REFUSED_S = 1.0  # pause while the store takes no writes: each attempt lists all keys
_RETRY_S = 0.2  # pause after an outage; each attempt waits for the store's time-out as well
_ILL_S, _ILL_MOST_S = 2.0, 60.0  # after so long an ill leader steps down; doubled each time that no other did better
_ASK_AGAIN_S = 1.0  # between requests to servers for a view that the store has lost
_JUDGED_S = 1.0  # a view that could not be written for so long is planned again: a server that was silent may have
# spoken since, and the one that was to replace it may be gone


async def run_coordinator(
    store: Store,
    *,
    name: str,
    ttl_s: float = 3.0,
    settle_s: float = 0.02,
    stop: asyncio.Event,
    dial: Dial | None = None,
    on_ill: Callable[[bool], None] = lambda ill: None,
    while_leading: WhileLeading | None = None,
    on_failover: OnFailover = lambda epoch, detected, written: None,
) -> None:
    """Leads the cluster, or stands by, until `stop` is set; then gives the office up so that a standby takes over.

    Waits for the cluster's config.

    ttl_s          how long a leader that has gone silent stays the leader
    settle_s       how long changes are gathered before a view is written; a death is not delayed
    dial           connects to a server; without it only leases tell which servers are gone
    on_ill         called when this coordinator begins, and ceases, to hear so few servers that it must be what is ill
    while_leading  work done while it leads, which never ends by itself
    on_failover    called for each view without servers that were lost: its epoch, and in Unix time when the first of
                   them was found lost and when the view stood
    """
    check_name("coordinator", name)
    if dial is None:
        await first_of(_serve(store, name, ttl_s, settle_s, None, while_leading, on_failover), stop.wait())
        return
    lines = ServerLinks(dial, on_ill)
    await first_of(lines.run(), _serve(store, name, ttl_s, settle_s, lines, while_leading, on_failover), stop.wait())


async def _serve(
    store: Store, name: str, ttl_s: float, settle_s: float, lines: ServerLinks | None,
    while_leading: WhileLeading | None, on_failover: OnFailover,
) -> None:  # fmt: skip
    patience_s, last_good, first_plans = _ILL_S, LastGood(), _FirstPlans()
    while True:
        try:
            lease, guard = await campaign(store, name, ttl_s, lines, last_good)
            try:
                log.info("leads cluster", leader=name)
                term = _Term(store, guard, settle_s, lines, on_failover, last_good, first_plans)
                work = [keep_leadership(store, lease, ttl_s, term.answered), term.lead()]
                if lines is not None:
                    work.append(_while_well(lines, patience_s))
                if while_leading is not None:
                    work.append(while_leading())
                await first_of(*work)
            finally:
                if lines is not None:
                    lines.stand_by()
                await farewell(store, lease)
        except _Ill as error:
            patience_s = min(2 * patience_s, _ILL_MOST_S)
            log.warning("steps down", leader=name, error=error)
        except Fenced as error:
            patience_s = _ILL_S
            log.warning("steps down", leader=name, error=error)
        except StoreUnavailable as error:
            if (left_out := _SPARING.due(str(error)[:_ERROR_PREFIX])) is not None:
                log.warning("waits for the store", leader=name, error=error, left_out=left_out)
            await asyncio.sleep(_RETRY_S)


class _Ill(Fenced):
    """This leader hears too few servers, and gives its office up."""


async def _while_well(lines: ServerLinks, patience_s: float) -> None:
    """Raises _Ill when this leader has been ill for so long that another one might do better."""
    loop = asyncio.get_running_loop()
    well = loop.time()
    while loop.time() - well < patience_s:
        await asyncio.sleep(TICK_S)
        if not lines.ill:
            well = loop.time()
    raise _Ill(f"for {patience_s:g} s it has heard less than half of the servers, which all fell silent together")


class _Alarm:
    """A flag that something is to be planned. since: loop time of the first ring after it was cleared."""

    def __init__(self) -> None:
        self.since = 0.0
        self._rung = asyncio.Event()
        self._urgent = asyncio.Event()

    def ring(self, urgent: bool) -> None:
        if not self._rung.is_set():
            self.since = asyncio.get_running_loop().time()
        self._rung.set()
        if urgent:
            self._urgent.set()

    def clear(self) -> None:
        self._rung.clear()
        self._urgent.clear()

    async def wait(self, settle_s: float) -> None:
        """Waits until it rings; then `settle_s` more for changes that come together, unless it is urgent."""
        await self._rung.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(settle_s):  # `wait_for` may swallow a cancellation before Python 3.12
                await self._urgent.wait()


class _FirstPlans:
    """Plans first views beside the event loop: with a thousand servers that takes seconds, in which the lease is to be
    renewed and servers are to be heard. One at a time; a plan outlives the term in which it was begun, so that the next
    one need not begin again."""

    def __init__(self) -> None:
        self._inputs: tuple[Members, ClusterConfig, Health] | None = None
        self._planning: asyncio.Task[Plan | None] | None = None

    async def plan(self, members: Members, config: ClusterConfig, health: Health) -> Plan | None:
        """Returns the decision for these members, as `plan` does."""
        inputs = members, config, Health(gone=health.gone, silent=health.silent, pending=health.pending)
        while self._planning is not None and not self._planning.done() and self._inputs != inputs:
            await asyncio.wait([self._planning])
        if self._planning is None or self._inputs != inputs:
            self._inputs = inputs
            self._planning = asyncio.create_task(asyncio.to_thread(plan, None, *inputs), name="plan of the first view")
        return await asyncio.shield(self._planning)


class _Term:
    """One term of a leader.

    _store, _guard, _last_good  the store, the condition of each write, and the last good values
    _first_plans                plans first views
    _settle_s                   for how many seconds changes are gathered
    _timer, _roster_timer, _ask_timer  the timers of plans, of rosters, and of requests to servers for their view
    _lines, _alarm, _on_failover  the lines to servers, the flag to plan, and what is called for failovers
    _pace, _lease_grace         when level joiners are promoted, and which missing workers may still come back
    _identity, _view            the cluster's identity, and the newest view
    _last_reason                why no view was written, as logged last
    """

    def __init__(
        self, store: Store, guard: Guard, settle_s: float, lines: ServerLinks | None, on_failover: OnFailover,
        last_good: LastGood, first_plans: _FirstPlans,
    ) -> None:  # fmt: skip
        self._on_failover = on_failover
        self._first_plans = first_plans
        self._last_good = last_good
        self._store = store
        self._guard = guard
        self._settle_s = settle_s
        self._alarm = _Alarm()
        self._lines = lines
        if lines is not None:
            lines.lead(guard.create_revision, self._heard)
        self._pace = Pace()
        self._lease_grace = LeaseGrace(asyncio.get_running_loop().time())
        self._identity: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paced_by: Health | None = None  # as of the last plan, without levels, while level joiners wait
        self._roster_timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None
        self._view: View | None = None
        self._last_reason = ""
        self._unsure: Plan | None = None  # written or not: the next listing tells

    async def lead(self) -> None:
        """Plans and writes at each change until fenced."""
        try:
            await self._follow_store()
        finally:
            for timer in (self._timer, self._roster_timer, self._ask_timer):
                if timer is not None:
                    timer.cancel()

    def answered(self) -> None:
        """The store has answered just now."""
        self._lease_grace.answered(asyncio.get_running_loop().time())

    async def _follow_store(self) -> None:
        """Leads from a fresh listing, again after each lost race or outage. The lines to servers stay."""
        while True:
            try:
                await self._lead_from(await self._store.list(""))
            except StoreUnavailable as error:
                if (left_out := _SPARING.due(str(error)[:_ERROR_PREFIX])) is not None:
                    log.warning("the store is out; the view stands as it is", error=error, left_out=left_out)
                if not error.indefinite:
                    await asyncio.sleep(_REFUSED_S if isinstance(error, WritesRefused) else _RETRY_S)

    async def _lead_from(self, listing: Listing) -> None:
        tracker = ClusterTracker(self._store.cluster, listing, self._last_good)
        self._alarm.ring(False)
        self._look_at(tracker)
        if self._unsure is not None and self._unsure.view == tracker.view:
            self._tell(self._unsure, asyncio.get_running_loop().time(), time.time())
        self._unsure = None

        def changed(impact: Impact) -> None:
            self._look_at(tracker)
            self._alarm.ring(impact is Impact.DEATH)

        await first_of(self._write(tracker), tracker.follow(self._store, changed))

    def _heard(self, death: bool) -> None:
        """Takes a change from the lines. When all joiners are level, there is nothing more to gather; while level
        joiners wait for others, one more level joiner is no reason to plan."""
        urgent = death
        if not urgent and self._lines is not None and self._view is not None:
            health = self._lines.health()
            urgent = self._pace.complete(health, self._view)
            if not urgent and self._paced_by == dataclasses.replace(health, level={}, epochs={}):
                return
        self._alarm.ring(urgent)

    def _look_at(self, tracker: ClusterTracker) -> None:
        if tracker.identity != self._identity:  # another cluster's: its members have yet to register
            self._identity, self._lease_grace = tracker.identity, LeaseGrace(asyncio.get_running_loop().time())
        self._view = tracker.view
        if self._lines is not None:
            self._lines.look_at(tracker)

    async def _write(self, tracker: ClusterTracker) -> None:
        """Writes what is planned at each alarm. Ends if a race was lost: then the tracker is not up to date."""
        while True:
            self._alarm.clear()
            tracker.check_leadership(self._guard)
            if not (
                await self._mend(tracker) and await self._write_view(tracker) and await self._write_roster(tracker)
            ):
                return
            for key, revision in [*tracker.drains_done(), *tracker.forgotten()]:
                await self._store.delete(key, expect=revision, guard=self._guard)
            await self._alarm.wait(self._settle_s)

    async def _mend(self, tracker: ClusterTracker) -> bool:
        """Puts back a config that the store has lost, and tables that nobody has dropped. Returns False if a race was
        lost."""
        good = self._last_good
        if not tracker.state.servers:
            return True
        if CONFIG in tracker.damage and tracker.config is not None:
            why, config = tracker.damage[CONFIG], tracker.config
            if not tracker.state.revisions[CONFIG]:  # numbers count from the creation of its key: go on above all
                config = dataclasses.replace(config, base=max(tracker.number, tracker.state.revision) + UNHEARD)
            if not await self._put(tracker, CONFIG, config):
                return False
            log.warning("put back", key=CONFIG, why=f"{CONFIG} {why}")
        for key, value in list(good.lost.items()):
            if await self._store.compare_and_set(key, value, expect=0, guard=self._guard) is not None:
                log.warning("put back", key=key, why="it is gone, and nobody has dropped the table")
            good.lost.pop(key, None)
        return True

    async def _write_view(self, tracker: ClusterTracker) -> bool:
        decision = await self._decide(tracker)
        if decision is None or decision.view is None:
            self._say("" if decision is None else decision.reason)
            return True
        try:
            done = await self._put(tracker, VIEW, decision.view, _JUDGED_S)
        except TooLarge as error:  # the view that stands goes on
            self._say(f"cannot be written: {error} ({decision.reason})")
            return True
        except StoreUnavailable as error:
            if error.indefinite:
                self._unsure = decision
            raise
        if done:
            written = asyncio.get_running_loop().time(), time.time()
            self._look_at(tracker)
            self._tell(decision, *written)
            self._alarm.ring(False)  # a view is one step; there may be a next one
        return done

    async def _write_roster(self, tracker: ClusterTracker) -> bool:
        if tracker.identity is None or (tracker.roster is not None and tracker.roster.cluster != tracker.identity):
            return True
        decision = self._decide_roster(tracker, tracker.identity)
        if decision is None:
            return True
        done = await self._put(tracker, ROSTER, decision.roster)
        if done:
            log.info("roster", version=decision.roster.version, reason=decision.reason)
        return done

    def _decide_roster(self, tracker: ClusterTracker, identity: str) -> RosterPlan | None:
        """Decides the next roster. In place of a lost one, or as the first though workers have taken part, it gets a
        version above all that were."""
        damage = tracker.damage.get(ROSTER) if tracker.state.servers else None
        decision = plan_roster(tracker.roster, self._present(tracker), identity)
        if damage is not None and decision is None and tracker.roster is not None:
            decision = RosterPlan(tracker.roster, "as it was")
        if decision is None or not (damage is not None or (tracker.roster is None and tracker.state.records)):
            return decision
        version = max(decision.roster.version, tracker.number)
        reason = decision.reason if damage is None else f"{ROSTER} {damage}: put back; {decision.reason}"
        return RosterPlan(dataclasses.replace(decision.roster, version=version), reason)

    def _present(self, tracker: ClusterTracker) -> list[WorkerInfo]:
        """Returns the workers to list, and plans again when missing workers can no longer come back."""
        loop = asyncio.get_running_loop()
        present = self._lease_grace.present(
            tracker.roster, tracker.state.workers.values(), tracker.state.signed_off, loop.time()
        )
        if self._roster_timer is not None:
            self._roster_timer.cancel()
        if len(present) > len(tracker.state.workers):
            self._roster_timer = loop.call_later(self._lease_grace.left_s(loop.time()), self._alarm.ring, False)
        return present

    async def _put(
        self, tracker: ClusterTracker, key: str, value: ClusterConfig | View | Roster, timeout_s: float = 0.0
    ) -> bool:
        encoded = value.to_json() if isinstance(value, ClusterConfig) else value.encode()
        writes: dict[str, tuple[bytes, int | None]] = {key: (encoded, tracker.state.revisions[key])}
        if not isinstance(value, ClusterConfig):
            change, difference = change_of(value, tracker.view if key == VIEW else tracker.roster)
            writes[change] = difference, None
        revision = await self._store.compare_and_set_all(writes, guard=self._guard, timeout_s=timeout_s)
        if revision is not None:
            tracker.written(key, value, revision)
        return revision is not None

    async def _decide(self, tracker: ClusterTracker) -> Plan | None:
        cluster = self._store.cluster
        if tracker.config is None or tracker.identity is None:
            damage = tracker.damage.get(CONFIG)
            return Plan(None, f"{CONFIG} {damage}: {REMEDY}" if damage else f"cluster {cluster} has no config yet")
        if tracker.view is not None and tracker.view.cluster != tracker.identity:
            return Plan(None, f"the view is that of {tracker.view.cluster}, the config that of {tracker.identity}")
        health = self._health(tracker)
        if VIEW in tracker.damage or is_outdated(tracker.view, health.epochs):
            return self._decide_lost(tracker, health)
        try:
            servers = tuple(tracker.state.servers.values())
            members = Members(
                tracker.identity,
                servers,
                tracker.state.draining,
                tracker.state.recovery.ranges,
                tracker.state.recovery.given_up,
                tracker.state.restores,
                tracker.state.leaving,
            )
            paced, limits = self._paced(tracker, health), self._limits(tracker)
            if tracker.view is None:
                return await self._decide_first(tracker, tracker.config, members, paced)
            return plan(tracker.view, members, tracker.config, paced, limits)
        except UnsafePlan:  # the view that stands may serve badly, this one would lose data
            log.exception("a plan is not carried out")
            return None

    async def _decide_first(
        self, tracker: ClusterTracker, config: ClusterConfig, members: Members, health: Health
    ) -> Plan | None:
        """Decides the first view. It is planned again if its servers or the cluster have changed meanwhile, or if a
        server has registered that may follow a view already."""
        revision = tracker.state.revisions[VIEW]
        decision = await self._first_plans.plan(members, config, health)
        if decision is None or decision.view is None:
            return decision
        now, there = self._health(tracker), {server.member for server in tracker.state.servers.values()}
        left = [s.name for s in decision.view.servers if s.member in now.gone or s.member not in there]
        if left:
            why = f"{names(left)} left"
        elif now.pending - (now.gone.keys() - now.silent) or is_outdated(None, now.epochs):
            why = "a server came that may follow a view"
        elif (tracker.config, tracker.view, tracker.state.revisions[VIEW]) != (config, None, revision):
            why = "the cluster changed"
        else:
            return decision
        self._alarm.ring(False)
        return Plan(None, f"{why} while the first view was planned: it is planned again")

    def _decide_lost(self, tracker: ClusterTracker, health: Health) -> Plan:
        """Decides the view to write in place of one that the store has lost."""
        damage = (
            "is gone" if tracker.view is None else f"is of epoch {tracker.view.epoch}, and servers follow a newer one"
        )
        why = f"{VIEW} {tracker.damage.get(VIEW, damage)}"
        if not tracker.state.servers:
            return Plan(None, f"{why}, and no server is registered: {REMEDY}")
        certain = VIEW in tracker.damage and tracker.certain
        views = {} if self._lines is None else self._lines.views()
        decision = put_back(tracker.view, certain, why, health.epochs, views)
        if decision.view is None and self._lines is not None and self._ask_timer is None:
            self._lines.ask_views()
            self._ask_timer = asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._ask_again)
        return decision

    def _ask_again(self) -> None:
        self._ask_timer = None
        self._alarm.ring(False)

    def _limits(self, tracker: ClusterTracker) -> Limits:
        """Returns how much may move at once, given the sizes that servers report."""
        if self._lines is None or tracker.view is None:
            return Limits()
        held = int(np.count_nonzero(tracker.view.chains >= 0))
        return Limits.by_bytes(sum(load.nbytes for load in self._lines.loads().values()) / max(1, held))

    def _paced(self, tracker: ClusterTracker, health: Health) -> Health:
        """Lets level joiners wait for the rest of their batch, and plans again in time."""
        loop = asyncio.get_running_loop()
        left_s = 0.0 if tracker.view is None else self._pace.wait(health, tracker.view, loop.time())
        if self._timer is not None:
            self._timer.cancel()
        self._paced_by = None if left_s <= 0 else dataclasses.replace(health, level={}, epochs={})
        if left_s <= 0:
            return health
        self._timer = loop.call_later(left_s, self._alarm.ring, True)
        return dataclasses.replace(health, ripe=False)

    def _health(self, tracker: ClusterTracker) -> Health:
        if self._lines is not None:
            return self._lines.health()
        registered = {server.member for server in tracker.state.servers.values()}
        listed = () if tracker.view is None else tracker.view.servers
        return Health(gone={s.member: "its lease ended" for s in listed if s.member not in registered})

    def _tell(self, decision: Plan, now: float, wall: float) -> None:
        """Logs a view that was written at loop time `now`. `failover` lines are also for programs: Unix time."""
        if decision.view is None:
            return
        since = now - self._alarm.since
        if decision.lost:
            gone = {} if self._lines is None else self._lines.gone()
            since = min((now - gone[m].at for m in decision.lost if m in gone), default=since)
            log.warning(
                "failover",
                epoch=decision.view.epoch,
                gone=",".join(map(str, decision.lost)),
                detected=round(wall - since, 3),
                written=round(wall, 3),
                reason=decision.reason,
            )
            self._on_failover(decision.view.epoch, wall - since, wall)
        log.info("view", epoch=decision.view.epoch, after_ms=round(since * 1e3, 1), reason=decision.reason)

    def _say(self, reason: str) -> None:
        """Logs why nothing is written, when that changes."""
        if reason and reason != self._last_reason:
            log.warning("no view is written", reason=reason)
        self._last_reason = reason
