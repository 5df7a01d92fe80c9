"""The state of rounds at replicas, without a server."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticps.server.core import barrier_state
from elasticps.server.core.barrier_state import Rounds
from elasticps.store.codec import Codec
from elasticps.wire.frames import Block

P = 4
APP = "app"


class Keys:
    """Key k belongs to range k // 10."""

    push = Codec((), 1)

    def select(self, keys: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero(keys % 10 < bounds[keys // 10])


TABLES = {1: Keys()}


def share(keys: list[int], value: float, rate: float) -> list[Block]:
    grads = np.full((len(keys), 1), value, np.float32)
    return [Block(1, np.array(keys), grads, np.array([rate], np.float32))]


def closed(held: list[int], groups: list[list[int]]) -> dict[int, tuple[float, float]]:
    """What a replica of the ranges `held` applies that closes them group by group: by key the mean and the rate."""
    rounds = Rounds(P)
    for worker, keys, rate in ((7, [11, 21], 0.5), (5, [1, 11], 0.25), (6, [1, 22], 0.5)):
        mine = [k for k in keys if k // 10 in held]
        rounds.keep(APP, 1, worker, np.array(held), share(mine, float(worker), rate) if mine else [])
    found: dict[int, tuple[float, float]] = {}
    for group in groups:
        for _, of, grads, rates in rounds.close(APP, 1, (5, 6, 7), 3, np.array(group), TABLES):
            found |= {k: (float(g), float(rates[0])) for k, g in zip(of.tolist(), grads[:, 0], strict=True)}
    return found


def test_a_key_gets_the_rate_of_the_first_worker_that_has_it() -> None:
    means = closed([0, 1, 2, 3], [[0, 1, 2, 3]])
    assert means == {1: (pytest.approx(11 / 3), 0.25), 11: (4.0, 0.25), 21: (pytest.approx(7 / 3), 0.5), 22: (2.0, 0.5)}


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[2, 3], [0, 1]], [[1, 2]], [[2]]])
def test_replicas_with_different_ranges_apply_the_same_means(groups: list[list[int]]) -> None:
    held = sorted(r for group in groups for r in group)
    means = closed([0, 1, 2, 3], [[0, 1, 2, 3]])
    assert closed(held, groups) == {key: mean for key, mean in means.items() if key // 10 in held}


def test_the_last_rounds_of_long_absent_workers_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a low id that was in each round would be told that it was in none."""
    monkeypatch.setattr(barrier_state, "MAX_REMEMBERED", 3)
    rounds = Rounds(4)
    for clock in range(1, 9):
        rounds.decide("app", clock, [1, clock + 10])
    assert rounds.groups["app"].last == {1: 8, 17: 7, 18: 8}


def test_an_older_round_that_is_closed_after_a_newer_one_changes_nothing() -> None:
    rounds, everywhere = Rounds(P), np.arange(P)
    for clock in (1, 2):
        rounds.keep(APP, clock, 5, everywhere, share([1, 11], 1.0, 0.5))
        assert rounds.close(APP, clock, (5,), 1, everywhere, TABLES)
    rounds.keep(APP, 3, 5, everywhere, share([1], 1.0, 0.5))
    assert not rounds.close(APP, 1, (5, 6), 2, everywhere, TABLES)
    assert rounds.closed(APP).tolist() == [2] * P
    assert rounds.sharing(APP, 3) == {5}
