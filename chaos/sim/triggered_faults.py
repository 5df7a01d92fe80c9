"""Faults that wait for an event: a step that only one server has, a suspicion, a level joiner."""

from __future__ import annotations

from chaos.sim.checks.views import left_alone
from chaos.sim.checks.violation import Violation
from chaos.sim.injector import LOOK_S, PATIENCE_S, RESTART_S, Injector, peer_host, pick
from chaos.sim.story import Fault
from coordinator.core.view import View
from replication.chain import Member
from replication.effects import CaughtUp

HEIR_S = 1.4  # before a server is suspected that only workers and leaders hear
SUSPECTED_S = 1.0  # a server that is silent for so long is suspected
AT_ONCE_S = 0.05  # so soon after one is suspected the other dies


def server_limps(injector: Injector, fault: Fault) -> None:
    """Cuts a server off from its neighbours, then from its workers, and kills it: what it did alone must not count."""
    random = injector.random

    def lose_workers(name: str) -> None:
        injector.reset(lambda sock: sock.process.host in injector.workers and peer_host(sock) == name)

    def limp(name: str) -> None:
        others = injector.others(name)
        out, back = [(name, other) for other in others], [(other, name) for other in others]
        injector.cut((out, back, out + back)[int(fault.pick * 1000) % 3], fault.for_s + 1.0)
        for _ in range(random.randint(0, 3)):
            injector.after(random.uniform(0, fault.for_s), lose_workers, name)
        if random.random() < 0.7:  # its successor asks for its clocks, and gets them before the server dies
            before_s = fault.for_s - 2 * RESTART_S
            injector.after(random.uniform(0, before_s), injector.restart_worker, fault)
        injector.after(fault.for_s, injector.die_if_spared, name, fault.pick < 0.3)

    injector.server(fault, limp)


def server_and_worker_die(injector: Injector, fault: Fault) -> None:
    """Lets a server forward nothing. A worker dies of which only that server has a step; the worker's successor asks
    for its clocks; then the server dies."""
    random = injector.random

    def cut(name: str) -> None:
        injector.cut([(name, other) for other in injector.others(name)], HEIR_S)
        wait(name, HEIR_S / 3)

    def wait(name: str, left_s: float) -> None:
        server = injector.cluster.servers[name].now
        waits = server is not None and bool((server.replica.acked < server.replica.seq).any())
        if left_s > 0 and not waits:
            injector.after(LOOK_S / 20, wait, name, left_s - LOOK_S / 20)
            return
        soon_s = random.choice((0.0, 0.1, 0.3)) * random.random()
        injector.after(soon_s, injector.restart_worker, fault)
        injector.after(soon_s + random.choice((0.05, RESTART_S + 0.3)), injector.die_if_spared, name)

    injector.server(fault, cut)


def other_dies(injector: Injector, fault: Fault) -> None:
    """Stalls a server until it is suspected; then kills at once a server that is left alone with some of its ranges,
    and sometimes a leader, too."""
    cluster = injector.cluster

    def stall(name: str) -> None:
        process = cluster.servers[name].process
        injector.note(f"{name} stalls until it is suspected")
        process.stall()

        def thaw() -> None:
            injector.recovered(name)
            process.thaw()

        thawed, before = injector.later(PATIENCE_S, thaw), cluster.view

        def suspected(view: View) -> bool:
            nonlocal before
            lately, before = before, view
            left = left_alone(lately, view, name)
            if not len(left):
                return False
            other = view.servers[pick(view.heads[left].tolist(), fault)].name
            alone = left[view.heads[left] == view.index(other)].tolist()
            injector.after(injector.random.uniform(0, AT_ONCE_S), die, other, set(alone))
            injector.after(fault.for_s, thawed)
            return True

        injector.watch_views(suspected)

    def die(other: str, alone: set[int]) -> None:
        lost = cluster.uncopied(without=other)
        if lost & alone:
            text = f"{other} alone has ranges {sorted(lost & alone)} so soon after one was suspected"
            cluster.broken(Violation("a suspicion and a death", text))
        elif not lost:
            injector.die(other)
            if fault.pick > 0.5:
                injector.kill_leader(pick(list(cluster.leaders), fault))

    injector.server(fault, stall)


def server_cut_off(injector: Injector, fault: Fault) -> None:
    """Loses all that a server sends to other servers and leaders, but not to workers, until it is suspected: it comes
    back with steps that only it has."""

    def cut(name: str) -> None:
        others = [*injector.others(name), *injector.cluster.leaders]
        injector.note(f"{name} is heard by workers only")
        healed = injector.cut([(name, other) for other in others], PATIENCE_S, lambda: injector.recovered(name))

        def suspected(view: View) -> bool:
            if not (view.joining[view.copy_state > 0] == view.index(name)).any():
                return False
            injector.after(injector.random.uniform(0, fault.for_s), healed)
            return True

        injector.watch_views(suspected)

    injector.server(fault, cut)


def level_joiner_cut_off(injector: Injector, fault: Fault) -> None:
    """Cuts the next level joiner off from its tail at once; sometimes kills the leaders, too."""
    random = injector.random

    def level(tail: Member, level: CaughtUp) -> bool:
        way, back = (tail.name, level.joiner.name), (level.joiner.name, tail.name)
        how = random.randrange(4)
        if how < 2:
            injector.cut([[way], [way, back]][how], fault.for_s)
        elif how == 2:
            injector.note(f"the connections of {tail.name} and {level.joiner.name} break")
            injector.reset(lambda sock: (sock.process.host, peer_host(sock)) == way)
        else:
            injector.stall(injector.cluster.servers[level.joiner.name].process, fault.for_s)
        what = random.random()
        for name, leader in injector.cluster.leaders.items():
            if what < 0.35:
                injector.stall(leader, fault.for_s)
            elif what < 0.6 and leader.alive:
                injector.kill_leader(name)
        return True

    injector.watch_joiners(level)


def level_joiner_takes_over(injector: Injector, fault: Fault) -> None:
    """Keeps views from being written when the next joiner is level, and silences its tail. So the joiner takes the
    tail's place, and mostly dies at once: the only other copy is that of the silent tail."""
    cluster = injector.cluster

    def level(tail: Member, level: CaughtUp) -> bool:
        if injector.nobody_suffers() and injector.is_alive(tail.name):
            injector.suffers(tail.name)
            injector.store_away(LOOK_S + SUSPECTED_S)
            injector.after(LOOK_S, silent, tail.name, level)  # the leader has heard of it
        return True

    def silent(name: str, level: CaughtUp) -> None:
        injector.recovered(name)
        if not injector.is_alive(name) or any(server.process.stalled for server in cluster.servers.values()):
            return  # with another one that is silent, both copies may be
        process, joiner = cluster.servers[name].process, level.joiner.name
        injector.note(f"{name} stalls until another has its place")
        process.stall()
        injector.later(2 * SUSPECTED_S + fault.for_s, process.thaw)

        def taken(view: View) -> bool:
            if not (process.alive and process.stalled):
                return True  # it was too late
            chain = [view.servers[i].name for i in view.chains[level.range] if i >= 0]
            if name in chain or joiner not in chain:
                return False
            if level.range in cluster.uncopied(without=joiner):
                text = f"{joiner} alone has range {level.range} as it takes over from {name}"
                cluster.broken(Violation("a suspicion and a death", text))
            injector.after(injector.random.uniform(0, AT_ONCE_S), die, joiner)
            return True

        injector.watch_views(taken)

    def die(joiner: str) -> None:
        if fault.pick >= 0.2 and injector.is_alive(joiner) and not cluster.uncopied(without=joiner):
            injector.die(joiner)

    injector.watch_joiners(level)
