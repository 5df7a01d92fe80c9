"""The processes of a simulated cluster: built from the code of real ones, killed and started again like them."""

from __future__ import annotations

import asyncio
import math
import traceback
from asyncio import events
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from greenlet import getcurrent

from chaos.sim.checks.answers import Answers
from chaos.sim.checks.lasting import Lasting
from chaos.sim.checks.views import Views
from chaos.sim.checks.violation import Violation
from chaos.sim.clock import Clock, Process
from chaos.sim.loop import Loop
from chaos.sim.network import Listener, Network, Socket, Weather
from chaos.sim.store import StoreProcess
from chaos.sim.threads import Thread, Threads
from coordinator.core.keys import DRAINS, ROSTER, VIEW, drained
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.sessions import ServerSession
from elasticps.checkpoint.row_writer import InlineRowWriter
from elasticps.checkpoint.storage import Storage
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.metrics.timing import Meter, TimedServer
from elasticps.model.spec import Consistency
from elasticps.monitor import dial_server
from elasticps.server.network.busy_poll import BusyPoll
from elasticps.server.options import ServerOptions
from elasticps.server.process.lifecycle import ServerRegistration, Surroundings, serve_until
from elasticps.server.server import Server
from replication.chain import COMPLETE, Member

NAME = "sim"
PORT = 7000
STORE_HOST = "store"
STORE_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 60.0
LOG_BUDGET_BYTES = 256 << 20
LEADER_LEASE_S = 1.5
BEGUN_S, WALL_S = 1_700_000_000.0, 20.0  # seconds since 1970 at the beginning; how many go by in one of virtual time
END_S = 60.0  # of virtual time, in which what is cancelled ends
WORKER_TIMEOUT_S = 300.0  # longer than any story, whose own bound finds a worker that waits in vain


class Still(BusyPoll):
    """Takes the place of a server's busy polling, which would never end on virtual time: the server sleeps at once."""

    def __init__(self) -> None:
        pass

    def touched(self) -> None:
        pass


class Gone(BaseException):
    """Raised where a process ends itself by `os._exit`."""


@dataclass
class ServerProcess:
    """A server's process. now: the incarnation that serves, None between two; draining: it was asked to leave; left: it
    has left."""

    process: Process
    loop: Loop
    stop: asyncio.Future[str]
    leave: asyncio.Future[str]
    now: Server | None = None
    draining: bool = False
    left: bool = False


class Cluster:
    """All processes of a story, and the first promise that was broken."""

    def __init__(
        self, seed: int, weather: Weather, config: ClusterConfig, calm: bool = False, admin: bool = False,
        proven: bool = False,
    ) -> None:  # fmt: skip
        """admin: servers register the address of their admin service, which makes views longer, and stories others.
        proven: every peer counts as having proven who it is."""
        self.clock = Clock(seed)  # virtual time, chance and the trace
        self.network = Network(self.clock, weather)  # hosts and the links between them
        self.servers: dict[str, ServerProcess] = {}  # by name, also those that have ended
        self.leaders: dict[str, Process] = {}  # coordinators, by name
        self.violation: Violation | None = None  # the first promise that was broken
        self.over = False  # what happens from now on breaks no promise
        self.drain_timeout_s = DRAIN_TIMEOUT_S  # how long a server that drains hands over
        # admin: servers tell an address for operators; proven: all peers count as authenticated.
        self._admin, self._proven = admin, proven
        self._loops: list[Loop] = []  # of all processes, to be closed at the end
        self._threads: list[Threads] = []  # of workers
        self._numbers: dict[str, int] = {}  # how often each name was started
        # The coordination store, in a process of its own.
        self.store = StoreProcess(self._loop(Process(self.clock, STORE_HOST, STORE_HOST)), self.network, NAME)
        # How the cluster was created.
        self.config = self.store.run(create_cluster(self.store.data, replace(config, id="simulated")))
        # Checks: of views, of copies that have to last, of answers.
        self.views = Views(config.replicas, config.ranges, lambda m: self.life(m.name, m.incarnation) is not None, calm)
        self.lasting = Lasting(config.ranges, lambda m: self.life(m.name, m.incarnation))  # whatever was acknowledged
        self.answers = Answers()  # checks that each answer goes to the connection that asked
        self.network.tap = self._sent
        self.store.written = self._written
        self.wrong_clocks: dict[str, float] = {}  # by host, by how many seconds its wall clock is ahead
        # Called with each server before it has connections.
        self.on_build: Callable[[Server], None] = lambda server: None
        self.on_view: Callable[[View], None] = lambda view: None  # called with each view that is written
        self.on_server: Callable[[Server], None] = lambda server: None  # called with each server that starts
        self.on_roster: Callable[[set[int]], None] = lambda counted: None  # the same of rosters: the workers' ids
        self._revision = 0  # of the newest view
        self._roster_revision = 0  # of the newest roster
        self._read: tuple[int, View] | None = None  # the view that was read last, and its revision

    def wall_s(self, host: str = "") -> float:
        """Seconds since 1970, by the clock of a host, or by a correct one."""
        return BEGUN_S + WALL_S * self.clock.now + self.wrong_clocks.get(host, 0.0)

    def broken(self, violation: Violation) -> None:
        """Notes that a promise is broken; the first one counts."""
        if self.violation is None and not self.over:
            self.violation = violation
            self.clock.note(f"BROKEN {violation}")

    def _sent(self, source: Socket, target: Socket, data: bytes) -> None:
        try:
            self.answers.sent(source, target, data)
        except Violation as violation:
            self.broken(violation)

    @property
    def host(self) -> str:
        """The host whose turn it is."""
        loop = events._get_running_loop()
        return loop.process.host if isinstance(loop, Loop) else ""

    def running(self) -> str:
        """Names the process whose turn it is."""
        thread, loop = getcurrent(), events._get_running_loop()
        if isinstance(thread, Thread):
            return str(thread)
        return str(loop.process) if isinstance(loop, Loop) else "the world"

    def _written(self) -> None:
        entry = self.store.run(self.store.data.get(VIEW))
        if entry is not None and entry.revision != self._revision:
            self._revision = entry.revision
            view = self.view
            assert view is not None
            try:
                self.views.on_write(view, self.clock.now)
                self.lasting.on_write(view)
            except Violation as violation:
                self.broken(violation)
            self.on_view(view)
        roster = self.store.run(self.store.data.get(ROSTER))
        if roster is not None and roster.revision != self._roster_revision:
            self._roster_revision = roster.revision
            self.on_roster(self.counted)

    # --- processes --------------------------------------------------------------------------------------------------

    def _process(self, name: str) -> Process:
        """Makes a process on the host of its name. Each start of a name is one more incarnation of the process."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        self.clock.note(f"{name} starts, for the {number}. time")
        return Process(self.clock, f"{name}.{number}", name)

    def _loop(self, process: Process) -> Loop:
        loop = Loop(process, self.network, self._failed)  # type: ignore[abstract]  # it lacks only methods that nobody calls
        process.turn = loop.turn
        self._loops.append(loop)
        return loop

    def _failed(self, process: Process, error: BaseException | None, message: str) -> None:
        if isinstance(error, Violation):
            self.broken(error)
        elif not isinstance(error, Gone) and not self.over:
            text = "" if error is None else "".join(traceback.format_exception(error))
            self.broken(Violation("no exception is lost", f"{process}: {message}\n{text}"))

    def exited(self, code: int) -> None:
        """Takes the place of `os._exit`: the running process is gone."""
        loop = cast(Loop, events._get_running_loop())
        self.broken(Violation("no process ends itself", f"{loop.process} ends with {code}:\n{traceback.format_exc()}"))
        loop.process.kill()
        raise Gone

    def kill(self, process: Process, power: bool) -> None:
        """Kills a process. power: its host loses its power, too, and peers are not told."""
        if process.alive:
            self.clock.note(f"{process} {'loses its power' if power else 'is killed'}")
            if power:
                self.network.darken(process.host)
            process.kill()

    # --- servers ----------------------------------------------------------------------------------------------------

    def start_server(self, name: str) -> None:
        """Starts a server's process, under a name that may have been used before."""
        if self.over:
            return
        self.network.lighten(name)
        process = self._process(name)
        loop = self._loop(process)
        listener = self.network.listen(process, PORT)
        found = ServerProcess(process, loop, loop.create_future(), loop.create_future())
        self.servers[name] = found
        process.turn = lambda: self._turn(found)
        loop.create_task(self._serve(found, listener, name))

    async def _serve(self, found: ServerProcess, listener: Listener, name: str) -> None:
        async def show(server: Server | None) -> None:
            if server is None and found.draining and found.now is not None and not found.now.removed.done():
                return  # it is not ready for more, but has what it has until that has moved
            found.now = server
            if server is not None:
                self.on_server(server)
                if found.draining:
                    self.views.can_drain(name, self.clock.now)  # it could not say so before

        store = self.store.client(name, STORE_TIMEOUT_S)
        serves = partial(self._serves, name)
        around = Surroundings(store, self.config, listener, self._build, show, serves)  # type: ignore[arg-type]
        registration = ServerRegistration(name, f"{name}:{PORT}", f"{name}:{PORT + 1}" if self._admin else "")
        try:
            await serve_until(around, registration, found.stop, found.leave, wait_s=1e9,
                       drain_timeout_s=self.drain_timeout_s)  # fmt: skip
        except Exception as error:  # any: that a server ends by an error breaks a promise
            self._failed(found.process, error, "a server ended")
        self.clock.note(f"{found.process} ends: {found.stop.result() if found.stop.done() else ''}")
        found.left = found.draining
        if found.draining and found.now is not None and not self.over:
            self._check_drained(found.now.serving.me)
        found.process.kill()

    def _build(self, session: ServerSession, cluster: str, ranges: int, loop: asyncio.AbstractEventLoop) -> Server:
        """Builds a server. Every other one is measured, as servers with metrics are: that is another shell around the
        same core."""
        name = session.info.name
        options = ServerOptions(
            log_budget_bytes=LOG_BUDGET_BYTES, clock=loop.time, wall=partial(self.wall_s, name), busy_poll=Still(),
            row_writer=InlineRowWriter(loop, Storage("memory://sim")),
        )  # fmt: skip
        build = partial(TimedServer, Meter(loop.time, sample=1)) if int(name[1:]) % 2 else Server
        server = build(session.info, cluster, ranges, loop, options)
        self.on_build(server)
        return server

    async def _serves(self, asks: str, server: ServerInfo) -> bool:
        """Returns what a server's health service would answer to the server `asks`."""
        found, reaches = self.servers.get(server.name), self.network.reaches
        if found is None or not (reaches(asks, server.name) and reaches(server.name, asks)):
            return False
        return found.process.alive and not found.process.stalled and not found.draining

    def _turn(self, found: ServerProcess) -> float | None:
        again = found.loop.turn()
        if found.now is not None and not self.over:
            try:
                self.lasting.turned(found.now)
            except Violation as violation:
                self.broken(violation)
        return again

    def _check_drained(self, member: Member) -> None:
        """Checks that a server which ends holds nothing; or, if it had no time, nothing that only it has a copy of."""
        view = self.view
        index = -1 if view is None else view.as_chains.index(member)
        if view is None or index < 0:
            return
        ranges = set(np.flatnonzero((view.chains == index).any(axis=1)).tolist())
        if self._hurried:
            ranges &= self.uncopied(member.name, partial(self._outstays, member))
        if ranges:
            self.broken(
                Violation("drain", f"{member} ends as a replica of ranges {sorted(ranges)} in epoch {view.epoch}")
            )

    @property
    def _hurried(self) -> bool:
        """Whether servers that drain may end before they have handed everything over."""
        return self.drain_timeout_s < DRAIN_TIMEOUT_S

    def _stays(self, name: str) -> bool:
        """Whether a server's copies count: it may not end by itself at any moment."""
        return not (self._hurried and self.servers[name].draining)

    def _outstays(self, member: Member, other: str) -> bool:
        """Whether another server keeps its copies although `member`, which drained, ends with its own.

        A server that is asked to drain writes a request, then looks who else drains, and only then ends. So of two the
        second to write sees the first one's request in every look, and keeps what only these two have. The moment of a
        SIGTERM does not count: nobody else can know of it before the request is in the store.
        """
        if not self.servers[other].draining:
            return True
        drains = self.store.run(self.store.data.list(DRAINS)).entries
        drain_revisions = {drained(entry.key, entry.value): entry.revision for entry in drains}
        life = self.servers[other].now
        never = math.inf  # no request yet
        return life is not None and drain_revisions.get(life.serving.me, never) > drain_revisions.get(member, never)

    def drain(self, name: str) -> None:
        """Does what SIGTERM does: asks a server to move what it has to others, and to end."""
        found = self.servers[name]
        found.draining = True
        self.views.on_drain(name, self.clock.now)
        if not found.leave.done():
            found.leave.set_result("SIGTERM")

    # --- leaders ----------------------------------------------------------------------------------------------------

    def start_leader(self, name: str) -> None:
        """Starts a coordinator, which leads or stands by."""
        if self.over:
            return
        self.network.lighten(name)
        process = self._process(name)
        loop = self._loop(process)
        self.leaders[name] = process
        store = self.store.client(name, STORE_TIMEOUT_S)
        before = events._get_running_loop()
        events._set_running_loop(loop)
        stop = asyncio.Event()
        events._set_running_loop(before)

        async def lead() -> None:
            await run_coordinator(store, name=name, ttl_s=LEADER_LEASE_S, stop=stop, dial=dial_server(name))

        loop.create_task(self._lead(process, lead))

    async def _lead(self, process: Process, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # any: that a leader ends by an error breaks a promise
            self._failed(process, error, "a leader ended")

    # --- tasks beside -----------------------------------------------------------------------------------------

    def start_task(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a process that runs `work` and nothing else."""
        process = self._process(name)
        self._loop(process).create_task(self._lead(process, work))

    # --- workers ----------------------------------------------------------------------------------------------------

    def start_worker(self, name: str, program: Callable[[Threads], None]) -> Threads:
        """Starts a worker's process, which runs a program in its main thread."""
        process = self._process(name)
        threads = Threads(process, self._loop(process), self.network, self.network.weather.preempted)
        self._threads.append(threads)

        def main() -> None:
            try:
                program(threads)
            except Violation as violation:
                self.broken(violation)
            except Exception as error:  # any: that a worker ends by an error breaks a promise
                self._failed(process, error, "a worker ended")

        threads.spawn("main", main)
        return threads

    def connect(self, threads: Threads, worker: str, consistency: Consistency, window: int, app: str) -> Client:
        """Connects a worker's client, as `elasticps.connect` does."""
        store = self.store.client(threads.process.host, WORKER_TIMEOUT_S)
        control = Registry(store, threads, "virtual")
        control.authenticated = self._proven
        return Client(control, worker, consistency, window, WORKER_TIMEOUT_S, app)

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View | None:
        """The newest view, as the store has it."""
        entry = self.store.run(self.store.data.get(VIEW))
        if entry is not None and (self._read is None or self._read[0] != entry.revision):
            self._read = entry.revision, View.decode(entry.value)
        return None if entry is None or self._read is None else self._read[1]

    @property
    def counted(self) -> set[int]:
        """Returns the ids of the workers in the roster, as the store has it."""
        entry = self.store.run(self.store.data.get(ROSTER))
        return set() if entry is None else {worker.id for worker in Roster.decode(entry.value).workers}

    def life(self, name: str, incarnation: int) -> Server | None:
        """Returns the server of that name if it runs as that incarnation."""
        found = self.servers.get(name)
        if found is None or not found.process.alive or found.now is None:
            return None
        return found.now if found.now.me.incarnation == incarnation else None

    def whole(self, without: str = "") -> bool:
        """Whether every range has all its replicas, alive and in the newest view, and would keep one without the server
        `without`."""
        needed = self.indispensable()
        return needed is not None and without not in needed and "" not in needed

    def indispensable(self) -> set[str] | None:
        """Names the servers without which some range would have no replica that stays; "" is among them where one has
        none anyway. None unless every range has all its replicas, alive and in the newest view."""
        view = self.view
        if view is None:
            return None
        well = [self._well(s.name, s.incarnation, view.epoch) for s in view.servers]
        staying = sum(not s.left for s in self.servers.values())
        needed = min(self.config.replicas, staying)
        stays = [self._stays(server.name) for server in view.servers]
        found: set[str] = set()
        for chain in view.chains.tolist():
            members = [i for i in chain if i >= 0]
            if len(members) < needed or not all(well[i] for i in members):
                return None
            lasting = [view.servers[i].name for i in members if stays[i]]
            if len(lasting) < 2:
                found.add(lasting[0] if lasting else "")
        return found

    def uncopied(self, without: str, stays: Callable[[str], bool] | None = None) -> set[int]:
        """Returns the ranges of the newest view that have no complete copy in a process that lives and stays, other
        than the server `without`. A retained copy counts until the replica that is left has asked to go on without it:
        that request may be on its way. stays: whether a server's copies count; by default, unless it may end by itself.
        """
        view, stays = self.view, stays or self._stays
        assert view is not None
        servers = [self.life(s.name, s.incarnation) for s in view.servers]
        living = [
            server is not None and s.name != without and stays(s.name)
            for s, server in zip(view.servers, servers, strict=True)
        ]
        alone = np.array([*(0 if server is None else server.leaders.alone for server in servers), 0])
        late = np.isin(view.copy_state, COMPLETE) & (alone[view.tails] >= view.since)
        copies = np.where(
            late[:, None], np.pad(view.chains, ((0, 0), (0, 1)), constant_values=-1), view.as_chains.copies
        )
        copied = np.array([*living, False])[copies].any(axis=1)
        return set(np.flatnonzero(~copied).tolist())

    def _well(self, name: str, incarnation: int, epoch: int) -> bool:
        server = self.life(name, incarnation)
        return server is not None and not self.servers[name].process.stalled and server.serving.epoch == epoch

    def settled(self) -> str:
        """Says what is not yet as it should be after the last fault; "" if all is."""
        view = self.view
        if view is None:
            return "there is no view"
        if not self.whole():
            return (
                f"not every range has its replicas: {view.chains.tolist()} of {[str(s.member) for s in view.servers]}"
            )
        if np.count_nonzero(view.joining >= 0):
            return f"ranges are being filled: {view.joining.tolist()}"
        for name, found in self.servers.items():
            if found.draining and not found.left:
                return f"{name} has not drained"
            if not found.left and (found.now is None or found.now.serving.epoch < view.epoch):
                return f"{name} does not serve under epoch {view.epoch}"
        return ""

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> list[str]:
        """Ends all processes quietly, so that nothing is left open. Returns the tasks that did not end, in words."""
        self.over = True
        self.store.up = True
        for threads in self._threads:
            threads.end()
        for loop in self._loops:
            loop.quiet = True
            loop.process.revive()
            loop.process.turn = loop.turn
            for task in list(loop.tasks):
                task.cancel()
            loop.process.wake()
        open_ = [task for loop in self._loops for task in loop.tasks]

        def ended() -> bool:
            while open_ and open_[-1].done():
                open_.pop()
            return not open_ and not self._tasks()

        self.clock.run(self.clock.now + END_S, ended)
        return [str(task) for task in self._tasks()]

    def _tasks(self) -> list[asyncio.Task[Any]]:
        """Returns the tasks that have not ended, with those that others began in their last turns."""
        return [task for loop in self._loops for task in loop.tasks if not task.done()]
