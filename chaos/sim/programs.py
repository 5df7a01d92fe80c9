"""The programs of workers, on the public client: training loops whose every pull is checked."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.rounds import Rounds
from chaos.sim.checks.shards import Hand, Handed, key_of
from chaos.sim.checks.sums import COLUMNS, KEYS, Column, Keys, Pulled, Rows, Sums, check_same, units
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import Cluster
from chaos.sim.small_limits import TIGHT_ROWS
from chaos.sim.story import App, Story
from chaos.sim.threads import Threads
from elasticps.client.client import Client
from elasticps.client.steps import Step
from elasticps.client.tables import SparseTable
from elasticps.errors import Closed
from elasticps.kernels.hashing import key_ranges, range_shift
from elasticps.model.caching import Cache
from elasticps.model.filters import KeyDeltas, KeysOnce, Zstd
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP, BSP, SSP, Consistency, Normal
from elasticps.store.store import initial_rows

FIXED_DIM = 8
FIXED_KEYS = 4096
INIT = Normal(std=0.1, seed=7)
MOST_AT_ONCE = 6  # pulls
MOST_BESIDE = 150  # turns of a thread that pulls beside the one that trains
HURRY_S = 0.004  # between two of them
WAIT_S = 1e4
PASSED_OVER = 0.1  # of the shards
SLOW_START_S = (1.2, 2.0)
SHARDS_BEFORE_A_PAUSE = 3
PAUSE_S = 0.02
SHORT_PUSH, SHORT_PULL = (KeysOnce(), KeyDeltas(), Zstd()), (KeysOnce(), KeyDeltas())
MOST_CACHED, SELDOM = 4, 0.2
FEW = 3  # keys
FREE_BESIDE = 0.4  # of the workers of an application under bounded delay that push few keys
STEPS_OF_OTHERS = 10  # some of them followed by a pull
OFTEN = 0.5
STILL = np.arange(11, dtype=np.float32)  # a tensor that nobody pushes to


class Training(Protocol):
    """The part of a story that its programs know. on: workers begin new steps."""

    on: bool
    story: Story


def sums_table(ps: Client, name: str, short: bool, cache: Cache | None = None) -> SparseTable:
    """Opens a table of sums."""
    push, pull = (SHORT_PUSH, SHORT_PULL) if short else ((), ())
    return ps.table(name, dim=COLUMNS, optimizer=Accumulate(), push=push, pull=pull, cache=cache)


class Worker:
    """The base of all workers: a name, an application, a cluster to train on."""

    consistency: Consistency = ASP()

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training) -> None:
        self.cluster = cluster
        self.name = name
        self.app = app
        self.training = training
        self.random: Random
        self.done = False
        self.lost = False  # its name
        self.stepped = False  # it has taken all the steps that it is to take, where they are counted
        self.steps = 0
        self.pulls = 0

    def run(self, threads: Threads) -> None:
        """Runs one incarnation of the worker."""
        self.done = self.lost = False
        self.threads = threads
        self.random = self.cluster.clock.chance(f"program of {threads.process}")
        try:
            ps = self.cluster.connect(threads, self.name, self.consistency, self.app.window, self.app.name)
            self.main(ps)
            ps.close()
        except Closed as error:  # it was frozen for longer than its lease, or another one has its name
            self.cluster.clock.note(f"{threads.process} was fenced: {error}")
            self.lost = True
            self.fenced()
            return
        self.done = True
        self.cluster.clock.note(f"{threads.process} is done after {self.steps} steps, {self.pulls} pulls")

    def main(self, ps: Client) -> None:
        raise NotImplementedError

    def fenced(self) -> None:
        """The worker has been fenced, and begins again."""

    def think(self) -> None:
        self.threads.sleep(self.random.expovariate(1 / self.app.think_s))

    @property
    def now(self) -> float:
        return self.cluster.clock.now

    def some_keys(self, most: int = KEYS) -> NDArray[np.int64]:
        """Draws keys; where servers keep lists of keys, often one of a few lists."""
        keys = self.random.sample(range(KEYS), self.random.randint(1, most))
        if self.training.story.short and keys[0] % 3:
            first = 12 * (keys[0] % 8)
            keys = [(first + i) % KEYS for i in range(KEYS // 2)]
        return np.array(keys, np.int64)


class Free(Worker):
    """A worker that pushes and pulls freely, under no bound or under bounded delay."""

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, sums: Sums, tight: bool) -> None:
        super().__init__(cluster, name, app, training)
        self.sums = sums
        self.tight = tight
        self.column: Column | None = None
        self.max_age: int | None = None  # by how many steps rows that it keeps may be old, if it keeps any
        self.together: Together | None = None
        self.free = sums.bound is None or (
            training.story.few and Random(f"free {training.story.seed} {name}").random() < FREE_BESIDE
        )
        if sums.bound is not None and not self.free:
            self.consistency = SSP(staleness=sums.bound)

    def main(self, ps: Client) -> None:
        column = self.column = self.sums.start(self.name)
        column.worker, column.free = ps.worker.id, self.free
        if self.app.eager:  # a server that cannot pass anything on answers this, and does not know of tables
            ps.resume()
        table = sums_table(ps, "sums", self.training.story.short, self._cache())
        fixed = ps.table("fixed", dim=FIXED_DIM, optimizer=Accumulate(), init=INIT)
        self.together = Together(self, ps, table, fixed) if self.training.story.together else None
        outstanding: list[Step] = []
        found = ps.resume()
        if found.predecessor:
            self.sums.resume(column, self.now, found.begun, found.trained)
        column.pushed = ps.clock
        if self.sums.bound is not None and self.random.random() < 0.3:  # it holds the others back from now on
            column.joined_s = min(column.joined_s, self.now)
            self.threads.sleep(self.random.uniform(*SLOW_START_S))
        readers = [
            self.threads.spawn(f"reader {i}", self._reader(ps, table, fixed, column)) for i in range(self.app.readers)
        ]
        while self.training.on:
            action = self.random.random()
            if action < 0.03 and not self.free:
                self.pause(ps, table, column)
            elif action < 0.45:
                outstanding.append(self.push(ps, table, column))
            elif action < 0.55:
                self.push_in_parts(ps, table, column)
            elif action < 0.75:
                self.pull(ps, table, column)
            elif action < 0.85:
                self.pull_many(ps, table, fixed, column)
            elif action < 0.95 and outstanding:
                outstanding.pop(self.random.randrange(len(outstanding))).result()
            else:
                ps.flush()
            column.commit(self.now, ps.committed)
            column.joined_s = min(column.joined_s, self.now)
            self.think()
        ps.flush()
        column.commit(self.now, ps.committed)
        column.joined_s = float("inf")
        for reader in readers:
            self.threads.join(reader, WAIT_S)

    def _cache(self) -> Cache | None:
        self.max_age = None
        if not self.training.story.caches or self.random.random() < SELDOM:
            return None
        self.max_age = self.random.randint(
            0, min(MOST_CACHED, MOST_CACHED if self.sums.bound is None else self.sums.bound)
        )
        return Cache(rows=self.random.choice((5, 40, KEYS)), staleness=self.max_age)

    def _reader(self, ps: Client, table: SparseTable, fixed: SparseTable, column: Column) -> Callable[[], None]:
        """Pulls beside the thread that trains."""

        def read() -> None:
            try:
                for _ in range(MOST_BESIDE):
                    if not self.training.on:
                        break
                    if self.random.random() < 0.7:
                        self.pull(ps, table, column)
                    else:
                        self.pull_many(ps, table, fixed, column)
                    self.threads.sleep(self.random.expovariate(1 / HURRY_S))
            except Closed:
                pass  # the thread that trains says so

        return read

    def pause(self, ps: Client, table: SparseTable, column: Column) -> None:
        """Trains the data shards that there are, after which the worker holds nobody back, and pauses. Goes on when all
        others have gone on without it."""
        others = [c for c in self.sums.columns if c is not column and not c.ended and c.joined_s < float("inf")]
        if self.sums.pausing is not None or not others or self.app.readers:
            return
        self.sums.pausing = column
        for shard in ps.shards(SHARDS_BEFORE_A_PAUSE, 1, name=f"before a pause of {column.index}"):
            self.cluster.clock.note(f"{self.threads.process} trains {shard.start} before a pause")
            self.push(ps, table, column)
        column.commit(self.now, ps.committed)
        column.joined_s, beyond = float("inf"), ps.clock + (self.sums.bound or 0) + STEPS_OF_OTHERS
        while any(c.pushed < beyond and not c.ended and c.joined_s < float("inf") for c in others):
            self.threads.sleep(PAUSE_S)
        self.sums.pausing = None
        ps.resume()
        column.pushed = ps.clock

    def push(self, ps: Client, table: SparseTable, column: Column) -> Step:
        keys, at = self.keys_to_push(ps, table), ps.clock + 1
        if self.together is not None and self.random.random() < OFTEN:
            return self.together.push(column, keys, at)
        column.begin(at, keys)
        grads = self.sums.grads(column, keys)
        step = ps.push({table: (keys, grads)})
        keys[:], grads[:] = 0, -1  # they are the caller's again
        self.landed(column, step.clock, at)
        return step

    def keys_to_push(self, ps: Client, table: SparseTable) -> Keys:
        """Draws any keys; where frames are small, often as many of one head as just fit into one frame."""
        if not self.tight:
            return self.some_keys(FEW) if self.training.story.few else self.some_keys()
        ranges = np.empty(KEYS, np.int32)
        view = ps.view
        key_ranges(np.arange(KEYS), table.salt, range_shift(view.ranges), ranges)
        heads = view.heads[ranges]
        mine = np.flatnonzero(heads == self.random.choice(heads.tolist())).tolist()
        return np.array(self.random.sample(mine, min(len(mine), TIGHT_ROWS)), np.int64)

    def push_in_parts(self, ps: Client, table: SparseTable, column: Column) -> None:
        at, keys = ps.clock + 1, self.keys_to_push(ps, table)
        with ps.step() as step:
            for part in np.array_split(keys, self.random.randint(1, 3)):
                if len(part):
                    column.begin(at, part)
                    step.push({table: (part, self.sums.grads(column, part))})
        self.landed(column, step.commit().clock, at)

    def landed(self, column: Column, clock: int, expected: int) -> None:
        assert clock == expected, f"a step that was to be {expected} is {clock}"
        column.pushed = clock
        if self.max_age is not None:
            self.sums.mark(column, self.now)
        self.steps += 1

    def pull(self, ps: Client, table: SparseTable, column: Column) -> None:
        keys, tail = self.some_keys(), self.random.random() < 0.7
        if self.max_age is not None and self.random.random() < SELDOM:
            table.fetch(self.some_keys(), self.random.randint(1, 2))
        pulled = self.sums.ask(column, keys, self.now, tail=tail, max_age=self.max_age)
        self.check(pulled, table, table.pull(keys, read="tail" if tail else "any"))
        self.pulls += 1

    def pull_many(self, ps: Client, table: SparseTable, fixed: SparseTable, column: Column) -> None:
        """Starts several pulls at once, some of which are answered while others are still being sent."""
        if self.together is not None and self.random.random() < OFTEN:
            self.together.pull(column)
            return
        pulled, reads = [], []
        for _ in range(self.random.randint(2, MOST_AT_ONCE)):
            if self.random.random() < 0.3:
                keys = self.some_keys()
                pulled.append(self.sums.ask(column, keys, self.now, tail=True, max_age=self.max_age))
                reads.append((keys, table.pull_async(keys)))
            else:
                count = self.random.randint(1, 800 if self.app.large and not self.tight else 100)
                keys = np.array(self.random.sample(range(FIXED_KEYS), count), np.int64)
                reads.append((keys, fixed.pull_async(keys)))
        if self.random.random() < 0.3:
            self.think()  # a reader that is slow
        for keys, read in reads:
            rows = read.result()
            if rows.shape[1] == COLUMNS:
                self.check(pulled.pop(0), table, rows)
            else:
                check_same(self.name, keys, rows, initial_rows(INIT, keys, FIXED_DIM))
            self.pulls += 1

    def check(self, pulled: Pulled, table: SparseTable, rows: Rows) -> None:
        if pulled.company:
            self.sums.check_bound(pulled, self.cluster.counted)
        self.sums.check(pulled, rows)
        if pulled.tail and self.max_age is None:  # own pushes are shown before they are committed
            self.cluster.lasting.shown(table.id, pulled.keys, rows)

    def fenced(self) -> None:
        if self.column is not None:
            self.column.ended = True


class Together:
    """Combined pulls of a worker: rows of both tables and a tensor at once, also behind a push; sums of all rows."""

    def __init__(self, worker: Free, ps: Client, table: SparseTable, fixed: SparseTable) -> None:
        self.worker, self.ps, self.table, self.fixed = worker, ps, table, fixed
        self.tensor = ps.tensor("still", init=STILL, optimizer=Accumulate())

    def push(self, column: Column, keys: Keys, at: int) -> Step:
        """Pushes, and pulls behind the push, or behind its last part."""
        worker, ps = self.worker, self.ps
        grads, keys_of = worker.sums.grads(column, keys), self._some_keys()
        pulled = worker.sums.ask(column, keys_of[self.table], worker.now, tail=True, max_age=worker.max_age)
        if len(keys) > 1 and worker.random.random() < SELDOM:
            opened = ps.step()
            column.begin(at, keys[:1])
            opened.push({self.table: (keys[:1], grads[:1])})
            column.begin(at, keys[1:])  # killed before, it leaves the first part alone
            step, pull = ps.push_pull({self.table: (keys[1:], grads[1:])}, keys_of, step=opened)
        else:
            column.begin(at, keys)
            step, pull = ps.push_pull({self.table: (keys, grads)}, keys_of)
        keys[:], grads[:] = 0, -1  # they are the caller's again
        worker.landed(column, step.clock, at)
        pulled.least[column.index] = np.maximum(pulled.least[column.index], column.upto(at))
        if worker.random.random() < SELDOM:
            worker.think()
        self._check(pulled, keys_of, pull.result())
        return step

    def pull(self, column: Column) -> None:
        """Pulls, or asks for the sum of all rows."""
        worker, every = self.worker, np.arange(KEYS)
        if worker.max_age is None and worker.random.random() < SELDOM:
            pulled = worker.sums.ask(column, every, worker.now, tail=True)
            found, amounts = self.table.reduce("sum"), units(every)
            least = int((pulled.least @ amounts).sum())
            most = int(sum(each.counts[-1] @ amounts for each in worker.sums.columns))
            if not least <= found <= most:
                text = f"{worker.threads.process} is told a sum of {found}, for {least} to {most}"
                raise Violation("sums of all rows", text)
            return
        keys_of = self._some_keys()
        pulled = worker.sums.ask(column, keys_of[self.table], worker.now, tail=True, max_age=worker.max_age)
        self._check(pulled, keys_of, self.ps.pull(keys_of))

    def _some_keys(self) -> dict[Any, Any]:
        random = self.worker.random
        fixed = np.array(random.sample(range(FIXED_KEYS), random.randint(0, 60)), np.int64)
        return {self.table: self.worker.some_keys(), self.fixed: fixed, self.tensor: None}

    def _check(self, pulled: Pulled, keys_of: dict[Any, Any], found: dict[Any, Rows]) -> None:
        self.worker.check(pulled, self.table, found[self.table])
        keys = keys_of[self.fixed]
        check_same(self.worker.name, keys, found[self.fixed], initial_rows(INIT, keys, FIXED_DIM))
        check_same(self.worker.name, np.arange(len(STILL)), found[self.tensor][:, None], STILL[:, None])
        self.worker.pulls += 1


class Synchronous(Worker):
    """A worker that trains in synchronous rounds."""

    consistency = BSP()

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, rounds: Rounds) -> None:
        super().__init__(cluster, name, app, training)
        self.rounds = rounds

    def main(self, ps: Client) -> None:
        column = self.rounds.start(ps.worker.id)
        table = sums_table(ps, "means", self.training.story.short)
        keys, everything = self.rounds.keys(column), np.arange(KEYS)
        grads = self.rounds.grads(column, keys)
        begun = 0  # the newest step
        while self.training.on:
            if self.random.random() < 0.7:
                ps.push({table: (keys, grads)})
            else:
                with ps.step() as step:
                    order = self.random.sample(range(len(keys)), len(keys))
                    for part in np.array_split(order, self.random.randint(1, min(3, len(keys)))):
                        step.push({table: (keys[part], grads[part])})
            self.steps += 1
            late, begun = begun > 0 and ps.clock > begun + 1, ps.clock
            if self.random.random() < 0.7:
                rows = table.pull(everything)
                self.rounds.check(self.name, column, ps.clock, rows, late=late or ps.clock > begun)
                self.pulls += 1
            self.think()
        ps.flush()


class Sharded(Worker):
    """A worker that trains data shards as they are handed out, sometimes in synchronous rounds."""

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, handed: Handed) -> None:
        super().__init__(cluster, name, app, training)
        self.handed = handed
        self.hand: Hand | None = None
        if app.kind == "shards in rounds":
            self.consistency = BSP()

    def main(self, ps: Client) -> None:
        hand = self.hand = self.handed.start(ps.worker.id)
        table = None if self.app.eager else sums_table(ps, "trained", self.training.story.short)
        grads = self.handed.grads(hand)
        for shard in ps.shards(self.handed.shards, 1):
            table = table or sums_table(ps, "trained", self.training.story.short)
            self.handed.take(hand, shard.start, self.cluster.counted)
            self.think()
            if self.random.random() < PASSED_OVER:
                self.handed.pass_over(hand, shard.start)
                continue
            self.handed.begin(shard.start)
            step = ps.push({table: (key_of(shard.start), grads)})
            self.handed.step(hand, shard.start, step.clock)
            self.steps += 1
            if self.random.random() < 0.3:
                step.result()
            if self.random.random() < 0.3:
                self.settled(ps, hand)
        self.handed.over(hand, self.cluster.counted)
        self.settled(ps, hand)

    def settled(self, ps: Client, hand: Hand) -> None:
        """Reports the steps that the worker knows to be committed, unless it is fenced and does not know that."""
        ps.flush()
        if ps.worker.id in self.cluster.counted:
            self.handed.committed(hand, ps.committed)

    def fenced(self) -> None:
        if self.hand is not None:
            self.hand.ended = True
