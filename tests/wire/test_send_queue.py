from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.wire.stream import BUFFERS_PER_CALL, SendQueue


class Socket:
    """Takes so many bytes of each call: 0 is none, and then nothing until it is tried again."""

    def __init__(self, takes: list[int]) -> None:
        self.takes = takes
        self.arrived = b""
        self.calls = 0

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        self.calls += 1
        assert 0 < len(buffers) <= BUFFERS_PER_CALL
        offered = b"".join(buffers)
        room = self.takes.pop(0) if self.takes else len(offered)
        if not room:
            raise BlockingIOError
        self.arrived += offered[:room]
        return min(room, len(offered))


@given(
    rounds=st.lists(st.lists(st.binary(max_size=9), max_size=6), max_size=8),
    takes=st.lists(st.integers(0, 20), max_size=20),
)
def test_everything_leaves_once_and_in_order(rounds: list[list[bytes]], takes: list[int]) -> None:
    queue, socket, given_bytes = SendQueue(), Socket(takes), b""
    for buffers in rounds:
        queue.add(buffers)
        given_bytes += b"".join(buffers)
        left = not queue.send(socket)
        assert left is bool(queue)
        assert given_bytes.startswith(socket.arrived)
        assert len(socket.arrived) + queue.nbytes == len(given_bytes)
    while not queue.send(socket):
        pass
    assert socket.arrived == given_bytes
    assert queue.nbytes == 0


def test_a_socket_that_accepted_a_part_is_not_tried_again_at_once() -> None:
    queue, socket = SendQueue(), Socket([3])
    queue.add((b"abc", b"def"))
    assert not queue.send(socket)
    assert (socket.calls, queue.nbytes) == (1, 3)


def test_more_buffers_than_a_call_takes_leave_in_several() -> None:
    queue, socket = SendQueue(), Socket([])
    queue.add([b"x"] * (2 * BUFFERS_PER_CALL + 1))
    assert queue.send(socket)
    assert socket.calls == 3


def test_a_broken_connection_is_an_error() -> None:
    class Broken:
        def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
            raise BrokenPipeError

    queue = SendQueue()
    queue.add((b"a",))
    with pytest.raises(BrokenPipeError):
        queue.send(Broken())
    queue.clear()
    assert not queue
