"""Answers taken apart by the compiled call and frame by frame in Python: the same rows, the same state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.core.view import WorkerInfo
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.pull import ServerPull, coded_pull, joined
from elasticps.client.pull_batch import OWNERS, PULL, PUSH, SLOTS, SMALL_BYTES
from elasticps.client.pull_layouts import BLOCKS, Query
from elasticps.client.push_batch import Packer
from elasticps.client.pushes import StepState
from elasticps.client.runtime import Runtime
from elasticps.kernels.hashing import table_salt
from elasticps.model.spec import BFloat16
from elasticps.store.codec import Codec
from elasticps.wire.frames import LAST, MAX_BODY_BYTES, FrameError, Header, Kind
from elasticps.wire.pool import Pool
from elasticps.wire.stream import Assembler
from tests.client.views import view

SERVERS = ("s0", "s1", "s2")
WINDOW = 8


class Twin:
    """A worker whose requests and received bytes are given. compiled: it uses the compiled call."""

    def __init__(self, servers: int, compiled: bool) -> None:
        chains = [[r % servers] for r in range(16)]
        worker = WorkerInfo(7, "w", 1, "a")
        self.dispatcher = Dispatcher(
            Runtime(), "c", worker, view(chains, servers=SERVERS[:servers]), WINDOW, lambda on_view: None
        )
        self.states: list[StepState] = []
        self.reads: list[ServerPull] = []
        self.broken: list[str] = []
        self._packer = Packer(Pool(0))
        self._streams = []
        for member in self.dispatcher.routes.members:
            peer = self.dispatcher.connections.want(member)
            assert peer is not None
            link = peer.link
            link.ready = True
            self.dispatcher.pushes.connected(member)
            usual = link._usual if compiled else None
            self._streams.append(Assembler(link._frame, MAX_BODY_BYTES, link._target, usual))

    def close(self) -> None:
        self.dispatcher.close()

    def push(self) -> None:
        self.states.append(StepState(self.dispatcher.session.clock + 1))
        part = self._packer.pack([], self.dispatcher.routes)
        self.dispatcher.pushes.push(part, True, self.states[-1])

    def read(self, keys: NDArray[np.int64], dim: int) -> None:
        out = np.zeros((len(keys), dim), np.float32)
        self._start(ServerPull(self._done, Query(1, table_salt(1), dim, "t"), keys, out))

    def read_dense(self, size: int, dim: int) -> None:
        blocks = np.arange(-(-size // dim))
        self._start(
            ServerPull(self._done, Query(2, table_salt(2), dim, "d"), blocks, np.zeros(size, np.float32), BLOCKS)
        )

    def read_tables(self, keys: list[NDArray[np.int64]], dims: list[int], coded: bool) -> None:
        reads: list[ServerPull] = []
        for number, (some, dim) in enumerate(zip(keys, dims, strict=True), 3):
            out, codec = np.zeros((len(some), dim), np.float32), Codec([BFloat16()], dim)
            if coded and number % 2:
                query = Query(number, table_salt(number), dim, str(number))
                reads.append(coded_pull(self._done, query, codec, some, out))
                reads[-1].value[:] = 0.0
            else:
                reads.append(ServerPull(self._done, Query(number, table_salt(number), dim, str(number)), some, out))
        size = dim * len(keys[0]) + 1  # a tensor's last block is short
        blocks, values = np.arange(-(-size // dim)), np.zeros(size, np.float32)
        reads.append(ServerPull(self._done, Query(2, table_salt(2), dim, "d"), blocks, values, BLOCKS))
        self._start(joined(self._done, reads))

    def _start(self, read: ServerPull) -> None:
        self.reads.append(read)
        self.dispatcher.start_pulls([read], None, 0)

    def _done(self, read: ServerPull, timeout: float | None) -> None:
        assert read.done()

    def receive(self, server: int, data: bytes, pieces: list[int]) -> None:
        stream, at, sizes = self._streams[server], 0, itertools.cycle(pieces)
        try:
            while at < len(data):
                buffer = stream.buffer
                n = min(len(buffer), len(data) - at, next(sizes))
                buffer[:n] = data[at : at + n]
                at += n
                stream.received(n)
        except FrameError as error:
            self.broken.append(str(error))

    def state(self) -> list[object]:
        session, pulls = self.dispatcher.session, self.dispatcher.pulls
        return [
            [[rows.tobytes() for rows in shown(read)] for read in self.reads], sorted(pulls._parts),
            [sorted(read.parts) for read in self.reads], session.committed,
            sorted(session._frames), [state.done for state in self.states], self.broken,
        ]  # fmt: skip


def shown(read: ServerPull) -> list[NDArray[np.float32]]:
    """The rows that have arrived, or lie in the caller's array already."""
    if read.members:
        return [one.arrived() if read.done() else one.value for one in read.members]
    return [read.result() if read.done() else read.value]


def answers_of(rng: np.random.Generator, twin: Twin) -> list[bytes]:
    """Possible answers of each server to several requests, mixed; now and then a wrong one."""
    dispatcher = twin.dispatcher
    found: list[list[list[bytes]]] = [[] for _ in dispatcher.routes.members]
    for request, sent in dispatcher.pushes._sent.items():
        found[dispatcher.routes.index_of[sent.frame.head]].append([Header(Kind.OK, request=request, epoch=1).pack()])
    for request, part in dispatcher.pulls._parts.items():
        assert part.member is not None
        answer, at = list[bytes](), 0
        while at < part.count:
            n = int(rng.integers(1, part.count - at + 1))
            floats = part.pull.layout.floats(part.pull, part.positions, at, n)
            data = rng.integers(0, 256, 4 * floats, np.uint8).tobytes() + bytes(4 * (floats % 2))
            wrong = 1 << 20 if rng.random() < 0.01 else 0
            last = LAST if at + n == part.count else 0
            answer.append(Header(Kind.ROWS, last, len(data), request, 1, at + wrong, items=n).pack() + data)
            at += n
        found[dispatcher.routes.index_of[part.member]].append(answer)
    for here in found:
        for owner in (PUSH, PULL):
            stranger = OWNERS * (1000 + SLOTS * int(rng.integers(3))) + owner
            body = bytes(8 * int(rng.integers(40)))
            here.append([Header(Kind.ROWS, LAST, len(body), stranger, 1, items=1).pack() + body])
            here.append([Header(Kind.OK, request=stranger).pack()])
    return [mixed(rng, here) for here in found]


def mixed(rng: np.random.Generator, answers: list[list[bytes]]) -> bytes:
    """Several answers, each in its own order."""
    turns = rng.permutation([i for i, answer in enumerate(answers) for _ in answer])
    left = [iter(answer) for answer in answers]
    return b"".join([next(left[turn]) for turn in turns])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1 << 32), st.integers(1, 3))
def test_compiled_code_and_python_read_the_same_answers(seed: int, servers: int) -> None:
    rng = np.random.default_rng(seed)
    twins = Twin(servers, True), Twin(servers, False)
    try:
        for _ in range(3):
            for _ in range(int(rng.integers(1, 12))):
                kind, dim = rng.random(), int(rng.choice([1, 2, 7, 64, 1000]))
                keys, size = rng.integers(0, 1 << 62, int(rng.integers(0, 60))), int(rng.integers(1, 40_000))
                for twin in twins:
                    if kind < 0.3 and twin.dispatcher.session.room:
                        twin.push()
                    elif kind < 0.6:
                        twin.read(keys.copy(), dim)
                    elif kind < 0.8:
                        lists = np.split(keys, sorted({len(keys) // 3, len(keys) // 2}))
                        twin.read_tables(lists, [dim, 5, 2, 9][: len(lists)], kind < 0.7)
                    else:
                        twin.read_dense(size, dim)
            assert twins[0].state() == twins[1].state()
            for server, data in enumerate(answers_of(rng, twins[0])):
                pieces = rng.integers(1, int(rng.choice([300, 5_000, 200_000])), 20).tolist()
                for twin in twins:
                    twin.receive(server, data, pieces)
                assert twins[0].state() == twins[1].state()
            if twins[0].broken:
                break
    finally:
        for twin in twins:
            twin.close()


@pytest.mark.parametrize("rows", [1, SMALL_BYTES // 256, SMALL_BYTES // 256 + 1])
def test_a_read_that_is_given_up_is_not_written_to(rows: int) -> None:
    twin = Twin(1, True)
    try:
        twin.read(np.arange(rows), 64)
        (request,) = twin.dispatcher.pulls._parts
        twin.dispatcher.forget_pull(twin.reads[0], FrameError("nobody waits"))  # type: ignore[arg-type]
        body = b"\xff" * (256 * rows)
        twin.receive(0, Header(Kind.ROWS, LAST, len(body), request, 1, items=rows).pack() + body, [1 << 30])
        assert not twin.reads[0].value.any()
    finally:
        twin.close()
