from __future__ import annotations

import itertools

from elasticps.client.core.new_views import ASK_EVERY_S, STORE_AFTER_S, ViewRefresh

NOTHING = (0, 0, 0)


def test_a_client_that_lacks_nothing_sends_no_request() -> None:
    refresh = ViewRefresh()
    assert not any(any(refresh.turn(10 + i, 5, False, NOTHING, 7)) for i in range(10))


def test_while_a_server_is_lost_the_others_are_asked_often() -> None:
    refresh = ViewRefresh()
    checked = sum(refresh.turn(10 + i / 100, 5, True, NOTHING, i).ask_servers for i in range(100))
    assert 0.5 / ASK_EVERY_S < checked <= 1 / ASK_EVERY_S


def test_a_view_of_a_reported_epoch_is_requested_until_it_arrives() -> None:
    refresh = ViewRefresh()
    refresh.epoch = 6
    assert refresh.turn(10, 5, False, NOTHING, 0).ask_servers
    assert not refresh.turn(11, 6, False, NOTHING, 0).ask_servers


def test_a_request_that_stays_the_oldest_is_a_reason_to_ask() -> None:
    refresh = ViewRefresh()
    assert not refresh.turn(10.0, 5, False, (0, 3, 0), 0).ask_servers
    assert not refresh.turn(10.05, 5, False, (0, 4, 0), 0).ask_servers
    assert not refresh.turn(10.1, 5, False, (0, 4, 0), 0).ask_servers
    assert refresh.turn(10.2, 5, False, (0, 4, 0), 0).ask_servers
    assert not refresh.turn(10.3, 5, False, NOTHING, 0).ask_servers


def test_the_store_is_read_only_while_servers_are_silent_and_ever_more_seldom() -> None:
    refresh = ViewRefresh()
    heard_all_the_time = [refresh.turn(10 + i / 50, 5, True, NOTHING, i).ask_store for i in range(200)]
    assert not any(heard_all_the_time)
    silent = [i / 50 for i in range(1000) if refresh.turn(14 + i / 50, 5, True, NOTHING, 200).ask_store]
    assert silent[0] <= 2 * STORE_AFTER_S
    gaps = [b - a for a, b in itertools.pairwise(silent)]
    assert gaps == sorted(gaps)
    assert len(silent) < 8


def test_the_store_is_not_read_twice_at_once() -> None:
    refresh = ViewRefresh()
    refresh.reading = True
    assert not any(refresh.turn(10 + i / 10, 5, True, NOTHING, 0).ask_store for i in range(50))
