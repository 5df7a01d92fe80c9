"""Handles HELLO: checks who connects, gives each connection its kind of peer, and knows all connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from coordinator.core import fields
from coordinator.core.view import WORKERS_MAX, RosterChange, WorkerInfo
from elasticps.security.identity import NotAuthorised, Role
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.network.connection import Connection, Handler, PeerKind
from elasticps.server.roles.context import Context
from elasticps.server.roles.leaders import Leaders
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.system.descriptors import ConnectionLimits
from elasticps.wire.frames import FrameError, Header, Kind, json_body, json_frame, whole
from replication.chain import Member
from replication.progress import MAX_WORKER

log = fields.logger(__name__)

MAX_WORKERS = WORKERS_MAX  # their connections, as many as a roster lists, where descriptors allow them
MAX_READERS = 1024
MAX_UNKNOWN = 1024  # connections that have not said yet who they are: then the oldest of them goes
_STARTED_AGAIN = "worker {!r} was started again; this is the older incarnation"


class PeerKinds(NamedTuple):
    """What a worker, another replica, the head of a group range that announces rounds, and a reader may send."""

    worker: PeerKind
    replica: PeerKind
    rounds: PeerKind
    reader: PeerKind


class HelloHandler:
    """Gives each connection its kind of peer after HELLO or WELCOME: one of `kinds`, or a leader. `greet` send a
    worker what it has to know after its WELCOME."""

    def __init__(
        self, context: Context, links: ReplicaLinks, leaders: Leaders, kinds: PeerKinds,
        greet: Sequence[Callable[[Connection], None]], allowed: ConnectionLimits,
    ) -> None:  # fmt: skip
        self._me = context.serving.me  # peers and leaders have to mean this incarnation
        self._cluster = context.cluster  # and everybody this cluster
        self._serving = context.serving  # has the roster and the view
        self._held = context.held  # HELLOs that wait for a newer one
        self._links = links  # take connections of peers
        self._leaders = leaders  # take those of leaders
        self._worker, self._peer, self._rounds, self._reader = kinds  # what each may send
        self._greet = greet  # see above
        self._follow: Callable[[Connection, str], None] = lambda connection, name: None  # set by `feed`
        self._readers: set[Connection] = set()  # connections of readers
        self._allowed = allowed  # how many workers and unknown peers
        self.connections: dict[Connection, None] = {}  # in the order in which they came
        self._unknown: dict[Connection, None] = {}  # without a HELLO, in the same order
        self._as_workers: dict[Connection, None] = {}  # whose HELLO was a worker's
        self._of_worker: dict[int, Connection] = {}  # the newest of each worker, by id
        self._named: dict[tuple[str, str], dict[Connection, None]] = {}  # of workers, by application and name
        handlers: dict[int, Handler] = {
            Kind.HELLO: self._hello, Kind.WELCOME: self._welcomed, Kind.ERROR: self._rejected,
        }  # fmt: skip
        # What a peer may send before it is known.
        self.newcomer = PeerKind(handlers, self.forget, opened=self._opened, wrong="came before HELLO")
        # What a leader may send.
        self._leader = PeerKind(
            {
                Kind.VIEW: context.updates.by_leader,
                Kind.VIEW_DIFFERENCE: context.updates.by_leader,
                Kind.GET_VIEW: leaders.beat,
            },
            self.forget,
            leaders.remove,
        )
        for role in kinds:
            role.closed = (self.forget, *role.closed)

    @property
    def workers(self) -> Iterable[Connection]:
        """Connections of workers."""
        return (connection for connection in self.connections if connection.worker)

    def leader_wall_s(self) -> float:
        """The leader's time, in seconds since 1970; 0 while it is unknown."""
        return self._leaders.clocks().leader

    def connections_of(self, workers: Iterable[WorkerInfo]) -> list[Connection]:
        """The connections of these workers."""
        return [c for w in workers for c in self._named.get((w.app, w.name), ()) if c.worker == w.id]

    def follow(self, change: RosterChange) -> None:
        """Follows a newer roster: cuts off older incarnations of its workers. Looks only at connections of workers
        that came or left: a roster changes with each worker, and every server hears of it."""
        workers, newest = self._serving.workers, self._serving.newest
        for name in {(worker.app, worker.name): None for worker in (*change.left, *change.came)}:
            for connection in list(self._named.get(name, ())):
                connection.set_rostered(connection.worker in workers)
                if newest.get(name, 0) > connection.worker:
                    text = _STARTED_AGAIN.format(connection.worker_name)
                    connection.send(connection.errors.for_connection("fenced", text))
                    connection.transport.close()

    def tick(self) -> None:
        """Called a few times a second: drops connections whose peer has gone unnoticed, or whose certificate has
        ended."""
        for connection in list(self.connections):
            connection.notice_end()
            connection.notice_expiry()

    def close(self) -> None:
        """Drops every connection."""
        for connection in list(self.connections):
            connection.transport.abort()

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        for those in (self.connections, self._unknown, self._as_workers):
            those.pop(connection, None)
        self._readers.discard(connection)
        if self._of_worker.get(connection.worker) is connection:
            del self._of_worker[connection.worker]
        name = connection.app, connection.worker_name
        namesakes = self._named.get(name, {})
        namesakes.pop(connection, None)
        if not namesakes:
            self._named.pop(name, None)
        self._held.forget(connection)

    def _opened(self, connection: Connection) -> None:
        self.connections[connection] = self._unknown[connection] = None
        most = min(MAX_UNKNOWN, self._allowed.unknown)
        if len(self._unknown) > most:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            text = f"more than {most} connections have not said who they are{self._because(most < MAX_UNKNOWN)}"
            oldest.reject(FrameError(text))

    def _because(self, of_files: bool) -> str:
        """The reason for a limit, where it is that of open files."""
        files = self._allowed.files
        return f"; its limit of open files (`ulimit -n`), {files}, has room for no more" if of_files else ""

    # --- the first frame --------------------------------------------------------------------------------------------

    def _welcomed(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is None:
            raise FrameError("WELCOME came before HELLO")
        self._unknown.pop(connection, None)
        connection.welcome(self._peer)
        if not self._links.arrived(connection):
            connection.transport.abort()

    def _rejected(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is None:
            raise FrameError("ERROR came before HELLO")
        log.warning("our link is refused", peer=connection.member, message=json_body(body.data).get("message"))
        connection.transport.abort()

    def _hello(self, connection: Connection, header: Header, body: Body) -> None:
        try:
            self._hear(connection, header, body)
        except NotAuthorised as error:
            connection.reject(error)

    def _hear(self, connection: Connection, header: Header, body: Body) -> None:
        document, me = json_body(body.data), self._me
        if document.get("cluster") != self._cluster:
            text = f"server {me.name} belongs to cluster {self._cluster!r}, not {document.get('cluster')!r}"
            raise RequestError("cluster", text)
        if "worker" in document:
            self._hello_worker(connection, header, body, document)
        elif "reader" not in document and document.get("to") != list(me):
            raise RequestError("incarnation", f"this is {me}, not {document.get('to')}")
        elif "peer" in document:
            self._hello_peer(connection, header, body, document)
        elif "rounds" in document:
            self._hello_rounds(connection, header, body, document)
        elif "reader" in document:
            self._hello_reader(connection, header, document)
        elif "leader" in document:
            self._prove(connection, Role.COORDINATOR, document["leader"])
            self._welcome(connection, header, self._leader)
            self._leaders.add(connection)
        else:
            raise FrameError("a hello says who speaks: a worker, a reader, a peer, a head of rounds or a leader")

    def _hello_worker(self, connection: Connection, header: Header, body: Body, document: dict[str, Any]) -> None:
        worker, name, app = whole(document["worker"], MAX_WORKER, 1), document.get("name"), document.get("app")
        if not (isinstance(name, str) and isinstance(app, str)):
            raise FrameError("a worker's hello gives its id, its name and its app")
        # First, as a HELLO that waits for the roster counts as a worker's connection.
        self._prove(connection, Role.WORKER, str(name).rpartition("/")[2], str(app))
        self._unknown.pop(connection, None)
        self._as_workers[connection] = None
        most = min(MAX_WORKERS, self._allowed.workers)
        if len(self._as_workers) > most + (worker in self._of_worker):  # one that comes back takes its own place
            because = self._because(most < MAX_WORKERS)
            raise FrameError(f"server {self._me.name} already has {most} connections of workers{because}")
        if worker not in self._serving.workers:
            if self._serving.newest.get((str(app), str(name)), 0) > worker:
                raise RequestError("fenced", _STARTED_AGAIN.format(name))
            self._held.need_roster()
            if self._held.wait(connection, header, body):
                return
            text = f"worker {name!r} (id {worker}) is not in the roster: it left, or its registration ran out"
            raise RequestError("unlisted", text)
        known = self._serving.workers[worker]
        if (name, app) != (known.name, known.app):
            raise NotAuthorised(f"worker {worker} is {known.name!r} of {known.app!r}, not {name!r} of {app!r}")
        before = self._of_worker.get(worker)
        if before is not None and before.arrival > connection.arrival:  # the worker has given this one up
            connection.discarding = True
            connection.give_up()
            return
        connection.is_worker(worker, known.name, known.app)
        self._replace(connection)
        self._welcome(connection, header, self._worker)
        for greet in self._greet:
            greet(connection)

    def feed(self, follow: Callable[[Connection, str], None]) -> None:
        """follow: called with each new connection of a reader, and the reader's name."""
        self._follow = follow

    def _hello_reader(self, connection: Connection, header: Header, document: dict[str, Any]) -> None:
        name, app = document.get("reader"), document.get("app")
        if not (isinstance(name, str) and isinstance(app, str) and 0 < len(name) <= 256 and len(app) <= 256):
            raise FrameError("a reader's hello gives its name and its app")
        identity = connection.identity
        if identity is not None and not (
            identity.cluster == self._cluster.partition("@")[0] and identity.covers(Role.WORKER, identity.name, app)
        ):
            identity.require(self._cluster, Role.READER, name, app)
        if len(self._readers) >= MAX_READERS:
            raise FrameError(f"server {self._me.name} already has {MAX_READERS} connections of readers")
        self._readers.add(connection)
        connection.app = app
        self._welcome(connection, header, self._reader)
        self._follow(connection, name)

    def _replace(self, connection: Connection) -> None:
        """Ends an older connection of the same worker. The worker has given it up and repeats its requests on the new
        one: what still arrives on the old one must not be taken for something newer."""
        before = self._of_worker.get(connection.worker)
        self._of_worker[connection.worker] = connection
        self._named.setdefault((connection.app, connection.worker_name), {})[connection] = None
        if before is not None and before is not connection:
            before.give_up()

    def _hello_peer(self, connection: Connection, header: Header, body: Body, document: dict[str, Any]) -> None:
        match document:
            case {"peer": [str(name), int(incarnation)], "number": int(number)} if number > 0:
                member = Member(name, incarnation)
            case _:
                raise FrameError("a peer's hello gives its name and incarnation, and the number of its link")
        if self._is_listed(connection, header, body, member):
            connection.member, connection.number = member, number
            self._welcome(connection, header, self._peer)
            if not self._links.arrived(connection):
                connection.transport.abort()

    def _hello_rounds(self, connection: Connection, header: Header, body: Body, document: dict[str, Any]) -> None:
        match document["rounds"]:
            case [str(name), int(incarnation)]:
                member = Member(name, incarnation)
            case _:
                raise FrameError("a hello of a head of rounds gives its name and incarnation")
        if self._is_listed(connection, header, body, member):
            connection.member = member
            self._welcome(connection, header, self._rounds)

    def _is_listed(self, connection: Connection, header: Header, body: Body, member: Member) -> bool:
        """Whether the view lists a server, which has proved who it is; False if its HELLO waits for a view. Raises
        `RequestError` if it is not in the view."""
        self._prove(connection, Role.SERVER, member.name)
        if self._held.wait_for_view(connection, header, body):
            return False
        view = self._serving.view
        if view is None or member not in view.as_chains.members:
            raise RequestError("incarnation", f"{member} is not in the view of epoch {self._serving.epoch}")
        return True

    def _prove(self, connection: Connection, role: Role, name: object, app: str = "") -> None:
        """Raises NotAuthorised unless the certificate is that of the role and name in the HELLO."""
        if connection.identity is not None:
            connection.identity.require(self._cluster, role, str(name), app)

    def _welcome(self, connection: Connection, header: Header, role: PeerKind) -> None:
        self._unknown.pop(connection, None)
        connection.welcome(role)
        document = {"server": self._me.name, "incarnation": self._me.incarnation, "cluster": self._cluster}
        connection.send(json_frame(Kind.WELCOME, document, request=header.request, epoch=self._serving.epoch))
