"""Which answer belongs to which request, and who is asked again when views, connections or signals come in between."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View, WorkerInfo
from coordinator.grpc_limits import REMEDY
from elasticps.client.absence import absent_servers, explain_wait, name_peers
from elasticps.client.connections import PeerConnections, ServerPeer, ending_error, refused_by, server_error
from elasticps.client.core.fan_out import FAN_OUT_ANSWERS, Answer, FanOut, FanOuts, Questions, Script, T, carry_out
from elasticps.client.core.new_views import SPEAK_OF_VIEWS, NewViews, ReadStore
from elasticps.client.core.routing import routes_of
from elasticps.client.core.session import PushSession
from elasticps.client.core.standing import standing_servers
from elasticps.client.delay import WorkerDelay
from elasticps.client.holding import WorkerHold
from elasticps.client.participation import Participation
from elasticps.client.pull import PullsInFlight, ServerPull
from elasticps.client.pull_batch import ANSWERS, FAN_OUT, OWNERS, PULL, PUSH, take_answers
from elasticps.client.pushes import PushesInFlight
from elasticps.client.runtime import Runtime, at_fork
from elasticps.client.transport import Link, LinkDriver, LinkReceiver
from elasticps.errors import Closed, ClusterUnreachable, Error, Timeout, VersionMismatch
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import (
    LAST,
    REFUSED,
    FrameError,
    Header,
    Kind,
    VersionError,
    json_body,
    json_frame,
    read_partly,
)
from elasticps.wire.headers import GetViewHeader
from elasticps.wire.refusals import RefusedRows
from replication.chain import Member
from replication.effects import Status

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = logging.getLogger(__name__)


class Dispatcher:
    """A worker's requests to the servers of the newest view. `lock` guards everything here; `ask_view` reads the view
    from the coordination store, in a thread of its own, and hands it over.

    `session` knows the outstanding steps; `pushes`, `pulls` and `_fan_outs` (questions to several servers) know what is
    on its way. `_driver` reads the links of `connections`. Servers hear by `participation` whether this worker takes
    part, by `holding` and `delay` how far it has written and committed. `new_views` says when to ask for a view.
    """

    def __init__(
        self, runtime: Runtime, cluster: str, worker: WorkerInfo, view: View, window: int, ask_view: ReadStore,
        credentials: Credentials | None = None, *, authenticated: bool = False,
    ) -> None:  # fmt: skip
        """authenticated: as for `NewViews`."""
        self.runtime = runtime  # clock, threads, sockets
        self.cluster = cluster  # its name
        self.worker = worker  # this one, as registered
        self.lock = runtime.rlock()
        self.routes = routes_of(view)  # of the newest view
        self.session = PushSession(worker.id, view.ranges, window)
        self.error: Error | None = None  # once set, nothing goes on
        # Hears of the epochs in which ranges came back from a checkpoint, and of the last committed step.
        self.on_restored: Callable[[list[int], int], None] = lambda epochs, committed: None
        self.on_watch: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)  # caches and shards, for an `Activity`
        self.disowned = False  # this is a fork of the process that connected
        self.new_views = NewViews(cluster, view.ranges, ask_view, self._from_store, authenticated=authenticated)
        self.new_views.since_s = runtime.monotonic()
        self._answered = np.empty(ANSWERS, np.int64)  # requests, of one buffer
        self._hurt = False  # an exception came while something here was being changed
        self._driver = LinkDriver(runtime, self._broken, self._turn, self._failed)
        self.nudge = self._driver.nudge  # something is to be waited for
        hello = {"cluster": cluster, "worker": worker.id, "name": worker.name, "app": worker.app}
        receiver = LinkReceiver(self._on_frame, self._sink, self._usual)
        self.connections = PeerConnections(
            runtime, self._driver, self.lock, json_frame(Kind.HELLO, hello), receiver, self._gone, credentials,
            partial(standing_servers, worker.id, worker.app),
        )  # fmt: skip
        self.participation = Participation(self.connections)
        pushes, questions = (itertools.count(OWNERS + owner, OWNERS) for owner in (PUSH, FAN_OUT))
        keys_of, send_all, want = self.connections.keys_of, self.connections.send_all, self.connections.want
        self.pushes = PushesInFlight(self.session, worker.id, pushes, send_all, self._fenced, keys_of, want)
        self.pulls = PullsInFlight(self.routes, self.session, send_all, self.connections.stop_receiving, keys_of)
        self._fan_outs = FanOuts(questions, self.connections.ask)
        need, send = self.new_views.need, self.connections.send
        self.delay = WorkerDelay(worker.app, self.session, send, self._fan_outs, self.pulls, self.routes, need)
        self.holding = WorkerHold(
            runtime, self.lock, self.session, self.connections, lambda: self._hurt or self._fan_outs.writing
        )
        self.connections.follow(self.routes)
        self.pushes.adopt(self.routes)
        at_fork(self.disown)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self, deadline_s: float) -> None:
        """Connects to the standing servers, or if absent to others; `ClusterUnreachable` names those out of reach."""
        self._driver.start()
        self.meet(lambda: self.connections.standing, deadline_s)
        if not self.connections.ready:
            self.meet(lambda: self.routes.serving, deadline_s)

    def meet(self, servers: Callable[[], Sequence[Member]], deadline_s: float) -> None:
        """Connects to servers, as `start` does."""

        def missing() -> list[ServerPeer]:
            with self.lock:
                return self.connections.unready(servers())

        def met() -> bool:
            return self.error is not None or {peer.member for peer in missing()} <= self.absent()

        in_time = self._driver.wait(met, deadline_s - self.runtime.monotonic())
        peers = self.connections.peers
        report = name_peers(missing() if in_time else self.connections.unready([*peers]), self.routes, peers)
        if not in_time:
            raise ClusterUnreachable(f"cluster {self.cluster!r}: cannot connect to server {report}")
        self.check()
        if report:
            log.warning("worker %s goes on without ranges that nobody else has: server %s", self.worker.name, report)

    def close(self) -> None:
        """Closes every connection; whoever still waits is told."""
        self.error = self.error or Closed("the client is closed")
        self._driver.close()
        self.connections.close()

    def check(self) -> None:
        """Raises what has ended this client, if anything has."""
        if self.error is not None:
            raise self.error
        if self._hurt:
            self._mend()

    def disown(self) -> None:
        """In a forked child: nothing goes on here, and what the parent does is not disturbed."""
        self.disowned = True
        self.error = Closed(f"this client belongs to process {os.getppid()}, of which this process is a fork. {REMEDY}")
        self.lock = self.runtime.rlock()  # a thread that is not here any more may hold the other one
        self._driver.disown()
        self.connections.disown()

    def fence(self, text: str) -> None:
        """Ends everything: another incarnation of this worker has taken over."""
        self._end(Closed(text))

    def _fenced(self) -> None:
        self.fence(f"the cluster no longer knows worker {self.worker.name!r}; it left, or was started again")

    def _end(self, error: Error) -> None:
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            for part in (self.pushes, self.pulls, self.delay, self._fan_outs):
                part.fail(error)

    def hurt(self) -> None:
        """Something was raised, by a signal handler perhaps, while state was being changed: begin afresh."""
        self._hurt = True
        self._driver.nudge()

    def _mend(self) -> None:
        """Begins afresh: opens every connection again, asks every server what it has, asks again for every answer."""
        with self.lock:
            if not self._hurt or self.error is not None:
                return
            self.connections.follow(self.routes)
            self.connections.begin_afresh()
            self.connections.unready(self._needed())
            self.pushes.routes = self.routes
            self.pushes.recover()
            self.pulls.recover()
            self.pulls.adopt(self.routes)
            self._fan_outs.recover(self.routes)
            self._hurt = False
        self._driver.nudge()

    def _failed(self, error: BaseException) -> None:
        """Links could not be read, for a reason that is none of theirs."""
        if self.runtime.interruptible():
            self.hurt()
            return
        if not isinstance(error, Exception):  # the thread is made to end
            return
        if self.error is None:
            log.error("worker %s cannot go on", self.worker.name, exc_info=error)
        ended = Closed(f"the client has failed and cannot go on: {error!r}; connect again")
        ended.__cause__ = error
        self._end(ended)

    # --- asking and waiting -------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits, reading meanwhile, until `done()`, which has to come true when this ends; `Timeout` says for whom."""
        if not self._driver.wait(done, timeout_s):
            self.check()
            raise Timeout(f"{what} took longer than {timeout_s:.1f} s: {self.explain()}")

    def ask_all(
        self, questions: Questions, timeout_s: float, what: str, *, of_absent: bool = True, writes: bool = False
    ) -> list[Answer]:
        """Asks, and asks again under every view with other heads, until all have answered; returns the answers. With
        of_absent=False those that are absent are asked when they are there again, nobody waits for that, and nothing is
        returned. writes: not while a cut is taken. Raises the first refusal, or `Timeout`."""
        fan_out = FanOut(questions, writes)

        def done() -> bool:
            return fan_out.done() or (not of_absent and bool(owing := fan_out.owing) and owing <= self.absent())

        try:
            while not self._begin(fan_out):
                self.wait_released(0, timeout_s)
            self._driver.nudge()
            self.wait(done, timeout_s, what)
            with self.lock:
                fan_out.left = not fan_out.done()
        finally:
            with self.lock:
                if not fan_out.left:
                    self._fan_outs.end(fan_out)
        if fan_out.error is not None:
            raise fan_out.error
        return [] if fan_out.left else fan_out.answers

    def _begin(self, fan_out: FanOut) -> bool:
        with self.lock:
            self.check()
            if fan_out.writes and self.holding.holds(0):
                return False
            self._change(self._fan_outs.begin, fan_out, self.routes)
            return True

    def wait_released(self, clock: int, timeout_s: float) -> None:
        """Waits until step `clock` (0: whatever else is written) may begin: for `timeout_s` beyond what a cut takes."""
        holds, most_s = self.holding.holds, self.holding.left_s + timeout_s
        self.wait(lambda: self.error is not None or not holds(clock), most_s, "being held for a checkpoint")
        self.check()

    @contextmanager
    def entering(self, timeout_s: float) -> Iterator[None]:
        """While this worker begins to take part in rounds: not while it holds for a cut."""
        try:
            while not self._enter():
                self.wait_released(0, timeout_s)
            yield
        finally:
            self.holding.entered()

    def _enter(self) -> bool:
        with self.lock:
            self.check()
            return self.holding.enter()

    def carry_out(self, script: Script[T]) -> T:
        """Asks whatever a script wants to know, and returns what came of it."""
        return carry_out(script, self.ask_all)

    def _change(self, change: Callable[..., None], *args: object) -> None:
        """Changes state, and begins afresh where that raises: it may be half changed."""
        try:
            change(*args)
        except BaseException:
            self.hurt()
            raise

    def start_pulls(self, pulls: Sequence[ServerPull], bound: int | None, wait_ms: int) -> None:
        """Sends pulls; bound: of the delay, None for none; `wait_ms` as in the PULL header."""
        with self.lock:
            self.check()
            start = self.pulls.start if bound is None else partial(self.delay.start, bound)
            self._change(start, pulls, wait_ms)
        self._driver.nudge()

    def forget_pull(self, pull: ServerPull, error: Error) -> None:
        """Gives up what is still unanswered of a pull."""
        with self.lock:
            self._change(self.pulls.forget, pull, error)

    # --- receiving ----------------------------------------------------------------------------------------------

    def _sink(self, header: Header) -> Sequence[memoryview] | None:
        """Where the rows of an answer go."""
        return self.pulls.sink(header)

    def _usual(self, link: Link, staging: NDArray[np.uint8], start: int, end: int) -> int:
        """Takes the usual answers out of what was received, in one call; where the first frame stands that is left."""
        with self.lock:
            if self._hurt or not link.ready:
                return start
            start, count, epoch = take_answers(staging, start, end, self.pulls.landing.slots, self._answered)
            if epoch > self.delay.heard:
                self.delay.heard = epoch
            for request in self._answered[:count].tolist():
                if request % OWNERS == PUSH:
                    self.pushes.ok(request)
                else:
                    self.pulls.arrived(request)
            self.new_views.heard += count
            if self.holding.hold.cut or self.delay.busy:
                self._tell()
            return start

    def _on_frame(self, link: Link, header: Header, body: NDArray[np.uint8]) -> None:
        with self.lock:
            if self._hurt:  # it may be the answer to a part of what was to be sent: everything is asked again
                return
            self.new_views.heard += link.ready  # a server started again at a lost one's address has no news for us
            kind, request = header.kind, header.request
            owner = request % OWNERS
            self.delay.heard = max(self.delay.heard, header.epoch * (owner == PUSH))
            if kind == Kind.OK and owner == PUSH:
                self.pushes.ok(request)
            elif kind == Kind.ROWS:
                self.pulls.rows(header, body)
            elif kind == Kind.PARTLY and owner == PUSH:
                self.pushes.partly(request, header.epoch, *read_partly(header, body))
            elif kind == Kind.CLOCKS and owner == PUSH:
                clocks = ClocksFrame.of(header, body, self.routes.view.ranges)
                refused = refused_by(link.server.name, clocks.refused, self.routes.view.ranges)
                self.pushes.clocks(request, header.epoch, *clocks[:3], refused)
            elif kind == Kind.PARTLY:
                self._stall(request, owner, header.epoch)
            elif kind in FAN_OUT_ANSWERS:
                self._fan_outs.answered(header, body.tobytes())
            elif kind == Kind.ERROR and header.flags & REFUSED:
                refused = refused_by(link.server.name, body, self.routes.view.ranges)
                if owner == PUSH:
                    self.pushes.refused(request, [each[1:] for each in refused], bool(header.flags & LAST))
            elif kind == Kind.ERROR:
                self._on_error(link, header, json_body(body.data))
            elif kind in SPEAK_OF_VIEWS:
                self._hear_of(link.member, header, body)
            elif kind == Kind.WELCOME:
                self._welcomed(link, header.epoch, json_body(body.data))
            elif kind == Kind.HOLD:
                self.holding.hear(link.member, header)
            elif kind == Kind.RELEASE:
                self.holding.release(header)
            elif kind == Kind.ASK_CLOCK:
                self.delay.want(link.member, header)
            elif kind == Kind.WATCH:
                self.connections.report_use(link.member, self.session, self.on_watch())
            else:
                raise FrameError(f"{Kind(kind).name} is not an answer")
            self._tell()

    def _tell(self) -> None:
        self.holding.tell()
        if self.delay.busy:
            self.delay.tell()

    def _on_error(self, link: Link, header: Header, document: dict[str, object]) -> None:
        code, text, request = document.get("code"), str(document.get("message")), header.request
        epoch, owner = document.get("epoch"), request % OWNERS
        epoch = epoch if isinstance(epoch, int) else header.epoch
        if (ending := ending_error(document, link.server.name)) is not None:
            self._end(ending)
        # Another cluster's server has taken a lost one's address; or the roster is without us, until we are registered
        # again. Only who has our name now ends us.
        elif code in ("malformed", "cluster", "unlisted"):
            raise ConnectionResetError(text)
        elif code == "stale-view" and owner == PUSH:
            self.pushes.not_done(request, Status.STALE_VIEW, epoch)
        elif code == "stale-view":
            self._stall(request, owner, epoch)
        elif code == "gap" and owner == PUSH:
            self.pushes.not_done(request, Status.GAP, header.epoch)
        else:
            error = server_error(document, link.server.name)
            if owner == PUSH:
                known = self.pushes.refused(request, [(error, RefusedRows({}, self.routes.view.ranges))], True)
            else:
                known = (self.pulls.finish if owner == PULL else self._fan_outs.refused)(request, error)
            if not known and request:
                log.debug("server %s, to a request that is forgotten: %s", link.server.name, text)

    def _stall(self, request: int, owner: int, epoch: int) -> None:
        """A server has another view than the one that a pull or a question was planned under: plan it again, as soon as
        there is a newer one or, should it be the same, at the next turn."""
        self.new_views.need(epoch)
        if owner == PULL:
            self.pulls.stall(request)
        else:
            self._fan_outs.stall(request, self.routes)

    # --- views --------------------------------------------------------------------------------------------------

    def _hear_of(self, member: Member, header: Header, body: NDArray[np.uint8]) -> None:
        """A server speaks of a newer view, or sends it."""
        view, since = self.new_views.read(now_s := self.runtime.monotonic(), header, body, self.routes.view)
        if since is not None:
            self.connections.send(member, [GetViewHeader(since).header().pack()])
        if view is not None and self.new_views.hear(now_s, member, view):
            self._adopt(view)
        elif self.new_views.doubted:
            self._driver.nudge()

    def _adopt(self, view: View) -> None:
        """Follows a newer view: links, pushes, reads and questions."""
        if view.epoch <= self.routes.epoch or self.error is not None:
            return
        log.info("worker %s follows epoch=%d reason=%r", self.worker.name, view.epoch, view.reason)
        if epochs := sorted({*view.recovery_epoch[view.recovery_epoch > self.routes.epoch].tolist()}):
            self.participation.go_on(self.session.committed)
            self.on_restored(epochs, self.session.committed)
        self.routes = self.delay.routes = routes_of(view)
        self.new_views.followed(self.runtime.monotonic())
        self.connections.follow(self.routes)
        self.pushes.adopt(self.routes)
        self.pulls.adopt(self.routes)
        self._fan_outs.adopt(self.routes)
        self.delay.tell()

    def _from_store(self, view: View | None) -> None:
        with self.lock:
            if (newest := self.new_views.choose(self.runtime.monotonic(), self.routes.epoch, view)) is not None:
                self._adopt(newest)
        self._driver.nudge()

    def _welcomed(self, link: Link, epoch: int, document: dict[str, object]) -> None:
        """A server knows us: tell it whether, and where, we take part, then whatever it has to do for us. Its view may
        be one of which it has told its workers before we were among them."""
        self.new_views.need(epoch)
        if self.connections.welcomed(link, document):
            self.participation.tell(link.member)
            self.pushes.connected(link.member)
            self._fan_outs.connected(link.member)
            self.pulls.connected(link.member)

    def _gone(self, member: Member) -> None:
        self.holding.gone(member)
        self.delay.gone(member)
        self.pushes.disconnected(member)

    def _broken(self, link: Link, error: Exception) -> None:
        with self.lock:
            if self.connections.broken(link, error) and isinstance(error, VersionError):
                self._end(VersionMismatch(f"server {link.server.name}: {error}"))
        self._driver.nudge()

    def _turn(self) -> bool:
        """The background thread's, a few times a second: opens links that are due, asks for views that are wanted,
        plans again what nobody answers; says whether there is anything to wait for."""
        if self.error is not None:
            return False
        if self._hurt:
            self._mend()
        connections = self.connections
        with self.lock:
            due = connections.due()
            connections.judge_silence()
            connections.renew()
            connections.close_unused(self._needed)
            self.pulls.resume()
            self._fan_outs.resume(self.routes)
            self.holding.tell()
            oldest = self.pushes.oldest, self.pulls.oldest, self._fan_outs.oldest
            self.new_views.need(self.pushes.needed_epoch)
            lost = connections.lost or self.session.headless > 0
            now, chance = self.runtime.monotonic(), self.runtime.chance
            if self.new_views.turn(now, self.routes.epoch, lost, oldest, chance()):
                connections.send_to_one([GetViewHeader(self.routes.epoch).header().pack()], chance())
            waiting = any(oldest) or bool(self._fan_outs or self.session.outstanding)
            busy = lost or waiting or connections.busy
        for peer in due:
            connections.open(peer)
        return busy

    def _needed(self) -> set[Member]:
        """Servers that owe this worker something, or wait for something of it."""
        owing = self.pushes.owing | self.pulls.owing | self._fan_outs.servers
        return owing | self.holding.hold.servers | self.delay.servers

    def absent(self) -> set[Member]:
        """Servers of ranges that have no replica within reach. What does not need them goes on without them."""
        with self.lock:
            return absent_servers(self.routes, self.connections.peers, self.runtime.monotonic())

    def explain(self) -> str:
        """Who is being waited for, for people."""
        with self.lock:
            waited_for, session = self.pulls.owing | self._fan_outs.owing, self.session
            peers, now = self.connections.peers, self.runtime.monotonic()
            return explain_wait(self.routes, peers, now, session.owing(), waited_for, session.headless)
