"""Does what a story says, to whom it may be done: a range's last replica is never taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from chaos.sim.checks.views import left_alone
from chaos.sim.clock import Process
from chaos.sim.cluster import PORT, STORE_HOST, Cluster
from chaos.sim.story import Fault
from chaos.sim.threads import Threads
from chaos.sim.violation import Violation
from coordinator.view import View
from replication.chain import Member
from replication.effects import CaughtUp

T = TypeVar("T")
RESTART_S = 0.4  # a supervisor starts what has died again after about so long
LOOK_S = 0.1  # until a server may be hit
PATIENCE_S = 3.0
HEIR_S = 1.4  # before a server is suspected that nobody but workers and leaders hears
SUSPECTED_S = 1.0  # a server that is silent for so long is suspected
AT_ONCE_S = 0.05  # so soon after one is suspected the other dies
CROWD = 60  # more than a server whose limits are small allows


class Faults:
    """Injects faults; `workers` names the processes of the workers, `restart(name)` kills one and starts it again,
    `double(name)` starts its successor while it lives."""

    def __init__(
        self,
        cluster: Cluster,
        workers: dict[str, Threads],
        restart: Callable[[str], None],
        double: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.workers = workers
        self.restart = restart
        self.double = double
        self.over = False
        self.happened: list[str] = []
        self._random = cluster.clock.chance("faults")
        self._undo: dict[int, Callable[[], None]] = {}
        self._hit: dict[str, None] = {}  # servers that suffer
        self._joined = 0
        self._kinds: dict[str, Callable[[Fault], None]] = {
            "server dies": lambda fault: self._server_dies(fault, power=False),
            "host dies": lambda fault: self._server_dies(fault, power=True),
            "server stalls": self._server_stalls,
            "server stalls, other dies": self._other_dies,
            "worker stalls": self._worker_stalls,
            "worker restarts": self._worker_restarts,
            "worker dies cut off": self._worker_dies_cut_off,
            "worker doubles": self._worker_doubles,
            "server limps": self._server_limps,
            "leader without store": self._leader_without_store,
            "tear": self._tear,
            "worker reads nothing": self._worker_reads_nothing,
            "crowd": self._crowd,
            "leader dies": self._leader_dies,
            "leader stalls": self._leader_stalls,
            "servers apart": self._servers_apart,
            "one way": self._one_way,
            "worker apart": self._worker_apart,
            "leader apart": self._leader_apart,
            "store apart": self._store_apart,
            "store away": self._store_away,
            "reset": self._reset,
            "reset all": self._reset_all,
            "server joins": self._server_joins,
            "server drains": self._server_drains,
            "level joiner cut off": self._level_joiner_cut_off,
            "level joiner takes over": self._level_joiner_takes_over,
            "server cut off": self._server_cut_off,
            "server and worker die": self._server_and_worker_die,
            "servers drain": self._servers_drain,
        }

    def begin(self, fault: Fault) -> None:
        """It is time for a fault."""
        if not self.over:
            self._kinds[fault.what](fault)

    def end(self) -> None:
        """Nothing goes wrong any more; what does is mended, who died comes back."""
        self.over = True
        for undo in list(self._undo.values()):
            undo()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.happened.append(text)
        self.cluster.clock.note(f"fault: {text}")

    def _later(self, delay_s: float, undo: Callable[[], None]) -> None:
        """Undoes a fault after a while, or when faults end."""
        key = len(self.happened) + len(self._undo) * 1000 + self.cluster.clock.events

        def once() -> None:
            if self._undo.pop(key, None) is not None:
                undo()

        self._undo[key] = once
        self.cluster.clock.after(delay_s, once)

    def _server(self, fault: Fault, use: Callable[[str], None], tries: float = PATIENCE_S) -> None:
        """Picks a server that can be spared, as soon as there is one."""
        cluster = self.cluster
        spared = [n for n, s in cluster.servers.items() if not (s.left or s.asked) and n not in self._hit]
        alone = cluster.config.replicas == 1  # nobody dies there
        spared = [n for n in spared if s_alive(cluster, n) and cluster.whole(without="" if alone else n)]
        if self.over or tries <= 0:
            return
        if not spared or self._hit:
            cluster.clock.after(LOOK_S, self._server, fault, use, tries - LOOK_S)
            return
        name = _pick(spared, fault)
        self._hit[name] = None
        use(name)

    def _healed(self, name: str) -> None:
        self._hit.pop(name, None)

    # --- servers ----------------------------------------------------------------------------------------------------

    def _server_dies(self, fault: Fault, power: bool) -> None:
        self._server(fault, lambda name: self._die(name, power))

    def _server_limps(self, fault: Fault) -> None:
        """A server loses its neighbours, then its workers, and its life at last: what it did alone must not count."""

        def limp(name: str) -> None:
            others = [n for n in self.cluster.servers if n != name]
            out, back = [(name, other) for other in others], [(other, name) for other in others]
            pairs = (out, back, out + back)[int(fault.pick * 1000) % 3]
            self._cut(pairs, fault.for_s + 1.0)
            clock = self.cluster.clock
            for _ in range(self._random.randint(0, 3)):
                clock.after(self._random.uniform(0, fault.for_s), self._lose_workers, name)
            if self._random.random() < 0.7:  # its successor asks how far it was, and is told before the server dies
                before_s = fault.for_s - 2 * RESTART_S
                clock.after(self._random.uniform(0, before_s), self.begin, replace(fault, what="worker restarts"))
            clock.after(fault.for_s, die, name)

        def die(name: str) -> None:
            if self.over or not s_alive(self.cluster, name) or self.cluster.uncopied(without=name):
                self._healed(name)
            else:
                self._die(name, power=fault.pick < 0.3)

        self._server(fault, limp)

    def _server_and_worker_die(self, fault: Fault) -> None:
        """A server can pass nothing on. A worker dies of whom it has a step that nobody else has, its heir looks
        around, and then the server dies."""

        def cut(name: str) -> None:
            self._cut([(name, other) for other in self.cluster.servers if other != name], HEIR_S)
            wait(name, HEIR_S / 3)

        def wait(name: str, left_s: float) -> None:
            server = self.cluster.servers[name].now
            waits = server is not None and bool((server.replica.acked < server.replica.seq).any())
            if left_s > 0 and not self.over and not waits:
                self.cluster.clock.after(LOOK_S / 20, wait, name, left_s - LOOK_S / 20)
                return
            soon_s = self._random.choice((0.0, 0.1, 0.3)) * self._random.random()
            self.cluster.clock.after(soon_s, self._worker_restarts, fault)
            self.cluster.clock.after(soon_s + self._random.choice((0.05, RESTART_S + 0.3)), die, name)

        def die(name: str) -> None:
            if self.over or not s_alive(self.cluster, name) or self.cluster.uncopied(without=name):
                self._healed(name)
            else:
                self._die(name)

        self._server(fault, cut)

    def _lose_workers(self, name: str) -> None:
        hosts = set(self.workers)
        for sock in [s for s in self.cluster.network.sockets if s.process.host in hosts]:
            if sock.peer is not None and sock.peer.process.host == name:
                self.cluster.network.reset(sock)

    def _server_stalls(self, fault: Fault) -> None:
        def stall(name: str) -> None:
            process = self.cluster.servers[name].process
            self._note(f"{name} stalls for {fault.for_s:.3f} s")
            process.stall()

            def thaw() -> None:
                self._healed(name)
                process.thaw()

            self._later(fault.for_s, thaw)

        self._server(fault, stall)

    def _other_dies(self, fault: Fault) -> None:
        """A server stalls until it is suspected; at once one dies that is left alone with some of its ranges, and
        sometimes a leader too."""

        def stall(name: str) -> None:
            process = self.cluster.servers[name].process
            self._note(f"{name} stalls until it is suspected")
            process.stall()
            self.cluster.on_view = lambda view: suspected(view)
            before = self.cluster.view
            over = False

            def thaw() -> None:
                nonlocal over
                if not over:
                    over = True
                    self._healed(name)
                    process.thaw()

            def suspected(view: View) -> None:
                nonlocal before
                lately, before = before, view
                left = left_alone(lately, view, name)
                if len(left):
                    self.cluster.on_view = lambda view: None
                    other = view.servers[_pick(view.heads[left].tolist(), fault)].name
                    alone = left[view.heads[left] == view.index(other)].tolist()
                    self.cluster.clock.after(self._random.uniform(0, AT_ONCE_S), die, other, set(alone))
                    self._later(fault.for_s, thaw)

            def die(other: str, alone: set[int]) -> None:
                lost = self.cluster.uncopied(without=other)
                if lost & alone:
                    text = f"{other} alone has ranges {sorted(lost & alone)} so soon after {name} was suspected"
                    self.cluster.broken(Violation("a suspicion and a death", text))
                elif not (lost or self.over):
                    self._hit[other] = None
                    self._die(other)
                    if fault.pick > 0.5:
                        self._leader_dies(fault)

            self._later(PATIENCE_S, thaw)

        self._server(fault, stall)

    def _server_cut_off(self, fault: Fault) -> None:
        """Nothing that a server says reaches other servers or leaders, but its workers still talk to it, until it is
        suspected: it comes back with what nobody else has."""

        def cut(name: str) -> None:
            self._note(f"{name} is heard by workers only")
            others = [n for n in (*self.cluster.servers, *self.cluster.leaders) if n != name]
            for other in others:
                self.cluster.network.lose(name, other)
            over = False

            def heal() -> None:
                nonlocal over
                if not over:
                    over = True
                    self._healed(name)
                    for other in others:
                        self.cluster.network.heal(name, other)

            def suspected(view: View) -> None:
                if (view.joining[view.kept > 0] == view.index(name)).any():
                    self.cluster.on_view = lambda view: None
                    self.cluster.clock.after(self._random.uniform(0, fault.for_s), heal)

            self.cluster.on_view = suspected
            self._later(PATIENCE_S, heal)

        self._server(fault, cut)

    def _die(self, name: str, power: bool = False) -> None:
        """A server dies, and starts again."""
        self._note(f"{name} {'loses its power' if power else 'dies'}")
        self.cluster.kill(self.cluster.servers[name].process, power)

        def again() -> None:
            self._healed(name)
            self.cluster.start_server(name)

        self._later(RESTART_S * self._random.uniform(0.1, 3), again)

    def _server_joins(self, fault: Fault) -> None:
        self._joined += 1
        if self._joined <= 2:
            name = f"s{len(self.cluster.servers)}"
            self._note(f"{name} joins")
            self.cluster.views.on_join(sum(not s.left for s in self.cluster.servers.values()) + 1)
            self.cluster.start_server(name)

    def _server_drains(self, fault: Fault) -> None:
        staying = [n for n, s in self.cluster.servers.items() if not s.asked]
        if len(staying) > self.cluster.config.replicas:
            name = _pick(staying, fault)
            self._note(f"{name} is asked to drain")
            self.cluster.drain(name)

    def _servers_drain(self, fault: Fault) -> None:
        """Several at once."""
        for pick in (fault.pick, 0.0, 0.99):
            self._server_drains(replace(fault, pick=pick))

    def _level_joiner_cut_off(self, fault: Fault) -> None:
        """The next joiner that is level is cut off from its tail at once; sometimes leaders are gone, too."""

        def cut(tail: Member, level: CaughtUp) -> None:
            self.cluster.lasting.on_level = lambda tail, level: None
            if self.over:
                return
            way, back = (tail.name, level.joiner.name), (level.joiner.name, tail.name)
            how = self._random.randrange(4)
            if how < 2:
                self._cut([[way], [way, back]][how], fault.for_s)
            elif how == 2:
                self._note(f"the connections of {tail.name} and {level.joiner.name} break")
                sockets = self.cluster.network.sockets
                for sock in [s for s in sockets if s.peer is not None and (s.process.host, s.peer.process.host) == way]:
                    self.cluster.network.reset(sock)
            else:
                self._stall(self.cluster.servers[level.joiner.name].process, fault.for_s)
            what = self._random.random()
            for name, leader in self.cluster.leaders.items():
                if what < 0.35:
                    self._stall(leader, fault.for_s)
                elif what < 0.6 and leader.alive:
                    self._kill_leader(name)

        self.cluster.lasting.on_level = cut

    def _level_joiner_takes_over(self, fault: Fault) -> None:
        """No view can be written as the next joiner is level, and its tail falls silent. So it takes that one's place,
        and mostly dies at once: the silent one's copy is the only other."""
        cluster = self.cluster

        def away(tail: Member, level: CaughtUp) -> None:
            cluster.lasting.on_level = lambda tail, level: None
            if self.over or self._hit or not s_alive(cluster, tail.name):
                return
            self._hit[tail.name] = None
            self._store_away(replace(fault, for_s=LOOK_S + SUSPECTED_S))
            cluster.clock.after(LOOK_S, silent, tail.name, level)  # the leader has heard of it

        def silent(name: str, level: CaughtUp) -> None:
            self._healed(name)
            if self.over or not s_alive(cluster, name):
                return
            process, joiner = cluster.servers[name].process, level.joiner.name
            self._note(f"{name} stalls until another has its place")
            process.stall()

            def taken(view: View) -> None:
                chain = [view.servers[i].name for i in view.chains[level.range] if i >= 0]
                if process.alive and process.stalled and name not in chain and joiner in chain:
                    cluster.on_view = lambda view: None
                    if level.range in cluster.uncopied(without=joiner):
                        text = f"{joiner} alone has range {level.range} as it takes over from {name}"
                        cluster.broken(Violation("a suspicion and a death", text))
                    cluster.clock.after(self._random.uniform(0, AT_ONCE_S), die, joiner)

            cluster.on_view = taken
            self._later(2 * SUSPECTED_S + fault.for_s, process.thaw)

        def die(joiner: str) -> None:
            spared = self.over or fault.pick < 0.2 or not s_alive(cluster, joiner)
            if not spared and not cluster.uncopied(without=joiner):
                self._hit[joiner] = None
                self._die(joiner)

        cluster.lasting.on_level = away

    def _crowd(self, fault: Fault) -> None:
        """More connect to a server than it allows, and say nothing."""

        def come(name: str) -> None:
            crowd = Process(self.cluster.clock, "crowd", "crowd")
            self._note(f"a crowd connects to {name} for {fault.for_s:.3f} s")
            for _ in range(CROWD):
                self.cluster.network.connect(crowd, name, PORT)

            def leave() -> None:
                self._healed(name)
                crowd.kill()

            self._later(fault.for_s, leave)

        self._server(fault, come)

    # --- links ------------------------------------------------------------------------------------------------------

    def _cut(self, pairs: Sequence[tuple[str, str]], for_s: float, healed: Callable[[], None] = lambda: None) -> None:
        network = self.cluster.network
        self._note(f"{', '.join(f'{a} → {b}' for a, b in pairs)} lost for {for_s:.3f} s")
        for pair in pairs:
            network.lose(*pair)

        def heal() -> None:
            for pair in pairs:
                network.heal(*pair)
            healed()

        self._later(for_s, heal)

    def _servers_apart(self, fault: Fault) -> None:
        def cut(name: str) -> None:
            others = [n for n in self.cluster.servers if n != name]
            if others:
                other = _pick(others, fault)
                self._cut([(name, other), (other, name)], fault.for_s, lambda: self._healed(name))

        self._server(fault, cut)

    def _one_way(self, fault: Fault) -> None:
        def cut(name: str) -> None:
            others = [n for n in self.cluster.servers if n != name] + list(self.workers) + list(self.cluster.leaders)
            other = _pick(others, fault)
            pair = (name, other) if fault.for_s * 1000 % 2 < 1 else (other, name)
            self._cut([pair], fault.for_s, lambda: self._healed(name))

        self._server(fault, cut)

    def _worker_apart(self, fault: Fault) -> None:
        worker, server = _pick(list(self.workers), fault), _pick(list(self.cluster.servers), fault)
        self._cut([(worker, server), (server, worker)], fault.for_s)

    def _leader_apart(self, fault: Fault) -> None:
        leader, server = _pick(list(self.cluster.leaders), fault), _pick(list(self.cluster.servers), fault)

        def cut(name: str) -> None:
            self._cut([(leader, server), (server, leader)], fault.for_s, lambda: self._healed(name))

        self._server(fault, cut)

    def _leader_without_store(self, fault: Fault) -> None:
        leader = _pick(list(self.cluster.leaders), fault)
        self._cut([(leader, STORE_HOST), (STORE_HOST, leader)], fault.for_s)

    def _store_apart(self, fault: Fault) -> None:
        hosts = [*self.cluster.servers, *self.cluster.leaders, *self.workers]
        host = _pick(hosts, fault)
        self._cut([(host, STORE_HOST), (STORE_HOST, host)], fault.for_s)

    def _store_away(self, fault: Fault) -> None:
        self._note(f"the store is away for {fault.for_s:.3f} s")
        self.cluster.store.up = False

        def back() -> None:
            self.cluster.store.up = True

        self._later(fault.for_s, back)

    def _reset(self, fault: Fault) -> None:
        sockets = list(self.cluster.network.sockets)
        if sockets:
            sock = _pick(sockets, fault)
            self._note(f"the connection {sock} breaks")
            self.cluster.network.reset(sock)

    def _tear(self, fault: Fault) -> None:
        sockets = list(self.cluster.network.sockets)
        if sockets:
            sock = _pick(sockets, fault)
            late_s = self._random.choice((0.01, 0.05, 0.2))
            self._note(f"the connection {sock} breaks there, and for {late_s} s only there")
            self.cluster.network.tear(sock, late_s)

    def _reset_all(self, fault: Fault) -> None:
        host = _pick([*self.cluster.servers, *self.workers], fault)
        self._note(f"all connections of {host} break")
        for sock in [s for s in self.cluster.network.sockets if s.process.host == host]:
            self.cluster.network.reset(sock)

    # --- workers and leaders ----------------------------------------------------------------------------------------

    def _worker_stalls(self, fault: Fault) -> None:
        name = _pick(list(self.workers), fault)
        self._stall(self.workers[name].process, fault.for_s)

    def _worker_reads_nothing(self, fault: Fault) -> None:
        process = self.workers[_pick(list(self.workers), fault)].process
        self._note(f"{process} reads nothing for {fault.for_s:.3f} s")
        process.deaf = True

        def hear() -> None:
            process.deaf = False
            for sock in [s for s in self.cluster.network.sockets if s.process is process]:
                sock.notify()

        self._later(fault.for_s, hear)

    def _worker_restarts(self, fault: Fault) -> None:
        name = _pick(list(self.workers), fault)
        self._note(f"{name} dies and starts again")
        self.restart(name)

    def _worker_dies_cut_off(self, fault: Fault) -> None:
        """What it has sent to a server arrives when its successor has come."""
        worker, server = _pick(list(self.workers), fault), self._random.choice(list(self.cluster.servers))
        self._cut([(worker, server)], 0.3 + fault.for_s)
        self.cluster.clock.after(self._random.uniform(0, 0.2), self._worker_restarts, fault)

    def _worker_doubles(self, fault: Fault) -> None:
        """It stalls, another one takes its name, and then it wakes up."""
        name = _pick(list(self.workers), fault)
        process = self.workers[name].process
        if process.alive and not process.stalled:
            self._stall(process, 0.2 + fault.for_s)
            self.double(name)

    def _leader_dies(self, fault: Fault) -> None:
        self._kill_leader(_pick(list(self.cluster.leaders), fault))

    def _kill_leader(self, name: str) -> None:
        self._note(f"leader {name} dies")
        self.cluster.kill(self.cluster.leaders[name], power=False)
        self._later(RESTART_S * self._random.uniform(0.1, 3), lambda: self.cluster.start_leader(name))

    def _leader_stalls(self, fault: Fault) -> None:
        self._stall(self.cluster.leaders[_pick(list(self.cluster.leaders), fault)], fault.for_s)

    def _stall(self, process: Process, for_s: float) -> None:
        if process.alive and not process.stalled:
            self._note(f"{process} stalls for {for_s:.3f} s")
            process.stall()
            self._later(for_s, process.thaw)


def s_alive(cluster: Cluster, name: str) -> bool:
    """Whether a server's process runs."""
    process = cluster.servers[name].process
    return process.alive and not process.stalled


def _pick(some: Sequence[T], fault: Fault) -> T:
    return some[int(fault.pick * len(some))]
