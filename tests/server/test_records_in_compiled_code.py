"""Compiled code takes records of sparse steps, over real sockets: Python has them before it handles anything else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.server.fast.layout import H_ENABLED, H_FORWARDS, H_PUSHES
from elasticps.wire.clocks import ClocksFrame, encode_record
from elasticps.wire.frames import Kind
from elasticps.wire.headers import GetClocksHeader, PushHeader
from replication.progress import before_part
from replication.step_records import record_of
from tests.server.conftest import RANGES, WORKER, Group, Run

KEYS = range(40)
TICKED = np.arange(RANGES) % 3 == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_a_question_right_behind_sparse_steps_is_answered_with_their_records(run: Run, compiled: bool) -> None:
    async def story(group: Group) -> None:
        servers = [await group.start(name) for name in "ab"]
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        worker = await group.connect("a")
        for server in servers:
            server.fast.h[H_ENABLED] = compiled
        await asyncio.wait_for(worker.push(view, "a", 1, KEYS, 1.0), 10)
        before = [s.fast.counter(H_PUSHES) + s.fast.counter(H_FORWARDS) for s in servers]
        records = [record_of(clock, clock - 2, TICKED) for clock in (2, 3, 4)]
        pushes = []
        for record in records:
            header = PushHeader(0, view.epoch, record.clock, before_part(record.clock, 0), 1, record=True).header(0)
            pushes.append(worker.ask(header, worker._block(view, "a", KEYS, 1.0), encode_record(record)))
        question = worker.ask(GetClocksHeader(WORKER, epoch=view.epoch).header())
        for push in pushes:
            assert (await asyncio.wait_for(push, 10))[0].kind == Kind.OK
        after = [s.fast.counter(H_PUSHES) + s.fast.counter(H_FORWARDS) for s in servers]
        assert np.subtract(after, before).tolist() == [3 * compiled, 3 * compiled]
        header, body = await asyncio.wait_for(question, 10)
        expected = [(WORKER, record) for record in records[1:]]  # the last one says that step 2 is committed
        assert ClocksFrame.of(header, np.frombuffer(body, np.uint8), RANGES).records == expected
        for server in servers:
            assert [(WORKER, record) for record in server.replica.records.of(WORKER)] == expected

    run(story)
