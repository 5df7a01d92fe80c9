"""A step makes a frame for each head that it has rows for, and one for its worker's home: not one for each server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from elasticps.client.core.routing import Routes
from elasticps.client.core.session import Ask, Frame, PushSession
from elasticps.client.push_batch import PackedPart, Packer, PushSource
from elasticps.client.pushes import PushesInFlight, StepState
from elasticps.kernels.hashing import key_ranges, table_salt
from elasticps.wire.clocks import split_record
from elasticps.wire.frames import HEADER_BYTES, Buffer, unpack_header
from elasticps.wire.headers import PushHeader
from elasticps.wire.pool import Pool
from replication.chain import Member
from replication.effects import Status
from replication.progress import PART_BITS
from replication.step_records import home_range, last_whole_step
from tests.client.views import view

TABLE, WORKER, ROWS = 9, 7, 64
SALT = table_salt(TABLE)


class Worker:
    """A worker of so many servers with so many ranges, whose frames are kept."""

    def __init__(self, servers: int, ranges: int) -> None:
        names = tuple(f"s{i}" for i in range(servers))
        self.routes = Routes(view([[r % servers] for r in range(ranges)], servers=names))
        self.frames: list[tuple[Member, bytes]] = []
        self.session = PushSession(WORKER, ranges, 4)
        self.pushes = PushesInFlight(self.session, WORKER, itertools.count(1), self._send, lambda: None)
        self.pushes.adopt(self.routes)
        for member in self.routes.members:
            self.pushes.connected(member)
        self.packer = Packer(Pool(1 << 24))
        self.home = self.routes.members[self.routes.view.heads[home_range(WORKER, ranges)]]

    def _send(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        for member, buffers in frames.items():
            data = b"".join(bytes(each) for each in buffers)
            while data:
                header = unpack_header(data)
                end = HEADER_BYTES + header.body
                self.frames.append((member, data[:end]))
                data = data[end:]

    def heads_of(self, keys: np.ndarray) -> set[Member]:
        """The heads of these keys' ranges."""
        ranges = np.empty(len(keys), np.int32)
        key_ranges(keys, SALT, self.routes.shift, ranges)
        return {self.routes.members[i] for i in self.routes.view.heads[ranges].tolist()}

    def packed(self, keys: np.ndarray) -> PackedPart:
        """A part with rows for these keys."""
        source = PushSource(TABLE, int(np.array(SALT, np.uint64).view(np.int64)), 4, -1, keys,
                            np.ones((len(keys), 4), np.float32), np.array([0.1], np.float32))  # fmt: skip
        return self.packer.pack([source], self.routes)

    def push(self, keys: np.ndarray, state: StepState | None, last: bool = True) -> list[tuple[Member, PushHeader]]:
        """Pushes a part, and returns who got which header."""
        self.frames.clear()
        self.pushes.push(self.packed(keys), last, state)
        return [(member, PushHeader.of(unpack_header(data))) for member, data in self.frames]

    def answer(self, sent: list[tuple[Member, PushHeader]]) -> None:
        """All of it is committed."""
        for _, header in sent:
            assert self.pushes.ok(header.request)


@pytest.mark.parametrize(("servers", "ranges"), [(3, 256), (30, 1024), (100, 4096), (1000, 16384)])
def test_a_step_makes_no_more_frames_than_heads_touched_and_one(servers: int, ranges: int) -> None:
    worker, random = Worker(servers, ranges), np.random.default_rng(servers)
    last: dict[Member, int] = {}
    for clock in range(1, 6):
        keys, state = random.integers(0, 1 << 40, ROWS), StepState(clock)
        touched = worker.heads_of(keys)
        sent = worker.push(keys, state)
        assert {member for member, _ in sent} == touched | {worker.home}
        assert len(sent) <= len(touched) + 1
        for member, header in sent:
            assert header.prev == last.get(member, 0)
            assert header.record == (member == worker.home and len(sent) < servers)
            last[member] = clock << 16
        worker.answer(sent[:-1])
        assert worker.session.committed == clock - 1
        worker.answer(sent[-1:])
        assert worker.session.committed == clock
        assert state.done


def test_the_last_part_goes_wherever_a_part_has_gone_and_its_record_says_so() -> None:
    ranges = 1024
    worker, random, state = Worker(30, ranges), np.random.default_rng(1), StepState(1)
    parts = [random.integers(0, 1 << 40, 2) for _ in range(3)]
    touched = [worker.heads_of(keys) for keys in parts]
    first, second = worker.push(parts[0], state, False), worker.push(parts[1], None, False)
    assert [{member for member, _ in sent} for sent in (first, second)] == touched[:2]
    last = worker.push(parts[2], None)
    assert {member for member, _ in last} == set.union(*touched) | {worker.home}
    (frame,) = [data for member, data in worker.frames if member == worker.home]
    body = np.frombuffer(frame[HEADER_BYTES:], np.uint8)
    _, record = split_record(body, 1, ranges)
    ticked = {worker.routes.members[worker.routes.view.heads[r]] for r in record.ranges.tolist()}
    assert (record.committed, ticked) == (0, {member for member, _ in last})
    before = {member: header.prev for member, header in last}
    for member in touched[0] - touched[1]:
        assert before[member] == 1, "one part of step 1"
    for member in touched[1]:
        assert before[member] == 2


def test_a_home_that_comes_back_from_a_checkpoint_is_told_what_was_committed_by_then() -> None:
    ranges = 1024
    worker, random = Worker(30, ranges), np.random.default_rng(1)
    first = worker.push(random.integers(0, 1 << 40, 2), StepState(1))
    worker.push(random.integers(0, 1 << 40, 2), StepState(2))
    worker.answer(first)  # the record of step 1 is lost with its home, and that of step 2 said that it may not be whole
    session, before = worker.session, worker.routes.view.as_chains
    epoch, lost = before.epoch + 1, np.arange(ranges) == home_range(WORKER, ranges)
    since = np.where(lost, epoch, before.since)
    (ask,) = session.adopt(replace(before, epoch=epoch, since=since, recovery_epoch=np.where(lost, epoch, 0)))
    assert isinstance(ask, Ask)
    assert ask.head == worker.home
    order = before.headed[before.members.index(worker.home)]
    nothing = np.zeros(len(order), np.int64)
    effects = session.clocks(ask.ask, Status.COMMITTED, session.epoch, order, nothing, nothing)
    (record,) = [each.record for each in effects if isinstance(each, Frame) and each.record is not None]
    assert (record.clock, record.committed) == (2, 1)


def test_a_home_that_came_back_from_a_checkpoint_gets_a_record_of_steps_that_tick_all_ranges_too() -> None:
    """Nothing else says there that the steps before are whole, where the worker dies before one of these is."""
    ranges = 256
    worker, keys = Worker(3, ranges), np.arange(512)
    worker.answer(worker.push(keys, StepState(1)))
    worker.push(keys, StepState(2))
    session, before = worker.session, worker.routes.view.as_chains
    assert [step.record for step in session._steps.values()] == [None], "it ticks all ranges"
    epoch, lost = before.epoch + 1, np.arange(ranges) == home_range(WORKER, ranges)
    since = np.where(lost, epoch, before.since)
    (ask,) = session.adopt(replace(before, epoch=epoch, since=since, recovery_epoch=np.where(lost, epoch, 0)))
    assert isinstance(ask, Ask)
    order = before.headed[before.members.index(worker.home)]
    nothing = np.zeros(len(order), np.int64)
    sent = [
        *session.clocks(ask.ask, Status.COMMITTED, session.epoch, order, nothing, nothing),
        *session.push(worker.packed(keys)),
    ]
    records = [each.record for each in sent if isinstance(each, Frame) and each.record is not None]
    assert [(each.clock, each.committed) for each in records] == [(2, 1), (3, 1)]
    assert all(each.ranges.tolist() == list(range(ranges)) for each in records)
    # The worker dies: home has step 3, but one range lacks it, and some have nothing since step 1.
    committed = np.full(ranges, 3 << PART_BITS)
    committed[0] = 0
    assert last_whole_step(0, home_range(WORKER, ranges), committed, records) == 1
