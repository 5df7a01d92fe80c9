from __future__ import annotations

import itertools

import numpy as np
import pytest

from elasticps.client.core.new_views import ASK_FIRST_S, ASK_MOST_S, STORE_AFTER_S, ViewRefresh, ViewWant

NOTHING = (0, 0, 0)


def turn(
    refresh: ViewRefresh, now: float, epoch: int, lost: bool, oldest: tuple[int, ...], heard: int, chance: float = 0.5
) -> ViewWant:
    return refresh.turn(now, epoch, lost, oldest, heard, chance)


def question_times(refresh: ViewRefresh, chances: np.random.Generator, start: float, stop: float) -> list[float]:
    """When a client that misses a server asks, of a turn each 20 ms."""
    every = np.arange(start, stop, 0.02).tolist()
    return [now for now in every if refresh.turn(now, 5, True, NOTHING, 0, chances.random()).ask_server]


def test_a_client_that_lacks_nothing_sends_no_request() -> None:
    refresh = ViewRefresh()
    assert not any(any(turn(refresh, 10 + i, 5, False, NOTHING, 7)) for i in range(10))


@pytest.mark.parametrize("seed", range(5))
def test_while_a_server_is_lost_others_are_asked_at_once_and_then_ever_more_seldom(seed: int) -> None:
    times = question_times(ViewRefresh(), np.random.default_rng(seed), 10, 70)
    assert times[:2] == [10, pytest.approx(10 + ASK_FIRST_S, abs=0.05)]
    assert 60 / (1.5 * ASK_MOST_S) < len(times) < 60 / ASK_MOST_S + 20
    gaps = np.diff(times[10:])
    assert gaps.min() > 0.5 * ASK_MOST_S - 0.03
    assert gaps.max() - gaps.min() > 0.2 * ASK_MOST_S, "clients that have lost a server together do not ask together"


def test_a_word_of_a_newer_view_another_view_and_another_loss_begin_the_questions_again() -> None:
    chances = np.random.default_rng(1)
    refresh = ViewRefresh()
    question_times(refresh, chances, 10, 70)
    refresh.epoch = 6
    assert len(question_times(refresh, chances, 70, 71)) >= 4
    question_times(refresh, chances, 71, 100)
    assert refresh.turn(100, 6, True, NOTHING, 0, 0.5).ask_server
    question_times(refresh, chances, 100.1, 130)
    assert not turn(refresh, 130, 6, False, NOTHING, 0).ask_server
    assert turn(refresh, 130.1, 6, True, NOTHING, 0).ask_server


def test_a_view_of_a_reported_epoch_is_requested_until_it_arrives() -> None:
    refresh = ViewRefresh()
    refresh.epoch = 6
    assert turn(refresh, 10, 5, False, NOTHING, 0).ask_server
    assert not turn(refresh, 11, 6, False, NOTHING, 0).ask_server


def test_a_request_that_stays_the_oldest_is_a_reason_to_ask() -> None:
    refresh = ViewRefresh()
    assert not turn(refresh, 10.0, 5, False, (0, 3, 0), 0).ask_server
    assert not turn(refresh, 10.05, 5, False, (0, 4, 0), 0).ask_server
    assert not turn(refresh, 10.1, 5, False, (0, 4, 0), 0).ask_server
    assert turn(refresh, 10.2, 5, False, (0, 4, 0), 0).ask_server
    assert not turn(refresh, 10.3, 5, False, NOTHING, 0).ask_server


def test_the_store_is_read_only_while_servers_are_silent_and_ever_more_seldom() -> None:
    refresh = ViewRefresh()
    heard_all_the_time = [turn(refresh, 10 + i / 50, 5, True, NOTHING, i).ask_store for i in range(200)]
    assert not any(heard_all_the_time)
    silent = [i / 50 for i in range(1000) if turn(refresh, 14 + i / 50, 5, True, NOTHING, 200).ask_store]
    assert silent[0] <= 2 * STORE_AFTER_S
    gaps = [b - a for a, b in itertools.pairwise(silent)]
    assert gaps == sorted(gaps)
    assert len(silent) < 8


def test_the_store_is_not_read_twice_at_once() -> None:
    refresh = ViewRefresh()
    refresh.reading = True
    assert not any(turn(refresh, 10 + i / 10, 5, True, NOTHING, 0).ask_store for i in range(50))
