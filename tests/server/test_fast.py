"""The compiled path and Python give the same bytes and the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import cast, get_args

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core import reads
from elasticps.server.fast.layout import H_FORWARDS, H_PUSHES
from elasticps.server.fast.path import FastPath
from elasticps.server.roles import snapshots
from elasticps.server.roles.executor import Executor
from elasticps.wire.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    block_head,
    json_frame,
)
from elasticps.wire.headers import PushHeader
from replication.chain import Member
from replication.effects import Effect
from replication.progress import PART_BITS
from tests.server.conftest import RANGES
from tests.server.story import WORKERS, Story
from tests.server.wires import Clock, Pipe, Wires


@pytest.fixture(autouse=True)
def one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a snapshot's chunk took is no reason to wait before the next; futures need no loop that runs."""
    monkeypatch.setattr(snapshots, "BUSY_S", -1.0)
    monkeypatch.setattr(asyncio, "get_running_loop", Clock)


@pytest.mark.parametrize("seed", range(30))
def test_compiled_and_python_give_the_same_bytes_and_the_same_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 3:  # answers in several frames
        monkeypatch.setattr(reads, "CHUNK_BYTES", (0, 10, 1000)[seed % 3])
    outcomes = []
    for compiled in (False, True):
        story = Story(seed, compiled)
        story.run(60)
        story.check_replicas()
        written = [bytes(pipe.written) for pipe in story.wires.pipes]
        outcomes.append(((story.wires.state(), story.written), written))
        handled = sum(s.fast.counter(H_PUSHES) + s.fast.counter(H_FORWARDS) for s in story.wires.servers.values())
        assert bool(handled) == compiled
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] == outcomes[1][1]


def test_buffers_with_bytes_for_a_joiner_are_not_overwritten() -> None:
    """While a range is filled nothing is logged for its joiner, and nothing but its socket keeps what it is sent."""
    wires = Wires(1, compiled=True)
    for name in "ab":
        wires.start(name, WORKERS)
    tail, joiner = wires.servers["a"], wires.servers["b"]
    wires.adopt(lambda r: ["a"])
    there, _ = wires.connect("a", WORKERS[0])
    wide = TableSpec("wide", 128, Accumulate())
    body = json_frame(Kind.CREATE, {"id": 50, "spec": wide.to_json()})[HEADER_BYTES:]
    there.write(Header(Kind.CREATE, epoch=1, request=2, body=len(body)).pack() + body)
    wires.settle()
    view = wires.adopt(lambda r: ["a"], lambda r: "b")
    there_to_joiner = cast(Pipe, wires.link("a", "b").transport)
    while not tail.replica.shared().synced.all():  # a first piece of every range was cut
        assert wires.deliver()
    assert there_to_joiner.back is not None
    there_to_joiner.reading = False  # the tail does not hear that they are in place
    wires.settle()
    there_to_joiner.back.reading = False  # the joiner takes nothing more

    keys = np.arange(100)
    routes = Routes(view)
    plan = plan_push(keys, table_salt(50), routes)
    for clock in range(1, 9):
        grads = np.full((len(keys), wide.dim), 10.0**clock, np.float32)
        body = block_head(50, len(keys), wide.dim, Accumulate().step_values(1, None))
        body += keys[plan.order].tobytes() + grads.tobytes()
        header = PushHeader(2 + clock, view.epoch, clock, clock - 1 << PART_BITS, 1)
        there.write(header.header(len(body)).pack() + body)
    wires.settle()
    assert tail.fast.counter(H_PUSHES) == 7  # by compiled code: all but the first of the worker
    there_to_joiner.reading = there_to_joiner.back.reading = True
    wires.settle()
    assert len(tail.replica.levels()) == RANGES
    digests = [[s.store.tables[50].digest_range(r) for r in range(RANGES)] for s in (tail, joiner)]
    assert digests[0] == digests[1]


def test_every_effect_is_carried_out() -> None:
    assert set(Wires(1, compiled=True).start("a", ()).executor.handlers) == set(get_args(Effect))


def test_acknowledged_clocks_of_departed_workers_stay_their_own() -> None:
    path = FastPath(RANGES, 1 << 20)
    executor = Executor(Member("s", 1), RANGES, 1 << 20, path)

    def roster(version: int, workers: Collection[int]) -> None:
        executor.perform(executor.replica.adopt_roster, version, frozenset(workers))

    def take_part(worker: int) -> None:
        executor.replica.clocks.set(worker, np.arange(RANGES), worker << 16)
        path.sync()

    for worker in range(1, 41):
        take_part(worker)
        executor.note_committed(worker, worker)
    acknowledged = {worker: worker for worker in range(1, 41)}
    assert path.acknowledged_clocks() == acknowledged
    for version, present in enumerate(({40}, {40, 41}, {3, 40}, set(range(100, 140)), (), {3}), start=1):
        roster(version, present)
        for worker in present:
            take_part(worker)
        assert path.acknowledged_clocks() == acknowledged
    executor.note_committed(3, 5)
    assert path.acknowledged_clocks() == acknowledged | {3: 5}
