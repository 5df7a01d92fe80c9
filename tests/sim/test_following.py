"""The judge of readers in the simulator finds each kind of break, and nothing in a reader that keeps its promises."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.sim.checks.lasting import Lasting
from chaos.sim.checks.sums import COLUMNS, KEYS, Column, Sums, units
from chaos.sim.checks.violation import Violation
from chaos.sim.following import ALL, Follower
from elasticps.readers.values import AsOf

TABLE = 7


class Rows:
    """A table, at a server or a reader: by key a row, or none."""

    def __init__(self, pushes: np.ndarray) -> None:
        self.spec = SimpleNamespace(name="sums", dim=COLUMNS)
        self.app, self.number = "app", TABLE
        self.pushes = pushes.copy()  # int64 [COLUMNS, KEYS]
        self.keys = ALL.copy()

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        out[:] = (self.pushes * units(ALL)).T[keys]

    def ranges_of(self, keys: np.ndarray) -> np.ndarray:
        return np.zeros(len(keys), np.int64)

    def range_keys(self, r: int) -> np.ndarray:
        return self.keys

    list_range = range_keys


class Scene:
    """One server, one worker of three steps, and a reader that shows what a test says. All has all of it at first."""

    def __init__(self) -> None:
        self.sums = Sums("app", None)
        self.column: Column = self.sums.start("w0")
        self.column.worker = 1
        for step in (1, 2, 3):
            self.column.begin(step, ALL)
            self.column.pushed = step
        self.server, self.reader = Rows(self.at(3)), Rows(self.at(3))
        tables = {TABLE: self.server}
        server = SimpleNamespace(member="s0", me=SimpleNamespace(name="s0"),
                                 store=SimpleNamespace(tables=tables, live=tables))  # fmt: skip
        lasting = Lasting(1, lambda member: server)  # type: ignore[arg-type, return-value]
        lasting._members, lasting._copies_of = ["s0"], np.array([[0]])  # type: ignore[list-item]
        view = SimpleNamespace(servers=[SimpleNamespace(name="s0", incarnation=1)], tails=np.array([0]))
        cluster: Any = SimpleNamespace(lasting=lasting, counted={1}, view=view, life=lambda *which: server)
        self.follower = Follower(cluster, "r0", "app", self.sums, lambda: False)
        self.steps = {1: np.array([3])}
        self.moves_to: int | None = None  # what it shows after it has been looked at while it holds
        self.follower.reader = self.as_reader()

    def at(self, step: int) -> np.ndarray:
        """The pushes of the worker's steps so far."""
        pushes = np.zeros((COLUMNS, KEYS), np.int64)
        pushes[self.column.index] = self.column.upto(step)
        return pushes

    def as_reader(self) -> Any:
        reader: Any = SimpleNamespace()
        reader.tables = {"sums": self.reader.spec}
        reader._lock, reader._links = nullcontext(), SimpleNamespace(error=None)
        reader._tables = SimpleNamespace(by_name={"sums": self.reader}, by_id={TABLE: self.reader})
        reader.pull, reader.release = self._pull, lambda: None
        reader.hold = lambda timeout: AsOf(0.0, 1, np.zeros(1, np.int64), self.steps, held=True)
        return reader

    def _pull(self, keys: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = np.empty((len(keys["sums"]), COLUMNS), np.float32)
        self.reader.gather(keys["sums"], rows)
        return {"sums": rows}

    def look(self) -> None:
        self.follower._look(self.follower.reader)  # type: ignore[arg-type]

    def hold(self) -> None:
        def sleep(seconds: float) -> None:
            if self.moves_to is not None:
                self.reader.pushes = self.at(self.moves_to)

        self.follower._hold(self.follower.reader, SimpleNamespace(sleep=sleep), Random(1))  # type: ignore[arg-type]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_reader_that_goes_on_with_what_was_committed_is_right(scene: Scene) -> None:
    for step in (1, 2, 3):
        scene.reader.pushes = scene.at(step)
        scene.look()
    scene.hold()
    assert scene.follower.held == 1
    assert scene.follower.differ() == ""


def test_a_row_that_goes_back_is_found(scene: Scene) -> None:
    scene.look()
    scene.reader.pushes[scene.column.index, 5] = 2
    with pytest.raises(Violation, match="shows 2 pushes of column 0 to key 5, and has shown 3"):
        scene.look()


def test_a_value_that_a_replica_lacks_is_found(scene: Scene) -> None:
    scene.server.pushes[scene.column.index, 4] = 2
    with pytest.raises(Violation, match="a tail has shown of key 4 what s0, a replica, lacks"):
        scene.look()


def test_a_moment_that_mixes_steps_is_found(scene: Scene) -> None:
    scene.reader.pushes[scene.column.index, 9] = 2
    with pytest.raises(Violation, match=r"holds 2 pushes of w0 .* to key 9, its steps up to 3 have 3"):
        scene.hold()


def test_a_moment_that_says_other_steps_than_it_has_is_found(scene: Scene) -> None:
    scene.steps = {1: np.array([2])}
    with pytest.raises(Violation, match="its steps up to 2 have 2"):
        scene.hold()


def test_a_moment_that_moves_is_found(scene: Scene) -> None:
    scene.reader.pushes, scene.steps, scene.moves_to = scene.at(2), {1: np.array([2])}, 3
    with pytest.raises(Violation, match="shows other rows while it holds"):
        scene.hold()


def test_a_moment_of_a_worker_that_has_left_may_be_anything(scene: Scene) -> None:
    """Its last step may be in part of the ranges."""
    scene.reader.pushes[scene.column.index, 9] = 2
    scene.follower.cluster.counted.clear()
    scene.hold()
    assert scene.follower.held == 1


def test_a_deletion_that_was_lost_is_found(scene: Scene) -> None:
    scene.server.keys = ALL[ALL != 3]
    assert "keys [3] are only here or there" in scene.follower.differ()


def test_a_row_that_was_lost_is_found(scene: Scene) -> None:
    scene.reader.keys = ALL[ALL != 3]
    assert "keys [3] are only here or there" in scene.follower.differ()


def test_a_row_that_is_older_at_rest_is_found(scene: Scene) -> None:
    scene.reader.pushes[scene.column.index, 8] = 1
    assert scene.follower.differ() == "r0 differs from s0 in key 8 of 'sums'"


def test_a_table_that_is_missing_at_rest_is_found(scene: Scene) -> None:
    scene.follower.reader._tables.by_id.clear()  # type: ignore[union-attr]
    assert "r0 has tables []" in scene.follower.differ()
