"""Clocks that are wrong: which time heads log, and which rows sweeps choose."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import SGD
from elasticps.model.policies import MAX_TIME, Capacity, Eviction, IdleFor, MinCountSketch
from elasticps.model.spec import TableSpec
from elasticps.server.core.clocks import Clocks
from elasticps.server.core.view_exchange import HOLD_TIMEOUT_S
from elasticps.server.roles.leaders import FORGOTTEN_S
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, block_head, json_frame
from elasticps.wire.headers import PushHeader
from replication.progress import before_part
from tests.server.conftest import RANGES
from tests.server.wires import Clock, Wires

TABLE, WORKER, NOW, HOUR_S = 50, 5, 1_000_000, 3_600
USED_MOST, USED_LESS, NEW = np.arange(20), np.arange(100, 280), np.arange(500, 560)


@pytest.fixture(autouse=True)
def no_loop_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "get_running_loop", Clock)


class Growing:
    """A server with a growing table; its wall clock is `wires.wall_s`, and a leader tells it the time."""

    def __init__(
        self, *eviction: Eviction, admission: MinCountSketch | None = None, skew_s: int = 0, median_s: int = NOW
    ) -> None:
        self.spec = TableSpec("t", 2, SGD(lr=0.5), admission=admission, eviction=eviction)
        self.wires = wires = Wires(1, compiled=False)
        wires.wall_s, wires.led = float(NOW + skew_s), median_s > 0
        self.server: Server = wires.start("a", (WORKER,))
        self.view = wires.adopt(lambda r: ["a"])
        self.there, _ = wires.connect("a", WORKER)
        if wires.led:
            wires.tell_time(median_s)
        body = json_frame(Kind.CREATE, {"id": TABLE, "spec": self.spec.to_json()})[HEADER_BYTES:]
        self.there.write(Header(Kind.CREATE, epoch=1, request=2, body=len(body)).pack() + body)
        wires.settle()
        self.clock = 0

    def beat(self, median_s: float, leader_s: float | None = None) -> None:
        """The leader is heard, and the server logs the time."""
        self.wires.tell_time(median_s, leader_s)
        self.server.sweeper.stamp()

    def pass_time(self, seconds: float) -> None:
        """The monotonic clock goes on, and what has waited is looked at again."""
        self.wires.clock.now += seconds
        self.server.held.release()
        self.wires.settle()

    def sweep(self) -> None:
        self.server.sweeper.tick()
        self.wires.settle()

    @property
    def times(self) -> list[int]:
        """The times of ranges, each once."""
        return sorted(set(self.server.store.times.tolist()))

    def push(self, keys: np.ndarray, times: int) -> None:
        routes = Routes(self.view)
        plan = plan_push(keys, table_salt(TABLE), routes)
        for _ in range(times):
            self.clock += 1
            body = block_head(TABLE, len(keys), self.spec.dim, self.spec.optimizer.step_values(1, None))
            body += keys[plan.order].tobytes() + np.ones((len(keys), self.spec.dim), np.float32).tobytes()
            self.there.write(
                PushHeader(2 + self.clock, 1, self.clock, before_part(self.clock, 0), 1).header(len(body)).pack() + body
            )
        self.wires.settle()

    def left(self, keys: np.ndarray) -> int:
        return int(np.count_nonzero(~self.server.store.tables[TABLE].missing(keys)))


def most_used() -> Growing:
    return Growing(Capacity(200, keep="most_used", half_life="1h"))


# --- which of the clocks counts ---------------------------------------------------------------------------------------


def test_a_head_logs_the_median_and_a_sweep_uses_the_earliest_clock() -> None:
    clocks = Clocks(own=5.0, leader=9.0, median=7.0)
    assert (clocks.logged, clocks.swept, clocks.skew) == (7, 5, -2)
    assert Clocks(9.0, 8.0, 7.0).swept == 7


def test_without_a_median_the_later_clock_is_logged() -> None:
    """An older leader tells its own time alone."""
    assert [Clocks(5.0, 9.0).logged, Clocks(9.0, 5.0).logged] == [9, 9]
    assert [Clocks(5.0, 9.0).swept, Clocks(9.0, 5.0).swept, Clocks(9.0, 5.0).skew] == [5, 5, 4]


def test_without_a_leader_a_server_knows_its_own_clock_alone() -> None:
    assert Clocks(5.0) == (5, 0, 0)
    assert (Clocks(5.0).logged, Clocks(5.0).skew, Clocks(5.0).known) == (5, 0, False)


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [100 * HOUR_S, -100 * HOUR_S])
def test_the_wrong_clock_of_a_server_is_not_logged(skew_s: int) -> None:
    growing = Growing(IdleFor("1h"), skew_s=skew_s)
    growing.beat(NOW + 10)
    assert growing.times == [NOW + 10]


@pytest.mark.parametrize("skew_s", [100 * HOUR_S, -100 * HOUR_S])
def test_the_wrong_clock_of_a_leader_is_not_logged(skew_s: int) -> None:
    growing = Growing(IdleFor("1h"))
    growing.beat(NOW + 10, NOW + skew_s)
    assert growing.times == [NOW + 10]


def test_time_goes_on_by_the_last_median_while_no_leader_is_heard() -> None:
    growing = Growing(IdleFor("1h"), skew_s=100 * HOUR_S)
    growing.wires.clock.now += 2 * FORGOTTEN_S
    growing.server.sweeper.stamp()
    assert growing.times == [NOW + 2 * FORGOTTEN_S]
    assert not growing.server.leaders.clocks().leader, "so nothing is swept"


def test_a_leader_that_does_not_know_yet_how_late_it_is_changes_nothing() -> None:
    growing = Growing(IdleFor("1h"), skew_s=100 * HOUR_S)
    growing.beat(0, 0)
    growing.server.sweeper.stamp()
    assert growing.times == [NOW]


def test_a_table_waits_until_a_leader_has_said_what_time_it_is() -> None:
    growing = Growing(IdleFor("1h"), skew_s=100 * HOUR_S, median_s=0)
    growing.push(USED_MOST, 1)
    assert growing.times == [0]
    assert not growing.server.store.tables
    growing.wires.tell_time(NOW)
    growing.pass_time(1)
    assert growing.times == [NOW + 1]
    assert growing.left(USED_MOST) == len(USED_MOST)


def test_a_server_that_no_leader_tells_the_time_logs_its_own_only_where_there_is_none() -> None:
    """Rows cannot be without a time; but a clock that may be wrong moves none that there is."""
    growing = Growing(IdleFor("1h"), median_s=0)
    growing.pass_time(HOLD_TIMEOUT_S + 1)
    assert growing.times == [NOW]
    growing.wires.wall_s += 100 * HOUR_S
    growing.server.sweeper.stamp()
    assert growing.times == [NOW]
    growing.beat(NOW + 10)
    assert growing.times == [NOW + 10]


def test_a_time_beyond_what_rows_keep_is_logged_as_the_last_time_there_is() -> None:
    growing = most_used()
    growing.beat(MAX_TIME)
    growing.wires.clock.now += 5
    growing.server.sweeper.stamp()
    assert growing.server.store.times.tolist() == [MAX_TIME] * RANGES


@pytest.mark.parametrize(("wall_s", "reported"), [(NOW + 0.25, NOW + 0.25), (-5.0, 0), (1e18, MAX_TIME)])
def test_reports_tell_a_server_s_time_as_far_as_a_message_can(wall_s: float, reported: float) -> None:
    growing = most_used()
    growing.wires.wall_s = wall_s
    assert json.loads(growing.server.leaders.report()[HEADER_BYTES:])["seconds"] == reported


# --- what follows from it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["server", "leader", "median"])
def test_a_clock_that_is_ahead_evicts_nothing(wrong: str) -> None:
    growing = Growing(IdleFor("1h"))
    growing.push(USED_MOST, 1)
    late = NOW + 100 * HOUR_S
    growing.wires.wall_s = late if wrong == "server" else NOW
    growing.beat(late if wrong == "median" else NOW, late if wrong == "leader" else NOW)
    growing.sweep()
    assert growing.left(USED_MOST) == len(USED_MOST)


def test_rows_that_are_idle_by_all_clocks_go() -> None:
    growing = Growing(IdleFor("1h"))
    growing.push(USED_MOST, 1)
    growing.wires.wall_s += 2 * HOUR_S
    growing.beat(growing.wires.wall_s)
    growing.sweep()
    assert growing.left(USED_MOST) == 0


def test_a_sketch_is_not_halved_by_a_clock_that_is_ahead() -> None:
    growing = Growing(admission=MinCountSketch(4, nbytes=1 << 20, halve_after="1h"))
    growing.push(USED_MOST, 2)
    growing.wires.wall_s += 100 * HOUR_S
    growing.beat(NOW + 1)
    growing.push(USED_MOST, 2)
    assert growing.left(USED_MOST) == len(USED_MOST), "all four pushes counted"


def test_counts_do_not_fall_by_a_clock_that_is_ahead() -> None:
    growing = most_used()
    growing.push(USED_MOST, 5)
    growing.wires.wall_s += 100 * HOUR_S
    growing.beat(NOW + 1, NOW + 100 * HOUR_S)
    growing.push(USED_MOST, 1)
    counts = growing.server.store.tables[TABLE].read_usage(USED_MOST)[:, 1].copy().view(np.float32)
    assert (counts > 5.9).all()


def test_rows_in_use_while_most_clocks_were_ahead_do_not_go_before_others() -> None:
    growing = most_used()
    growing.push(USED_MOST, 20)
    growing.push(USED_LESS, 3)
    growing.beat(NOW + 5 * HOUR_S)
    growing.push(USED_MOST, 1)  # their counts fall to a 32nd, and those of the others shall do so, too
    growing.beat(NOW)
    growing.push(NEW, 4)
    growing.sweep()
    assert growing.left(USED_MOST) == len(USED_MOST)
    assert growing.left(USED_LESS) < len(USED_LESS)


def test_a_server_says_that_cluster_time_is_ahead_of_the_clocks(caplog: pytest.LogCaptureFixture) -> None:
    growing = most_used()
    growing.beat(NOW + 5 * HOUR_S)
    growing.beat(NOW)
    growing.sweep()
    assert "clocks were ahead" in caplog.text
    assert growing.server.sweeper.lead_s == 5 * HOUR_S


def test_a_server_says_that_its_clock_differs_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    growing = Growing(IdleFor("1h"), skew_s=-HOUR_S)
    growing.sweep()
    assert "this server's clock differs from the others'" in caplog.text
    assert growing.server.sweeper.skew_s == -HOUR_S
