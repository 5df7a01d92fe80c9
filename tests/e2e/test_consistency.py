"""Promises of the consistency models, checked by what each pull saw; sums, applications and custom functions."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from tests.e2e.conftest import Connect, wait_for_others
from tests.e2e.oracle import wait_for
from tests.e2e.worker_process import child, counts, ones

FOREVER = float("inf")


@dataclass
class Life:
    """A worker's row, the clock that it started above, and from when to when it certainly took part."""

    row: int
    base: int
    begins_s: float
    ends_s: float = FOREVER


@dataclass
class Pull:
    """The counts of steps that a worker saw in each row at its clock."""

    life: Life
    clock: int
    began_s: float
    ended_s: float
    seen: list[float]


@dataclass
class History:
    """Everything that happened."""

    rows: int
    incarnations: list[Life] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)

    def check(self, staleness: int) -> tuple[int, int]:
        """Fails if a pull missed a step that it must show. Returns (pulls, the largest delay that was seen)."""
        worst = 0
        for pull in self.pulls:
            assert pull.life.base + pull.seen[pull.life.row] == pull.clock, "a worker does not see its own steps"
            for other in self.incarnations:
                if other.begins_s < pull.began_s and pull.ended_s < other.ends_s:
                    delay = pull.clock - (other.base + int(pull.seen[other.row]))
                    assert delay <= staleness, f"{pull} missed steps of {other}: {delay} behind"
                    worst = max(worst, delay)
        return len(self.pulls), worst


class Trainer(threading.Thread):
    """Adds 1 to a row of its own in each step, and records what it sees of all rows."""

    def __init__(self, ps: eps.Client, history: History, row: int, slow_s: float) -> None:
        super().__init__(daemon=True)
        self.ps, self.history, self.row, self.slow_s = ps, history, row, slow_s
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            table = counts(self.ps)
            keys = np.arange(self.history.rows)
            life = Life(self.row, self.ps.resume().clock, time.monotonic())
            self.history.incarnations.append(life)
            while not self.stop.is_set():
                self.ps.push({table: ones(np.array([self.row]))})
                began_s = time.monotonic()
                seen = table.pull(keys)[:, 0].tolist()
                self.history.pulls.append(Pull(life, self.ps.clock, began_s, time.monotonic(), seen))
                time.sleep(self.slow_s)
            life.ends_s = time.monotonic()
        except BaseException as error:
            self.error = error
        finally:
            self.ps.close()

    def end(self) -> None:
        self.stop.set()
        self.join(60)
        assert not self.is_alive(), "a worker hangs"
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 3])  # stories have both
def test_bounded_delay_is_never_broken(staleness: int) -> None:
    """Workers are slow, come, leave and are killed, and a server dies."""
    with eps.LocalCluster(servers=3, replicas=2) as cluster:

        def train(row: int, slow_s: float) -> Trainer:
            bound = eps.SSP(staleness=staleness)
            ps = eps.connect(cluster.url, worker=f"w{row}", app="ssp", consistency=bound, timeout=60)
            return Trainer(ps, history, row, slow_s)

        def progress() -> None:
            goal = len(history.pulls) + 60
            wait_for(lambda: len(history.pulls) > goal, lambda: f"no progress: {len(history.pulls)} pulls", 120, raise_)

        def raise_() -> None:
            for trainer in trainers:
                if trainer.error is not None:
                    raise trainer.error

        history = History(rows=6)
        trainers = [train(0, 0.0), train(1, 0.01)]
        progress()
        with child("bounded", cluster.url, "ssp", "mortal", 2, consistency="ssp") as mortal:
            born = mortal.hear_until("base")
            life = Life(2, born["base"], born["at"])
            history.incarnations.append(life)
            for _ in range(10):
                mortal.hear_until("clock")
            life.ends_s = time.monotonic()
            mortal.process.send_signal(signal.SIGKILL)
            mortal.process.wait(20)
        progress()
        trainers.append(train(3, 0.005))
        progress()
        cluster.kill("s1")
        progress()
        trainers[1].end()
        trainers.append(train(4, 0.0))
        progress()
        cluster.start_server("s1")
        progress()
        for trainer in trainers:
            trainer.end()
        pulls, worst = history.check(staleness)
        assert pulls > 300
        assert worst == staleness  # the bound was used, so the oracle is not idle


def test_the_oracle_notices_a_broken_bound() -> None:
    quick, slow = Life(0, 0, 0.0), Life(1, 2, 0.0)
    history = History(2, [quick, slow], [Pull(quick, 9, 1.0, 2.0, [9.0, 4.0])])
    assert history.check(3) == (1, 3)
    with pytest.raises(AssertionError, match="3 behind"):
        history.check(2)
    slow.begins_s = 1.5  # it had not joined when the pull began
    assert history.check(0) == (1, 0)
    with pytest.raises(AssertionError, match="its own steps"):
        History(2, [quick], [Pull(quick, 9, 1.0, 2.0, [8.0, 4.0])]).check(9)


def test_without_a_bound_no_pull_waits(connect: Connect) -> None:
    quick, idle = connect("quick", timeout=10), connect("idle")
    idle.resume()
    for _ in range(50):
        quick.push({counts(quick): ones(np.array([1]))})
        counts(quick).pull(np.array([1]))
    assert quick.clock == 50


def test_a_timeout_of_a_bounded_pull_names_the_slow_worker(connect: Connect) -> None:
    quick, idle = connect("quick", consistency=eps.SSP(staleness=2)), connect("idle")
    idle.resume()
    for _ in range(2):
        quick.push({})
    counts(quick).pull(np.array([1]))
    quick.push({})
    wait_for_others(quick, 1.0)
    with pytest.raises(eps.Timeout, match=f"waited too long for worker {quick.app}/idle"):
        counts(quick).pull(np.array([1]))


# --- the classic store --------------------------------------------------------------------------------------------


def test_pushes_of_all_workers_are_aggregated(connect: Connect) -> None:
    workers = [connect(f"w{i}") for i in range(3)]
    keys = np.array([5, 5, 1 << 60, -7])
    for i, ps in enumerate(workers):
        sums = ps.table("sums", dim=2, optimizer=eps.Accumulate())
        ps.push({sums: (keys, np.full((4, 2), 10.0**i, np.float32))}).result()
    assert sums.pull([5, 1 << 60, -7, 8])[:, 0].tolist() == [222.0, 111.0, 111.0, 0.0]


PLUGIN = """
import numpy as np

from elasticps.store import register_filter, register_optimizer

def largest(w, s, g, v, c):
    for d in range(w.shape[0]):
        if g[d] > w[d]:
            w[d] = g[d]

register_optimizer("largest", largest)

def to_steps(x, words, c):
    for j in range(x.shape[0]):
        words[j] = np.uint32(np.int64(x[j] / c[0]) & 0xFFFFFFFF)

def from_steps(words, x, c):
    for j in range(x.shape[0]):
        x[j] = np.float32(np.int32(words[j])) * c[0]

register_filter("steps", to_steps, from_steps)
"""


def test_users_can_register_their_own_optimizer_and_filter(tmp_path: Path) -> None:
    exec(PLUGIN, {})  # the worker has the filter, too
    (tmp_path / "my_updates.py").write_text(PLUGIN)
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        eps.LocalCluster(servers=2, plugins=["my_updates"], environment=environment) as cluster,
        eps.connect(cluster.url, worker="w0") as ps,
    ):
        table = ps.table("peaks", dim=1, optimizer=eps.Custom("largest"))
        for value in (3.0, 7.0, 5.0):
            ps.push({table: ([1, 2], np.array([[value], [-value]], np.float32))}).result()
        assert table.pull([1, 2])[:, 0].tolist() == [7.0, 0.0]
        steps = [eps.CustomFilter("steps", bits=32, constant_values=(0.5,), feedback=True)]
        table = ps.table("sums", dim=2, optimizer=eps.Accumulate(), push=steps, pull=steps)
        for _ in range(3):
            ps.push({table: ([1, 2], np.array([[0.75, -0.75], [4, 0.25]], np.float32))})
        ps.flush()
        assert table.pull([2, 1]).tolist() == [[12, 0.5], [2, -2]]


@dataclass(frozen=True)
class Apps:
    """Two applications on one cluster."""

    ads: eps.Client
    feed: eps.Client


@pytest.fixture
def apps(cluster: eps.LocalCluster, connect: Connect) -> Iterator[Apps]:
    prefix = connect("reader").app
    bound = {"consistency": eps.SSP(staleness=0), "timeout": 60}
    with (
        eps.connect(cluster.url, worker="w0", app=f"{prefix}-ads", **bound) as ads,  # type: ignore[arg-type]
        eps.connect(cluster.url, worker="w0", app=f"{prefix}-feed", **bound) as feed,  # type: ignore[arg-type]
    ):
        yield Apps(ads, feed)


def test_applications_do_not_see_each_others_tables(apps: Apps) -> None:
    ads = apps.ads.table("rows", dim=2, optimizer=eps.Accumulate())
    feed = apps.feed.table("rows", dim=3, optimizer=eps.SGD(lr=0.1))  # another spec under the same name
    apps.ads.push({ads: ([1], np.ones((1, 2), np.float32))}).result()
    assert not feed.pull([1]).any()
    with pytest.raises(eps.InputError, match="is not open on this client: it was dropped"):
        apps.feed.push({ads: ([1], np.ones((1, 2), np.float32))})
    with pytest.raises(eps.SpecError):
        apps.ads.table("rows", dim=3, optimizer=eps.Accumulate())


def test_applications_do_not_wait_for_each_other(apps: Apps) -> None:
    apps.feed.resume()  # takes part, and stays at clock 0
    for _ in range(5):
        apps.ads.push({counts(apps.ads): ones(np.array([1]))})
        counts(apps.ads).pull([1])
    assert (apps.ads.clock, apps.feed.clock) == (5, 0)


def test_workers_of_two_applications_may_have_like_names(cluster: eps.LocalCluster) -> None:
    with (
        eps.connect(cluster.url, worker="likely.w") as one,
        eps.connect(cluster.url, worker="w", app="likely") as other,
    ):
        for ps in (one, other):
            ps.push({counts(ps): ones(np.array([1]))}).result()
        assert (one.committed, other.committed) == (1, 1)  # neither has fenced the other
    with pytest.raises(eps.ConfigError, match="no usable worker name"):
        eps.connect(cluster.url, worker="likely/w")


def test_applications_have_shards_of_their_own(apps: Apps) -> None:
    found = []
    for ps, samples in ((apps.ads, 10), (apps.feed, 6)):
        for shard in ps.shards(samples, 2):
            found.append((ps.app, shard.index))
            ps.push({})
    assert found == [(apps.ads.app, i) for i in range(5)] + [(apps.feed.app, i) for i in range(3)]
