"""A coordinator's lines to the servers: it hears their reports, and as the leader sends views and beats. The only I/O
of failure detection. Standbys have lines too, so that a new leader knows at once how the servers are.

One task for each incarnation of a server connects to it, again at once when the connection ends. All that it hears goes
to the pure `Detector`. A line that stays silent is replaced after a while: after a cut of the network, packets that
were held back come seconds late, and a new connection works at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from coordinator.cluster_tracker import ClusterTracker
from coordinator.core import fields
from coordinator.core.capacities import RowCount, allowances
from coordinator.core.clocks import UNKNOWN, ClusterTime, ServerClocks
from coordinator.core.differences import ViewHistory
from coordinator.core.health import BEAT_S, TICK_S, Detector, Dial, Gone, Load, Report, ServerLink, Succession
from coordinator.core.planner import Health
from coordinator.core.view import ServerInfo, View
from replication.chain import Member

log = fields.logger(__name__)

_SECOND_TRY_S = 0.003  # between the two refusals that mean death
_RETRY_S = 0.25  # between attempts to reach one that is dead
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # doubled between attempts that end at once and tell nothing
_LASTING_S = 0.02  # an attempt that lasted this long is made again at once
_REDIAL_S = 2.0  # a line or an attempt that is silent for so long is replaced
_VIEW_LAG_S = 0.1  # a report this soon after a view may have been sent before the view came


@dataclass
class _Open:
    """A line in use. sent, sent_at: the epoch of the last view that was sent, and when; repeated: the last epoch that
    was sent twice; report: the newest, on this line."""

    line: ServerLink
    sent: int = 0
    sent_at: float = 0.0
    repeated: int = 0
    report: Report | None = None


class ServerLinks:
    """Lines to the servers that `look_at` shows, while `run` runs.

    _on_ill  called when this coordinator begins, and ceases, to hear so few servers that it must be what is ill
    """

    def __init__(self, dial: Dial, on_ill: Callable[[bool], None]) -> None:
        self._dial = dial  # connects to a server
        self._on_ill = on_ill
        self._on_change: Callable[[bool], None] = _nothing  # called when the planner should look again
        self._term = 0  # while this coordinator leads, else 0
        self._beaten = 0.0  # loop time of the last beat
        self._detector = Detector()  # which servers are gone
        self._succession = Succession()  # whether the leader is
        self._clocks = ServerClocks()  # what time it is
        self._differing: set[Member | None] = set()  # clocks that are wrong, as logged last; None: this coordinator's
        self._calls: dict[Member, tuple[ServerInfo, float, asyncio.Task[None]]] = {}  # when each task began
        self._ending: set[asyncio.Task[None]] = set()  # tasks of lines that were closed
        self._open: dict[Member, _Open] = {}  # lines in use
        self._view: View | None = None  # the newest
        self._history = ViewHistory()  # that, and some before it
        self._views: dict[Member, View] = {}  # that servers follow, as far as they were asked
        self._cluster = ""  # its identity
        # The identity, servers and view that `look_at` took last.
        self._looked_at: tuple[str | None, Mapping[str, ServerInfo], View | None] = None, {}, None
        self._over = False  # all lines have been closed

    async def run(self) -> None:
        """Judges silence, and beats, until cancelled; then closes all lines. Raises the error of a line that failed."""
        loop, ill = asyncio.get_running_loop(), False
        try:
            while True:
                before = self._detector.gone
                if self._detector.tick(loop.time()):
                    self._tell(before)
                if self._detector.ill != ill:
                    ill = not ill
                    self._on_ill(ill)
                    if ill:
                        log.warning(
                            "most servers fell silent at once: the trouble must be here, nobody is taken for dead"
                        )
                if loop.time() - self._beaten > BEAT_S - TICK_S / 2:
                    self._beat()
                self._redial_silent(loop.time())
                for _, _, task in self._calls.values():
                    if task.done():  # its server would be silent for ever
                        task.result()
                await asyncio.sleep(TICK_S)
        finally:
            self._over = True
            for member in list(self._calls):
                self._hang_up(member)
            await asyncio.gather(*self._ending, return_exceptions=True)

    def lead(self, term: int, on_change: Callable[[bool], None]) -> None:
        """Leads from now on: sends beats and views. on_change: called when the planner should look again; its argument
        says that a member is newly gone."""
        self._term, self._on_change = term, on_change
        self._differing = set()
        self._beat()

    def stand_by(self) -> None:
        """Ceases to lead: sends no more beats and views."""
        self._term, self._on_change = 0, _nothing

    @property
    def ill(self) -> bool:
        """Whether so few servers are heard that this coordinator must be what is ill."""
        return self._detector.ill

    def lost_term(self) -> int:
        """Returns the term of a leader that the servers have lost, 0 for none."""
        members = self._calls if self._view is None else self._view.as_chains.members
        return self._succession.lost_term(members, _now())

    def look_at(self, tracker: ClusterTracker) -> None:
        """Takes the servers and the view that the store has now. Does nothing if both are the objects that it took
        last: workers that come and go change neither."""
        before, self._looked_at = self._looked_at, (tracker.identity, tracker.state.servers, tracker.view)
        if before[0] == tracker.identity and before[1] is tracker.state.servers and before[2] is tracker.view:
            return
        if tracker.identity is not None and before[0] == tracker.identity and before[2] is tracker.view:
            self._follow_keys(before[1], tracker.state.servers, tracker.view)
        elif tracker.identity is not None:
            listed = () if tracker.view is None else tracker.view.servers
            self.follow(tracker.identity, listed, tracker.state.servers.values())
            if tracker.view is not None:
                self.announce(tracker.view)

    def follow(self, cluster: str, listed: Iterable[ServerInfo], registered: Iterable[ServerInfo]) -> None:
        """Keeps a line to each server that the view lists or the store has registered. cluster: their cluster's
        identity."""
        if cluster != self._cluster:
            self._cluster = cluster
            self._views.clear()
            self._detector.reset_epochs()
        servers = {server.member: server for server in listed}
        keys = {server.member: server for server in registered}
        servers.update(keys)
        self._detector.watch({member: member in keys for member in servers}, _now())
        self._clocks.watch(servers)
        for member in sorted(self._calls.keys() - servers.keys()):
            self._hang_up(member)
        for member in sorted(servers.keys() - self._calls.keys()):
            self._call(servers[member])

    def _follow_keys(
        self, before: Mapping[str, ServerInfo], servers: Mapping[str, ServerInfo], view: View | None
    ) -> None:
        """Does what `follow` does, where only keys of servers have changed: each of a thousand that start costs what it
        is."""
        listed = {} if view is None else view.by_member
        ended = [old.member for name, old in before.items() if servers.get(name) is not old]
        came = {new.member: new for name, new in servers.items() if before.get(name) is not new}
        for member in sorted(ended):
            if member in listed and member not in came:
                self._detector.note(member, False, _now())
            elif member not in came:
                self._detector.forget(member)
                self._clocks.forget(member)
                self._hang_up(member)
        for member in sorted(came):
            self._detector.note(member, True, _now())
            if member not in self._calls:
                self._call(came[member])

    def announce(self, view: View) -> None:
        """Takes a newer view: a leader sends it to every server that is connected, and to each that connects."""
        if self._view is not None and view.epoch <= self._view.epoch and view.cluster == self._view.cluster:
            return
        self._view = view
        self._history.add(view)
        if self._term:
            if view.epoch == 1:
                self._beat()  # servers need to know the time before they make tables
            for opened in self._open.values():
                if opened.report is not None:  # else it goes out as that comes
                    self._send(opened, view)

    def health(self) -> Health:
        """Returns what the planner needs to know of the servers of the newest view."""
        return self._detector.health(self._view)

    def ask_views(self) -> None:
        """Asks all servers that are heard for the view that they follow; `views` has the answers."""
        for opened in self._open.values():
            with suppress(OSError):
                opened.line.ask_view()

    def views(self) -> dict[Member, View]:
        """Returns the views of this cluster that servers follow, by their newest answers to `ask_views`."""
        return {member: view for member, view in self._views.items() if view.cluster == self._cluster}

    def gone(self) -> dict[Member, Gone]:
        """Returns the members that are gone, why, and since when, in the time of the event loop."""
        return self._detector.gone

    def loads(self) -> dict[Member, Load]:
        """Returns the newest load of each server."""
        return self._detector.loads

    # -- one line ---------------------------------------------------------------------------------------------------

    def _call(self, server: ServerInfo) -> None:
        if self._over:  # the task that follows the store is about to end, too
            return
        task = asyncio.create_task(self._keep(server), name=f"line to {server.member}")
        self._calls[server.member] = (server, _now(), task)

    def _hang_up(self, member: Member) -> None:
        _, _, task = self._calls.pop(member)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    def _redial_silent(self, now: float) -> None:
        for member, (server, since, _) in list(self._calls.items()):
            if now - max(since, self._detector.heard_at(member)) > _REDIAL_S:
                self._hang_up(member)
                self._call(server)

    async def _keep(self, server: ServerInfo) -> None:
        member, refusals, failures = server.member, 0, 0
        pause = 0.0
        while True:
            began = _now()
            try:
                async with self._dial(server, self._cluster) as line:
                    refusals = 0
                    await self._listen(member, line)
            except PermissionError:
                self._refused(member, "another answers in its place")
                pause = _RETRY_S
            except ConnectionRefusedError:
                refusals += 1
                pause = _SECOND_TRY_S if refusals == 1 else _RETRY_S
                if refusals > 1:
                    self._refused(member, "connection refused")
            except (TimeoutError, OSError) as error:
                log.debug("a line ended", member=member, error=error)
                failures = 0 if _now() - began > _LASTING_S else failures + 1
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10)) if failures else 0.0
            except Exception:  # any: a server that sends nonsense counts as silent, and the others must be heard
                log.exception("a line failed", member=member)
                pause = _RETRY_S
            await asyncio.sleep(pause)

    async def _listen(self, member: Member, line: ServerLink) -> None:
        opened = self._open[member] = _Open(line)
        self._detector.connected(member, _now())
        if self._term:
            self._beat_on(opened, self._cluster_time())
        try:
            async for report in line.reports():
                if isinstance(report, View):
                    self._views[member] = report
                    self._change(True)
                    continue
                opened.report = report
                self._succession.heard(member, report.tenure, _now())
                self._clocks.heard(member, report.seconds, time.time())
                self._change(self._detector.heard(member, report, _now()))
                self._catch_up(opened, report)
            raise ConnectionResetError("its reports ended")
        finally:
            self._views.pop(member, None)
            if self._open.get(member) is opened:
                del self._open[member]
                self._detector.lost(member, _now())

    def _catch_up(self, opened: _Open, report: Report) -> None:
        """Sends the view to a server whose report shows that it does not follow it; whole, if it has been sent."""
        view = self._view
        if not self._term or view is None or report.epoch >= view.epoch or opened.repeated >= view.epoch:
            return
        if opened.sent < view.epoch:
            self._send(opened, view)
        elif _now() - opened.sent_at > _VIEW_LAG_S:
            opened.repeated = view.epoch
            self._send(opened, view, whole=True)

    def _beat(self) -> None:
        self._beaten = _now()
        if self._term:
            cluster_time, allowed = self._cluster_time(), self._allowances()
            if cluster_time != UNKNOWN:
                self._compare_clocks()
            for member, opened in self._open.items():
                self._beat_on(opened, cluster_time, allowed.get(member, ()))

    def _beat_on(self, opened: _Open, cluster_time: ClusterTime, allowed: Sequence[RowCount] = ()) -> None:
        with suppress(OSError):
            opened.line.beat(self._term, 0 if self._view is None else self._view.epoch, allowed, cluster_time)

    def _cluster_time(self) -> ClusterTime:
        # Before the first view others may yet register, and no row is there that needs a time.
        awaited = self._view is None or self._detector.awaited
        return self._clocks.time(time.time(), self._detector.gone, awaited)

    def _compare_clocks(self) -> None:
        """Logs which clocks have come to differ from the others, and which agree again."""
        differing = self._clocks.differing(self._detector.gone)
        for who in differing.keys() - self._differing:
            log.warning(
                "a clock differs from the others: set it right", of=_owner(who), seconds=round(differing[who], 1)
            )
        for who in self._differing - differing.keys():
            log.warning("a clock agrees with the others again, or has left", of=_owner(who))
        self._differing = set(differing)

    def _allowances(self) -> Mapping[Member, Sequence[RowCount]]:
        """How many rows servers may keep of tables that are above their capacity; nothing while it is not known how
        many there are: not all ranges have a head that follows the view and has reported."""
        view, reports = self._view, {m: opened.report for m, opened in self._open.items() if opened.report is not None}
        if view is None or not any(report.counts for report in reports.values()):
            return {}
        counts = {m: (report.headed, report.counts) for m, report in reports.items() if report.epoch == view.epoch}
        return allowances(counts) if sum(headed for headed, _ in counts.values()) == view.ranges else {}

    def _send(self, opened: _Open, view: View, *, whole: bool = False) -> None:
        """Sends the view, as its difference from the newest one that the server has by its report and by what was sent
        here."""
        known = max(opened.sent, 0 if opened.report is None else opened.report.epoch)
        opened.sent, opened.sent_at = view.epoch, _now()
        with suppress(OSError):  # the reports end too, and that is where it is noticed
            opened.line.send_view(view, None if whole else self._history.since(known))

    def _refused(self, member: Member, why: str) -> None:
        before = self._detector.gone
        if self._detector.refused(member, why, _now()):
            self._tell(before)

    def _change(self, changed: bool) -> None:
        if changed:
            self._on_change(False)

    def _tell(self, before: dict[Member, Gone]) -> None:
        gone = self._detector.gone
        new = gone.keys() - before.keys()
        self._on_change(bool(new))
        for member in sorted(new) if self._term else ():
            log.warning("taken to be gone", member=member, reason=gone[member].why)


def _nothing(death: bool) -> None:
    """Does nothing: a standby does not plan."""


def _owner(who: Member | None) -> str:
    return "this coordinator" if who is None else f"server {who}"


def _now() -> float:
    return asyncio.get_running_loop().time()
