"""What goes on between a client and its servers: links kept up, views followed, requests matched with answers, and
asked again of whoever is to answer them now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.view import View, WorkerInfo
from elasticps.client.connections import RETRY_FIRST_S, Peer, server_error
from elasticps.client.protocol.fan_out import Answer, FanOut, FanOuts, Questions, Script, T, carry_out
from elasticps.client.protocol.routing import Routes
from elasticps.client.protocol.session import Session
from elasticps.client.protocol.view_refresh import ViewRefresh
from elasticps.client.pulls import Pulls, Read
from elasticps.client.pushes import Pushes
from elasticps.client.runtime import Lock, Runtime
from elasticps.client.transport import Driver, Link
from elasticps.errors import (
    Closed,
    ClusterUnreachable,
    Error,
    Timeout,
    VersionMismatch,
)
from elasticps.wire.frames import (
    LAST,
    Buffer,
    FrameError,
    Header,
    Kind,
    VersionError,
    json_body,
    json_frame,
    read_clocks,
    read_partly,
)
from elasticps.wire.headers import JoinHeader
from elasticps.wire.views import read_view
from replication.chain import Member
from replication.effects import Status

log = logging.getLogger(__name__)

RETRY_MOST_S = 0.5
CONNECT_TIMEOUT_S = 1.0
HELLO_TIMEOUT_S = 5.0  # a server that accepts but does not answer is tried again after so long


class Dispatcher:
    """Links to all servers of the newest view. `lock` guards everything here; `ask_view` reads the view from the
    coordination store, in a thread of its own, and hands it over."""

    def __init__(
        self,
        runtime: Runtime,
        cluster: str,
        worker: WorkerInfo,
        view: View,
        session: Session,
        lock: Lock,
        requests: Iterator[int],
        ask_view: Callable[[Callable[[View | None], None]], None],
    ) -> None:
        self.runtime = runtime
        self.cluster = cluster
        self.worker = worker
        self.routes = Routes(view)
        self.error: Error | None = None  # once set, nothing goes on
        self.pushes = Pushes(session, worker.id, requests, self._send, self._fenced)
        self.pulls = Pulls(self.routes, worker.id, requests, self._send, self._abandon)
        self._lock = lock
        self._ask_view = ask_view
        self._presence = JoinHeader(pause=True).header()  # the first word on each connection: whether we take part
        self._peers: dict[Member, Peer] = {}
        self._calls = FanOuts(requests, self._send)
        self._wanted = ViewRefresh()
        self._heard = 0  # frames received, from servers of our view
        hello = {"cluster": cluster, "worker": worker.id, "name": worker.name, "app": worker.app}
        self._hello = json_frame(Kind.HELLO, hello)
        self._hurt = False  # an exception came while something here was being changed
        self._driver = Driver(runtime, self._broken, self._turn, self._failed)
        self._set_peers()
        self.pushes.adopt(self.routes)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self, deadline_s: float) -> None:
        """Connects to every server; `ClusterUnreachable` names those that could not be reached by the deadline."""
        self._driver.start()
        if not self._driver.wait(
            lambda: self.error is not None or all(p.link.ready for p in self._serving()), deadline_s
        ):
            missing = ", ".join(
                f"{p.info.name} at {p.info.address} ({p.trouble})" for p in self._serving() if not p.link.ready
            )
            raise ClusterUnreachable(f"cluster {self.cluster!r}: cannot connect to server {missing}")
        self.check()

    def close(self) -> None:
        self.error = self.error or Closed("the client is closed")
        self._driver.close()
        for peer in list(self._peers.values()):
            peer.link.close()

    def check(self) -> None:
        """Raises what has ended this client, if anything has."""
        if self.error is not None:
            raise self.error
        if self._hurt:
            self._mend()

    def disown(self, text: str) -> None:
        """In a forked child: nothing goes on here, and what the parent does is not disturbed."""
        self.error = Closed(text)
        self._driver.disown()
        for peer in self._peers.values():
            if peer.link.socket is not None:
                peer.link.socket.close()  # the child's descriptor; the connection is the parent's

    def fence(self, text: str) -> None:
        """Ends everything: another incarnation of this worker has taken over."""
        self._end(Closed(text))

    def _fenced(self) -> None:
        self.fence(f"the cluster no longer knows worker {self.worker.name!r}; it left, or was started again")

    def _end(self, error: Error) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self.pushes.fail(error)
            self.pulls.fail(error)
            self._calls.fail(error)

    # --- exceptions out of place --------------------------------------------------------------------------------

    def hurt(self) -> None:
        """Something was raised, by a signal handler perhaps, while state was being changed: begin afresh."""
        self._hurt = True
        self._driver.nudge()

    def _mend(self) -> None:
        """Begins afresh: opens every connection again, asks every server what it has, asks again for every answer."""
        with self._lock:
            if not self._hurt or self.error is not None:
                return
            self._set_peers()
            for peer in self._peers.values():
                self._driver.remove(peer.link)
                peer.link.close()
                peer.retry_at_s = 0.0
            self.pushes.routes = self.routes
            self.pushes.recover()
            self.pulls.recover()
            self.pulls.adopt(self.routes)
            self._calls.recover(self.routes)
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

    def _serving(self) -> list[Peer]:
        """Servers that head or answer for some range."""
        with self._lock:
            routes = self.routes
            used = np.unique(np.concatenate([routes.view.heads, routes.view.tails]))
            return [self._peers[routes.members[i]] for i in used.tolist() if i >= 0]

    # --- sending ------------------------------------------------------------------------------------------------

    def _send(self, member: Member, buffers: Sequence[Buffer]) -> None:
        """Sends to a server if it can be reached; otherwise its next connection, or the next view, will see to it."""
        peer = self._peers.get(member)
        if peer is None or not peer.link.ready:
            return
        try:
            if not peer.link.send(buffers):
                self._driver.want_write(peer.link)
        except OSError:  # whoever reads the link learns of it there, and begins again
            self._driver.nudge()

    def nudge(self) -> None:
        self._driver.nudge()

    def wait(self, done: Callable[[], bool], deadline_s: float) -> bool:
        return self._driver.wait(lambda: done() or self.error is not None, deadline_s) and done()

    # --- rounds -------------------------------------------------------------------------------------------------

    def ask_heads(self, headers: Callable[[Routes], Header], body: bytes, timeout_s: float, what: str) -> list[Answer]:
        """Asks every head the same; returns their answers."""
        return self.ask_all(
            lambda routes: [(routes.members[s], headers(routes), [body]) for s in routes.share_of], timeout_s, what
        )

    def ask_all(self, questions: Questions, timeout_s: float, what: str) -> list[Answer]:
        """Asks, and asks again under every view with other heads, until all have answered; returns the answers.

        Raises the first refusal, or `Timeout`.
        """
        fan_out = FanOut(questions)
        try:
            with self._lock:
                self.check()
                try:
                    self._calls.begin(fan_out, self.routes)
                except BaseException:
                    self.hurt()
                    raise
            self._driver.nudge()
            if not self.wait(fan_out.done, self.runtime.monotonic() + timeout_s):
                self.check()
                raise Timeout(f"{what} took longer than {timeout_s:.1f} s: {self.explain()}")
        finally:
            with self._lock:
                self._calls.end(fan_out)
        if fan_out.error is not None:
            raise fan_out.error
        return fan_out.answers

    def carry_out(self, script: Script[T]) -> T:
        """Asks whatever a script wants to know, and returns what came of it."""
        return carry_out(script, self.ask_all)

    def join(self, base: int, timeout_s: float) -> None:
        """Tells every server, now and on each later connection, the clock that this worker starts above."""
        with self._lock:
            self.pushes.session.start_at(base)
        self._appear(JoinHeader(base).header(), timeout_s)

    def pause(self, timeout_s: float) -> None:
        """Tells every server that this worker holds nobody back, until it joins again."""
        self._appear(JoinHeader(pause=True).header(), timeout_s)

    def _appear(self, presence: Header, timeout_s: float) -> None:
        with self._lock:
            self._presence = presence
            for member in self._peers:
                self._send(member, [presence.pack()])
        self.ask_all(lambda routes: [(p.member, presence, []) for p in self._serving()], timeout_s, "joining")

    # --- reads --------------------------------------------------------------------------------------------------

    def start_reads(self, reads: Sequence[Read], bound: int | None, wait_ms: int) -> None:
        """Asks for the parts of reads; `bound` and `wait_ms` as in the PULL header."""
        with self._lock:
            self.check()
            try:
                self.pulls.start(reads, bound, wait_ms)
            except BaseException:
                self.hurt()
                raise
        self._driver.nudge()

    def forget_read(self, read: Read, error: Error) -> None:
        """Gives up what is still unanswered of a read."""
        with self._lock:
            try:
                self.pulls.forget(read, error)
            except BaseException:
                self.hurt()
                raise

    def _abandon(self, member: Member, request: int) -> None:
        """Nobody wants an answer any more. If half of it has been received, into a caller's memory, the connection ends
        here, so that the other half lands nowhere."""
        peer = self._peers.get(member)
        if peer is not None and peer.link.sinking == request:
            self._cut(peer, "its answer was no longer wanted")

    # --- receiving ----------------------------------------------------------------------------------------------

    def _on_frame(self, link: Link, header: Header, body: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._hurt:  # it may be the answer to a part of what was to be sent: everything is asked again
                return
            self._heard += link.ready  # a server started again at a lost one's address has no news for us
            request = header.request
            if header.kind == Kind.OK:
                if not self.pushes.ok(request):
                    self._calls.answered(header, body.tobytes())
            elif header.kind in (Kind.BARRIER_DECISION, Kind.SHARDS):
                self._calls.answered(header, body.tobytes())
            elif header.kind == Kind.ROWS:
                if header.flags & LAST:
                    self.pulls.finish(request, None)
            elif header.kind == Kind.PARTLY:
                if not self.pushes.partly(request, header.epoch, *read_partly(header, body)):
                    self._stall(request, header.epoch)
            elif header.kind == Kind.CLOCKS:
                if not self.pushes.clocks(request, header.epoch, *read_clocks(header, body)):
                    self._calls.answered(header, body.tobytes())
            elif header.kind == Kind.ERROR:
                self._on_error(link, header, json_body(body.data))
            elif header.kind == Kind.VIEW:
                view = read_view(header, body, self.routes.epoch)
                if view is not None:
                    self._adopt(view)
            elif header.kind == Kind.WELCOME:
                self._welcomed(link, json_body(body.data))
            else:
                raise FrameError(f"{Kind(header.kind).name} is not an answer")

    def _on_error(self, link: Link, header: Header, document: dict[str, object]) -> None:
        code, text, request = document.get("code"), str(document.get("message")), header.request
        epoch = document.get("epoch")
        epoch = epoch if isinstance(epoch, int) else header.epoch
        if code == "fenced":
            self._end(Closed(text))
        elif code == "version":
            self._end(VersionMismatch(f"server {link.server.name}: {text}"))
        # Another cluster's server has taken a lost one's address; or the roster is without us, until we are registered
        # again. Only who has our name now ends us.
        elif code in ("malformed", "cluster", "unlisted"):
            raise ConnectionResetError(text)
        elif code == "stale-view":
            if not self.pushes.not_done(request, Status.STALE_VIEW, epoch):
                self._stall(request, epoch)
        elif code != "gap" or not self.pushes.not_done(request, Status.GAP, header.epoch):
            error = server_error(document, link.server.name)
            answered = not document.get("partly")
            if self.pulls.finish(request, error) or self.pushes.refused(request, error, answered):
                return
            if not self._calls.refused(request, error) and request:
                log.debug("server %s, to a request that is forgotten: %s", link.server.name, text)

    def _stall(self, request: int, epoch: int) -> None:
        """A server has another view than the one that a pull or a call was planned under: plan it again, as soon as
        there is a newer one or, should it be the same, at the next turn."""
        self._wanted.epoch = max(self._wanted.epoch, epoch)
        self.pulls.stall(request)
        self._calls.stall(request, self.routes)

    def _resume(self) -> None:
        """Plans again what has nobody to answer it."""
        self.pulls.resume()
        self._calls.resume(self.routes)

    # --- views --------------------------------------------------------------------------------------------------

    def _adopt(self, view: View) -> None:
        """Follows a newer view: links, pushes, reads and rounds."""
        if view.epoch <= self.routes.epoch or self.error is not None:
            return
        if view.cluster != self.cluster or view.ranges != self.routes.view.ranges:
            raise FrameError(f"a view of cluster {view.cluster!r} with {view.ranges} ranges is not this cluster's")
        log.info("worker %s follows epoch=%d reason=%r", self.worker.name, view.epoch, view.reason)
        self.routes = Routes(view)
        self._set_peers()
        self.pushes.adopt(self.routes)
        self.pulls.adopt(self.routes)
        self._calls.adopt(self.routes)

    def _set_peers(self) -> None:
        for member, peer in list(self._peers.items()):
            if member not in self.routes.index_of:
                del self._peers[member]
                self._close_link(peer)
        for info, member in zip(self.routes.view.servers, self.routes.members, strict=True):
            known = self._peers.get(member)
            if known is not None and known.info.address == info.address:
                continue
            if known is not None:
                self._close_link(known)
            link = Link(self.runtime, info, self._on_frame, self.pulls.sink)
            self._peers[member] = Peer(info, member, link, down_since_s=self.runtime.monotonic())
        self._driver.nudge()

    def _close_link(self, peer: Peer) -> None:
        self._driver.remove(peer.link)
        peer.link.close()
        self.pushes.disconnected(peer.member)

    def _from_store(self, view: View | None) -> None:
        with self._lock:
            self._wanted.reading = False
            if view is not None and self.error is None:
                try:
                    self._adopt(view)
                except FrameError as error:
                    log.warning("the coordination store: %s", error)
        self._driver.nudge()

    # --- connections --------------------------------------------------------------------------------------------

    def _welcomed(self, link: Link, document: dict[str, object]) -> None:
        """A server knows us: tell it whether, and where, we take part, then whatever it has to do for us."""
        peer = self._peers.get(link.member)
        if peer is None or peer.link is not link:
            return
        if document.get("incarnation") != peer.info.incarnation:
            text = f"it was started again (incarnation {document.get('incarnation')}) and has lost its ranges"
            raise ConnectionResetError(text)
        link.ready, peer.retry_in_s, peer.down_since_s, peer.trouble = True, RETRY_FIRST_S, None, ""
        self._send(peer.member, [self._presence.pack()])
        self.pushes.connected(peer.member)
        self._calls.connected(peer.member)
        self.pulls.connected(peer.member)

    def _broken(self, link: Link, error: Exception) -> None:
        with self._lock:
            peer = self._peers.get(link.member)
            if peer is None or peer.link is not link:
                return
            self._close_link(peer)
            if isinstance(error, VersionError):
                self._end(VersionMismatch(f"server {link.server.name}: {error}"))
            now = self.runtime.monotonic()
            peer.down_since_s = peer.down_since_s or now
            reason = error.strerror if isinstance(error, OSError) else None
            peer.trouble = reason.lower() if reason else str(error) or type(error).__name__
            peer.retry_at_s = now + peer.retry_in_s
            peer.retry_in_s = min(peer.retry_in_s * 2, RETRY_MOST_S)
        self._driver.nudge()

    def _cut(self, peer: Peer, why: str) -> None:
        self._broken(peer.link, ConnectionResetError(why))

    def _turn(self) -> bool:
        """The background thread's, a few times a second: opens links that are due, asks for views that are wanted,
        plans again what nobody answers; says whether there is anything to wait for."""
        if self.error is not None:
            return False
        if self._hurt:
            self._mend()
        with self._lock:
            now = self.runtime.monotonic()
            peers = list(self._peers.values())
            due = [p for p in peers if p.link.socket is None and now >= p.retry_at_s]
            for peer in peers:
                self._judge_silence(peer, now)
            self._resume()
            oldest = self.pushes.oldest, self.pulls.oldest, self._calls.oldest
            ready = [p for p in peers if p.link.ready]
            self._wanted.epoch = max(self._wanted.epoch, self.pushes.needed_epoch)
            lost = len(ready) < len(peers)
            want = self._wanted.turn(now, self.routes.epoch, lost, oldest, self._heard)
            if want.ask_servers:
                for peer in ready:
                    if not peer.link.unsent:
                        self._send(peer.member, [Header(Kind.GET_VIEW, epoch=self.routes.epoch).pack()])
            if want.ask_store:
                self._wanted.reading = True
                self._ask_view(self._from_store)
            waiting = any(oldest) or bool(self._calls or self.pushes.session.outstanding)
            busy = lost or waiting or any(p.link.unsent for p in peers)
        for peer in due:
            self._open(peer)
        return busy

    def _judge_silence(self, peer: Peer, now: float) -> None:
        link, waited_s = peer.link, now - peer.hello_at_s
        if link.socket is None or link.ready:
            return
        if link.unsent and waited_s > CONNECT_TIMEOUT_S:
            self._cut(peer, f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
        elif waited_s > HELLO_TIMEOUT_S:
            self._cut(peer, f"it accepted but said nothing for {HELLO_TIMEOUT_S:.0f} s")

    def _open(self, peer: Peer) -> None:
        """Not under the lock: a name may take long to resolve."""
        peer.hello_at_s = self.runtime.monotonic()
        try:
            peer.link.connect(self._hello)
        except OSError as error:
            self._broken(peer.link, error)
            return
        with self._lock:
            if peer.link.socket is None:  # closed again meanwhile
                return
            if self._peers.get(peer.member) is peer and self.error is None:
                self._driver.add(peer.link)
            else:
                peer.link.close()

    def explain(self) -> str:
        """Who is being waited for, for people."""
        with self._lock:
            now, routes = self.runtime.monotonic(), self.routes
            owing = self.pushes.session.owing()
            asked = self.pulls.asked | self._calls.asked
            told = []
            for member in sorted({*owing, *asked}):
                peer = self._peers[member]
                count = int((routes.view.heads == routes.index_of[member]).sum())
                state = "connected, not answering" if peer.down_since_s is None else (
                    f"unreachable for {now - peer.down_since_s:.1f} s ({peer.trouble})"
                )  # fmt: skip
                clock = f", owes step {owing[member]}" if member in owing else ""
                told.append(f"server {member.name} at {peer.info.address}, head of {count} ranges: {state}{clock}")
            if headless := self.pushes.session.headless:
                told.append(f"{headless} ranges have no server")
            waits = "; ".join(told) or "nothing is outstanding"
            return f"{waits}; the cluster's view is at epoch {routes.epoch}"
