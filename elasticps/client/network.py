"""What goes on between a client and its servers: links kept up, requests matched with answers, lost ones sent again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.view import ServerInfo, View, WorkerInfo
from elasticps.client.driver import Driver
from elasticps.client.link import Link
from elasticps.client.reads import Read, ReadPart, pull_frame
from elasticps.client.routing import Routes
from elasticps.client.session import Session
from elasticps.errors import (
    Closed,
    ClusterUnreachable,
    Error,
    ServerError,
    SpecError,
    Timeout,
    UnknownTable,
    VersionMismatch,
)
from elasticps.wire.frames import LAST, Buffer, FrameError, Header, Kind, VersionError, json_body, json_frame

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.01
RETRY_MOST_S = 1.0
HELLO_TIMEOUT_S = 5.0  # a server that accepts but does not answer is tried again after so long


@dataclass(eq=False)
class Call:
    """A small request that is repeated until it is answered: CREATE, INIT, JOIN."""

    server: str
    request: int
    buffers: Sequence[Buffer]
    answer: Header | None = None
    error: Exception | None = None

    def done(self) -> bool:
        return self.answer is not None or self.error is not None


@dataclass(eq=False)
class Peer:
    """A server as this client sees it."""

    info: ServerInfo
    link: Link
    retry_at_s: float = 0.0
    retry_in_s: float = RETRY_FIRST_S
    hello_at_s: float = 0.0
    down_since_s: float | None = None
    trouble: str = "not connected yet"
    calls: list[Call] = field(default_factory=list)


class Network:
    """Links to all servers of the view. Frames that were not answered when a link broke are sent again on the next
    one, in their order and before anything new; servers recognise duplicates."""

    def __init__(
        self,
        cluster: str,
        worker: WorkerInfo,
        view: View,
        session: Session,
        lock: threading.RLock,
        requests: Iterator[int],
    ) -> None:
        self.cluster = cluster
        self.worker = worker
        self.routes = Routes(view)
        self.error: Error | None = None  # once set, nothing goes on
        self._session = session
        self._lock = lock
        self._requests = requests
        self._peers: dict[str, Peer] = {}
        self._pulls: dict[int, ReadPart] = {}
        self._calls: dict[int, Call] = {}
        self._creates: dict[int, bytes] = {}  # table id -> CREATE body, repeated on every new connection
        self._driver = Driver(self._broken, self._turn)
        self._set_peers()

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
        for peer in self._peers.values():
            peer.link.close()

    def check(self) -> None:
        """Raises what has ended this client, if anything has."""
        if self.error is not None:
            raise self.error

    def fence(self, text: str) -> None:
        """Ends everything: another incarnation of this worker has taken over."""
        self._end(Closed(text))

    def _end(self, error: Error) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self._session.fail(error)
            for part in self._pulls.values():
                part.read.error = error
            for call in self._calls.values():
                call.error = error
            self._pulls.clear()
            self._calls.clear()

    def serving(self) -> list[ServerInfo]:
        """Servers that head or answer for some range."""
        return [p.info for p in self._serving()]

    def _serving(self) -> list[Peer]:
        used = np.unique(np.concatenate([self.routes.view.heads, self.routes.view.tails]))
        return [self._peers[self.routes.view.servers[i].name] for i in used.tolist() if i >= 0]

    def _set_peers(self) -> None:
        for info in self.routes.view.servers:
            peer = self._peers.get(info.name)
            if peer is None or peer.info != info:
                if peer is not None:
                    self._driver.remove(peer.link)
                    peer.link.close()
                link = Link(info, self._on_frame, self._sink)
                self._peers[info.name] = Peer(info, link, down_since_s=time.monotonic())

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, server: str, buffers: Sequence[Buffer]) -> None:
        """Sends to a server if it can be reached; otherwise the next connection will."""
        peer = self._peers[server]
        if not peer.link.ready:
            return
        try:
            if not peer.link.send(buffers):
                self._driver.want_write(peer.link)
        except OSError as error:
            self._driver.remove(peer.link)
            self._broken(peer.link, error)

    def nudge(self) -> None:
        self._driver.nudge()

    def start_call(self, server: str, request: int, buffers: Sequence[Buffer]) -> Call:
        call = Call(server, request, buffers)
        with self._lock:
            self.check()
            self._calls[request] = call
            self.send(server, buffers)
        return call

    def finish_calls(self, calls: Sequence[Call], timeout_s: float, what: str) -> None:
        """Waits for all; raises the first error, or `Timeout`."""
        if not self.wait(lambda: all(c.done() for c in calls), time.monotonic() + timeout_s):
            for call in calls:
                self._calls.pop(call.request, None)
            raise Timeout(f"{what} took longer than {timeout_s:.1f} s: {self.explain()}")
        for call in calls:
            if call.error is not None:
                raise call.error

    def create_table(self, table_id: int, spec: str, timeout_s: float) -> None:
        """Makes the table known to every server, now and on every later connection."""
        document = {"id": table_id, "spec": spec}
        calls = []
        with self._lock:
            self._creates[table_id] = json_frame(Kind.CREATE, document)
            for info in self.serving():
                request = next(self._requests)
                calls.append(self.start_call(info.name, request, [json_frame(Kind.CREATE, document, request=request)]))
        self.finish_calls(calls, timeout_s, "creating a table")

    def start_read(self, read: Read, bound: int, wait_ms: int) -> None:
        """Asks for a read's parts; `bound` and `wait_ms` as in the PULL header."""
        with self._lock:
            self.check()
            read.bound, read.wait_ms = bound, wait_ms
            self._ask(read)
        self._driver.nudge()

    def _ask(self, read: Read) -> None:
        parts = read.plan(self.routes)
        for part in parts:
            part.request = next(self._requests)
            read.parts[part.request] = self._pulls[part.request] = part
        for part in parts:
            self._send_pull(part)

    def _send_pull(self, part: ReadPart) -> None:
        self.send(part.server, pull_frame(part, self.routes.epoch, self.worker.id))

    def forget_read(self, read: Read) -> None:
        """Drops what is still unanswered of a read; late answers are thrown away."""
        with self._lock:
            for request in read.parts:
                self._pulls.pop(request, None)
            read.parts.clear()

    def wait(self, done: Callable[[], bool], deadline_s: float) -> bool:
        return self._driver.wait(lambda: done() or self.error is not None, deadline_s) and done()

    # --- receiving ----------------------------------------------------------------------------------------------

    def _sink(self, header: Header) -> Sequence[memoryview] | None:
        if header.kind != Kind.ROWS:
            return None
        part = self._pulls.get(header.request)
        return None if part is None else part.views(header)

    def _on_frame(self, link: Link, header: Header, body: NDArray[np.uint8]) -> None:
        with self._lock:
            if header.kind == Kind.OK:
                if not self._session.answered(header.request):
                    call = self._calls.pop(header.request, None)
                    if call is not None:
                        call.answer = header
            elif header.kind == Kind.ROWS:
                if header.flags & LAST:
                    self._finish_part(header.request, None)
            elif header.kind == Kind.ERROR:
                self._on_error(link, header, json_body(body.data))
            elif header.kind == Kind.VIEW:
                self._adopt(View.decode(body[: header.items].tobytes()))
            elif header.kind == Kind.WELCOME:
                self._welcomed(link, json_body(body.data))
            else:
                raise FrameError(f"{Kind(header.kind).name} is not an answer")

    def _finish_part(self, request: int, error: Exception | None) -> None:
        part = self._pulls.pop(request, None)
        if part is None:
            return
        part.read.error = part.read.error or error
        del part.read.parts[request]

    def _on_error(self, link: Link, header: Header, document: dict[str, object]) -> None:
        code, text = document.get("code"), str(document.get("message"))
        if code == "fenced":
            self._end(Closed(text))
        elif code == "version":
            self._end(VersionMismatch(f"server {link.server.name}: {text}"))
        elif code == "cluster":
            self._end(ClusterUnreachable(text))
        elif code == "malformed":
            raise ConnectionResetError(text)
        elif code == "stale-view" and header.request in self._pulls:
            read = self._pulls[header.request].read
            for request in list(read.parts):
                self._pulls.pop(request, None)
            read.parts.clear()
            self._ask(read)
        else:
            error = _server_error(code, link.server.name, text)
            if header.request in self._pulls:
                self._finish_part(header.request, error)
            elif not self._session.answered(header.request, error):
                call = self._calls.pop(header.request, None)
                if call is not None:
                    call.error = error
                elif header.request:
                    log.warning("server %s: %s", link.server.name, text)

    def _adopt(self, view: View) -> None:
        if view.epoch > self.routes.epoch:
            self.routes = Routes(view)
            self._set_peers()

    # --- connections --------------------------------------------------------------------------------------------

    def _welcomed(self, link: Link, document: dict[str, object]) -> None:
        """A server knows us: send what it may have missed, in order, before anything new."""
        peer = self._peers[link.server.name]
        if document.get("incarnation") != peer.info.incarnation:
            text = f"it was started again (incarnation {document.get('incarnation')}) and has lost its ranges"
            raise ConnectionResetError(text)
        peer.link.ready, peer.retry_in_s, peer.down_since_s, peer.trouble = True, RETRY_FIRST_S, None, ""
        for body in self._creates.values():
            self.send(peer.info.name, [body])
        for call in list(self._calls.values()):
            if call.server == peer.info.name:
                self.send(call.server, call.buffers)
        for frame in self._session.unanswered(peer.info.name):
            self.send(frame.server, frame.buffers)
        for part in list(self._pulls.values()):
            if part.server == peer.info.name:
                self._send_pull(part)

    def _broken(self, link: Link, error: Exception) -> None:
        with self._lock:
            peer = self._peers[link.server.name]
            if peer.link is not link:
                return
            link.close()
            if isinstance(error, VersionError):
                self._end(VersionMismatch(f"server {link.server.name}: {error}"))
            now = time.monotonic()
            peer.down_since_s = peer.down_since_s or now
            peer.trouble = str(error) or type(error).__name__
            peer.retry_at_s = now + peer.retry_in_s
            peer.retry_in_s = min(peer.retry_in_s * 2, RETRY_MOST_S)
        self._driver.nudge()

    def _turn(self) -> bool:
        """The background thread's: opens links that are due; says whether there is anything to wait for."""
        busy = False
        for peer in list(self._peers.values()):
            if not peer.link.ready and self.error is None:
                busy = True
                self._open(peer, time.monotonic())
            busy = busy or peer.link.unsent
        return bool(busy or self._session.outstanding or self._pulls or self._calls)

    def _open(self, peer: Peer, now: float) -> None:
        if peer.link.socket is not None:
            if now - peer.hello_at_s > HELLO_TIMEOUT_S:
                self._driver.remove(peer.link)
                self._broken(peer.link, TimeoutError(f"it accepted but said nothing for {HELLO_TIMEOUT_S:.0f} s"))
            return
        if now < peer.retry_at_s:
            return
        hello = {"cluster": self.cluster, "worker": self.worker.id, "name": self.worker.name, "app": self.worker.app}
        try:
            peer.link.connect()
            peer.hello_at_s = now
            self._driver.add(peer.link)
            peer.link.send([json_frame(Kind.HELLO, hello)])
        except OSError as error:
            self._driver.remove(peer.link)
            self._broken(peer.link, error)

    def explain(self) -> str:
        """Who is being waited for, for people."""
        now = time.monotonic()
        oldest = self._session.waiting_for()
        names = {*oldest, *(p.server for p in self._pulls.values()), *(c.server for c in self._calls.values())}
        told = []
        for name in sorted(names):
            peer = self._peers[name]
            index = self.routes.view.index(name)
            count = int((self.routes.view.heads == index).sum())
            state = "connected, not answering" if peer.down_since_s is None else (
                f"unreachable for {now - peer.down_since_s:.1f} s ({peer.trouble})"
            )  # fmt: skip
            clock = f", owes step {oldest[name]}" if name in oldest else ""
            told.append(f"server {name} at {peer.info.address}, head of {count} ranges: {state}{clock}")
        return "; ".join(told) or "nothing is outstanding"


def _server_error(code: object, server: str, text: str) -> Exception:
    if code == "spec":
        return SpecError(text)
    if code == "unknown-table":
        return UnknownTable(text)
    if code == "behind":
        return Timeout(text)
    return ServerError(f"server {server} refused: {text}")
