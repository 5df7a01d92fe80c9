"""What a reader knows of its ranges, as servers that have left them, or have not said all yet, go on sending."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.core.view import ServerInfo, View
from elasticps.readers.core.following import Feed, Following, OutOfOrder, Wishes
from elasticps.wire.windows import Subscribed, WindowFrame

RANGES = 4
NONE = np.empty(0, np.int64)
SERVERS = (ServerInfo("s0", 1, "127.0.0.1:1"), ServerInfo("s1", 1, "127.0.0.1:2"))


def view_of(epoch: int, tails: list[int], since: tuple[int, ...] = (1,) * RANGES) -> View:
    chains = np.array(tails, np.int32)[:, None]
    nobody, begun = np.full(RANGES, -1, np.int32), np.ones(RANGES, np.int64)
    return View("c", epoch, RANGES, 1, SERVERS, chains, nobody, np.array(since), "", recovery_epoch=begun)


def followed(following: Following) -> Feed:
    """The feed of the first server, which has answered for all ranges and told that they are empty."""
    feed = following.connected(next(iter(following.tails)))
    subscription = following.subscribe(feed)
    following.answered(feed, Subscribed(subscription.number, 1, NONE, np.arange(RANGES)))
    tell(following, feed, 1, 10, range(RANGES))
    assert following.time_us.tolist() == [10] * RANGES  # there was nothing to read
    assert not following.exact.any()
    tell(following, feed, 1, 20, range(RANGES))
    assert following.exact.all()
    return feed


def counted(following: Following, feed: Feed) -> list[bool]:
    """Of which ranges rows of a server count."""
    found = following.counts(feed)
    return [True] * RANGES if found is None else found.tolist()


def tell(
    following: Following, feed: Feed, epoch: int, time_us: int, ranges: object = (), complete: bool = True
) -> None:  # fmt: skip
    named = np.array(list(ranges), np.int64)  # type: ignore[call-overload]
    frame = WindowFrame(epoch, feed.window + 1, time_us, complete, ranges=named, positions=named * 0 + time_us)
    following.window(feed, frame)
    following.applied(feed, frame)


def test_ranges_get_older_of_which_a_server_in_a_newer_view_says_nothing() -> None:
    """It may not be their tail any more, and then sends none of their rows."""
    following = Following(view_of(1, [0] * RANGES), Wishes(None, "", 10))
    feed = followed(following)
    tell(following, feed, 2, 30, [1, 2])
    assert following.time_us.tolist() == [20, 30, 30, 20]
    following.adopt(view_of(2, [0] * RANGES))
    tell(following, feed, 2, 40)
    assert following.time_us.tolist() == [40] * RANGES


def test_a_range_is_not_exact_until_all_of_a_window_has_come() -> None:
    following = Following(view_of(1, [0] * RANGES), Wishes(None, "", 10))
    feed = followed(following)
    tell(following, feed, 1, 30, complete=False)
    assert not following.exact.any()
    assert (following.time_us == 20).all()
    tell(following, feed, 1, 40, [0])
    assert following.exact.all()


def test_ranges_that_changed_in_a_view_that_was_skipped_are_asked_for_again() -> None:
    """Their server may have left them in between, and sends nothing of them any more."""
    following = Following(view_of(1, [0] * RANGES), Wishes(None, "", 10))
    feed = followed(following)
    assert following.adopt(view_of(3, [0] * RANGES, since=(1, 3, 2, 1))) == [feed]
    subscription = following.subscribe(feed)
    tell(following, feed, 3, 40, [0, 1])  # what it has not left goes on
    assert all(counted(following, feed))
    assert following.time_us.tolist() == [40, 40, 20, 20]
    following.answered(feed, Subscribed(subscription.number, 3, np.arange(RANGES), NONE))
    tell(following, feed, 3, 50, [1])
    assert following.time_us.tolist() == [50] * RANGES
    assert not following.adopt(view_of(4, [0] * RANGES, since=(4, 3, 2, 1)))  # none was skipped


def test_a_range_that_began_again_is_read_again() -> None:
    """What is there now came from a checkpoint, and its numbers are of another history."""
    following = Following(view_of(1, [0] * RANGES), Wishes(None, "", 10))
    feed = followed(following)
    recovered = np.array([1, 2, 1, 1])
    assert following.adopt(replace(view_of(2, [0] * RANGES, since=(1, 2, 1, 1)), recovery_epoch=recovered)) == [feed]
    subscription = following.subscribe(feed)
    assert subscription.positions.tolist() == [20, -1, 20, 20]
    assert subscription.origins.tolist() == recovered.tolist()
    assert not following.filled


def test_windows_of_a_server_count_for_ranges_that_it_has_answered_for_as_their_tail() -> None:
    following = Following(view_of(1, [0, 0, 1, 1]), Wishes(None, "", 10))
    first, second = (following.connected(member) for member in list(following.tails))
    to_first, to_second = following.subscribe(first), following.subscribe(second)
    assert not any(counted(following, first))
    following.answered(first, Subscribed(to_first.number, 1, NONE, np.array([0, 1])))
    following.answered(second, Subscribed(to_second.number, 1, NONE, np.array([2, 3])))
    following.adopt(view_of(2, [0, 1, 1, 1], since=(1, 2, 1, 1)))
    assert counted(following, first) == [True, False, False, False]
    following.subscribe(second)
    assert counted(following, second) == [False, False, True, True]


def test_windows_come_in_their_order_and_none_is_left_out() -> None:
    following = Following(view_of(1, [0] * RANGES), Wishes(None, "", 10))
    feed = followed(following)
    for number in (feed.window, feed.window + 2):
        with pytest.raises(OutOfOrder, match="came after 2"):
            following.window(feed, WindowFrame(1, number, 30, True))
