"""Links to servers of a view: opened when they are needed, greeted, tried again when they break, closed when unused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import ServerInfo
from elasticps.client.core.routing import Routes
from elasticps.client.core.session import PushSession
from elasticps.client.runtime import Lock, Runtime
from elasticps.client.short_keys import ShortKeys
from elasticps.client.transport import Link, LinkDriver, LinkReceiver
from elasticps.errors import (
    Closed,
    ConfigError,
    Error,
    LeftOut,
    NotFinite,
    ServerError,
    ServerFull,
    SpecError,
    Timeout,
    UnknownTable,
    VersionMismatch,
)  # fmt: skip
from elasticps.wire.activity import Activity, UseHeader
from elasticps.wire.frames import Buffer
from elasticps.wire.refusals import RefusedRows, decode_refused
from replication.chain import Member

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

RETRY_FIRST_S = 0.01
RETRY_MOST_S = 0.5
CONNECT_TIMEOUT_S = 1.0
HELLO_TIMEOUT_S = 5.0  # a server that accepts but does not answer is tried again after so long
UNUSED_S = 60.0  # a link that brought and took nothing for one or two of these is closed
LOST_S = 0.1  # a server that is not connected by then counts as lost


@dataclass(eq=False)
class ServerPeer:
    """A server as this client sees it."""

    info: ServerInfo
    member: Member
    link: Link
    retry_at_s: float = 0.0
    retry_in_s: float = RETRY_FIRST_S
    hello_at_s: float = 0.0
    down_since_s: float | None = None
    trouble: str = "not connected yet"
    keys: ShortKeys = field(default_factory=ShortKeys)
    empty_as: int = 0  # the incarnation that answers in its place, without its rows
    bytes_seen: int = -1  # sent and received as unused links were last looked for


class PeerConnections:
    """Links to servers. Runs under `lock`, except for `open_due`. `hello` is the first frame on each; what they
    receive goes to `receiver`; `on_gone(member)` hears that a link, and what was in flight on it, is gone. standing:
    the servers of a view to which there is always a link, all without it. To others there is one from when something
    is to be asked there (`send_all`, `want`) until `close_unused`."""

    def __init__(
        self,
        runtime: Runtime,
        driver: LinkDriver,
        lock: Lock,
        hello: bytes,
        receiver: LinkReceiver,
        on_gone: Callable[[Member], None],
        credentials: Credentials | None = None,
        standing: Callable[[Routes], Sequence[Member]] = attrgetter("members"),
    ) -> None:
        self.peers: dict[Member, ServerPeer] = {}  # those to which there is to be a link
        self.missing: dict[Member, ServerPeer] = {}  # the peers whose present link is not ready
        self._runtime = runtime
        self._driver = driver
        self._lock = lock
        self._hello = hello
        self._receiver = receiver
        self._on_gone = on_gone
        self._credentials = credentials
        self._standing_of = standing
        self._routes: Routes | None = None  # None before the first view, and once all is closed
        self._look_at_s = 0.0  # for unused links
        self._gathered: dict[Member, list[Buffer]] | None = None  # what is to leave together
        self.breaks = 0  # connections that ended and were not given up
        self._before = (0, 0)  # bytes sent and received over links that there are no more

    def report_use(self, member: Member, session: PushSession, others: tuple[int, int, int]) -> None:
        """Answers a WATCH. others: what an `Activity` has of caches and shards."""
        use = Activity(session.clock, min(session.committed, session.clock), *self.traffic, *others)
        self.send(member, [UseHeader(session.worker).header().pack(), use.body()])

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, ever."""
        sent, received = self._before
        for peer in list(self.peers.values()):
            sent, received = sent + peer.link.sent, received + peer.link.received
        return sent, received

    @property
    def ready(self) -> list[ServerPeer]:
        """Those that have welcomed us."""
        return [peer for peer in list(self.peers.values()) if peer.link.ready]

    def follow(self, routes: Routes) -> None:
        """Keeps links to servers of this view, and no others."""
        self._routes = routes
        empty = dict(routes.view.empty)  # such a server may listen elsewhere now, where its hello says it to nobody
        for member, peer in list(self.peers.items()):
            index = routes.index_of.get(member)
            if index is not None and routes.view.servers[index].address == peer.info.address:
                peer.empty_as = empty.get(peer.info.name, peer.empty_as)
                continue
            self._forget(peer)
            self.want(member)
        for member in self.standing:
            self.want(member)
        self._driver.nudge()

    @property
    def standing(self) -> Sequence[Member]:
        """The servers to which there is always a link."""
        return () if self._routes is None else self._standing_of(self._routes)

    def want(self, member: Member) -> ServerPeer | None:
        """Sees to it that there is, or will be, a link to a server of the view; None for any other."""
        if (known := self.peers.get(member)) is not None:
            return known
        routes = self._routes
        if routes is None or (index := routes.index_of.get(member)) is None:
            return None
        info = routes.view.servers[index]
        link = Link(self._runtime, info, self._receiver, self._credentials)
        since, empty = self._runtime.monotonic(), dict(routes.view.empty)
        peer = ServerPeer(info, member, link, down_since_s=since, empty_as=empty.get(info.name, 0))
        self.peers[member] = self.missing[member] = peer
        self._driver.nudge()
        return peer

    def unready(self, members: Iterable[Member]) -> list[ServerPeer]:
        """Those of these servers of the view that have not welcomed us; each is wanted from now on."""
        return [peer for peer in map(self.want, members) if peer is not None and not peer.link.ready]

    def close_unused(self, needed: Callable[[], Collection[Member]]) -> None:
        """Looks every UNUSED_S for links that have brought and taken nothing since, and closes them: neither the
        standing ones nor those to the servers that are `needed`."""
        now = self._runtime.monotonic()
        if now < self._look_at_s or self._gathered is not None:
            return
        self._look_at_s = now + UNUSED_S
        unused, standing = [], self.standing
        for member, peer in self.peers.items():
            seen, peer.bytes_seen = peer.bytes_seen, peer.link.sent + peer.link.received
            if seen == peer.bytes_seen and member not in standing and not peer.link.has_backlog:
                unused.append(peer)
        if unused:
            keep = needed()
            for peer in unused:
                if peer.member not in keep:
                    self._forget(peer)

    def send(self, member: Member, buffers: Sequence[Buffer]) -> None:
        """Tells a server something, if it is connected: what it is to know on its next connection it is told then."""
        if member in self.peers:
            self.send_all({member: buffers})

    def send_to_one(self, buffers: Sequence[Buffer], chance: float) -> None:
        """Sends to one of the servers that take it at once; if there is none, another one is connected. chance: a
        random number, 0 to below 1."""
        if free := [peer.member for peer in self.ready if not peer.link.has_backlog]:
            self.send(free[int(chance * len(free))], buffers)
        elif self._routes is not None and self._routes.members:
            self.want(self._routes.members[int(chance * len(self._routes.members))])

    def ask(self, member: Member, buffers: Sequence[Buffer]) -> None:
        """Asks a server, as `send_all` does several."""
        self.send_all({member: buffers})

    def send_all(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        """Sends to servers; to those that are not connected whoever wants an answer sends it again when they are."""
        for member in frames:
            if member not in self.peers:
                self.want(member)
        if self._gathered is None:
            self._send(frames)
            return
        for member, buffers in frames.items():
            self._gathered.setdefault(member, []).extend(buffers)

    def gather(self) -> None:
        """Until `release` what is sent to a server waits, and leaves in one message then; all under the lock."""
        self._gathered = {}

    def release(self) -> None:
        """Sends what was gathered. If this, or what was to be gathered, ends with an exception: `abandon`."""
        self._send(self._gathered or {})
        self._gathered = None

    def abandon(self) -> bool:
        """Stops batching. True if a batch may have been partly sent."""
        gathered, self._gathered = self._gathered, None
        return bool(gathered)

    def _send(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        peers = self.peers
        self._driver.send(
            [(peers[member].link, frames[member]) for member in frames if member in peers and peers[member].link.ready]
        )

    def keys_of(self, member: Member) -> ShortKeys | None:
        """Who shortens the keys of frames for a server that can be reached now."""
        peer = self.peers.get(member)
        return peer.keys if peer is not None and peer.link.ready else None

    def welcomed(self, link: Link, document: dict[str, object]) -> bool:
        """A server has answered our hello. False if it is not wanted any more; raises if it is not the one we think."""
        peer = self.peers.get(link.member)
        if peer is None or peer.link is not link or link.socket is None:  # closed, after this had been received
            return False
        incarnation = document.get("incarnation")
        if incarnation != peer.info.incarnation:
            peer.empty_as = incarnation if isinstance(incarnation, int) else 0
            raise ConnectionResetError(f"it was started again (incarnation {incarnation}) and has lost its ranges")
        link.ready, peer.retry_in_s, peer.down_since_s, peer.trouble = True, RETRY_FIRST_S, None, ""
        peer.keys.connected()
        self.missing.pop(link.member, None)
        return True

    def broken(self, link: Link, error: Exception) -> bool:
        """A link has ended: it is opened again after a while. False if it is not wanted any more."""
        peer = self.peers.get(link.member)
        if peer is None or peer.link is not link:
            return False
        self.breaks += link.ready
        self._close(peer)
        now = self._runtime.monotonic()
        peer.down_since_s = peer.down_since_s or now
        reason = error.strerror if isinstance(error, OSError) else None
        peer.trouble = reason.lower() if reason else str(error) or type(error).__name__
        peer.retry_at_s = now + peer.retry_in_s
        peer.retry_in_s = min(peer.retry_in_s * 2, RETRY_MOST_S)
        return True

    def stop_receiving(self, member: Member, request: int) -> None:
        """Nobody wants an answer any more. If half of it has been received, into a caller's memory, the connection ends
        here, so that the other half lands nowhere."""
        peer = self.peers.get(member)
        if peer is not None and peer.link.sinking == request:
            self._cut(peer, "its answer was no longer wanted")

    def begin_afresh(self) -> None:
        """Closes every link, to be opened again at once."""
        for peer in self.peers.values():
            self._driver.remove(peer.link)
            peer.link.close()
            peer.retry_at_s = 0.0
        self.missing = dict(self.peers)

    def close(self) -> None:
        """Closes every link for good."""
        self._routes = None
        for peer in list(self.peers.values()):
            peer.link.close()

    def disown(self) -> None:
        """In a forked child: closes its descriptors; the connections are the parent's."""
        for peer in self.peers.values():
            if peer.link.socket is not None:
                peer.link.socket.close()

    def judge_silence(self) -> None:
        """Gives up connections that do not come about."""
        now = self._runtime.monotonic()
        for peer in list(self.missing.values()):
            link, waited_s = peer.link, now - peer.hello_at_s
            if link.socket is None or link.ready:
                continue
            if link.has_backlog and waited_s > CONNECT_TIMEOUT_S:
                self._cut(peer, f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
            elif waited_s > HELLO_TIMEOUT_S:
                self._cut(peer, f"it accepted but said nothing for {HELLO_TIMEOUT_S:.0f} s")

    def renew(self) -> None:
        """Connects anew where certificates were renewed or are about to end: to one server after the other."""
        if self._credentials is not None and not self.missing:
            for peer in self.peers.values():
                if peer.link.stale:
                    self._cut(peer, "certificates are renewed")
                    return

    @property
    def busy(self) -> bool:
        """Whether a link is to be opened, or has more to send than its socket takes."""
        return bool(self.missing) or any(peer.link.has_backlog for peer in self.peers.values())

    @property
    def lost(self) -> bool:
        """Whether some server that is to be connected cannot be, or not soon."""
        now = self._runtime.monotonic()
        return any(
            peer.retry_in_s > RETRY_FIRST_S or now - (peer.down_since_s or now) > LOST_S
            for peer in self.missing.values()
        )

    def due(self) -> list[ServerPeer]:
        """Whose link is to be opened now."""
        now = self._runtime.monotonic()
        return [p for p in self.missing.values() if p.link.socket is None and now >= p.retry_at_s]

    def open(self, peer: ServerPeer) -> None:
        """Not under the lock: a name may take long to resolve."""
        peer.hello_at_s = self._runtime.monotonic()
        try:
            peer.link.connect(self._hello)
        except OSError as error:
            with self._lock:
                self.broken(peer.link, error)
            self._driver.nudge()
            return
        with self._lock:
            if peer.link.socket is None:  # closed again meanwhile
                return
            if self.peers.get(peer.member) is peer and self._routes is not None:
                self._driver.add(peer.link)
            else:
                peer.link.close()

    def received_from(self, member: Member) -> int:
        """Bytes that a server has sent, ever; 0 if there is to be no link to it."""
        peer = self.peers.get(member)
        return 0 if peer is None else peer.link.received

    def cut(self, member: Member, why: str) -> None:
        """Connects to a server again."""
        if (peer := self.peers.get(member)) is not None:
            self._cut(peer, why)

    def _cut(self, peer: ServerPeer, why: str) -> None:
        self.broken(peer.link, ConnectionResetError(why))
        self._driver.nudge()

    def _forget(self, peer: ServerPeer) -> None:
        """Gives a link up, which is no break."""
        del self.peers[peer.member]
        self.missing.pop(peer.member, None)
        self._drop(peer)

    def _drop(self, peer: ServerPeer) -> None:
        self._close(peer)
        self._before = self._before[0] + peer.link.sent, self._before[1] + peer.link.received

    def _close(self, peer: ServerPeer) -> None:
        self._driver.remove(peer.link)
        peer.link.close()
        if self.peers.get(peer.member) is peer:
            self.missing[peer.member] = peer
        self._on_gone(peer.member)


def refused_by(server: str, body: NDArray[np.uint8], ranges: int) -> list[tuple[int, Exception, RefusedRows]]:
    """(clock, error, rows) of steps of which a server refused rows. ranges: of the cluster."""
    return [(clock, server_error(why, server), rows) for clock, why, rows in decode_refused(body, ranges)]


_NO_SPEC = "a table's spec must be an object of"  # what a server says of a spec that has more than it knows
_EARLIER = (
    "Server {} is of an earlier version than this worker, and its tables neither grow nor forget: upgrade the servers "
    "(docs/guides/machines.md), or make the table without admission, eviction and usage"
)

_CERTIFICATE = (
    "Name the certificate of this application and role as cert= and key= in the URL; elasticps certificates makes one "
    "(docs/guides/serve.md for readers)"
)


def server_error(document: Mapping[str, Any], server: str) -> Exception:
    """What a refusal is raised as."""
    code, text = document.get("code"), str(document.get("message"))
    if code == "spec":
        return SpecError(f"{text}. {_EARLIER.format(server)}" if text.startswith(_NO_SPEC) else text)
    if code == "unknown-table":
        return UnknownTable(text)
    if code == "behind":
        return Timeout(text)
    if code == "memory":
        return ServerFull(text, str(document.get("server")), str(document.get("table")), int(document.get("bytes", 0)))
    if code == "not-finite":
        return NotFinite(text, str(document.get("table")), int(document.get("key", 0)))
    if code == "left-out":
        return LeftOut(text)
    return ServerError(f"server {server} refused: {text}")


def ending_error(document: Mapping[str, Any], server: str, who: str = "worker") -> Error | None:
    """What ends a client (`who`), if a refusal does."""
    code, text = document.get("code"), str(document.get("message"))
    if code == "fenced":
        return Closed(text)
    if code == "identity":
        return ConfigError(f"server {server} does not let this {who} in: {text}. {_CERTIFICATE}")
    if code == "version":
        return VersionMismatch(f"server {server}: {text}")
    return None
