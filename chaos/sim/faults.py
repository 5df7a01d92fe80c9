"""The faults that a story may name, and how each is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chaos.sim.clock import Process
from chaos.sim.cluster import PORT, STORE_HOST
from chaos.sim.injector import Injector, pick
from chaos.sim.story import Fault
from chaos.sim.triggered_faults import (
    level_joiner_cut_off,
    level_joiner_takes_over,
    other_dies,
    server_and_worker_die,
    server_cut_off,
    server_limps,
)
from coordinator.core.view import View
from elasticps.wire.frames import view_frame

FLOOD = 60  # connections: more than a server with small limits allows
MOST_JOIN = 2
LIE = 1 << 40  # epochs above the one that is


def inject(injector: Injector, fault: Fault) -> None:
    """Does a fault whose time has come."""
    if not injector.over:
        KINDS[fault.what](injector, fault)


# --- servers ----------------------------------------------------------------------------------------------------------


def server_dies(injector: Injector, fault: Fault) -> None:
    injector.server(fault, injector.die)


def host_dies(injector: Injector, fault: Fault) -> None:
    injector.server(fault, lambda name: injector.die(name, power=True))


def server_stalls(injector: Injector, fault: Fault) -> None:
    def stall(name: str) -> None:
        injector.stall(injector.cluster.servers[name].process, fault.for_s, lambda: injector.recovered(name))

    injector.server(fault, stall)


def server_joins(injector: Injector, fault: Fault) -> None:
    cluster = injector.cluster
    injector.joined += 1
    if injector.joined <= MOST_JOIN:
        name = f"s{len(cluster.servers)}"
        injector.note(f"{name} joins")
        cluster.views.on_join(sum(not s.left for s in cluster.servers.values()) + 1)
        cluster.start_server(name)


def server_drains(injector: Injector, fault: Fault) -> None:
    staying = [n for n, s in injector.cluster.servers.items() if not s.draining]
    if len(staying) > injector.cluster.config.replicas:
        name = pick(staying, fault)
        injector.note(f"{name} is asked to drain")
        injector.cluster.drain(name)


def servers_drain(injector: Injector, fault: Fault) -> None:
    """Drains several servers at once."""
    for which in (fault.pick, 0.0, 0.99):
        server_drains(injector, replace(fault, pick=which))


def server_lies(injector: Injector, fault: Fault) -> None:
    """A server shows workers a view that no leader has written, in which it heads everything, as an attacker might."""

    def lie(name: str) -> None:
        injector.recovered(name)
        view, server = injector.cluster.view, injector.cluster.servers[name].now
        if view is None or server is None or (mine := view.index(name)) < 0:
            return
        injector.note(f"{name} lies")
        chains, nobody = np.full_like(view.chains, -1), np.full_like(view.joining, -1)
        chains[:, 0] = mine
        forged = View(
            view.cluster, view.epoch + LIE, view.ranges, view.replicas, view.servers, chains, nobody, view.since, ""
        )
        frame = view_frame(forged)
        for connection in server.handshake.workers:
            connection.send(frame)

    injector.server(fault, lie)


def flood(injector: Injector, fault: Fault) -> None:
    """Opens more connections to a server than it allows, which say nothing."""

    def come(name: str) -> None:
        strangers = Process(injector.cluster.clock, "crowd", "crowd")
        injector.note(f"a crowd connects to {name} for {fault.for_s:.3f} s")
        for _ in range(FLOOD):
            injector.cluster.network.connect(strangers, name, PORT)

        def leave() -> None:
            injector.recovered(name)
            strangers.kill()

        injector.later(fault.for_s, leave)

    injector.server(fault, come)


# --- links ------------------------------------------------------------------------------------------------------------


def servers_apart(injector: Injector, fault: Fault) -> None:
    def cut(name: str) -> None:
        others = injector.others(name)
        if others:
            injector.cut_both(name, pick(others, fault), fault.for_s, lambda: injector.recovered(name))

    injector.server(fault, cut)


def one_way(injector: Injector, fault: Fault) -> None:
    def cut(name: str) -> None:
        other = pick([*injector.others(name), *injector.workers, *injector.cluster.leaders], fault)
        pair = (name, other) if fault.for_s * 1000 % 2 < 1 else (other, name)
        injector.cut([pair], fault.for_s, lambda: injector.recovered(name))

    injector.server(fault, cut)


def worker_apart(injector: Injector, fault: Fault) -> None:
    worker, server = pick(list(injector.workers), fault), pick(list(injector.cluster.servers), fault)
    injector.cut_both(worker, server, fault.for_s)


def leader_apart(injector: Injector, fault: Fault) -> None:
    """Cuts a leader off from a server, while no other server is hit."""
    leader, server = pick(list(injector.cluster.leaders), fault), pick(list(injector.cluster.servers), fault)

    def cut(name: str) -> None:
        injector.cut_both(leader, server, fault.for_s, lambda: injector.recovered(name))

    injector.server(fault, cut)


def leader_without_store(injector: Injector, fault: Fault) -> None:
    injector.cut_both(pick(list(injector.cluster.leaders), fault), STORE_HOST, fault.for_s)


def store_apart(injector: Injector, fault: Fault) -> None:
    """Cuts one process of any kind off from the store."""
    cluster = injector.cluster
    injector.cut_both(pick([*cluster.servers, *cluster.leaders, *injector.workers], fault), STORE_HOST, fault.for_s)


def store_away(injector: Injector, fault: Fault) -> None:
    injector.store_away(fault.for_s)


def reset(injector: Injector, fault: Fault) -> None:
    """Breaks one connection."""
    sockets = list(injector.cluster.network.sockets)
    if sockets:
        sock = pick(sockets, fault)
        injector.note(f"the connection {sock} breaks")
        injector.cluster.network.reset(sock)


def tear(injector: Injector, fault: Fault) -> None:
    """Breaks one connection, for a while at one end only."""
    sockets = list(injector.cluster.network.sockets)
    if sockets:
        sock = pick(sockets, fault)
        late_s = injector.random.choice((0.01, 0.05, 0.2))
        injector.note(f"the connection {sock} breaks there, and for {late_s} s only there")
        injector.cluster.network.tear(sock, late_s)


def reset_all(injector: Injector, fault: Fault) -> None:
    """Breaks all connections of a server or worker."""
    host = pick([*injector.cluster.servers, *injector.workers], fault)
    injector.note(f"all connections of {host} break")
    injector.reset(lambda sock: sock.process.host == host)


# --- workers and leaders ----------------------------------------------------------------------------------------------


def worker_stalls(injector: Injector, fault: Fault) -> None:
    injector.stall(injector.workers[pick(list(injector.workers), fault)].process, fault.for_s)


def worker_reads_nothing(injector: Injector, fault: Fault) -> None:
    process = injector.workers[pick(list(injector.workers), fault)].process
    injector.note(f"{process} reads nothing for {fault.for_s:.3f} s")
    process.deaf = True

    def hear() -> None:
        process.deaf = False
        for sock in [s for s in injector.cluster.network.sockets if s.process is process]:
            sock.notify()

    injector.later(fault.for_s, hear)


def worker_restarts(injector: Injector, fault: Fault) -> None:
    injector.restart_worker(fault)


def worker_dies_cut_off(injector: Injector, fault: Fault) -> None:
    """Restarts a worker, whose last bytes to a server arrive only after its successor has started."""
    worker, server = pick(list(injector.workers), fault), injector.random.choice(list(injector.cluster.servers))
    injector.cut([(worker, server)], 0.3 + fault.for_s)
    injector.after(injector.random.uniform(0, 0.2), injector.restart_worker, fault)


def worker_doubles(injector: Injector, fault: Fault) -> None:
    """Stalls a worker, starts a successor under its name, and then wakes it up."""
    name = pick(list(injector.workers), fault)
    process = injector.workers[name].process
    if process.alive and not process.stalled:
        injector.stall(process, 0.2 + fault.for_s)
        injector.double(name)


def leader_dies(injector: Injector, fault: Fault) -> None:
    injector.kill_leader(pick(list(injector.cluster.leaders), fault))


def leader_stalls(injector: Injector, fault: Fault) -> None:
    injector.stall(pick(list(injector.cluster.leaders.values()), fault), fault.for_s)


KINDS: dict[str, Callable[[Injector, Fault], None]] = {
    "server dies": server_dies,
    "host dies": host_dies,
    "server stalls": server_stalls,
    "server stalls, other dies": other_dies,
    "worker stalls": worker_stalls,
    "worker restarts": worker_restarts,
    "worker dies cut off": worker_dies_cut_off,
    "worker doubles": worker_doubles,
    "server limps": server_limps,
    "leader without store": leader_without_store,
    "tear": tear,
    "worker reads nothing": worker_reads_nothing,
    "crowd": flood,
    "leader dies": leader_dies,
    "leader stalls": leader_stalls,
    "servers apart": servers_apart,
    "one way": one_way,
    "worker apart": worker_apart,
    "leader apart": leader_apart,
    "store apart": store_apart,
    "store away": store_away,
    "reset": reset,
    "reset all": reset_all,
    "server joins": server_joins,
    "server lies": server_lies,
    "server drains": server_drains,
    "level joiner cut off": level_joiner_cut_off,
    "level joiner takes over": level_joiner_takes_over,
    "server cut off": server_cut_off,
    "server and worker die": server_and_worker_die,
    "servers drain": servers_drain,
}
