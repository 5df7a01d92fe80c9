"""Whom a worker has connected by what it does and by what views say. No socket is opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.core.view import View, WorkerInfo
from elasticps.client.core.fan_out import steps_of
from elasticps.client.core.routing import Routes
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.push_batch import Packer, PushSource
from elasticps.client.pushes import StepState
from elasticps.client.runtime import Runtime
from elasticps.kernels.hashing import table_salt
from elasticps.wire.pool import Pool
from replication.chain import Member
from tests.client.views import view

WORKER, APP, RANGES, SERVERS = 7, "a", 64, 64
NAMES = tuple(f"s{i}" for i in range(SERVERS))
SALT = int(np.array(table_salt(9), np.uint64).view(np.int64))


class Worker:
    """A worker of 64 servers that never reaches one of them."""

    def __init__(self) -> None:
        worker = WorkerInfo(WORKER, "w", 1, APP)
        self.dispatcher = Dispatcher(Runtime(), "c", worker, self.view(0), 4, lambda on_view: None)

    def view(self, shift: int, epoch: int = 1) -> View:
        return view([[(r + shift) % SERVERS] for r in range(RANGES)], epoch=epoch, servers=NAMES)

    def welcome(self) -> None:
        for peer in list(self.dispatcher.connections.missing.values()):
            self.dispatcher.pushes.connected(peer.member)

    def push(self, keys: Sequence[int]) -> None:
        dispatcher, n = self.dispatcher, len(keys)
        rows, grads, rate = np.array(keys), np.ones((n, 4), np.float32), np.array([0.1], np.float32)
        part = Packer(Pool(1 << 20)).pack([PushSource(9, SALT, 4, -1, rows, grads, rate)], dispatcher.routes)
        dispatcher.pushes.push(part, True, StepState(dispatcher.session.clock + 1))

    @property
    def connects(self) -> set[Member]:
        return set(self.dispatcher.connections.peers)


def test_a_push_has_the_heads_connected_that_it_goes_to_and_no_others() -> None:
    worker = Worker()
    standing = worker.connects
    assert len(standing) == 2
    worker.welcome()
    worker.push(range(5))
    heads = worker.dispatcher.session.outstanding_heads
    assert 2 < len(heads | standing) <= 5 + 2
    assert worker.connects == heads | standing
    worker.dispatcher.close()


def test_the_heads_of_outstanding_steps_under_a_new_view_are_connected() -> None:
    worker = Worker()
    worker.welcome()
    worker.push(range(5))
    worker.welcome()
    worker.dispatcher._adopt(worker.view(7, epoch=2))
    assert worker.dispatcher.session.outstanding_heads <= worker.connects
    worker.dispatcher.close()


def test_who_heads_its_home_now_is_connected() -> None:
    worker = Worker()
    before = worker.connects
    after = {Member(NAMES[(NAMES.index(member.name) + 1) % SERVERS], 1) for member in before}
    worker.dispatcher._adopt(worker.view(1, epoch=2))
    assert worker.connects == before | after  # the old ones are closed when they are not used any more
    assert set(worker.dispatcher.connections.standing) == after
    worker.dispatcher.close()


def test_a_predecessor_is_fenced_by_whoever_has_or_gets_a_copy() -> None:
    chains = view([[0, 1], [2, -1]], servers=NAMES[:5])
    object.__setattr__(chains, "joining", np.array([3, -1], np.int32))
    routes = Routes(chains)
    servers = {fencing: [member.name for member, *_ in next(steps_of(3, 1.0, fencing=fencing)).questions(routes)]
             for fencing in (False, True)}  # fmt: skip
    assert sorted(servers[False]) == ["s0", "s2"]
    assert sorted(servers[True]) == ["s0", "s1", "s2", "s3"]
