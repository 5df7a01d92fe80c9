"""Bugs in the shell: between the protocol and the sockets, where only a simulator of whole processes can find them.

Each is something that a careful person could have written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordinator.view import View
from elasticps.client.driver import Driver
from elasticps.client.link import Link
from elasticps.client.network import Network
from elasticps.client.pulls import Pulls
from elasticps.client.runtime import READABLE, WRITABLE
from elasticps.server import reads, requests
from elasticps.server.connection import Connection
from elasticps.server.fast.chunks import Chunks
from elasticps.server.fast.layout import C_SERIAL, C_SLOW, H_ENABLED, H_GUARDED
from elasticps.server.fast.path import FastPath
from elasticps.server.fast.young import YoungLog
from elasticps.server.parking import Parking
from elasticps.server.peers import Peers
from elasticps.server.requests import Requests
from elasticps.server.server import Server
from elasticps.wire.frames import FrameError, Header, Kind

Patch = Callable[[pytest.MonkeyPatch], None]


def _leave_every_frame_to_python(patch: pytest.MonkeyPatch) -> None:
    """For bugs in what Python does: usual frames would not come there."""

    def follow(self: FastPath, *arguments: Any) -> None:
        share(self, *arguments)
        self.h[H_ENABLED] = 0

    share = FastPath.follow_replica
    patch.setattr(FastPath, "follow_replica", follow)


# --- whose buffer is it ---------------------------------------------------------------------------------------------


def keep_the_keys_of_a_pull_as_a_view_of_a_buffer_that_is_used_again(patch: pytest.MonkeyPatch) -> None:
    def answer(read: Any, judge: Any, done: int = 0) -> None:
        rows, dim = len(read.keys), read.table.spec.dim
        if not done and rows * dim * 4 <= reads.CHUNK_BYTES and not judge.guarded():
            out = np.empty((rows, dim), np.float32)
            read.connection.send_all(reads._chunk(read, read.keys, out, 0, last=True))
        else:
            read.connection.stream(reads._chunks(read, judge, done))

    _leave_every_frame_to_python(patch)
    patch.setattr(requests, "answer", answer)
    patch.setattr(Chunks, "pinned", lambda self, number: False)


def gather_the_next_chunk_over_one_that_is_not_out_yet(patch: pytest.MonkeyPatch) -> None:
    _leave_every_frame_to_python(patch)
    patch.setattr(Connection, "waiting_bytes", property(lambda self: 0))


def use_memory_again_that_python_or_a_socket_refers_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chunks, "pinned", lambda self, number: False)


def receive_over_what_the_log_keeps(patch: pytest.MonkeyPatch) -> None:
    def received(self: FastPath, connection: Any, nbytes: int) -> None:
        self.chunks.refs[:] = 0
        handle(self, connection, nbytes)

    handle = FastPath.received
    patch.setattr(FastPath, "received", received)


# --- what is compiled beside Python ---------------------------------------------------------------------------------


def take_pushes_of_epochs_whose_heads_have_changed(patch: pytest.MonkeyPatch) -> None:
    def follow(self: FastPath, orders: Any) -> None:
        old = getattr(self, "_every", {})
        self._every = {**old, **orders}  # type: ignore[attr-defined]
        listen(self, self._every)  # type: ignore[attr-defined]

    listen = FastPath._follow_orders
    patch.setattr(FastPath, "_follow_orders", follow)


def acknowledge_young_entries_while_python_has_older_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(YoungLog, "old", lambda self: {})


# --- bytes and connections ------------------------------------------------------------------------------------------


def drop_the_rest_of_a_partial_write(patch: pytest.MonkeyPatch) -> None:
    def flush(self: Link, sock: Any) -> bool:
        queue = self._queue
        while queue:
            try:
                sock.sendmsg([queue[0]])
            except BlockingIOError:
                return False
            queue.popleft()
        return True

    patch.setattr(Link, "_flush", flush)


def keep_what_was_not_sent_for_the_next_connection(patch: pytest.MonkeyPatch) -> None:
    def close(self: Link) -> None:
        self.ready = False
        sock, self.socket = self.socket, None
        if sock is not None:
            sock.close()

    def connect(self: Link, hello: bytes) -> None:
        left = list(self._queue)
        begin(self, hello)
        self._queue.extend(left)

    begin = Link.connect
    patch.setattr(Link, "close", close)
    patch.setattr(Link, "connect", connect)


def answer_whoever_has_the_number_of_a_connection_now(patch: pytest.MonkeyPatch) -> None:
    def opened(self: FastPath, connection: Any, limit: int) -> int:
        slot = open_(self, connection, limit)
        self.connections[slot, C_SERIAL] = 1
        return slot

    def closed(self: FastPath, slot: int) -> None:
        close(self, slot)
        self.connections[slot, C_SERIAL] = 1

    open_, close = FastPath.open, FastPath.close
    patch.setattr(FastPath, "open", opened)
    patch.setattr(FastPath, "close", closed)


def lose_the_wish_to_write_of_another_thread(patch: pytest.MonkeyPatch) -> None:
    def poll(self: Any, timeout_s: float) -> None:
        for fd, event in self._poller.poll(timeout_s):
            link = self._links.get(fd)
            if link is None:
                continue
            try:
                if event & WRITABLE and link.flush():
                    self._poller.modify(fd, READABLE)
                if event & ~WRITABLE:
                    link.receive()
            except (OSError, ValueError) as error:
                self.remove(link)
                self._on_broken(link, error)
        self._announce()

    patch.setattr(Driver, "_poll", poll)


def hear_what_comes_on_an_older_link(patch: pytest.MonkeyPatch) -> None:
    def message(self: Server, connection: Connection, header: Header, body: Any) -> None:
        if connection.member is None:
            raise FrameError("came from somebody who is no replica")
        decoded = self._codec.decode(header, body)
        self.shell.perform(self.replica.receive, connection.member, decoded)
        if self._requests.waiting:
            self._requests.judge_parked()

    patch.setattr(Server, "_message", message)


def keep_the_first_link_of_two(patch: pytest.MonkeyPatch) -> None:
    def arrived(self: Peers, connection: Connection) -> bool:
        if self._links.get(connection.member) is not None:  # type: ignore[arg-type]
            return False
        return arrive(self, connection)

    arrive = Peers.arrived
    patch.setattr(Peers, "arrived", arrived)


def resend_to_a_new_link_what_it_has_heard(patch: pytest.MonkeyPatch) -> None:
    def receive(self: Any, peer: Any, message: Any) -> Any:
        if type(message).__name__ == "Piece" and not getattr(self, "_twice", False):
            self._twice = True
            first = list(hear(self, peer, message))
            return [*first, *[e for e in first if type(e).__name__ == "Install"]]
        return hear(self, peer, message)

    from replication.replica import Replica

    hear = Replica.receive
    patch.setattr(Replica, "receive", receive)


def release_held_frames_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    def release(self: Connection) -> None:
        if not self.holding:
            return
        self.holding = False
        self._set(C_SLOW, 0)
        try:
            while self._held and not self.holding:
                self._handler.handle(self, *self._held.pop())
        except FrameError as error:
            self.refuse(error)
        self._go_on_reading()

    patch.setattr(Connection, "release", release)


def read_on_while_frames_are_held(patch: pytest.MonkeyPatch) -> None:
    def frame(self: Connection, header: Header, body: Any, answered: int) -> None:
        self._handler.handle(self, header, body)

    patch.setattr(Connection, "frame", frame)


def forget_to_read_on_when_answers_have_left(patch: pytest.MonkeyPatch) -> None:
    def pump(self: Connection) -> None:
        read_on, self._read_on = self._read_on, lambda: None  # type: ignore[method-assign]
        go_on(self)
        self._read_on = read_on  # type: ignore[method-assign]

    go_on = Connection._pump
    patch.setattr(Connection, "_pump", pump)


# --- answers --------------------------------------------------------------------------------------------------------


def show_early_what_a_joiner_may_lack_once_the_first_chunk_was_shown(patch: pytest.MonkeyPatch) -> None:
    _leave_every_frame_to_python(patch)

    def shown_when(self: Any, keys: Any) -> Callable[[], bool]:
        if getattr(self, "first", None) is None:
            self.first = judge(self, keys)
            return self.first  # type: ignore[no-any-return]
        return lambda: True

    judge = requests._Judge.shown_when
    patch.setattr(requests._Judge, "shown_when", shown_when)


def show_early_what_a_joiner_may_lack(patch: pytest.MonkeyPatch) -> None:
    def follow(self: FastPath) -> None:
        listen(self)
        self.h[H_GUARDED] = 0

    listen = FastPath._follow_view
    patch.setattr(FastPath, "_follow_view", follow)
    patch.setattr(requests._Judge, "guarded", lambda self: False)


def reply_before_the_log_holds_the_entry(patch: pytest.MonkeyPatch) -> None:
    _leave_every_frame_to_python(patch)

    def push(self: Requests, connection: Connection, header: Header, body: Any) -> None:
        before = self._host.counts["pushes"]
        handle(self, connection, header, body)
        if self._host.counts["pushes"] > before:
            connection.send(Header(Kind.OK, request=header.request, epoch=self._host.epoch).pack())

    handle = Requests._push
    patch.setattr(Requests, "_push", push)
    build = Requests.__init__

    def init(self: Requests, *arguments: Any) -> None:
        build(self, *arguments)
        self.handlers[Kind.PUSH] = self._push

    patch.setattr(Requests, "__init__", init)


def serve_pulls_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    def serve(self: FastPath, tailed: Any, held: Any, tail_since: int, full_since: int) -> None:
        share(self, tailed, held, 0, 0)

    share = FastPath.serve
    patch.setattr(FastPath, "serve", serve)
    patch.setattr(Server, "serves", lambda self, header: True)


def let_what_was_asked_first_land_over_what_was_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Network, "_abandon", lambda self, member, request: None)
    patch.setattr(Pulls, "_drop", lambda self, part: part.read.parts.pop(part.request, None))


# --- views and rosters ----------------------------------------------------------------------------------------------


def adopt_views_in_the_order_in_which_they_are_decoded(patch: pytest.MonkeyPatch) -> None:
    def later(self: Server, view: View) -> None:
        if view.epoch <= self.epoch:
            return
        asked = getattr(self, "_asked", 0)
        self._asked = max(asked, view.epoch)  # type: ignore[attr-defined]
        self._loop.call_later(0.002 if view.epoch % 2 else 0.0, adopt_now, self, view)

    def adopt_now(self: Server, view: View) -> None:
        if view.epoch != self.epoch and not self.removed.done():
            self.epoch = min(self.epoch, view.epoch - 1)
            adopt(self, view)

    adopt = Server.adopt
    patch.setattr(Server, "adopt", later)


def let_a_worker_that_has_left_hold_others_back(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Parking, workers: Any) -> None:
        listen(self, {**self._workers, **workers})

    listen = Parking.follow
    patch.setattr(Parking, "follow", follow)


def let_a_worker_that_pauses_hold_others_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parking, "pause", lambda self, worker: None)


def take_a_welcome_for_news(patch: pytest.MonkeyPatch) -> None:
    def on_frame(self: Any, link: Any, header: Header, body: Any) -> None:
        self._heard += not link.ready
        hear(self, link, header, body)

    hear = Network._on_frame
    patch.setattr(Network, "_on_frame", on_frame)


def miss_the_view_that_came_while_the_store_was_read(patch: pytest.MonkeyPatch) -> None:
    from coordinator.membership import ViewFollower

    async def start(self: Any) -> None:
        listing = await self._store.list("view")
        for entry in listing.entries:
            self._adopt_view(entry.value)
        listing = await self._store.list("roster")
        for entry in listing.entries:
            self._adopt_roster(entry.value)
        for key, adopt in (("view", self._adopt_view), ("roster", self._adopt_roster)):
            later = (await self._store.list(key)).revision
            self._tasks.append(asyncio.create_task(self._follow(key, later, adopt)))

    patch.setattr(ViewFollower, "start", start)


PLANTED: tuple[Patch, ...] = (
    keep_the_keys_of_a_pull_as_a_view_of_a_buffer_that_is_used_again,
    gather_the_next_chunk_over_one_that_is_not_out_yet,
    use_memory_again_that_python_or_a_socket_refers_to,
    receive_over_what_the_log_keeps,
    take_pushes_of_epochs_whose_heads_have_changed,
    acknowledge_young_entries_while_python_has_older_ones,
    drop_the_rest_of_a_partial_write,
    keep_what_was_not_sent_for_the_next_connection,
    answer_whoever_has_the_number_of_a_connection_now,
    lose_the_wish_to_write_of_another_thread,
    hear_what_comes_on_an_older_link,
    keep_the_first_link_of_two,
    resend_to_a_new_link_what_it_has_heard,
    release_held_frames_in_the_wrong_order,
    read_on_while_frames_are_held,
    forget_to_read_on_when_answers_have_left,
    show_early_what_a_joiner_may_lack_once_the_first_chunk_was_shown,
    show_early_what_a_joiner_may_lack,
    reply_before_the_log_holds_the_entry,
    serve_pulls_of_any_epoch,
    let_what_was_asked_first_land_over_what_was_asked_again,
    adopt_views_in_the_order_in_which_they_are_decoded,
    let_a_worker_that_has_left_hold_others_back,
    let_a_worker_that_pauses_hold_others_back,
    take_a_welcome_for_news,
    miss_the_view_that_came_while_the_store_was_read,
)
