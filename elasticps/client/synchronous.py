"""A worker's side of synchronous rounds (BSP); `elasticps.server.rounds` has the whole story.

A step is closed when it is committed everywhere, all workers of the round have said the same of theirs, and every head
has averaged what it was given. That happens before anything that could see the result: the next push, a pull, a flush.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from elasticps.client.network import Network
from elasticps.client.rounds import Answer
from elasticps.client.routing import Routes
from elasticps.errors import ServerError
from elasticps.hashing import home_range
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_frame, unpack_header
from replication.chain import Member

GRACE_S = 1.0  # the server, which knows whom it waits for, gives up first


class SyncRounds:
    """Rounds of one worker. `pushed(clock)` after each step; `settle` closes it."""

    def __init__(self, network: Network, app: str, worker: int) -> None:
        self._network = network
        self._app = app
        self._worker = worker
        self._open = 0  # the step whose round is not closed yet, 0 for none
        self._lock = threading.Lock()

    def closed(self, clock: int) -> int:
        """The last round up to `clock` that is closed."""
        return min(clock, self._open - 1) if self._open else clock

    def enter(self, predecessor: int, timeout_s: float) -> tuple[int, int]:
        """Becomes a member; returns the last decided round, above which this worker starts, and the last one that its
        predecessor (0 for none) was in."""
        header = Header(Kind.ENTER, worker=self._worker, table=predecessor)
        (answer,) = self._ask_home(header, timeout_s, f"entering the rounds of {self._app!r}")
        decision = json.loads(answer.body)
        # whoever was in the last round may have died before closing it; what is closed already stays as it is
        self.close(decision["round"], decision["workers"], timeout_s)
        return decision["base"], decision["last"]

    def leave(self, timeout_s: float) -> None:
        """Is in no further round, until it enters again."""
        self._ask_home(Header(Kind.LEAVE, worker=self._worker), timeout_s, f"leaving the rounds of {self._app!r}")

    def pushed(self, clock: int) -> None:
        """A step was pushed; its round is open."""
        self._open = clock

    def settle(self, wait_committed: Callable[[], None], timeout_s: float) -> None:
        """Closes the open round, if there is one. Raises `Timeout`, which says for whom it waited."""
        with self._lock:
            if not self._open:
                return
            wait_committed()
            clock = self._open
            header = Header(Kind.DONE, clock=clock, worker=self._worker, wait_ms=int(timeout_s * 1000))
            (answer,) = self._ask_home(header, timeout_s + GRACE_S, f"round {clock} of {self._app!r}")
            decision = json.loads(answer.body)
            if decision["round"] != clock:
                raise ServerError(f"round {clock} of {self._app!r} was closed without this worker")
            self.close(clock, decision["workers"], timeout_s)
            self._open = 0

    def close(self, clock: int, workers: list[int], timeout_s: float) -> None:
        """Has every head close a round that is decided."""
        if clock:
            frame = json_frame(Kind.CLOSE, {"round": clock, "workers": workers})
            close, body = unpack_header(frame), frame[HEADER_BYTES:]
            self._network.ask_heads(lambda routes: close._replace(epoch=routes.epoch), body, timeout_s,
                                    f"closing round {clock} of {self._app!r}")  # fmt: skip

    def _ask_home(self, header: Header, timeout_s: float, what: str) -> list[Answer]:
        return ask_home(self._network, self._app, header, b"", timeout_s, what)


def ask_home(network: Network, app: str, header: Header, body: bytes, timeout_s: float, what: str) -> list[Answer]:
    """Asks the head of an application's home range; one answer."""

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        head = int(routes.view.heads[home_range(app, routes.view.ranges)])
        return [(routes.members[head], header._replace(epoch=routes.epoch), [body])] if head >= 0 else []

    return network.ask_all(questions, timeout_s, what)
