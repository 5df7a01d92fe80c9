"""Bugs in the shell: between the protocol and the sockets, where only a simulator of whole processes can find them.

Each is something that a careful person could have written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from coordinator.core.differences import ViewDifference
from coordinator.core.view import View
from elasticps.metrics.timing import TimedConnection
from elasticps.server.core.reads import PullRequest
from elasticps.server.core.requests import Body
from elasticps.server.core.serving import Serving
from elasticps.server.fast import layout as at
from elasticps.server.fast.buffers import Chunks
from elasticps.server.fast.path import FastPath
from elasticps.server.fast.recent_log import RecentLog
from elasticps.server.fast.shared import ReplicaMirror
from elasticps.server.network import connection
from elasticps.server.network.connection import Connection
from elasticps.server.roles import updates
from elasticps.server.roles.pushes import PushHandler
from elasticps.server.server import Server
from elasticps.wire.frames import Buffer, Header, Kind, read_view
from elasticps.wire.stream import SendQueue
from replication.effects import Install
from replication.progress import Clocks
from replication.replica import Replica
from tests.sim.planting import leave_every_frame_to_python

# --- whose buffer is it ---------------------------------------------------------------------------------------------


def keep_the_keys_of_a_pull_as_a_view_of_a_buffer_that_is_used_again(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(PullRequest, "detached", lambda self: self)
    patch.setattr(Chunks, "pinned", lambda self, number: False)


def gather_the_next_chunk_over_one_that_is_not_out_yet(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)
    patch.setattr(Connection, "waiting_bytes", property(lambda self: 0))


def use_memory_again_that_python_or_a_socket_refers_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chunks, "pinned", lambda self, number: False)


def receive_over_what_the_log_keeps(patch: pytest.MonkeyPatch) -> None:
    def received(self: FastPath, connection: Any, nbytes: int) -> None:
        self.chunks.refs[:] = 0
        handle(self, connection, nbytes)

    handle = FastPath.received
    patch.setattr(FastPath, "received", received)


def look_at_an_answer_that_must_wait(patch: pytest.MonkeyPatch) -> None:
    def watched(self: TimedConnection, chunks: Any) -> Any:
        for chunk in chunks:
            yield chunk
            self._answered(chunk[0])

    patch.setattr(TimedConnection, "_watched", watched)


# --- what is compiled beside Python ---------------------------------------------------------------------------------


def take_pushes_of_epochs_whose_heads_have_changed(patch: pytest.MonkeyPatch) -> None:
    def follow(self: ReplicaMirror, orders: Any) -> None:
        old = getattr(self, "_every", {})
        self._every = {**old, **orders}  # type: ignore[attr-defined]
        listen(self, self._every)  # type: ignore[attr-defined]

    listen = ReplicaMirror._follow_orders
    patch.setattr(ReplicaMirror, "_follow_orders", follow)
    patch.setattr(Clocks, "clear", lambda self, ranges: None)  # of ranges that left: no push would follow on nothing


def acknowledge_recent_entries_while_python_has_older_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecentLog, "old", lambda self: {})


# --- bytes and connections ------------------------------------------------------------------------------------------


def drop_the_rest_of_a_partial_write(patch: pytest.MonkeyPatch) -> None:
    def send(self: SendQueue, socket: Any, buffers: Iterable[Buffer] = ()) -> bool:
        self.add(buffers)
        while self:
            try:
                socket.sendmsg([self._queue[0]])
            except BlockingIOError:
                return False
            self.nbytes -= len(self._queue.popleft())
        return True

    patch.setattr(SendQueue, "send", send)


def answer_whoever_has_the_number_of_a_connection_now(patch: pytest.MonkeyPatch) -> None:
    def opened(self: FastPath, connection: Any, limit: int) -> int:
        slot = open_(self, connection, limit)
        self.connections[slot, at.C_SERIAL] = 1
        return slot

    def closed(self: FastPath, slot: int) -> None:
        close(self, slot)
        self.connections[slot, at.C_SERIAL] = 1

    open_, close = FastPath.open, FastPath.close
    patch.setattr(FastPath, "open", opened)
    patch.setattr(FastPath, "close", closed)


def leave_a_worker_unread_that_reads_again(patch: pytest.MonkeyPatch) -> None:
    def resume(self: Connection) -> None:
        self._paused = False
        self._cancel_timer()
        self._pump()

    patch.setattr(Connection, "resume_writing", resume)


def apply_a_snapshot_chunk_again_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    def receive(self: Any, peer: Any, message: Any) -> Any:
        out = list(hear(self, peer, message))
        self.chunks = [*getattr(self, "chunks", ()), *(e for e in out if isinstance(e, Install))]
        return out

    def peer_up(self: Any, peer: Any) -> Any:
        again, self.chunks = getattr(self, "chunks", []), []
        return [*again, *greet(self, peer)]

    hear, greet = Replica.receive, Replica.peer_up
    patch.setattr(Replica, "receive", receive)
    patch.setattr(Replica, "peer_up", peer_up)


def forget_to_read_on_when_answers_have_left(patch: pytest.MonkeyPatch) -> None:
    def pump(self: Connection) -> None:
        read_on, self._read_on = self._read_on, lambda: None  # type: ignore[method-assign]
        go_on(self)
        self._read_on = read_on  # type: ignore[method-assign]

    go_on = Connection._pump
    patch.setattr(Connection, "_pump", pump)


def send_what_was_left_of_a_connection_on_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SendQueue, "clear", lambda self: None)


def let_a_frame_between_replicas_be_no_larger_than_a_worker_s(patch: pytest.MonkeyPatch) -> None:
    def welcome(self: Connection, role: Any) -> None:
        greet(self, role)
        self._set(at.C_LIMIT, vars(connection)["MAX_BODY_BYTES"])

    greet = Connection.welcome
    patch.setattr(Connection, "welcome", welcome)


# --- answers --------------------------------------------------------------------------------------------------------


def reply_before_the_log_holds_the_entry(patch: pytest.MonkeyPatch) -> None:
    leave_every_frame_to_python(patch)

    def push(self: PushHandler, connection: Connection, header: Header, body: Any) -> None:
        before = self._counts["pushes"]
        handle(self, connection, header, body)
        if self._counts["pushes"] > before:
            connection.send(Header(Kind.OK, request=header.request, epoch=self._serving.epoch).pack())

    handle = PushHandler._push
    patch.setattr(PushHandler, "_push", push)
    build = PushHandler.__init__

    def init(self: PushHandler, *arguments: Any) -> None:
        build(self, *arguments)
        self.handlers[Kind.PUSH] = self._push

    patch.setattr(PushHandler, "__init__", init)


def serve_pulls_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    def serve(self: FastPath, tailed: Any, held: Any, tail_since: int, full_since: int) -> None:
        share(self, tailed, held, 0, 0)

    share = FastPath.serve
    patch.setattr(FastPath, "serve", serve)
    patch.setattr(Serving, "serves", lambda self, epoch, anywhere: True)


# --- views and rosters ----------------------------------------------------------------------------------------------


def let_a_view_that_comes_late_count_again(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: Server, view: View) -> None:
        views[view.epoch] = view
        self.serving.epoch = min(self.serving.epoch, view.epoch - 1)
        follow(self, view)

    follow = Server.adopt
    patch.setattr(Server, "adopt", adopt)
    views: dict[int, View] = {}

    def read(header: Header, body: Body, known: View | None) -> View | None:
        if header.kind == Kind.VIEW_DIFFERENCE:
            known = views.get(ViewDifference.decode(body[: header.items].tobytes()).base, known)
        return read_view(header, body, None if header.kind == Kind.VIEW else known)

    patch.setattr(updates, "read_view", read)
