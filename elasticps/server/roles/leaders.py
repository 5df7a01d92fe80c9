"""Reports to coordinators: what their failure detectors and planners need, and which coordinator leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.core import fields
from coordinator.core.capacities import RowCount
from coordinator.core.clocks import MOST_SECONDS, UNKNOWN, ClusterTime
from coordinator.core.sizing import fill_mark
from coordinator.core.view import View
from elasticps.server.core.clocks import Clocks
from elasticps.server.core.headroom import Headroom
from elasticps.server.core.report_pacing import ReportPacing
from elasticps.server.core.requests import Body
from elasticps.server.network.connection import Connection
from elasticps.server.roles.context import Context
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.store import count_bounded
from elasticps.wire.frames import Header, Kind, json_body, json_frame, row_counts, view_frame
from elasticps.wire.headers import GetViewHeader, UnchangedHeader
from replication.effects import CaughtUp

log = fields.logger(__name__)

LEVELS_S = 0.02  # ranges that become level within this time go in one report: each makes the leader plan
FORGOTTEN_S = 10.0  # a leader silent for so long has lost its lease: its term counts no more
ALONE_S = 0.1  # the last replica of a range, beside a retained copy, lives so long before it acknowledges alone


class Leaders:
    """Connections of coordinators.

    alone: the newest epoch since which this server has been the single replica of a range for ALONE_S, while a silent
    server retains a copy. A server that dies sooner has acknowledged nothing that the copy lacks.
    """

    def __init__(
        self, context: Context, links: ReplicaLinks, snapshots: SnapshotSender, headroom: Headroom,
        wall: Callable[[], float],
    ) -> None:  # fmt: skip
        self._loop = loop = context.loop  # for time and timers
        self._serving = context.serving  # the view that is followed
        self._executor = context.executor  # what reports are about
        self._executor.handlers[CaughtUp] = self.caught_up
        self._links = links  # who cannot be reached
        self._snapshots = snapshots  # which joiners are stalled
        self._headroom = headroom  # how much memory is left
        self._connections: dict[Connection, None] = {}  # of coordinators
        self._term = 0  # the newest that was heard
        self._spoken: Connection | None = None  # the connection it was heard on, while that lasts
        self._spoken_at = loop.time()  # when it was heard last, or when that connection ended
        self._wall = wall  # this server's clock, seconds since 1970
        self._time, self._time_at = UNKNOWN, 0.0  # what time a leader said it is, and loop time then
        self._allowed: tuple[int, tuple[RowCount, ...]] = 0, ()  # what it allowed then, and under which view
        self._report_due = False  # a report is due soon
        self._reports = ReportPacing()  # whether a report says more than that nothing has changed
        self.alone = 0

    def adopt(self, view: View) -> None:
        """Follows a view: starts the wait of ALONE_S for ranges of which this is the last replica."""
        left = view.as_chains.complete & (view.tails == view.as_chains.index(self._serving.me))
        since = int(view.since[left].max(initial=0))
        if since > self.alone:
            self._loop.call_later(ALONE_S, self._lived, since)

    def _lived(self, since: int) -> None:
        if since > self.alone:
            self.alone = since
            self.tell()

    def add(self, connection: Connection) -> None:
        """A coordinator has connected."""
        self._connections[connection] = None
        self._reports.forget()
        connection.send(self.report())

    def remove(self, connection: Connection) -> None:
        """A connection has ended. If that coordinator led, the others get a report at once."""
        self._connections.pop(connection, None)
        if connection is self._spoken:
            self._spoken, self._spoken_at = None, self._loop.time()
            self.tell()

    @property
    def present(self) -> bool:
        """Whether any coordinator is connected."""
        return bool(self._connections)

    def beat(self, connection: Connection, header: Header, body: Body) -> None:
        """GET_VIEW with a term is the beat of the coordinator that leads. After the store was rebuilt terms begin low
        again. Without a term a coordinator asks for the view that is followed here, as the store has lost it."""
        beat, now = GetViewHeader.of(header), self._loop.time()
        term = beat.term
        if not term:
            if self._serving.view is not None:
                connection.send(view_frame(self._serving.view))
            return
        if term >= self._term or now - self._spoken_at > FORGOTTEN_S:
            self._term, self._spoken, self._spoken_at = term, connection, now
            if beat.seconds:  # else it does not know yet how late it is
                self._time, self._time_at = ClusterTime(beat.seconds, beat.median), now
            counts = row_counts(json_body(body.data).get("allowances")) if header.body else ()
            self._allowed = beat.epoch, counts

    def clocks(self) -> Clocks:
        """What time it is, by all that is known. The leader's own time is unknown when none was heard for FORGOTTEN_S;
        the median goes on, as time does."""
        since_s = self._loop.time() - self._time_at
        leader = self._time.own + since_s if self._time.own and since_s < FORGOTTEN_S else 0.0
        return Clocks(self._wall(), leader, self._time.median + since_s if self._time.median else 0.0)

    def allowances(self) -> tuple[RowCount, ...]:
        """How many rows the ranges headed here may keep of tables that are above their capacity, as the leader said
        last; nothing where it does not know of the view that is followed here."""
        epoch, counts = self._allowed
        return counts if epoch == self._serving.epoch and self.clocks().leader else ()

    def report(self) -> bytes:
        """The REPORT frame, with the present state."""
        return json_frame(Kind.REPORT, self._state(), epoch=self._serving.epoch)

    def _state(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "levels": [[level.range, level.fill, *level.joiner] for level in self._executor.replica.levels()],
            "suspects": [[*member, round(seconds, 3)] for member, seconds in self._links.suspects().items()],
            "alone": self.alone,
            "spent": self._executor.replica.spent(),
            "stalled": [list(member) for member in self._snapshots.stalled()],
            "bytes": self._executor.store.nbytes,
            "memory": [self._headroom.used, self._headroom.mark, fill_mark(self._headroom.limit)],
            "leader": [self._term, self._spoken is not None, round(self._loop.time() - self._spoken_at, 3)],
            "requests": self._executor.counts.count("pushes") + self._executor.counts.count("pulls"),
            "seconds": round(min(max(self._wall(), 0.0), MOST_SECONDS), 3),
        }
        if counts := count_bounded(self._executor.store.live, self._serving.headed):
            document |= {"headed": len(self._serving.headed), "counts": counts}
        return document

    def tell(self) -> None:
        """Sends a report to every coordinator, or that nothing has changed in the last one."""
        self._report_due = False
        if self._connections:
            state, epoch = self._state(), self._serving.epoch
            if self._reports.says_more(state, self._loop.time()):
                frame = json_frame(Kind.REPORT, state, epoch=epoch)
            else:
                term, connected, silent_s = state["leader"]
                silent_ms, time_ms = round(1000 * silent_s), round(1000 * state["seconds"])
                frame = UnchangedHeader(epoch, term, connected, silent_ms, time_ms).header().pack()
            for connection in self._connections:
                connection.send(frame)

    def caught_up(self, effect: CaughtUp) -> None:
        """A joiner has all rows: coordinators get a report within LEVELS_S."""
        log.debug("caught up", range=effect.range, fill=effect.fill, joiner=effect.joiner)
        if not self._report_due:
            self._report_due = True
            self._loop.call_later(LEVELS_S, self.tell)
