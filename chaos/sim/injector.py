"""The parts of faults: which processes they may hit, what they do to them, and how that is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

from chaos.sim.clock import Process
from chaos.sim.cluster import Cluster
from chaos.sim.network import Socket
from chaos.sim.story import Fault
from chaos.sim.threads import Threads
from coordinator.core.view import View
from replication.chain import Member
from replication.effects import CaughtUp

T = TypeVar("T")
Pair = tuple[str, str]
RESTART_S = 0.4  # a supervisor starts what has died again after about so long
LOOK_S = 0.1  # until a server may be hit
PATIENCE_S = 3.0


class Injector:
    """Injects faults into a cluster. A range's last replica is never taken, and servers suffer one at a time.
    `workers` names the processes of the workers, `restart(name)` kills one and starts it again, `double(name)` starts
    its successor while it lives."""

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
        self.joined = 0  # servers
        self.random = cluster.clock.chance("faults")
        self._suffer: dict[str, None] = {}  # servers
        self._undo: dict[int, Callable[[], None]] = {}
        self._serial = count()
        self._of_views: list[Callable[[View], bool]] = []
        self._of_joiners: list[Callable[[Member, CaughtUp], bool]] = []
        cluster.on_view = self._view
        cluster.lasting.on_level = self._level

    def note(self, text: str) -> None:
        """Notes that a fault has happened."""
        self.happened.append(text)
        self.cluster.clock.note(f"fault: {text}")

    def end(self) -> None:
        """Ends all faults: undoes those that go on, and starts dead processes again."""
        self.over = True
        self._of_views.clear()
        self._of_joiners.clear()
        for undo in list(self._undo.values()):
            undo()

    # --- when -------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, call: Callable[..., None], *arguments: object) -> None:
        """Goes on with a fault after a while, unless faults have ended."""
        self.cluster.clock.after(delay_s, lambda: None if self.over else call(*arguments))

    def later(self, delay_s: float, undo: Callable[[], None]) -> Callable[[], None]:
        """Undoes a fault once: after a while, when faults end, or when the returned function is called."""
        key = next(self._serial)

        def once() -> None:
            if self._undo.pop(key, None) is not None:
                undo()

        self._undo[key] = once
        self.cluster.clock.after(delay_s, once)
        return once

    def watch_views(self, seen: Callable[[View], bool]) -> None:
        """Calls `seen` with every new view until it returns that this is the one it waits for."""
        self._of_views.append(seen)

    def watch_joiners(self, seen: Callable[[Member, CaughtUp], bool]) -> None:
        """Calls `seen` likewise with every joiner that a tail reports level; the first caller sees them alone."""
        self._of_joiners.append(seen)

    def _view(self, view: View) -> None:
        for seen in list(self._of_views):
            if seen(view):
                self._of_views.remove(seen)

    def _level(self, tail: Member, level: CaughtUp) -> None:
        if self._of_joiners and self._of_joiners[0](tail, level):
            self._of_joiners.pop(0)

    # --- servers ----------------------------------------------------------------------------------------------------

    def server(self, fault: Fault, use: Callable[[str], None], tries: float = PATIENCE_S) -> None:
        """Picks a server that can be spared, as soon as there is one. It counts as hit until it has `recovered`."""
        if self.over or tries <= 0:
            return
        cluster = self.cluster
        alone = cluster.config.replicas == 1  # then no server is killed
        spared = [n for n, s in cluster.servers.items() if not (s.left or s.draining) and n not in self._suffer]
        needed = cluster.indispensable()
        if alone and needed:
            needed &= {""}
        if needed is None or "" in needed:
            spared = []
        spared = [n for n in spared if self.is_alive(n) and n not in (needed or ())]
        if not spared or self._suffer:
            cluster.clock.after(LOOK_S, self.server, fault, use, tries - LOOK_S)
            return
        name = pick(spared, fault)
        self.suffers(name)
        use(name)

    def nobody_suffers(self) -> bool:
        """Whether no server is hit now."""
        return not self._suffer

    def suffers(self, name: str) -> None:
        """Marks a server as hit: no other server is hit meanwhile."""
        self._suffer[name] = None

    def recovered(self, name: str) -> None:
        """The server has recovered: others may be hit again."""
        self._suffer.pop(name, None)

    def is_alive(self, name: str) -> bool:
        """Whether a server's process runs."""
        process = self.cluster.servers[name].process
        return process.alive and not process.stalled

    def others(self, name: str) -> list[str]:
        """Returns the names of the other servers."""
        return [n for n in self.cluster.servers if n != name]

    def die(self, name: str, power: bool = False) -> None:
        """Kills a server, and starts it again."""
        self.note(f"{name} {'loses its power' if power else 'dies'}")
        self.suffers(name)
        self.cluster.kill(self.cluster.servers[name].process, power)

        def again() -> None:
            self.recovered(name)
            self.cluster.start_server(name)

        self.later(RESTART_S * self.random.uniform(0.1, 3), again)

    def die_if_spared(self, name: str, power: bool = False) -> None:
        """Kills a server that is hit already, unless a range's last replica would die with it."""
        if not self.is_alive(name) or self.cluster.uncopied(without=name):
            self.recovered(name)
        else:
            self.die(name, power)

    # --- other processes --------------------------------------------------------------------------------------------

    def stall(self, process: Process, for_s: float, healed: Callable[[], None] = lambda: None) -> None:
        """Suspends a process for a while."""

        def thaw() -> None:
            process.thaw()
            healed()

        if process.alive and not process.stalled:
            self.note(f"{process} stalls for {for_s:.3f} s")
            process.stall()
            self.later(for_s, thaw)

    def kill_leader(self, name: str) -> None:
        """Kills a coordinator, and starts it again."""
        self.note(f"leader {name} dies")
        self.cluster.kill(self.cluster.leaders[name], power=False)
        self.later(RESTART_S * self.random.uniform(0.1, 3), lambda: self.cluster.start_leader(name))

    def restart_worker(self, fault: Fault) -> None:
        """Kills a worker, and starts it again."""
        name = pick(list(self.workers), fault)
        self.note(f"{name} dies and starts again")
        self.restart(name)

    def store_away(self, for_s: float) -> None:
        """Lets the store answer nobody for a while."""
        self.note(f"the store is away for {for_s:.3f} s")
        self.cluster.store.up = False

        def back() -> None:
            self.cluster.store.up = True

        self.later(for_s, back)

    # --- links ------------------------------------------------------------------------------------------------------

    def cut(self, pairs: Sequence[Pair], for_s: float, healed: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Loses what the first host of each pair sends to the second. Returns a function that ends it."""
        network = self.cluster.network
        self.note(f"{', '.join(f'{a} → {b}' for a, b in pairs)} lost for {for_s:.3f} s")
        for pair in pairs:
            network.lose(*pair)

        def heal() -> None:
            for pair in pairs:
                network.heal(*pair)
            healed()

        return self.later(for_s, heal)

    def cut_both(self, a: str, b: str, for_s: float, healed: Callable[[], None] = lambda: None) -> None:
        """Loses what two hosts send to each other."""
        self.cut([(a, b), (b, a)], for_s, healed)

    def reset(self, which: Callable[[Socket], bool]) -> None:
        """Breaks the connections of all sockets that `which` chooses."""
        for sock in [s for s in self.cluster.network.sockets if which(s)]:
            self.cluster.network.reset(sock)


def pick(some: Sequence[T], fault: Fault) -> T:
    """Returns which of `some` a fault hits."""
    return some[int(fault.pick * len(some))]


def peer_host(sock: Socket) -> str | None:
    """Returns the host at the other end of a connection."""
    return None if sock.peer is None else sock.peer.process.host
