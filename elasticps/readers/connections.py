"""A reader's connections: follows views, subscribes at tails, and hands on what servers send, in order.

All of it runs in the background thread of the links, under one lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View
from elasticps.client.connections import PeerConnections, ending_error
from elasticps.client.core.new_views import SPEAK_OF_VIEWS, NewViews
from elasticps.client.core.routing import routes_of
from elasticps.client.registry import Registry
from elasticps.client.runtime import Lock
from elasticps.client.transport import Link, LinkDriver, LinkReceiver
from elasticps.errors import Closed, Error, VersionMismatch
from elasticps.readers.core.following import Feed, Following, OutOfOrder, Unacknowledged, Wishes
from elasticps.readers.core.relay_choice import StaleWatch
from elasticps.wire.frames import FrameError, Header, Kind, VersionError, json_body, json_frame
from elasticps.wire.headers import GetViewHeader
from elasticps.wire.range_parts import RangePart, ReadRange
from elasticps.wire.windows import Subscribed, WindowFrame, window_ack

log = logging.getLogger(__name__)

RETRY_S = 0.1  # a server that does not answer for all ranges that it was asked for is asked again
SILENT_S = 5.0  # a server that has sent nothing for so long, and a few windows, is connected again
TURN_MOST_S = 0.5  # of that counts between two looks: this process may have been stopped meanwhile
ACK_BYTES, ACK_WINDOWS = 2 << 20, 64  # an acknowledgement for so many, of 8 MB that may be on their way
ACK_S = 1.0  # and after so long: servers say in `elasticps status` how new what was acknowledged is
Bytes = NDArray[np.uint8]


class Sink(Protocol):
    """Takes what servers send. Called under the lock."""

    def subscribed(self, feed: Feed, ranges: NDArray[np.int64]) -> None:
        """A server has begun to answer for these ranges; what it had said of workers' clocks there comes again."""

    def queue(self, feed: Feed, header: Header, body: Bytes) -> bool:
        """Queues a frame that is not to be handled now; whether it did."""

    def window(self, feed: Feed, frame: WindowFrame, body: Bytes) -> None:
        """A window has come. Its arrays are views of the body."""

    def describe(self, request: ReadRange) -> ReadRange:
        """A request, with what of it is here already."""

    def rows(self, feed: Feed, rows: RangePart) -> None:
        """A part of a range has come, which counts. Its arrays are views of the body."""

    @property
    def full(self) -> bool:
        """Whether so much is queued that servers are to send nothing."""

    def settle(self) -> None:
        """Called without the lock, behind each frame: to tell others."""


class ReaderConnections:
    """following: which server is followed for each range. error: once set, nothing goes on."""

    def __init__(
        self, registry: Registry, lock: Lock, name: str, app: str, wishes: Wishes, timeout_s: float, sink: Sink
    ) -> None:  # fmt: skip
        runtime = registry.runtime
        view = registry.first_view(timeout_s)
        self.error: Error | None = None
        self.routes = routes_of(view)  # of the newest view
        self.following = Following(view, wishes)
        self._runtime = runtime  # clock, threads, sockets
        self._lock = lock  # of all here and of what the sink has
        self._name = name  # for the log
        self._sink = sink  # takes windows and rows
        self._again_s: dict[Feed, float] = {}  # when to subscribe again
        self._silent_s = SILENT_S + 3 * wishes.every_ms / 1e3
        self._stale = StaleWatch(wishes.every_ms / 1e3, several=registry.several)  # has other relays asked
        self._looked_s = runtime.monotonic()  # for silent servers
        self._silences: dict[Feed, tuple[int, float]] = {}  # bytes received then, and for how long none have come
        self._new_views = NewViews(
            view.cluster, view.ranges, registry.ask_view, self._from_store, authenticated=registry.authenticated
        )
        self._driver = LinkDriver(runtime, self._broken, self._turn, self._failed)
        hello = json_frame(Kind.HELLO, {"cluster": view.cluster, "reader": name, "app": app})
        receiver = LinkReceiver(self._on_frame, lambda header: None, lambda link, staging, start, end: start)
        self._connections = PeerConnections(
            runtime, self._driver, lock, hello, receiver, self.following.gone, registry.credentials
        )
        self._connections.follow(self.routes)

    def start(self) -> None:
        """Begins to connect."""
        self._driver.start()

    def close(self) -> None:
        """Ends all connections."""
        self.end(Closed("the reader is closed"))
        self._driver.close()
        self._connections.close()

    def end(self, error: Error) -> None:
        """Nothing goes on from here."""
        self.error = self.error or error

    def explain(self) -> str:
        """Which servers cannot be reached, and what is missing, for people."""
        with self._lock:
            missing = [f"{peer.info.name} at {peer.info.address} ({peer.trouble})"
                       for peer in self._connections.missing.values()]  # fmt: skip
            absent = int((self.following.have < 0).sum())
        servers = f"; not connected: server {', '.join(missing)}" if missing else ""
        return f"{absent} of {self.following.ranges} ranges are not here yet{servers}"

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, ever."""
        return self._connections.traffic

    def acknowledge(self, feed: Feed, number: int, nbytes: int) -> None:
        """A window of so many bytes needs no room any more: tells its server, of several at once."""
        waiting, since_s = feed.unacknowledged.nbytes + nbytes, feed.unacknowledged.since_s
        now_s = self._runtime.monotonic()
        due = waiting > ACK_BYTES or number % ACK_WINDOWS == 0 or now_s - since_s >= ACK_S
        if due and self.following.feeds.get(feed.member) is feed:
            waiting, since_s = 0, now_s
            self._connections.send(feed.member, [window_ack(number)])
        feed.unacknowledged = Unacknowledged(waiting, since_s)

    def subscribe(self, feed: Feed, fine_ms: int = 0) -> None:
        """Asks a server for its ranges, again perhaps. fine_ms: with a window after each change, for so long."""
        feed.fine_ms = fine_ms
        self._again_s.pop(feed, None)
        self._connections.send(feed.member, self.following.subscribe(feed).frame())

    # --- frames -----------------------------------------------------------------------------------------------------

    def _on_frame(self, link: Link, header: Header, body: Bytes) -> None:
        with self._lock:
            if self.error is not None:
                return
            self._new_views.heard += link.ready
            try:
                self._handle(link, header, body)
            except OutOfOrder as error:
                raise FrameError(str(error)) from None
        self._sink.settle()

    def _handle(self, link: Link, header: Header, body: Bytes) -> None:
        kind, feed = header.kind, self.following.feeds.get(link.member)
        if header.epoch > self.routes.epoch:
            self._new_views.need(header.epoch)
        if kind == Kind.WELCOME:
            if self._connections.welcomed(link, json_body(body.data)):
                self.subscribe(self.following.connected(link.member))
        elif kind == Kind.ERROR:
            self._on_error(link, feed, header, json_body(body.data))
        elif kind in SPEAK_OF_VIEWS:
            self._hear_of(link, header, body)
        elif feed is None:
            raise FrameError(f"{Kind(kind).name} came before WELCOME")
        elif not self._sink.queue(feed, header, body):
            self.handle(feed, header, body)

    def handle(self, feed: Feed, header: Header, body: Bytes) -> None:
        """Does what a frame of a server says that is followed."""
        kind, ranges = header.kind, self.following.ranges
        if kind == Kind.SUBSCRIBED:
            self._subscribed(feed, Subscribed.of(header, body, ranges))
        elif kind == Kind.WINDOW:
            frame = WindowFrame.of(header, body, ranges)
            self.following.window(feed, frame)
            self._sink.window(feed, frame, body)
        elif kind == Kind.RANGE_ROWS:
            rows = RangePart.of(header, body, ranges)
            counts, asks = self.following.rows(feed, rows)
            if counts:
                self._sink.rows(feed, rows)
            self.ask(feed, asks)
        else:
            raise FrameError(f"{Kind(kind).name} is nothing that a server says to a reader")

    def ask(self, feed: Feed, asks: Sequence[ReadRange]) -> None:
        """Asks a server for parts of ranges."""
        for one in asks:
            self._connections.send(feed.member, self._sink.describe(one).frame())

    def _subscribed(self, feed: Feed, answer: Subscribed) -> None:
        whole = self.following.answered(feed, answer)
        self._sink.subscribed(feed, np.concatenate([answer.continued, answer.unknown]))
        if not whole:
            self._again_s[feed] = self._runtime.monotonic() + RETRY_S

    def _on_error(self, link: Link, feed: Feed | None, header: Header, document: dict[str, object]) -> None:
        code, text, epoch = document.get("code"), str(document.get("message")), document.get("epoch")
        if (ending := ending_error(document, link.server.name, "reader")) is not None:
            self.end(ending)
        elif code == "stale-view" and feed is not None:
            self._new_views.need(epoch if isinstance(epoch, int) else header.epoch)
            self._again_s[feed] = self._runtime.monotonic() + RETRY_S
        else:
            raise ConnectionResetError(text)

    # --- views ------------------------------------------------------------------------------------------------------

    def _hear_of(self, link: Link, header: Header, body: Bytes) -> None:
        now_s = self._runtime.monotonic()
        view, since = self._new_views.read(now_s, header, body, self.routes.view)
        if since is not None:
            self._connections.send(link.member, [GetViewHeader(since).header().pack()])
        if view is not None and self._new_views.hear(now_s, link.member, view):
            self._adopt(view)
        elif self._new_views.doubted:
            self._driver.nudge()

    def _from_store(self, view: View | None) -> None:
        with self._lock:
            newest = self._new_views.choose(self._runtime.monotonic(), self.routes.epoch, view)
            if newest is not None and self.error is None:
                self._adopt(newest)
        self._driver.nudge()

    def _adopt(self, view: View) -> None:
        if view.epoch <= self.routes.epoch:
            return
        log.info("reader %s follows epoch=%d reason=%r", self._name, view.epoch, view.reason)
        self.routes = routes_of(view)
        self._new_views.followed(self._runtime.monotonic())
        due = self.following.adopt(view)
        self._connections.follow(self.routes)
        for feed in due:
            if self.following.feeds.get(feed.member) is feed:
                self.subscribe(feed)

    # --- the background thread ----------------------------------------------------------------------------------------

    def _broken(self, link: Link, error: Exception) -> None:
        with self._lock:
            if self._connections.broken(link, error) and isinstance(error, VersionError):
                self.end(VersionMismatch(f"server {link.server.name}: {error}"))
        self._driver.nudge()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            log.error("reader %s cannot go on", self._name, exc_info=error)
            ended = Closed(f"the reader has failed and cannot go on: {error!r}; open another one")
            ended.__cause__ = error
            self.end(ended)

    def _turn(self) -> bool:
        if self.error is not None:
            return False
        with self._lock:
            connections, now = self._connections, self._runtime.monotonic()
            due = connections.due()
            connections.judge_silence()
            self._judge_feeds(now)
            connections.renew()
            for feed in [feed for feed, when_s in self._again_s.items() if when_s <= now]:
                del self._again_s[feed]
                if self.following.feeds.get(feed.member) is feed:
                    self.subscribe(feed)
            lost = bool(connections.missing) or bool((self.routes.view.tails < 0).any())
            chance = self._runtime.chance
            if self._stale.due(now, self._runtime.wall(), int(self.following.time_us.min())):
                self._new_views.ask_store()
            if self._new_views.turn(now, self.routes.epoch, lost, (0,), chance()):
                connections.send_to_one([GetViewHeader(self.routes.epoch).header().pack()], chance())
        for peer in due:
            connections.open(peer)
        self._sink.settle()
        return True

    def _judge_feeds(self, now: float) -> None:
        """Connects again to servers that are silent. Each sends a window a few times a second, if only to say how new
        its state is; and whoever has vanished, or is behind a network that has forgotten the connection, says nothing.
        """
        passed_s, self._looked_s = min(now - self._looked_s, TURN_MOST_S), now
        before, self._silences = self._silences, {}
        for feed in list(self.following.feeds.values()):
            received = self._connections.received_from(feed.member)
            seen, silent_s = before.get(feed, (-1, 0.0))
            silent_s = 0.0 if received != seen or self._sink.full else silent_s + passed_s
            self._silences[feed] = received, silent_s
            if silent_s > self._silent_s:
                self._connections.cut(feed.member, f"it has sent nothing for {self._silent_s:.0f} s")
