"""What a reader has applied it acknowledges now and then, so that servers know how new it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticps.readers.connections import ACK_BYTES, ACK_S, ACK_WINDOWS, ReaderConnections
from elasticps.readers.core.following import Feed
from replication.chain import Member


def test_windows_are_acknowledged_by_bytes_and_number_and_at_least_once_a_second() -> None:
    now, sent = SimpleNamespace(s=100.0), list[object]()
    feed = Feed(Member("s0", 1), 0)
    links: Any = SimpleNamespace(
        following=SimpleNamespace(feeds={feed.member: feed}),
        _connections=SimpleNamespace(send=lambda member, frame: sent.append(member)),
        _runtime=SimpleNamespace(monotonic=lambda: now.s),
    )

    def acknowledged(number: int, nbytes: int = 100, *, after_s: float = 0.01) -> bool:
        now.s += after_s
        before = len(sent)
        ReaderConnections.acknowledge(links, feed, number, nbytes)
        return len(sent) > before

    assert acknowledged(1)  # the first says that there is something
    assert not acknowledged(2)
    assert acknowledged(ACK_WINDOWS)
    assert acknowledged(ACK_WINDOWS + 1, ACK_BYTES + 1)
    assert not acknowledged(ACK_WINDOWS + 2)
    for number in range(3, 10):  # an idle server sends a window four times a second
        assert acknowledged(number, after_s=ACK_S)
    links.following.feeds.clear()  # another connection to the server is followed
    assert not acknowledged(ACK_WINDOWS)
