"""What workers, a server and a leader say to the core: recorded frames that are made to fit its state, and some that
are made for it. `say` gives a few, in some of which something is wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from random import Random

import numpy as np

from coordinator.core.view import View
from elasticps.client.core.routing import Routes, plan_push
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.kernels.hashing import table_salt
from elasticps.model.spec import TableSpec
from elasticps.wire.activity import Activity, UseHeader
from elasticps.wire.clocks import ReadAfter, encode_record
from elasticps.wire.delay import ReportClock
from elasticps.wire.frames import (
    ALL_RANGES,
    ANY,
    CODED,
    DIGESTS,
    HEADER_BYTES,
    LAST,
    PACKED,
    RECORD,
    REPEAT,
    ROUND,
    SHORT,
    SLOTS,
    TABLES,
    FrameError,
    Header,
    Kind,
    block_head,
    grads_padding,
    json_frame,
    read_tables,
    table_block,
    unpack_header,
    view_frame,
)
from elasticps.wire.headers import PushHeader
from elasticps.wire.packing import pack
from elasticps.wire.reducing import ReduceHeader, function_body
from elasticps.wire.rounds import round_body, round_close
from replication.messages import OperationKind
from replication.progress import ERASER, MAX_CLOCK, PART_BITS, Progress, after_part
from replication.step_records import home_range, record_of
from tests.fuzz.core import APPS, CLUSTER, HOSTILE, ME, NOBODY, OWN, PEER, Core
from tests.fuzz.corpus import LEADER, RANGES, ROLES, ROUNDS, WORKER, Corpus
from tests.fuzz.corpus import PEER as AS_PEER
from tests.fuzz.mutations import mutate

INIT, DELETE, CLEAR, DROP, CUT = map(
    int,
    (OperationKind.INIT, OperationKind.DELETE, OperationKind.CLEAR, OperationKind.DROP, OperationKind.CUT),
)
HELD_CUT = 4
CHOSEN = 24  # frames of a kind that are said in one burst
KEYS = np.arange(200, dtype=np.int64)
_OFTEN = {Kind.PUSH: 6, Kind.PULL: 2, Kind.FORWARD: 6, Kind.ACK: 3, Kind.SNAPSHOT_CHUNK: 3, Kind.RESYNC: 2}


class Voices:
    """Everybody's, as long as one view lasts. `numbers` counts links."""

    def __init__(self, core: Core, corpus: Corpus, tables: Mapping[int, TableSpec], random: Random) -> None:
        self._core = core
        self._random = random
        self._tables = tables
        self._routes = Routes(core.server.serving.view)  # type: ignore[arg-type]
        self._kinds: dict[str, list[list[bytes]]] = {}
        for role in ROLES:
            found = {kind: random.sample(frames, min(len(frames), CHOSEN)) for kind, frames in corpus[role].items()}
            found.pop(Kind.HELLO, None)
            for kind, frames in self._made(role).items():
                found[kind] = [*found.get(kind, ()), *frames]
            self._kinds[role] = [found[kind] for kind in sorted(found) for _ in range(_OFTEN.get(Kind(kind), 1))]
        self._strange = [frame for role in ROLES for frames in self._kinds[role] for frame in frames[:4]]
        self._links = 0
        self._lists = ShortKeys()

    # --- first words ------------------------------------------------------------------------------------------------

    def hello(self, role: str, worker: int) -> bytearray:
        """The hello of a peer; for a worker, also that it takes part."""
        self._links += 1
        if role == WORKER:
            who = {"cluster": CLUSTER, "worker": worker, "name": f"w{worker}", "app": APPS[worker]}
            join = Header(Kind.JOIN, self._random.choice((LAST, LAST, LAST, 0, LAST | 32)), request=2).pack()
            return self._perhaps_wrong(bytearray(json_frame(Kind.HELLO, who)), 0.03) + join
        to = [ME, 1]
        if role == LEADER:
            who = {"cluster": CLUSTER, "leader": "c0", "to": to}
        elif role == ROUNDS:
            who = {"cluster": CLUSTER, "rounds": [PEER, 1], "to": to}
        else:
            who = {"cluster": CLUSTER, "peer": [PEER, 1], "to": to, "number": self._core.view_number() + self._links}
        return self._perhaps_wrong(bytearray(json_frame(Kind.HELLO, who)), 0.03)

    # --- and then ---------------------------------------------------------------------------------------------------

    def say(self, role: str, worker: int, count: int, wrong: float) -> list[bytearray]:
        """So many frames; `wrong`: how often something is wrong with one."""
        random, server = self._random, self._core.server
        kinds, epoch = self._kinds[role], server.serving.epoch
        if random.random() < 0.06:
            epoch = max(0, epoch + random.choice((-1, 1, 1, 1000)))
        clock, early, progress = self._next_clock(worker), np.ones(RANGES, np.int64), self._progress(worker)
        output = []
        for _ in range(count):
            frame = bytearray(random.choice(random.choice(kinds)))
            kind = frame[5]
            if kind != Kind.VIEW and random.random() < 0.95:
                struct.pack_into("<Q", frame, 24, epoch)
            if role == WORKER:
                struct.pack_into("<I", frame, 40, worker)
                if kind == Kind.PUSH:
                    frame = self._step(frame, worker, clock, progress)
                    clock += random.random() < 0.9
                elif kind == Kind.BARRIER_ARRIVE:
                    struct.pack_into("<Q", frame, 32, clock)
                elif kind == Kind.PULL:
                    struct.pack_into("<Q", frame, 32, random.choice((0, 0, clock - 1, clock)))
            elif kind in (Kind.FORWARD, Kind.ACK, Kind.RESYNC, Kind.SNAPSHOT_CHUNK, Kind.CHUNK_ACK):
                self._fit(frame, kind, early)
            if role == WORKER and kind in (Kind.PUSH, Kind.PULL) and random.random() < 0.3:
                frame = self._shorter(frame)
            frame = self._perhaps_wrong(frame, wrong)
            if not self._takes_over(frame):
                output.append(frame)
        return output

    def _shorter(self, frame: bytearray) -> bytearray:
        """As filters make it, or with lists that somebody else has sent; or a great deal in few bytes."""
        random, header = self._random, unpack_header(frame)
        if header.flags & (SHORT | PACKED):
            return frame
        if header.kind == Kind.PUSH and random.random() < 0.1:
            packed = pack([bytes(frame[HEADER_BYTES:]), bytes(random.choice((8, 1 << 16, 1 << 20)))])
            return bytearray(header._replace(flags=header.flags | PACKED, body=len(packed)).pack() + packed)
        lists = random.choice((self._lists, ShortKeys()))
        short = Short(random.random() < 0.5, random.random() < 0.5, random.random() < 0.5)
        if header.kind == Kind.PULL and not header.flags & TABLES:
            return bytearray(b"".join(lists.pull(memoryview(bytes(frame)), short)))
        if header.kind == Kind.PULL:
            body = frame[HEADER_BYTES:]
            try:
                read_tables(header.items, np.frombuffer(body, np.uint8))
            except FrameError:  # it says what cannot be
                return frame
            shorts = dict.fromkeys(self._tables, short)
            return bytearray(b"".join(lists.pull_tables(memoryview(bytes(frame)), shorts)))
        return bytearray(b"".join(lists.push(memoryview(bytes(frame)), dict.fromkeys(self._tables, short))))

    def _perhaps_wrong(self, frame: bytearray, wrong: float) -> bytearray:
        while self._random.random() < wrong:
            frame = mutate(self._random, frame, self._strange)
            wrong /= 2
        return frame

    def _takes_over(self, frame: bytearray) -> bool:
        """Whether this is a view that a server believes, and no leader may write: without certificates whoever leads is
        obeyed."""
        if len(frame) <= HEADER_BYTES or frame[5] != Kind.VIEW:
            return False
        try:
            view = View.decode(bytes(frame[HEADER_BYTES : HEADER_BYTES + int.from_bytes(frame[52:56], "little")]))
        except ValueError:
            return False
        return view.epoch > self._core.server.serving.epoch and view.cluster == CLUSTER and view.reason != "by hand"

    def _next_clock(self, worker: int) -> int:
        return (int(self._progress(worker)[self._core.server.serving.headed].max(initial=0)) >> PART_BITS) + 1

    def _progress(self, worker: int) -> Progress:
        clocks = self._core.server.replica.clocks
        return clocks.read(worker).copy() if clocks.known(worker) else np.zeros(RANGES, np.int64)

    def _step(self, frame: bytearray, worker: int, clock: int, progress: Progress) -> bytearray:
        """A PUSH of step `clock`, mostly the next by the worker's progress, int64 [P], now and then with a record."""
        random, header = self._random, unpack_header(frame)
        headed, home = self._core.server.serving.headed, home_range(worker, RANGES)
        ranges = headed
        if not header.flags & ALL_RANGES and len(frame) >= HEADER_BYTES + 8:
            m = min(int.from_bytes(frame[HEADER_BYTES : HEADER_BYTES + 8], "little"), RANGES)
            ranges = np.frombuffer(frame, "<i4", min(m, len(frame) - HEADER_BYTES - 8 >> 2), HEADER_BYTES + 8) % RANGES
        prev = int(progress[random.choice(ranges.tolist())]) if len(ranges) else 0
        after = after_part(clock, header.part, bool(header.flags & LAST))
        request = PushHeader(
            0, 0, clock, min(prev, after - 1) if random.random() < 0.95 else random.randrange(after), 0
        )
        steps = request.header(0)
        struct.pack_into("<QIH", frame, 32, clock, steps.worker, steps.first)
        progress[ranges[progress[ranges] == prev]] = after
        fits = header.flags & LAST and (ranges == home).any()
        if not header.flags & (RECORD | PACKED) and random.random() < (0.3 if fits else 0.005):
            committed = clock - 1 if random.random() < 0.9 else random.choice((0, clock, -1))
            record = self._record(clock, committed)
            struct.pack_into("<HQ", frame, 6, header.flags | RECORD, header.body + len(record))
            frame += record
        return frame

    def _record(self, clock: int, committed: int) -> bytes:
        bits = np.array([self._random.random() < 0.5 for _ in range(RANGES + (self._random.random() < 0.02))])
        return encode_record(record_of(clock, committed & (1 << 64) - 1, bits))

    def _fit(self, frame: bytearray, kind: int, early: np.ndarray) -> None:
        """Positions of logs as they are now; `ahead`: how many operations more have been forwarded in each range."""
        replica, random = self._core.server.replica, self._random
        if kind in (Kind.SNAPSHOT_CHUNK, Kind.CHUNK_ACK):
            r = struct.unpack_from("<I", frame, 40)[0] % RANGES
            fill = replica.transfer.fills.get(r)
            if kind == Kind.CHUNK_ACK and fill is not None:
                struct.pack_into("<I", frame, 56, max(0, fill.number - random.choice((0, 1, 1, 1))))
                struct.pack_into("<Q", frame, 32, int(replica.seq[r]))
            elif kind == Kind.SNAPSHOT_CHUNK and random.random() < 0.7:
                struct.pack_into("<I", frame, 56, replica.transfer._pieces.get(r, 0))
            view = self._core.server.serving.view
            struct.pack_into("<Q", frame, 16, 0 if view is None else int(view.since[r]))
            return
        m = struct.unpack_from("<I", frame, 48)[0]
        numbers = HEADER_BYTES + ((4 * m + 7) & ~7)
        if not 0 < m <= RANGES or numbers + 8 * m > len(frame):
            return
        ranges = np.frombuffer(frame, "<i4", m, HEADER_BYTES).astype(np.int64) % RANGES
        seqs = replica.seq[ranges]
        if kind == Kind.FORWARD:
            seqs = seqs + early[ranges]
            early[ranges] += 1
        elif random.random() < 0.5:
            seqs = np.maximum(seqs - random.choice((0, 1, 3)), 0)
        frame[numbers : numbers + 8 * m] = seqs.tobytes()

    # --- frames for this core ---------------------------------------------------------------------------------------

    def _close(self) -> bytes:
        random = self._random
        app = random.choice(list(APPS.values())).encode()
        left, joined = ([random.choice(HOSTILE) for _ in range(random.choice((0, 0, 1, 2)))] for _ in range(2))
        clock = random.choice((1, 1, 2, 3, 1 << 40))
        frames = round_close(random.choice((0, 5)), 0, app, clock, len(left), round_body(app, left, joined))
        return b"".join(map(bytes, frames))

    def _made(self, role: str) -> dict[int, list[bytes]]:
        core, random = self._core, self._random
        epoch, view = core.server.serving.epoch, core.server.serving.view
        assert view is not None
        if role == LEADER:
            return {Kind.VIEW: [view_frame(view)] * 20, Kind.GET_VIEW: [Header(Kind.GET_VIEW).pack()]}
        if role == ROUNDS:
            closes = [self._close() for _ in range(8)]
            return {Kind.ROUND_CLOSE: closes, Kind.GET_VIEW: [Header(Kind.GET_VIEW).pack()]}
        if role == AS_PEER:
            forwards = [self._forward(random.choice((0, 0, 0, INIT, DELETE, CLEAR, DROP, CUT))) for _ in range(CHOSEN)]
            rooms = json_frame(Kind.ROOM, {"rooms": [[1 << 40, 8, PEER, 1, 2, 3], [1 << 62, 1, "", 0, 0, 0]]})
            return {Kind.FORWARD: [f for f in forwards if f], Kind.ROOM: [rooms]}
        pushes = [self._push() for _ in range(2 * CHOSEN)]
        keys = [np.array(random.sample(range(200), n), np.int64) for n in (1, 8, 60)]
        pulls = [
            Header(Kind.PULL, random.choice((0, 0, ANY)), k.nbytes, 9, epoch, table=number, items=len(k),
                   bound=random.choice((0, 0, 1, 2)), wait_ms=random.choice((0, 5, 2000))).pack() + k.tobytes()
            for k in keys for number in self._tables
        ]  # fmt: skip
        pulls += [self._pull_tables(random.choice(keys)) for _ in range(6)]
        creates = [
            json_frame(Kind.CREATE, {"id": number, "spec": spec.to_json()}, request=8, epoch=epoch)
            for number, spec in self._tables.items()
        ]
        inits = [
            Header(Kind.INIT, flags & ALL_RANGES, len(body), 7, epoch, items=items).pack() + body
            for flags, items, body in (self._rows(no_values=True) for _ in range(8))
        ]
        erases = [self._erase(random.choice((DELETE, DELETE, CLEAR, DROP))) for _ in range(8)]
        core.server.admin.cuts.hold(HELD_CUT, 60.0)
        held = [
            Header(Kind.HELD, random.choice((0, LAST)), clock=random.randrange(50), worker=random.choice(HOSTILE),
                   table=random.choice((0, 1, HELD_CUT, 9))).pack()
            for _ in range(4)
        ]  # fmt: skip
        return {
            Kind.PUSH: pushes, Kind.PULL: pulls, Kind.READ_AFTER: [self._read_after() for _ in range(4)],
            Kind.CREATE: creates, Kind.INIT: inits, Kind.ERASE: erases,
            Kind.HELD: held, Kind.REPORT_CLOCK: [self._report_clock() for _ in range(8)],
            Kind.USE: [self._use() for _ in range(4)], Kind.REDUCE: [self._reduce() for _ in range(8)],
        }  # fmt: skip

    def _read_after(self) -> bytes:
        ranges = np.array(sorted(self._random.sample(range(RANGES), self._random.choice((1, 2, RANGES)))), np.int64)
        return ReadAfter(ranges, np.full(len(ranges), self._random.choice((0, 1, 1 << PART_BITS, 1 << 62)))).frame()

    def _report_clock(self) -> bytes:
        random = self._random
        clock, released, floor = (random.choice((0, 1, 9, 9, MAX_CLOCK - 1, MAX_CLOCK, -1)) for _ in range(3))
        report = ReportClock(
            random.choice(HOSTILE), random.choice((0, 1)), max(0, clock), released, floor, random.choice((0, 1, 9)),
            random.choice((0, 5, 6)),
        )  # fmt: skip
        return report.header().pack() + report.body

    def _use(self) -> bytes:
        random = self._random
        use = Activity(9, random.choice((3, 9, 10)), 5, 6, 8, random.choice((0, 8, 1 << 62)), random.choice((0, -1)))
        return UseHeader(random.choice(HOSTILE)).header().pack() + use.body()

    def _reduce(self) -> bytes:
        random = self._random
        body = function_body(random.choice(("l2", "max", "nonzero", "sum", "unheard")), random.choice(((), (), (0.5,))))
        table, r = random.choice(sorted(self._tables)), random.randrange(RANGES)
        return ReduceHeader(table, r, 4, self._core.server.serving.epoch).header(len(body)).pack() + body

    def _pull_tables(self, keys: np.ndarray) -> bytes:
        """Of several tables, with a block or two that say too much now and then."""
        random = self._random
        numbers = random.choices([*self._tables, 77], [4] * len(self._tables) + [1], k=random.choice((1, 2, 5, 300)))
        body = b"".join(table_block(number, len(keys)) + keys.tobytes() for number in numbers)
        if random.random() < 0.2:
            body = self._push()[HEADER_BYTES:]  # gradients, too
        flags, epoch = random.choice((0, ANY, CODED, SLOTS, DIGESTS)), self._core.server.serving.epoch
        header = Header(
            Kind.PULL, TABLES | flags, len(body), 9, epoch, items=len(numbers), wait_ms=random.choice((0, 5))
        )
        return header.pack() + body

    def _erase(self, kind: int) -> bytes:
        random, epoch = self._random, self._core.server.serving.epoch
        flags, items, body = self._rows(keys_alone=True) if kind == DELETE else (ALL_RANGES, 0, b"")
        return Header(
            Kind.ERASE, flags & ALL_RANGES, len(body), 5, epoch, random.randrange(1, 50), part=kind,
            table=self._erased(kind), items=items,
        ).pack() + body  # fmt: skip

    def _cut(self) -> bytes:
        number = self._random.randrange(1, 20)
        return b'{"number":%d,"since":%d,"writer":"s1","incarnation":1,"url":""}' % (number, number // 2)

    def _erased(self, kind: int) -> int:
        """A table; to be dropped, one of a few that nobody has: without the others there would be little left to do."""
        return self._random.choice(sorted(self._tables) if kind == CLEAR else range(1 << 20, (1 << 20) + 50))

    def _push(self) -> bytes:
        random = self._random
        flags, items, body = self._rows()
        flags |= random.choice((LAST, LAST, LAST, 0)) | random.choice((0, 0, 0, 0, ROUND, REPEAT))
        shard = (random.choice((1, 2, 3)), random.choice((1 << 16, 1 << 16 | 3))) if random.random() < 0.2 else (0, 0)
        return Header(
            Kind.PUSH, flags, len(body), 6, self._core.server.serving.epoch, items=items,
            table=random.choice((0, 1, 1)), bound=shard[0], wait_ms=shard[1],
        ).pack() + body  # fmt: skip

    def _rows(self, no_values: bool = False, keys_alone: bool = False) -> tuple[int, int, bytes]:
        """(flags, blocks, body) of rows that this server heads, in some of its ranges or in all."""
        random, routes = self._random, self._routes
        share = next((s for s in routes.shares if routes.members[s.server].name == ME), None)
        if share is None:
            return ALL_RANGES, 0, b""
        start, stop, flags, body = share.start, share.stop, ALL_RANGES, b""
        if random.random() < 0.5:
            start = random.randrange(start, stop)
            stop = random.randrange(start + 1, stop + 1)
            flags = 0
            body = struct.pack("<Q", stop - start) + routes.range_at[start:stop].astype("<i4").tobytes()
            body += bytes(-len(body) % 8)
        chosen = random.sample(sorted(self._tables), random.choice((1, 1, 2)))
        for number in chosen:
            spec = self._tables[number]
            keys = np.array(random.sample(range(200), random.choice((1, 5, 40))), np.int64)
            plan = plan_push(keys, table_salt(number), routes)
            mine = keys[plan.order[plan.offsets[start] : plan.offsets[stop]]]
            if keys_alone:
                body += block_head(number, len(mine), 0, np.empty(0, np.float32)) + mine.tobytes()
            else:
                body += self._block(number, spec, mine, no_values)
        return flags, len(chosen), body

    def _block(self, number: int, spec: TableSpec, keys: np.ndarray, no_values: bool) -> bytes:
        values = np.empty(0, np.float32) if no_values else spec.optimizer.step_values(1, None)
        grads = np.full((len(keys), spec.dim), self._random.choice((1.0, -2.0, 0.5)), np.float32)
        block = block_head(number, len(keys), spec.dim, values) + keys.tobytes() + grads.tobytes()
        return block + bytes(grads_padding(len(keys), spec.dim))

    def _forward(self, kind: int) -> bytes:
        """Of rows in the ranges that the peer is before us in, or some of them."""
        random, view = self._random, self._core.server.serving.view
        assert view is not None
        up = [
            r for r in range(OWN, RANGES)
            if view.chains[r, 0] == 0 and (view.chains[r, 1] == 1 or view.joining[r] == 1)
        ]  # fmt: skip
        if not up:
            return b""
        ranges = np.array(sorted(random.sample(up, random.randint(1, len(up)))), np.int64)
        body = ranges.astype("<i4").tobytes()
        body += bytes(-len(body) % 8) + bytes(8 * len(ranges))
        chosen = random.sample(sorted(self._tables), random.choice((1, 1, 2))) if kind < CLEAR else []
        position = np.full(RANGES, -1, np.int64)
        position[ranges] = np.arange(len(ranges))
        for number in chosen:
            table = self._core.server.store.tables.get(number)
            if table is None:
                continue
            where = position[table.ranges_of(KEYS)]
            keys = KEYS[np.argsort(where, kind="stable")][np.count_nonzero(where < 0) :]
            keys = keys[sorted(random.sample(range(len(keys)), min(len(keys), random.choice((1, 5, 40)))))]
            if kind == DELETE:
                body += block_head(number, len(keys), 0, np.empty(0, np.float32)) + keys.tobytes()
            else:
                body += self._block(number, self._tables[number], keys, no_values=kind == INIT)
        if not chosen:
            output = b'{"id":%d}' % self._erased(kind) if kind != CUT else self._cut()
            body += output + b" " * (-len(output) % 8)
        worker, after = (random.choice((*HOSTILE, NOBODY)), random.randrange(1, 50) << 16)
        if kind in (INIT, DROP, CUT):
            worker = after = 0
        elif kind:
            worker |= ERASER
        has_record = not kind and random.random() < (0.4 if home_range(worker, RANGES) in ranges else 0.05)
        if has_record:
            body += self._record(after >> PART_BITS, (after >> PART_BITS) - 1)
        return Header(
            Kind.FORWARD, RECORD * has_record, len(body), 0, 0, after, worker, part=kind, table=len(ranges),
            items=sum(n in self._core.server.store.tables for n in chosen),
        ).pack() + body  # fmt: skip
