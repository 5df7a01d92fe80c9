"""Readers beside the workers of a story: what they show, what they hold, and that they equal the tails at rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import numpy as np

from chaos.sim.checks.sums import COLUMNS, KEYS, Sums, units
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import WORKER_TIMEOUT_S, Cluster
from chaos.sim.story import Story
from chaos.sim.threads import Threads
from elasticps.client.registry import Registry
from elasticps.errors import Timeout
from elasticps.readers.reader import Reader
from elasticps.readers.values import AsOf, ReaderSpec

EVERY_S = (0.001, 0.01, 0.1)
HOLD_S = 0.4
THINK_S = 0.03
HELD_S = (0.0, 0.3)
STALLS, STALL_S = 2, (0.05, 0.6)
ALL = np.arange(KEYS)


class Follower:
    """One reader, of all tables of an application. sums: what its workers have pushed, if they push freely."""

    def __init__(self, cluster: Cluster, name: str, app: str, sums: Sums | None, on: Callable[[], bool]) -> None:
        self.cluster = cluster
        self.name = name
        self.app = app
        self.sums = sums
        self.reader: Reader | None = None
        self.held = 0  # moments that it has shown
        self._on = on
        self._shown = np.zeros((COLUMNS, KEYS), np.int64)  # so far: sums only grow

    def run(self, threads: Threads) -> None:
        """Runs the reader's process."""
        random = self.cluster.clock.chance(f"program of {threads.process}")
        store = self.cluster.store.client(threads.process.host, WORKER_TIMEOUT_S)
        spec = ReaderSpec(every=random.choice(EVERY_S), application=self.app, buffer_bytes=1 << 20)
        reader = self.reader = Reader(Registry(store, threads, "virtual"), spec, self.name, WORKER_TIMEOUT_S)
        reader.wait(WORKER_TIMEOUT_S)
        while self._on():
            if random.random() < 0.3:
                self._hold(reader, threads, random)
            else:
                self._look(reader)
            threads.sleep(random.expovariate(1 / THINK_S))

    def _look(self, reader: Reader) -> None:
        """Every row shown is one that was committed, and no older than what was shown before."""
        if self.sums is None or "sums" not in reader.tables:
            return
        with reader._lock:  # of one moment here
            rows = reader.pull({"sums": ALL})["sums"]
            table = reader._tables.by_name["sums"].number
        self.cluster.lasting.shown(table, ALL, rows)
        counts = rows.astype(np.int64).T // units(ALL)
        if (counts < self._shown).any():
            column, key = np.argwhere(counts < self._shown)[0].tolist()
            raise Violation(
                "a reader goes on",
                f"{self.name} shows {counts[column, key]} pushes of column {column} to key {key}, and has shown "
                f"{self._shown[column, key]}",
            )
        self._shown = counts

    def _hold(self, reader: Reader, threads: Threads, random: Random) -> None:
        """What is held has exactly the steps of each worker that it says, and does not change."""
        try:
            as_of = reader.hold(HOLD_S)
        except Timeout:
            return
        self.held += 1
        if self.sums is not None and "sums" in reader.tables:
            self._check_held(self.sums, reader, as_of)
            before = reader.pull({"sums": ALL})["sums"]
            threads.sleep(random.uniform(*HELD_S))
            if not np.array_equal(before, reader.pull({"sums": ALL})["sums"]):
                raise Violation("a moment stays", f"{self.name} shows other rows while it holds")
            self._look(reader)
        reader.release()

    def _check_held(self, sums: Sums, reader: Reader, as_of: AsOf) -> None:
        rows = reader.pull({"sums": ALL})["sums"]
        counts = rows.astype(np.int64).T // units(ALL)
        for column in sums.columns:
            step = as_of.steps.get(column.worker)
            if step is None or column.worker not in self.cluster.counted or column.sealed:
                continue  # of one that has left the steps may be anything
            expected = column.upto(step)
            if not np.array_equal(counts[column.index], expected):
                key = int(np.flatnonzero(counts[column.index] != expected)[0])
                raise Violation(
                    "a moment's content",
                    f"{self.name} holds {counts[column.index][key]} pushes of {column.name} (column {column.index}) to "
                    f"key {key}, its steps up to {step} have {expected[key]}",
                )

    def differ(self) -> str:
        """Says where the reader differs from the tails; "" if it has what they have, bit for bit."""
        reader, view = self.reader, self.cluster.view
        if reader is None or view is None or reader._links.error is not None:
            return f"{self.name} has ended: {reader and reader._links.error}"
        tails = [self.cluster.life(view.servers[i].name, view.servers[i].incarnation) for i in view.tails.tolist()]
        live = {n: t for one in tails if one is not None for n, t in one.store.live.items() if t.app == self.app}
        if {n: t.spec.name for n, t in live.items()} != {n: t.spec.name for n, t in reader._tables.by_id.items()}:
            return f"{self.name} has tables {sorted(reader._tables.by_id)}, servers have {sorted(live)}"
        for r, server in enumerate(tails):
            for number, table in reader._tables.by_id.items():
                if server is None or number not in server.store.live:
                    continue
                theirs = server.store.live[number]
                keys, ours = np.sort(theirs.range_keys(r)), np.sort(table.list_range(r))
                if not np.array_equal(keys, ours):
                    odd = np.setxor1d(keys, ours).tolist()
                    return f"{self.name}, range {r} of {table.spec.name!r}: keys {odd[:5]} are only here or there"
                rows = np.empty((2, len(keys), table.spec.dim), np.float32)
                theirs.gather(keys, rows[0])
                table.gather(keys, rows[1])
                if rows[0].tobytes() != rows[1].tobytes():
                    at = int(np.flatnonzero((rows[0] != rows[1]).any(axis=1))[0])
                    return f"{self.name} differs from {server.me.name} in key {keys[at]} of {table.spec.name!r}"
        return ""


class Followers:
    """The readers of one story: one of each application, two at most."""

    def __init__(self, cluster: Cluster, story: Story, sums: Mapping[str, Sums], on: Callable[[], bool]) -> None:
        self.all: list[Follower] = []
        self._cluster = cluster
        self._story = story
        self._sums = sums
        self._on = on

    def start(self) -> None:
        """Starts them, each after a while, and has some of them stall."""
        if not self._story.readers:
            return
        random = Random(f"readers {self._story.seed}")
        apps = [app.name for app in self._story.apps]
        for i, app in enumerate(random.sample(apps, min(2, len(apps))) if len(apps) > 1 else apps * 2):
            follower = Follower(self._cluster, f"r{i}", app, self._sums.get(app), self._on)
            self.all.append(follower)
            self._cluster.clock.at(random.uniform(0.0, 0.8), self._start, follower, random)

    def _start(self, follower: Follower, random: Random) -> None:
        threads = self._cluster.start_worker(follower.name, follower.run)
        process, clock = threads.process, self._cluster.clock
        for _ in range(random.randint(0, STALLS)):
            at_s = clock.now + random.uniform(0.1, 2.0)
            clock.at(at_s, process.stall)
            clock.at(at_s + random.uniform(*STALL_S), process.thaw)

    def differ(self) -> str:
        """Says where some reader differs from the tails; "" if none does."""
        return next(filter(None, (follower.differ() for follower in self.all)), "")
