"""A clock that is wrong for a while: which rows sweeps choose, and what is logged as time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import SGD
from elasticps.model.policies import MAX_TIME, Capacity
from elasticps.model.spec import TableSpec
from elasticps.server.server import Server
from elasticps.wire.frames import ALL_RANGES, HEADER_BYTES, LAST, Header, Kind, block_head, json_frame
from elasticps.wire.headers import GetViewHeader
from tests.server.conftest import RANGES
from tests.server.wires import Clock, Wires

TABLE, WORKER, HOUR_S = 50, 5, 3_600
SPEC = TableSpec("t", 2, SGD(lr=0.5), eviction=(Capacity(200, keep="most_used", half_life="1h"),))
USED_MOST, USED_LESS, NEW = np.arange(20), np.arange(100, 280), np.arange(500, 560)


@pytest.fixture(autouse=True)
def no_loop_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "get_running_loop", Clock)


class Growing:
    """A server with a growing table, and the wall clocks of the server and of its leader."""

    def __init__(self) -> None:
        self.wires = wires = Wires(1, compiled=False)
        self.server: Server = wires.start("a", (WORKER,))
        self.view = wires.adopt(lambda r: ["a"])
        self.there, _ = wires.connect("a", WORKER)
        body = json_frame(Kind.CREATE, {"id": TABLE, "spec": SPEC.to_json()})[HEADER_BYTES:]
        self.there.write(Header(Kind.CREATE, epoch=1, request=2, body=len(body)).pack() + body)
        wires.settle()
        self.clock = 0
        self.beat()

    def beat(self) -> None:
        """The leader, whose clock is right, is heard, and the server logs the time."""
        assert self.there.to is not None
        self.server.leaders.beat(self.there.to, GetViewHeader(1, 1, 1_000_000).header(), np.empty(0, np.uint8))
        self.server.sweeper.stamp()

    def push(self, keys: np.ndarray, times: int) -> None:
        routes = Routes(self.view)
        plan = plan_push(keys, table_salt(TABLE), routes)
        for _ in range(times):
            self.clock += 1
            body = block_head(TABLE, len(keys), SPEC.dim, SPEC.optimizer.step_values(1, None))
            body += keys[plan.order].tobytes() + np.ones((len(keys), SPEC.dim), np.float32).tobytes()
            self.there.write(
                Header(
                    Kind.PUSH, LAST | ALL_RANGES, epoch=1, clock=self.clock, worker=WORKER, items=1,
                    request=2 + self.clock, body=len(body),
                ).pack() + body
            )  # fmt: skip
        self.wires.settle()

    def left(self, keys: np.ndarray) -> int:
        return int(np.count_nonzero(~self.server.store.tables[TABLE].missing(keys)))


def test_rows_in_use_while_a_clock_was_ahead_do_not_go_before_others() -> None:
    growing = Growing()
    growing.push(USED_MOST, 20)
    growing.push(USED_LESS, 3)
    growing.wires.wall_s += 5 * HOUR_S
    growing.beat()
    growing.push(USED_MOST, 1)  # their counts fall to a 32nd, and those of the others shall do so, too
    growing.wires.wall_s -= 5 * HOUR_S
    growing.beat()
    growing.push(NEW, 4)
    growing.server.sweeper.tick()
    growing.wires.settle()
    assert growing.left(USED_MOST) == len(USED_MOST)
    assert growing.left(USED_LESS) < len(USED_LESS)


def test_a_clock_beyond_what_rows_keep_is_logged_as_the_last_time_there_is() -> None:
    growing = Growing()
    growing.wires.wall_s = MAX_TIME + 5.0
    growing.beat()
    assert growing.server.store.times.tolist() == [MAX_TIME] * RANGES


def test_a_server_says_that_cluster_time_is_ahead_of_all_clocks(caplog: pytest.LogCaptureFixture) -> None:
    growing = Growing()
    growing.wires.wall_s += 5 * HOUR_S
    growing.beat()
    growing.wires.wall_s -= 5 * HOUR_S
    growing.server.sweeper.tick()
    assert "a clock was ahead" in caplog.text
