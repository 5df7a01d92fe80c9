"""Random stories on a group of servers, made from a seed: what compiled code and Python have to do alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from coordinator.core.view import View
from elasticps.client.core.routing import Routes, plan_push
from elasticps.client.writes import named_ranges
from elasticps.kernels.hashing import HASH_END, table_salt
from elasticps.model.optimizers import SGD, Accumulate, Adagrad, Adam, ServerOptimizer
from elasticps.model.policies import Capacity, IdleFor, MinCount, MinCountSketch, Probability
from elasticps.model.spec import BFloat16, Filter, Float16, Int8, Normal, TableSpec
from elasticps.server.core.sweeps import SweptInterval
from elasticps.store.codec import Codec
from elasticps.store.eviction import OF_CANDIDATES, Measure, Predicate, Reason
from elasticps.store.retained import Allowance
from elasticps.store.stamps import rows_at, stamps_in
from elasticps.wire import frames
from elasticps.wire.clocks import ReadAfter, encode_record
from elasticps.wire.frames import (
    ANY,
    CODED,
    HEADER_BYTES,
    Header,
    Kind,
    block_head,
    grads_padding,
    json_frame,
    table_block,
    unpack_header,
)
from elasticps.wire.headers import EraseHeader, PushHeader
from replication.chain import Role
from replication.messages import OperationKind
from replication.progress import after_part
from replication.step_records import StepRecord, home_range, record_of
from tests.server.conftest import RANGES
from tests.server.wires import Pipe, Wires

WORKERS = (5, 9)
OPTIMIZERS: tuple[ServerOptimizer, ...] = (Accumulate(), SGD(lr=0.5), Adagrad(lr=0.1), Adam(lr=0.1))
FILTERS: tuple[tuple[Sequence[Filter], Sequence[Filter]], ...] = (
    ((), ()), ([Int8()], [BFloat16()]), ([Float16()], []), ([BFloat16()], [Int8()])
)  # fmt: skip
TABLES = {
    7 + i: TableSpec(f"t{i}", dim, OPTIMIZERS[i], Normal(std=1.0, seed=i), dtype, None, bool(i % 2), *FILTERS[i])
    for i, (dim, dtype) in enumerate(((3, "float32"), (4, "float32"), (1, "float32"), (8, "bfloat16")))
} | {
    11: TableSpec(
        "waits",
        4,
        Adagrad(lr=0.1),
        push=[Int8()],
        admission=MinCount(3),
        eviction=[Capacity(50, keep="most_used", half_life=8)],
    ),
    12: TableSpec("chance", 3, SGD(lr=0.5), dtype="bfloat16", admission=Probability(0.4), eviction=[IdleFor(10)]),
    13: TableSpec("sketched", 2, Adam(lr=0.1), admission=MinCountSketch(2, nbytes=1 << 14)),
    14: TableSpec("used", 2, Accumulate(), eviction=[IdleFor(10)]),
}
SERVERS = ("s0", "s1", "s2", "s3")


class Story:
    """A random story on a group of servers, made from one seed."""

    def __init__(self, seed: int, compiled: bool) -> None:
        self.random, self.tables_random = random.Random(seed), random.Random(f"tables {seed}")
        self.wires = Wires(seed, compiled)
        budget = self.random.choice((256 << 20, 256 << 20, 8_000))
        for name in SERVERS:
            self.wires.start(name, WORKERS, budget)
        self.clocks = dict.fromkeys(WORKERS, 0)
        self.parts = dict.fromkeys(WORKERS, 0)
        self.progress = {worker: np.zeros(RANGES, np.int64) for worker in WORKERS}  # by range, of what was pushed
        self.ticked: dict[int, np.ndarray] = {}  # by worker, the ranges that its step under way ticks, bool [P]
        self.requests = 100
        self.deletions = 0
        self.cut_number = 0
        self.at_cut: dict[tuple[str, int, int], Any] = {}  # server, table, range: rows as the cut found them
        self.written: list[Any] = []
        self.change_view(first=True)
        for i, a in enumerate(SERVERS):
            for b in SERVERS[i + 1 :]:
                self.wires.link(a, b)
        self.connections: dict[tuple[str, int], tuple[Pipe, Pipe]] = {
            (name, worker): self.wires.connect(name, worker) for name in SERVERS for worker in WORKERS
        }
        self.wires.settle()
        for name in SERVERS:
            for number, spec in TABLES.items():
                body = json_frame(Kind.CREATE, {"id": number, "spec": spec.to_json()})[HEADER_BYTES:]
                self.send(name, WORKERS[0], Header(Kind.CREATE, epoch=self.view.epoch), body)
        self.wires.settle()

    @property
    def view(self) -> View:
        view = self.wires.view
        assert view is not None
        return view

    def send(self, name: str, worker: int, header: Header, body: bytes = b"") -> None:
        there, _ = self.connections[name, worker]
        if there.closed:
            there, _ = self.connections[name, worker] = self.wires.connect(name, worker)
        self.requests += 1
        there.write(header._replace(request=self.requests, body=len(body)).pack() + body)

    def acts(self) -> list[Callable[[], None]]:
        acts = [self.push] * 12 + [self.pull] * 4 + [self.ask, self.cut, self.change_view]
        acts += [self.slow_reader, self.slow_link] + [self.erase] * 3 + [self.take_cut]
        return acts + [self.pass_time] * 2 + [self.sweep] * 2

    def run(self, turns: int) -> None:
        acts = self.acts()
        for _ in range(turns):
            self.random.choice(acts)()
            for _ in range(self.random.choice((0, 1, 5, 50, 400))):
                if not self.wires.deliver():
                    break
        self.wires.settle()
        self.written.append({name: self.write(name) for name in SERVERS})

    # --- what happens -----------------------------------------------------------------------------------------------

    def change_view(self, first: bool = False) -> None:
        """Any chain of every range, as long as nothing is lost: the leader would see to that."""
        pick = self.random
        if first:
            self.chains = [pick.sample(SERVERS, pick.choice((1, 2, 2, 3))) for _ in range(RANGES)]
            self.joining = [""] * RANGES
        else:
            self.wires.settle()  # what is under way comes to rest, so that who is level is known
            levels = {(v.range, v.joiner.name) for s in self.wires.servers.values() for v in s.replica.levels()}
            for r in range(RANGES):
                chain, joiner = self.chains[r], self.joining[r]
                if joiner and (r, joiner) in levels and pick.random() < 0.7:
                    chain = [*chain, joiner]
                    self.joining[r] = ""
                elif len(chain) > 1 and pick.random() < 0.15:
                    gone = pick.choice(chain)
                    chain = [s for s in chain if s != gone]
                others = [s for s in SERVERS if s not in chain]
                if others and len(chain) < 3 and pick.random() < 0.2:
                    self.joining[r] = pick.choice(others)
                self.chains[r] = chain
        self.wires.adopt(lambda r: self.chains[r], lambda r: self.joining[r])
        if not first:
            names = [s for s in SERVERS if any(s in c for c in self.chains) or s in self.joining]
            for i, a in enumerate(names):
                for b in names[i + 1 :]:
                    if self.wires.servers[a].links.link(self.wires.servers[b].member) is None:
                        self.wires.link(a, b)

    def cut(self) -> None:
        """Breaks a link between servers, or a worker's connection; it connects again."""
        if self.random.random() < 0.5:
            a, b = sorted(self.random.sample(SERVERS, 2))
            link = self.wires.servers[a].links.link(self.wires.servers[b].member)
            if link is not None:
                link.transport.abort()
                self.wires.settle()
            self.wires.link(a, b)
        else:
            there, _ = self.random.choice(list(self.connections.values()))
            there.abort()

    def slow_reader(self) -> None:
        """A worker whose socket takes little."""
        _, back = self.random.choice(list(self.connections.values()))
        back.window = self.random.choice((0, 500, 1 << 30))

    def slow_link(self) -> None:
        """A server whose socket takes little of what another one sends."""
        a, b = self.random.sample(SERVERS, 2)
        link = self.wires.servers[a].links.link(self.wires.servers[b].member)
        if link is not None:
            cast(Pipe, link.transport).window = self.random.choice((0, 2000, 1 << 30))

    def ask(self) -> None:
        name, worker = self.random.choice(SERVERS), self.random.choice(WORKERS)
        self.send(name, worker, Header(Kind.GET_CLOCKS, epoch=self.view.epoch, worker=worker))

    def pull(self) -> None:
        name, worker, number = (
            self.random.choice(SERVERS),
            self.random.choice(WORKERS),
            self.random.choice([*TABLES, 99]),
        )
        keys = np.array([self.random.randrange(300) for _ in range(self.random.choice((0, 1, 30, 400)))], np.int64)
        clock = self.random.choice((0, 0, self.clocks[worker], max(self.clocks[worker] - 1, 0)))
        flags = self.random.choice((0, ANY)) | self.random.choice((0, CODED))
        header = Header(
            Kind.PULL, flags, epoch=self.view.epoch, clock=clock, worker=worker, table=number,
            items=len(keys), bound=self.random.choice((0, 0, 0, 2)), wait_ms=5,
        )  # fmt: skip
        body = keys.tobytes()
        pick = self.tables_random
        if pick.random() < 0.5:
            numbers = pick.choices([*TABLES] * 5 + [99], k=pick.choice((0, 1, 3, 9)))
            header = header._replace(flags=flags | frames.TABLES, table=0, items=len(numbers))
            body = b"".join(table_block(n, len(keys) // (i + 1)) + body[: 8 * (len(keys) // (i + 1))]
                            for i, n in enumerate(numbers))  # fmt: skip
            if pick.random() < 0.03:
                body += table_block(7, 0)  # one that is not told of
        if self.random.random() < 0.3:
            self.read_after(name, worker)
        self.send(name, worker, header, body)

    def erase(self) -> None:
        """Rows of a table are deleted, or all of them, or the table with them; some of that comes twice."""
        pick, worker, routes = self.random, self.random.choice(WORKERS), Routes(self.view)
        self.deletions += 1
        kind = pick.choice((OperationKind.DELETE,) * 6 + (OperationKind.CLEAR,) * 2 + (OperationKind.DROP,))
        number = pick.choice(list(TABLES)) if kind != OperationKind.DROP else pick.choice((7, 99, 100))
        keys = np.array(pick.sample(range(300), pick.choice((1, 20, 200))), np.int64)
        plan = plan_push(keys, table_salt(number), routes)
        for share in routes.shares:
            body = b""
            if kind == OperationKind.DELETE:
                mine = keys[plan.order[plan.offsets[share.start] : plan.offsets[share.stop]]]
                body = block_head(number, len(mine), 0, np.empty(0, np.float32)) + mine.tobytes()
            erasure = EraseHeader(self.view.epoch, worker, self.deletions, kind, number, bool(body))
            for _ in range(pick.choice((1, 1, 1, 2))):
                self.send(routes.members[share.server].name, worker, erasure.header(), body)

    def pass_time(self) -> None:
        """Some seconds pass, and heads log that."""
        self.wires.wall_s += self.random.choice((1, 3, 10))
        self.wires.tell_time(self.wires.wall_s)
        for name in SERVERS:
            self.wires.servers[name].sweeper.stamp()

    def sweep(self) -> None:
        """Rows, or keys that wait for one, are evicted from some of the ranges' hashes."""
        pick, number = self.random, self.random.choice((11, 12, 13, 14))
        measure = pick.choice((Measure.LAST_USE, Measure.COUNT) + (OF_CANDIDATES if number == 11 else ()))
        now = int(self.wires.wall_s)
        below = {Measure.COUNT: int(np.float32(2).view(np.int32)), Measure.CANDIDATE: 2 << 32}.get(measure, now - 3)
        by = Predicate(measure, Reason.CAPACITY, below, now=now, decay=1 / 8 if measure == Measure.COUNT else 0.0)
        low, high = sorted(pick.choice((0, HASH_END // 3, HASH_END)) for _ in range(2))
        for name in SERVERS:
            server = self.wires.servers[name]
            headed = np.flatnonzero([chain[0] == name for chain in self.chains])
            if len(headed) and number in server.store.live:
                payload = SweptInterval(number, low, high, by)
                server.executor.log(self.view.epoch, OperationKind.EVICT, headed, payload, 96)

    def take_cut(self) -> None:
        """A cut passes everywhere, and two servers begin to write what they hold."""
        self.wires.settle()
        self.written.append({name: self.write(name) for name in SERVERS})
        self.cut_number += self.random.choice((1, 1, 70_000))
        self.at_cut.clear()
        for name in SERVERS:
            server = self.wires.servers[name]
            server.store.pass_cut(np.arange(RANGES), self.cut_number)
            held = np.flatnonzero(server.replica.role == Role.FULL).tolist()
            for number, table in server.store.live.items() if name in self.random.sample(SERVERS, 2) else ():
                table.keep(Allowance(1 << 30, lambda: None, lambda: None))
                assert table.retained is not None
                table.retained.begin(np.array(held, np.int64), 0)
                for r in held:
                    self.at_cut[name, number, r] = _as_dict(table.dump_stamped(r, 0, HASH_END))

    def write(self, name: str) -> list[Any]:
        """What a checkpoint would get from a server: as it was at the cut, of ranges that are still there."""
        found, store = [], self.wires.servers[name].store
        for number, table in store.live.items():
            mine = [r for r in range(RANGES) if (name, number, r) in self.at_cut]
            for r in mine:
                if table.retained is not None and table.retained.keeps(r):
                    listed, parts = table.retained.list_range(r, 0), range(table.retained.parts)
                    for part in parts:
                        keys, words = table.retained.take(listed, part, part + 1, self.cut_number)
                        stamps = stamps_in(words).astype(np.int64) + table.retained.base(r)
                        taken = keys, rows_at(words, table.stride), stamps
                        found.append((number, r, [array.tolist() for array in taken]))
                    rows: dict[int, Any] = {}
                    for *_, arrays in found[-len(parts) :]:
                        rows |= _as_dict(arrays, int(store.cuts.base[r]))
                    assert rows == self.at_cut[name, number, r]
            table.keep(None)
        return found

    def check_replicas(self) -> None:
        """Checks that replicas at the same place of a range's log have the same content."""
        for r in range(RANGES):
            found: dict[int, Any] = {}
            for name in self.chains[r]:
                server = self.wires.servers[name]
                if server.replica.role[r] == Role.FULL:
                    tables = {n: t.digest_range(r) for n, t in server.store.tables.items() if t.count_range(r)}
                    words = server.store.dropped_in(r), server.store.words(r)
                    replica = server.replica
                    rows = tables, words, replica.clocks.column(r)[1].tolist(), replica.records.column(r)
                    assert found.setdefault(int(server.replica.seq[r]), rows) == rows

    def push(self, everywhere: bool = False) -> None:
        """A part of a step for some heads, or all, mostly as a client would send it. The last part ticks what the parts
        before it have ticked, and the worker's home."""
        pick, worker = self.random, self.random.choice(WORKERS)
        routes, home = Routes(self.view), home_range(worker, RANGES)
        if self.parts[worker] == 0:
            self.clocks[worker] += 1
            self.ticked[worker] = np.zeros(RANGES, np.bool_)
        clock, part, last = self.clocks[worker], self.parts[worker], pick.random() < 0.8
        self.parts[worker] = 0 if last else part + 1
        epoch = self.view.epoch if pick.random() < 0.95 else max(1, self.view.epoch - 1)
        lag = pick.choice((0, 1, 2))
        committed = max(clock - lag, 0) if lag else None
        blocks = [self.block(number, routes) for number in pick.sample(list(TABLES), pick.choice((1, 1, 2, 4)))]
        shares = routes.shares if pick.random() < 0.4 or everywhere else pick.sample(routes.shares, 1)
        ticks = np.zeros(RANGES, np.bool_)
        for share in shares:
            ticks[routes.range_at[share.start : share.stop]] = True
        self.ticked[worker] |= ticks
        if last:
            of_home = next(s for s in routes.shares if home in routes.range_at[s.start : s.stop])
            self.ticked[worker][routes.range_at[of_home.start : of_home.stop]] = True
            ticks = self.ticked[worker]
        record = b""
        if last and not ticks.all():
            record = self.wrong_at_times(record_of(clock, min(committed or 0, clock - 1), ticks))
        before = self.progress[worker].copy()
        self.progress[worker][ticks] = after_part(clock, part, last)
        for share in routes.shares:
            ranks = np.arange(share.start, share.stop)
            for prev in np.unique(before[routes.range_at[ranks]]).tolist():
                mine = ranks[ticks[routes.range_at[ranks]] & (before[routes.range_at[ranks]] == prev)]
                whole = len(mine) == len(ranks) and pick.random() < 0.7
                middle = pick.randrange(len(mine)) if len(mine) and not whole else 0
                for piece in (mine[:middle], mine[middle:]):
                    if not len(piece):
                        continue
                    odd = pick.random()
                    if odd < 0.03:
                        continue  # lost: the next one is a gap, unless all that it lacks is said to be committed
                    ends = record if home in routes.range_at[piece] or (record and pick.random() < 0.01) else b""
                    named = b"" if whole else named_ranges(routes.range_at[piece])
                    rows, count = self.rows(blocks, piece)
                    header = PushHeader(
                        0, epoch, clock, prev if pick.random() < 0.98 else pick.choice((0, max(prev - 1, 0))), count,
                        part, last, whole, committed=committed, record=bool(ends),
                    )  # fmt: skip
                    name = routes.members[share.server].name
                    self.send(name, worker, header.header(0), named + rows + ends)
                    if odd > 0.97:
                        self.send(name, worker, header.header(0), named + rows + ends)
                    elif odd > 0.95:
                        again = header._replace(repeat=True, blocks=0)
                        self.send(name, worker, again.header(0), named + ends)

    def wrong_at_times(self, record: StepRecord) -> bytes:
        """The record of a step, which now and then cannot be."""
        output, odd = encode_record(record), self.random.random()
        if odd < 0.01:
            return encode_record(record._replace(committed=record.clock))
        if odd < 0.02:
            return output[:-1] + b"\x80"  # a range that there is not
        return output[8:] if odd < 0.03 else output

    def block(self, number: int, routes: Routes) -> tuple[int, Any, np.ndarray, np.ndarray, np.ndarray]:
        keys = np.array(self.random.sample(range(300), self.random.choice((1, 5, 60, 250))), np.int64)
        plan = plan_push(keys, table_salt(number), routes)
        grads = np.array([[self.random.randrange(-4, 5)] * TABLES[number].dim for _ in keys], np.float32)
        values = TABLES[number].optimizer.step_values(1, None)
        return number, plan, keys, Codec(TABLES[number].push, TABLES[number].dim).encode(grads), values

    def rows(self, blocks: Sequence[Any], ranks: np.ndarray) -> tuple[bytes, int]:
        """The blocks of a frame for the ranges at some ranks, and how many there are."""
        body, count = b"", 0
        for number, plan, keys, grads, values in blocks:
            mine = np.concatenate([plan.order[plan.offsets[p] : plan.offsets[p + 1]] for p in ranks.tolist()])
            if not len(mine) and self.random.random() < 0.8:
                continue
            if self.random.random() < 0.02:
                mine = mine[::-1]  # out of order
            count += 1
            dim = grads.shape[1]
            body += block_head(number, len(mine), dim, values) + keys[mine].tobytes() + grads[mine].tobytes()
            body += b"\0" * grads_padding(len(mine), dim)
        return body, count

    def read_after(self, name: str, worker: int) -> None:
        """What the next pull is to see: what the worker has pushed to some ranges, or more, or what cannot be."""
        pick = self.random
        ranges = np.array(sorted(pick.sample(range(RANGES), pick.choice((0, 1, 3, RANGES)))), np.int64)
        progress = self.progress[worker][ranges] + pick.choice((0, 0, 0, 0, -1, 1))
        frame = ReadAfter(ranges, progress).frame()
        body, header = frame[HEADER_BYTES:], unpack_header(frame)
        if len(body) and pick.random() < 0.03:
            body = pick.choice((body[8:], b"\xff" * 8 + body[8:], b"\x10\0\0\0" + body[4:]))
        self.send(name, worker, header, body)


def _as_dict(arrays: Any, base: int = 0) -> dict[int, Any]:
    keys, rows, stamps = (np.asarray(array).tolist() for array in arrays)
    return {key: (row, stamp - base) for key, row, stamp in zip(keys, rows, stamps, strict=True)}
