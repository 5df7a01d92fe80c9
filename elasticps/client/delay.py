"""A worker's part in bounded delay: its pulls wait here until what they need is released, and it reports its clock.

`elasticps.server.core.delay_coordinator` has the other side. What is committed when servers say so may not be at those
that are asked for rows under an older view. So each report has the newest epoch at which servers have said so, and a
pull is made under a view that is as new as those of the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticps.client.core.fan_out import FanOut, FanOuts, Questions, Send
from elasticps.client.core.routing import Routes
from elasticps.client.core.session import PushSession
from elasticps.client.pull import PullsInFlight, ServerPull
from elasticps.errors import Error
from elasticps.kernels.hashing import group_range
from elasticps.wire.delay import AskClockHeader, ReleasedHeader, ReportClock
from elasticps.wire.frames import Buffer, Header
from replication.chain import Member


class _ParkedPulls:
    """Pulls that need a clock to be released."""

    __slots__ = ("floor", "pulls", "wait_ms")

    def __init__(self, floor: int, pulls: Sequence[ServerPull], wait_ms: int) -> None:
        self.floor = floor
        self.pulls = pulls
        self.wait_ms = wait_ms


class WorkerDelay:
    """Of one worker; called under the client's lock. committed: the clock up to which others see all its steps; need:
    asks for a view of at least that epoch. heard: the newest epoch at which a server has answered a push; busy: whether
    something waits, so that `tell` has to be called whenever something has changed."""

    def __init__(
        self, app: str, session: PushSession, send: Send, fan_outs: FanOuts, pulls: PullsInFlight, routes: Routes,
        need: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.committed: Callable[[], int] = lambda: session.committed
        self.routes = routes  # of the newest view
        self.heard = 0
        self.busy = False
        self._app = app
        self._worker = session.worker
        self._send = send
        self._fan_outs = fan_outs
        self._pulls = pulls
        self._need = need
        self._released = 0
        self._view_epoch = 0  # of the oldest view under which pulls see what is released
        self._due: dict[Member, int] = {}  # who wants a report, and from which clock on
        self._waiting: list[_ParkedPulls] = []
        self._questions: dict[int, FanOut] = {}  # by floor

    def want(self, member: Member, header: Header) -> None:
        """ASK_CLOCK."""
        self._due[member] = AskClockHeader.of(header).clock
        self.busy = True

    @property
    def servers(self) -> set[Member]:
        """Who waits for a report."""
        return set(self._due)

    def gone(self, member: Member) -> None:
        """The connection to a server has ended; it asks again on the next one."""
        self._due.pop(member, None)

    def start(self, bound: int, pulls: Sequence[ServerPull], wait_ms: int) -> None:
        """Sends pulls, at once or when what they need is released: the clock that is `bound` before theirs."""
        floor = max((pull.clock for pull in pulls), default=0) - bound
        if floor <= 0 or self._open(floor):
            self._pulls.start(pulls, wait_ms)
            return
        for pull in pulls:
            pull.waits = True
        self._waiting.append(_ParkedPulls(floor, pulls, wait_ms))
        self.tell()

    def _open(self, floor: int) -> bool:
        return floor <= self._released and self.routes.epoch >= self._view_epoch

    def tell(self) -> None:
        """Reports to who wants it, and goes on with pulls that wait, as far as they may."""
        if self._due:
            committed = self.committed()
            for member in [m for m, clock in self._due.items() if committed >= clock]:
                del self._due[member]
                report = ReportClock(self._worker, self.heard, committed, self._released)
                self._send(member, [report.header().pack(), report.body])
        if self._waiting or self._questions:
            self._go_on()
        self.busy = bool(self._due or self._waiting or self._questions)

    def question(self, floor: int, wait_ms: int) -> Questions:
        """Asks the head of the application's group range to release `floor`; 0: to count this worker."""

        def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
            head = int(routes.view.heads[group_range(self._app, routes.view.ranges)])
            if head < 0:
                return []
            epoch = max(self.heard, routes.epoch)
            report = ReportClock(self._worker, epoch, self.committed(), self._released, floor, wait_ms)
            return [(routes.members[head], report.header(), [report.body])]

        return questions

    def released(self, header: Header) -> int:
        """Notes an answer; returns the clock that is released."""
        answer = ReleasedHeader.of(header)
        self._released = max(self._released, answer.clock)
        self._view_epoch = max(self._view_epoch, answer.epoch)
        return answer.clock

    def _go_on(self) -> None:
        for floor, fan_out in list(self._questions.items()):
            if fan_out.done():
                self._end(floor, fan_out)
        still = []
        for one in self._waiting:
            left = [pull for pull in one.pulls if pull.error is None]
            if left and self._open(one.floor):
                self._pulls.start(left, one.wait_ms)
                for pull in left:
                    pull.waits = False
            elif left:
                still.append(one)
        self._waiting = still
        floors = {one.floor: one.wait_ms for one in still}
        for floor in self._questions.keys() - floors.keys():  # nobody waits for it any more
            self._fan_outs.end(self._questions.pop(floor))
        for floor, wait_ms in floors.items():
            if floor <= self._released:
                self._need(self._view_epoch)
            elif floor not in self._questions and self.committed() >= floor:  # before that, others need not hear of it
                self._questions[floor] = fan_out = FanOut(self.question(floor, wait_ms))
                self._fan_outs.begin(fan_out, self.routes)

    def _end(self, floor: int, fan_out: FanOut) -> None:
        if fan_out.error is None:
            for answer in fan_out.answers:
                self.released(answer.header)
        else:
            for one in self._waiting:
                if one.floor == floor:
                    for pull in one.pulls:
                        pull.error = pull.error or fan_out.error
        del self._questions[floor]
        self._fan_outs.end(fan_out)

    def fail(self, error: Error) -> None:
        """Ends every pull that waits: nobody will answer any more."""
        for one in self._waiting:
            for pull in one.pulls:
                pull.error = pull.error or error
        self._waiting.clear()
        self._questions.clear()
