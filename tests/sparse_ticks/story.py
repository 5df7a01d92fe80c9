"""Random stories of sparse ticks, and what must hold in each."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tests.sparse_ticks.ranges import MASK, PART, Broken, Range, State, Tick, digest
from tests.sparse_ticks.worker import Step, Worker


class Story:
    """One random run. window: steps outstanding at most. group: the application's range, with shards and the delay."""

    def __init__(self, seed: int, mistake: str = "") -> None:
        self.random = random = Random(seed)
        self.mistake = mistake
        self.ranges = [Range(r, random.choice((2, 2, 3)), mistake) for r in range(random.choice((2, 4, 8)))]
        self.group = random.randrange(len(self.ranges))
        self.window = random.choice((1, 2, 4))
        self.staleness = random.choice((None, 0, 2))
        self.workers: list[Worker] = []
        self.truth: dict[tuple[int, int], Step] = {}
        self.committed: set[tuple[int, int]] = set()
        self.again: set[tuple[int, int]] = set()  # steps whose shards were handed out again
        self.lost: list[set[tuple[int, int, int]]] = [set() for _ in self.ranges]
        self.answered_wrongly: dict[tuple[int, int], int] = {}
        self.cut = 0
        self.cut_written: set[int] = set()
        self.holding: dict[int, tuple[int, int]] = {}  # by worker: the clock and digest that it reported
        self.checkpoint: list[State] | None = None
        self.checkpoints = 0
        self.reports: dict[int, int] = {}  # at the application's head, by worker: the committed clock last reported
        self.group_heads = 0
        self.shard = 0
        self.pulls = 0
        for _ in range(random.choice((1, 2, 3))):
            self.join(0)

    def shuffled(self, ranges: Iterable[int]) -> list[int]:
        """The same in some order."""
        order = sorted(ranges)
        self.random.shuffle(order)
        return order

    def join(self, base: int) -> Worker:
        """A worker starts, with an id that nobody has had."""
        worker = Worker(self, len(self.workers) + 1, self.random.randrange(len(self.ranges)), base)
        worker.seen = {r: (range_.heads, range_.recoveries) for r, range_ in enumerate(self.ranges)}
        self.workers.append(worker)
        return worker

    @property
    def roster(self) -> frozenset[int]:
        """The ids of the workers that are here."""
        return frozenset(worker.id for worker in self.workers if worker.present)

    # --- what happens -----------------------------------------------------------------------------------------------

    def play(self) -> int:
        """Plays, mends everything, and checks what must be so in the end; returns the number of steps."""
        for _ in range(self.random.randrange(40, 400)):
            self.event()
            self.check()
        self.finish()
        return len(self.truth)

    def event(self) -> None:
        """Something happens."""
        random, what = self.random, self.random.random()
        here = [worker for worker in self.workers if worker.alive and worker.present]
        worker = random.choice(here) if here else None
        range_ = random.choice(self.ranges)
        if worker is not None and what < 0.25:
            self.step(worker)
        elif what < 0.55:
            someone = random.choice(self.workers)
            if someone.links:
                self.receive(someone, random.choice(sorted(someone.links)))
        elif what < 0.72:
            range_.replicate(random)
        elif what < 0.78:
            range_.lose(random.randrange(len(range_.copies)))
        elif what < 0.80:
            range_.move()
        elif what < 0.81:
            self.recover(range_)
        elif worker is not None and what < 0.82:
            self.die(worker)
        elif worker is not None and what < 0.83:
            self.stand_still(worker)
        elif what < 0.86:
            self.cut_on()
        elif what < 0.90:
            self.report(random.choice(self.workers))
        elif worker is not None and what < 0.93:
            self.pull(worker)
        elif worker is not None:
            r = random.randrange(len(self.ranges))
            if r in worker.broken or worker.seen[r] != (self.ranges[r].heads, self.ranges[r].recoveries) or what > 0.99:
                worker.ask(r)
            else:
                worker.acknowledge(r)

    def step(self, worker: Worker) -> None:
        """A worker pushes a part."""
        if worker.open or (len(worker.steps) < self.window and worker.held < self.cut):
            few = self.random.randint(0, 3)
            touched = {self.random.randrange(len(self.ranges)) for _ in range(few)}
            last, shard = self.random.random() < 0.7, None
            if last and self.random.random() < 0.2:
                self.shard += 1
                shard = self.shard
                touched.add(self.group)
            worker.push(touched, last, shard)

    def deliver(self, tick: Tick, r: int) -> str:
        """A frame reaches a head."""
        range_ = self.ranges[r]
        verdict = range_.judge(tick)
        if verdict == "next":
            range_.write(tick)
        elif verdict == "duplicate" and range_.head.progress.get(tick.worker, 0) < tick.prev:
            self.answered_wrongly[tick.worker, r] = tick.after
        return verdict

    def receive(self, worker: Worker, r: int) -> None:
        """The next frame of a link."""
        link = worker.links[r]
        if worker.seen[r] != (self.ranges[r].heads, self.ranges[r].recoveries):
            del worker.links[r]  # it went to a head that is none any more
            worker.broken.add(r)
            return
        if self.deliver(link.popleft(), r) == "gap" and worker.alive:
            worker.ask(r)
        if not link and worker.links.get(r) is link:
            del worker.links[r]

    def recover(self, range_: Range) -> None:
        """All replicas of a range die, and it comes back from the newest checkpoint."""
        state = self.checkpoint[range_.r] if self.checkpoint is not None else None
        before = set(range_.head.applied)
        range_.recover(state)
        self.lost[range_.r] |= before - set(range_.head.applied)
        if range_.r == self.group:
            self.reports.clear()

    def die(self, worker: Worker) -> None:
        """A worker dies, and sooner or later a successor starts."""
        worker.alive = worker.present = False
        if self.mistake != "resume before the fence":
            self.fence_all()
        self.resume(worker)
        for r, link in worker.links.items():  # what is under way still arrives, or does not
            if worker.seen[r] == (self.ranges[r].heads, self.ranges[r].recoveries) and self.random.random() < 0.7:
                for tick in link:
                    self.deliver(tick, r)
        worker.links.clear()
        self.fence_all()

    def fence_all(self) -> None:
        """All servers follow the roster."""
        for range_ in self.ranges:
            range_.fence(self.roster)

    def stand_still(self, worker: Worker) -> None:
        """A worker's lease runs out, and it comes back under its id as nobody has taken its name."""
        worker.present = False
        self.fence_all()
        self.reports.pop(worker.id, None)
        worker.present = True
        self.fence_all()
        for r in range(len(self.ranges)):
            if self.random.random() < 0.8:
                worker.ask(r)

    # --- a successor ------------------------------------------------------------------------------------------------

    def trained(self, left: Worker) -> tuple[int, int]:
        """(trained, begun) of a worker that has left, as a successor learns it. The store knows where it started."""
        id, home = left.id, left.home
        state = self.ranges[home].head
        records, trained = state.records.get(id, {}), max(state.committed.get(id, 0), left.base)
        begun = max(state.progress.get(id, 0) >> PART, trained)
        if self.mistake == "resume trusts home alone":
            return begun, begun + self.window
        for clock in range(trained + 1, begun + 1):
            if clock not in records or not self.committed_at(id, clock, records[clock] | {home}):
                break
            trained = clock
        return trained, begun + self.window

    def committed_at(self, id: int, clock: int, ranges: Iterable[int]) -> bool:
        """Whether ranges say that a step is committed."""
        if self.mistake == "resume reads applied":
            return all(self.ranges[r].head.progress.get(id, 0) >= clock << PART for r in ranges)
        return all(self.ranges[r].acknowledged(id) >= clock << PART for r in ranges)

    def resume(self, worker: Worker) -> None:
        """A successor starts behind a worker that has died, and looks at the shards that it had marked."""
        trained, begun = self.trained(worker)
        base = worker.base
        if trained < worker.committed and not any(range_.recoveries for range_ in self.ranges):
            raise Broken(f"worker {worker.id}: step {worker.committed} was acknowledged, and counts as not trained")
        for clock in range(base + 1, max(trained, base) + 1):
            self.must_have(worker.id, clock, "trained, as its successor learns")
        seen = max((clock for id, clock in self.truth if id == worker.id and self.begun_anywhere(id, clock)), default=0)
        if begun < seen and not self.ranges[worker.home].recoveries:
            raise Broken(f"worker {worker.id}: its successor starts at {begun}, and some range has step {seen}")
        for shard, (id, clock) in list(self.ranges[self.group].head.shards.items()):
            if id == worker.id and self.shard_is_done(id, worker.home, clock):
                self.must_have(id, clock, f"done, with shard {shard}")
            elif id == worker.id:
                self.again.add((id, clock))
        self.join(max(begun, trained))

    def begun_anywhere(self, id: int, clock: int) -> bool:
        return any((id, clock) == (w, c) for range_ in self.ranges for w, c, _ in range_.tail.applied)

    def shard_is_done(self, id: int, home: int, clock: int) -> bool:
        """Whether the step that marked a shard is committed, as whoever gets the shard next learns it. What heads have
        may be on its way down the chains: the question is asked until all have it, or a head has gone without."""
        if self.mistake == "a shard by home alone":
            return self.ranges[home].head.progress.get(id, 0) >= clock << PART
        state = self.ranges[home].head
        if clock <= state.committed.get(id, 0):
            return True
        names = state.records.get(id, {}).get(clock)
        if names is None:
            return False
        if self.mistake != "a shard is asked about once":
            for r in names | {home}:
                self.ranges[r].settle()
        return self.committed_at(id, clock, names | {home})

    # --- cuts -------------------------------------------------------------------------------------------------------

    def cut_on(self) -> None:
        """A cut begins, or goes on: workers hold, ranges are cut, what they had is compared."""
        if not self.cut or len(self.cut_written) == len(self.ranges):
            if self.cut:
                self.prove()
            self.release()
            if self.random.random() < 0.5:
                self.cut += 1
            return
        here = [worker for worker in self.workers if worker.present]
        waiting = [worker for worker in here if worker.held < self.cut]
        if waiting:
            for worker in waiting:
                ready = not worker.steps
                if self.mistake == "held when home is":
                    ready = not worker.open and self.ranges[worker.home].acknowledged(worker.id) >= worker.clock << PART
                if worker.alive and ready:
                    worker.held = self.cut
                    self.holding[worker.id] = worker.clock, worker.digest()
        else:
            for r in self.shuffled(set(range(len(self.ranges))) - self.cut_written)[:3]:
                self.ranges[r].write(self.cut)
                self.cut_written.add(r)

    def release(self) -> None:
        """Workers go on."""
        for worker in self.workers:
            worker.held = self.cut
        self.holding.clear()
        self.cut_written.clear()

    def prove(self) -> None:
        """Takes the checkpoint if every range has it and the digests agree."""
        states = [range_.at_cut.get(self.cut) for range_ in self.ranges]
        whole = [state for state in states if state is not None]
        if len(whole) < len(self.ranges) or self.holding.keys() < self.roster:
            return
        for id, (clock, reported) in self.holding.items():
            if self.mistake != "held when home is":
                sums = sum(digest(r, id, state.progress.get(id, 0)) for r, state in enumerate(whole)) & MASK
                if sums != reported:
                    return
            for c in range(1, clock + 1):
                for r in self.truth[id, c].touched if (id, c) in self.truth else ():
                    for part in self.parts_in(id, c, r):
                        if part not in whole[r].applied and part not in self.lost[r]:
                            raise Broken(f"cut {self.cut}: range {r} lacks {part}, which worker {id} had committed")
            if any(w == id and c > clock for state in whole for w, c, _ in state.applied):
                raise Broken(f"cut {self.cut}: a range has a step of worker {id} after {clock}")
        self.checkpoint = whole
        self.checkpoints += 1

    # --- bounded delay ----------------------------------------------------------------------------------------------

    def report(self, worker: Worker) -> None:
        """A worker's home reports its committed clock to the application's head."""
        if self.group_heads != self.ranges[self.group].heads:
            self.group_heads = self.ranges[self.group].heads
            self.reports.clear()
        if not worker.present:
            return
        state = self.ranges[worker.home].head
        known = max(
            state.committed.get(worker.id, 0), worker.committed if worker.alive else 0
        )  # a note of the worker's
        if self.mistake == "the delay reads home":
            known = state.progress.get(worker.id, 0) >> PART
        self.reports[worker.id] = max(self.reports.get(worker.id, 0), known, worker.base)

    def lowest(self) -> int | None:
        """The lowest committed clock of the active workers, None while the application's head does not know it."""
        if self.group_heads != self.ranges[self.group].heads:
            self.group_heads = self.ranges[self.group].heads
            self.reports.clear()
        if not self.roster <= self.reports.keys() and self.mistake != "a new head of the application guesses":
            return None
        return min((clock for id, clock in self.reports.items() if id in self.roster), default=1 << 30)

    def pull(self, worker: Worker) -> None:
        """A pull under bounded delay, if it need not wait: it must see all that the delay demands."""
        lowest = self.lowest()
        if self.staleness is None or lowest is None:
            return
        floor = worker.clock - self.staleness
        if lowest >= floor:
            self.pulls += 1
            for other in self.workers:
                if other.present:
                    for clock in range(other.base + 1, min(floor, other.clock) + 1):
                        self.must_have(other.id, clock, f"within the delay of worker {worker.id}", tails_only=True)

    # --- promises ---------------------------------------------------------------------------------------------------

    def begin(self, id: int, clock: int, step: Step) -> None:
        """A worker begins a part."""
        self.truth[id, clock] = step

    def parts_in(self, id: int, clock: int, r: int) -> list[tuple[int, int, int]]:
        """The parts of a step that touch a range."""
        return [(id, clock, part) for part, touched in enumerate(self.truth[id, clock].parts) if r in touched]

    def commit(self, id: int, clock: int) -> None:
        """A worker learns that a step is committed."""
        self.committed.add((id, clock))
        self.must_have(id, clock, "acknowledged")

    def must_have(self, id: int, clock: int, why: str, *, tails_only: bool = False) -> None:
        """Every replica of each range that a step touches has it, but for what was lost with all replicas."""
        for r in self.truth[id, clock].touched if (id, clock) in self.truth else ():
            for copy in self.ranges[r].copies[-1:] if tails_only else self.ranges[r].copies:
                for part in self.parts_in(id, clock, r):
                    if part not in copy.applied and part not in self.lost[r]:
                        raise Broken(f"worker {id}, step {clock}: {why}, and range {r} lacks {part}")

    def check(self) -> None:
        """Each part at most once and in order, and what was acknowledged is there."""
        for r, range_ in enumerate(self.ranges):
            for copy in range_.copies:
                by_worker: dict[int, list[tuple[int, int, int]]] = {}
                for part in copy.applied:
                    by_worker.setdefault(part[0], []).append(part)
                for id, applied in by_worker.items():
                    if applied != sorted(set(applied)):
                        raise Broken(f"range {r} has parts of worker {id} twice or out of order: {applied}")
                    whole = [
                        part for c in range(1, applied[-1][1] + 1) if (id, c) in self.truth
                        for part in self.parts_in(id, c, r)
                    ]  # fmt: skip
                    missing = set(whole[: whole.index(applied[-1])]) - set(applied) - self.lost[r]
                    if missing:
                        raise Broken(f"range {r} has {applied[-1]} and lacks {sorted(missing)}")

    def finish(self) -> None:
        """Faults stop: every step is committed, every worker known, and everything there."""
        for worker in self.workers:
            if worker.alive and worker.open:
                worker.push(set(), True)
        for _ in range(6 * self.window + 12):
            for worker in self.workers:
                for r, range_ in enumerate(self.ranges):
                    if worker.alive:
                        for _ in range(4 * self.window):
                            if worker.links.get(r) and worker.seen[r] == (range_.heads, range_.recoveries):
                                self.receive(worker, r)
                        range_.settle()
                        if r in worker.broken or worker.seen[r] != (range_.heads, range_.recoveries):
                            worker.ask(r)
                        worker.acknowledge(r)
        self.check()
        for worker in self.workers:
            if worker.alive and worker.steps:
                raise Broken(f"worker {worker.id}: steps {sorted(worker.steps)} are never committed")
            self.report(worker)
        for id, clock in self.committed:
            self.must_have(id, clock, "acknowledged")
        for id, clock in self.again:
            ranges = [self.ranges[r] for r in self.truth[id, clock].ticks]
            if all(range_.tail.progress.get(id, 0) >= clock << PART for range_ in ranges):
                raise Broken(f"worker {id}, step {clock}: its shard was handed out again, and it is whole")
        lowest = self.lowest()
        if lowest is None or any(lowest > worker.clock for worker in self.workers if worker.alive):
            raise Broken(f"the lowest clock is {lowest} when nothing happens any more")
        for worker in self.workers:
            if worker.alive and worker.digest() != self.digest_of(worker.id):
                raise Broken(f"worker {worker.id}: no cut could be proved")

    def digest_of(self, id: int) -> int:
        """Of a worker's progress as all ranges have it."""
        return sum(digest(r, id, range_.tail.progress.get(id, 0)) for r, range_ in enumerate(self.ranges)) & MASK


def play(stories: int, mistake: str = "", first: int = 0) -> tuple[list[tuple[int, str]], int]:
    """Plays stories; returns which are broken and why, and the number of steps of all."""
    broken, steps = [], 0
    for seed in range(first, first + stories):
        try:
            steps += Story(seed, mistake).play()
        except Broken as error:
            broken.append((seed, str(error)))
    return broken, steps
