"""A model of bounded delay, without bytes: heads of a group range that release clocks, workers that pull within them.

Heads come one after another, and an earlier one may not know yet that it is none. A release is a minimum that a head
has taken, and an operation logged behind it that is committed: only the newest head can commit one. A worker that
joins is counted, asks, and starts at what is released when its own question is proved, or above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.sparse_ticks.ranges import Broken

SLACK = 2  # the bound of all pulls

MISTAKES = {
    "no proof": "a head releases its minimum without having shown that it is the head still",
    "nobody is unheard": "a new head counts only those of whom it has heard",
    "an older roster": "a new head begins with a roster that is older than its predecessor's",
    "releases are forgotten": "a new head does not take over what workers know to be released",
    "a joiner is not counted": "a head counts a worker from its first committed step on",
    "a joiner starts where it likes": "a worker that joins does not start at what is released",
    "a joiner is answered at once": "a worker that joins is told what is released before its question is proved",
    "not committed": "workers report steps that are not committed",
    "a lost connection": "a worker whose connection has ended is not counted",
}


@dataclass
class Head:
    """One server as the head of the range. pending: a minimum that is to be proved, and the joiners it is told to."""

    number: int
    roster: int  # the version of the roster that it follows
    unheard: set[int]
    clocks: dict[int, int] = field(default_factory=dict)
    released: int = 0
    joining: set[int] = field(default_factory=set)
    pending: tuple[int, frozenset[int]] | None = None


@dataclass
class Peer:
    """A worker. active: it has joined and been told where to start; head: the number of the one that it knows."""

    id: int
    base: int
    clock: int
    committed: int
    head: int
    active: bool = False
    alive: bool = True
    released: int = 0


class Delays:
    """One random run."""

    def __init__(self, seed: int, mistake: str = "") -> None:
        self.random = random = Random(seed)
        self.mistake = mistake
        self.rosters: list[frozenset[int]] = [frozenset()]  # by version
        self.logged_roster = 0  # the newest version in an operation that is committed
        self.heads = [Head(0, 0, set())]
        self.workers: dict[int, Peer] = {}
        self.pulls = 0
        for _ in range(random.choice((1, 2, 3))):
            self.join()

    def play(self) -> int:
        """Plays; returns the number of pulls that were checked."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self.step, 8), (self.commit, 8), (self.report, 10), (self.take, 5), (self.prove, 6), (self.pull, 10),
            (self.fail_over, 1), (self.follow, 2), (self.adopt, 3), (self.join, 1), (self.leave, 1), (self.cut_off, 1),
        ]  # fmt: skip
        chosen = [action for action, often in actions for _ in range(often * self.random.choice((1, 1, 3, 9)))]
        for _ in range(self.random.randrange(50, 400)):
            self.random.choice(chosen)()
        self.finish()
        return self.pulls

    def some(self) -> Peer | None:
        here = [worker for worker in self.workers.values() if worker.alive]
        return self.random.choice(here) if here else None

    def head_of(self, worker: Peer) -> Head:
        return self.heads[worker.head]

    # --- workers ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """A worker is in the roster, and joins at the head that it knows, which has that roster then."""
        if sum(worker.alive for worker in self.workers.values()) > 4:
            return
        number = len(self.workers) + 1
        self.rosters.append(self.rosters[-1] | {number})
        known = self.random.choice((len(self.heads) - 1, max(0, len(self.heads) - 2)))
        base = min((w.clock for w in self.workers.values() if w.alive and w.active), default=0)
        base = self.random.choice((0, base))
        self.workers[number] = worker = Peer(number, base, base, base, known)
        self.catch_up(self.head_of(worker))
        self.say(worker)

    def say(self, worker: Peer) -> None:
        """A worker tells its head that it takes part, and asks where to start, if it does not know."""
        head = self.head_of(worker)
        if self.mistake != "a joiner is not counted" or worker.committed > worker.base:
            head.clocks[worker.id] = max(head.clocks.get(worker.id, 0), worker.base)
        if not worker.active:
            head.joining.add(worker.id)

    def step(self) -> None:
        worker = self.some()
        if worker is not None and worker.active and worker.clock < worker.committed + 3:
            worker.clock += 1

    def commit(self) -> None:
        worker = self.some()
        if worker is not None and worker.committed < worker.clock:
            worker.committed += 1

    def report(self) -> None:
        worker = self.some()
        if worker is None:
            return
        head = self.head_of(worker)
        if worker.id not in self.rosters[head.roster]:
            return
        self.say(worker)
        head.unheard.discard(worker.id)
        clock = worker.clock if self.mistake == "not committed" else worker.committed
        if worker.id in head.clocks:
            head.clocks[worker.id] = max(head.clocks[worker.id], clock)
        if self.mistake != "releases are forgotten":
            head.released = max(head.released, worker.released)
        if self.mistake == "a joiner is answered at once" and worker.id in head.joining:
            self.start(worker, head)
        worker.released = max(worker.released, head.released if worker.active else 0)

    def start(self, worker: Peer, head: Head) -> None:
        """A worker learns where to start, and joins there."""
        head.joining.discard(worker.id)
        if self.mistake != "a joiner starts where it likes":
            worker.base = worker.clock = worker.committed = max(worker.base, head.released)
        worker.active = True
        worker.released = max(worker.released, head.released)
        self.say(worker)

    def adopt(self) -> None:
        """A worker hears of the newest head, and says there whether it takes part."""
        worker = self.some()
        if worker is not None:
            worker.head = len(self.heads) - 1
            if worker.id in self.rosters[self.head_of(worker).roster]:
                self.say(worker)

    def leave(self) -> None:
        """A worker's lease ends."""
        worker = self.some()
        if worker is not None and len([w for w in self.workers.values() if w.alive]) > 1:
            worker.alive = False
            self.rosters.append(self.rosters[-1] - {worker.id})

    def cut_off(self) -> None:
        """A connection ends."""
        worker = self.some()
        if worker is not None and self.mistake == "a lost connection":
            self.head_of(worker).clocks.pop(worker.id, None)

    def pull(self) -> None:
        """A pull that need not wait sees what the bound demands of every active worker."""
        worker = self.some()
        if worker is None or not worker.active or worker.clock - SLACK > worker.released:
            return
        self.pulls += 1
        for other in self.workers.values():
            if other.alive and other.active and other.committed < worker.clock - SLACK:
                raise Broken(f"worker {worker.id} pulls at {worker.clock}, {other.id} has committed {other.committed}")

    # --- heads ------------------------------------------------------------------------------------------------------

    def fail_over(self) -> None:
        """Another server heads the range; what it knows of the roster may be old, but not older than the log says."""
        least = 0 if self.mistake == "an older roster" else self.logged_roster
        roster = self.random.randrange(max(least, len(self.rosters) - 3), len(self.rosters))
        unheard = set() if self.mistake == "nobody is unheard" else set(self.rosters[roster])
        self.heads.append(Head(len(self.heads), roster, unheard))

    def follow(self) -> None:
        self.catch_up(self.random.choice(self.heads[-2:]))

    def catch_up(self, head: Head) -> None:
        """A head follows the newest roster: who is not in it counts no more."""
        head.roster = len(self.rosters) - 1
        present = self.rosters[-1]
        head.unheard &= present
        head.joining &= present
        head.clocks = {worker: clock for worker, clock in head.clocks.items() if worker in present}

    def take(self) -> None:
        """A head takes the minimum, and logs an operation."""
        head = self.random.choice(self.heads[-2:])
        if head.pending is None and not head.unheard:
            head.pending = min(head.clocks.values(), default=0), frozenset(head.joining)

    def prove(self) -> None:
        """The operation is committed, if the head is the newest one; else it never is."""
        head = self.random.choice(self.heads[-2:])
        if head.pending is None or (head is not self.heads[-1] and self.mistake != "no proof"):
            return
        (minimum, joining), head.pending = head.pending, None
        self.logged_roster = max(self.logged_roster, head.roster)
        head.released = max(head.released, minimum)
        for worker in self.workers.values():
            if worker.alive and worker.head == head.number and worker.id in self.rosters[head.roster]:
                if worker.id in joining and worker.id in head.joining:
                    self.start(worker, head)
                elif worker.active and self.random.random() < 0.7:
                    worker.released = max(worker.released, head.released)

    def finish(self) -> None:
        """Nothing goes wrong any more: everybody's steps are released."""
        head = self.heads[-1]
        for _ in range(4):
            self.catch_up(head)
            for worker in [worker for worker in self.workers.values() if worker.alive]:
                worker.head, worker.committed = head.number, worker.clock
                self.say(worker)
                head.unheard.discard(worker.id)
                head.clocks[worker.id] = max(head.clocks.get(worker.id, 0), worker.committed)
            head.pending = min(head.clocks.values()), frozenset(head.joining)
            self.random.seed(0)
            while head.pending is not None:
                self.prove()
        lowest = min(worker.clock for worker in self.workers.values() if worker.alive)
        if head.released < lowest:
            raise Broken(f"{head.released} is released when all have come to {lowest}")


def play(stories: int, mistake: str = "", first: int = 0) -> tuple[list[tuple[int, str]], int]:
    """Plays stories; returns which are broken and why, and the number of pulls of all."""
    broken, pulls = [], 0
    for seed in range(first, first + stories):
        try:
            pulls += Delays(seed, mistake).play()
        except Broken as error:
            broken.append((seed, str(error)))
    return broken, pulls
