"""Two threads that read and write the same sockets."""

from __future__ import annotations

from typing import cast

import pytest

from elasticps.client.runtime import READABLE, WRITABLE, Runtime, SocketPoller
from elasticps.client.transport import Link, LinkDriver


class OneSocket(SocketPoller):
    """A poller whose only socket can always be written; watched: the events it is watched for."""

    def __init__(self) -> None:
        self.watched = 0

    def register(self, fd: int, events: int) -> None:
        self.watched = events

    def modify(self, fd: int, events: int) -> None:
        self.watched = events

    def unregister(self, fd: int) -> None:
        self.watched = 0

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        return [(7, WRITABLE)] if self.watched & WRITABLE else []

    def close(self) -> None:
        pass


class Machine(Runtime):
    def __init__(self) -> None:
        self.sockets = OneSocket()

    def poller(self) -> SocketPoller:
        return self.sockets


class Busy:
    """A link on which another thread sends as soon as all has left: its socket takes half of that."""

    def __init__(self) -> None:
        self.driver: LinkDriver
        self.socket = self
        self.has_backlog = False
        self.flushed = 0

    def fileno(self) -> int:
        return 7

    def flush(self) -> bool:
        self.flushed += 1
        self.has_backlog = self.flushed == 1
        if self.has_backlog:  # all had left; now the other thread has its turn, and finds the socket full
            self.driver.want_write(cast(Link, self))
        return True


def test_bytes_that_another_thread_queues_during_a_flush_are_sent_too() -> None:
    machine, link = Machine(), Busy()
    link.driver = LinkDriver(machine, lambda link, error: None, lambda: False, lambda error: None)
    link.driver.add(cast(Link, link))
    assert link.driver.wait(lambda: link.flushed == 2, 30.0)
    assert not link.has_backlog
    assert machine.sockets.watched == READABLE


class Broken(Busy):
    """A link whose connection has ended."""

    def flush(self) -> bool:
        raise ConnectionResetError("gone")

    def interrupt(self, link: Link, error: Exception) -> None:
        raise KeyboardInterrupt


def test_an_exception_of_a_signal_handler_is_heard_of_also_while_a_broken_link_is_put_aside() -> None:
    """It leaves the link half closed: everything begins afresh, or nobody would open it again."""
    link, failed = Broken(), list[BaseException]()
    link.driver = LinkDriver(Machine(), link.interrupt, lambda: False, failed.append)
    link.driver.add(cast(Link, link))
    with pytest.raises(KeyboardInterrupt):
        link.driver.wait(lambda: False, 30.0)
    assert [type(error) for error in failed] == [KeyboardInterrupt]
