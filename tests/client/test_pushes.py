"""Frames of the session as PUSH frames, and answers as the session hears them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from elasticps.client.core.routing import Routes
from elasticps.client.core.session import PushSession
from elasticps.client.push_batch import Packer, PushSource
from elasticps.client.pushes import PushesInFlight, StepState
from elasticps.errors import NotFinite, ServerFull
from elasticps.kernels.hashing import key_ranges, table_salt
from elasticps.wire.frames import ALL_RANGES, HEADER_BYTES, LAST, REPEAT, Buffer, Header, Kind, unpack_header
from elasticps.wire.headers import NEVER
from elasticps.wire.pool import Pool
from elasticps.wire.refusals import RefusedRows
from replication.chain import Member
from replication.effects import Status
from tests.client.views import view

RANGES = 16
BEFORE = Routes(view([[r % 2, 1 - r % 2] for r in range(RANGES)], servers=("s0", "s1")))
AFTER = Routes(view([[0]] * RANGES, epoch=2, servers=("s1",)))
A, B = Member("s0", 1), Member("s1", 1)


def rows(*keys: int) -> RefusedRows:
    return RefusedRows({1: np.array(keys, np.int64)}, RANGES)


def done(step: StepState) -> bool:
    return step.done


class Wire:
    """Records sent frames and their receivers."""

    def __init__(self, window: int = 4) -> None:
        self.sent: list[tuple[Member, Header]] = []
        self.fenced = False
        self.packer = Packer(Pool(0))
        self.session = PushSession(7, RANGES, window)
        self.pushes = PushesInFlight(self.session, 7, itertools.count(1), self._send, self._end)
        self.pushes.adopt(BEFORE)
        self.pushes.connected(A)
        self.pushes.connected(B)

    def _send(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        for member, buffers in frames.items():
            content = b"".join(buffers)
            while content:
                header = unpack_header(content)
                assert HEADER_BYTES + header.body <= len(content)
                self.sent.append((member, header))
                content = content[HEADER_BYTES + header.body :]

    def _end(self) -> None:
        self.fenced = True

    def push(self, rows: int = 10, last: bool = True, dim: int = 2) -> StepState:
        keys = np.arange(rows)
        nothing = np.empty(0, np.float32)
        source = PushSource(
            1, int(table_salt(1).view(np.int64)), dim, -1, keys, np.ones((rows, dim), np.float32), nothing
        )
        part = self.packer.pack([source], self.pushes.routes)
        if not self.session.open:
            self.state = StepState(self.session.clock + 1)
        self.pushes.push(part, last, None if self.session.open else self.state)
        return self.state

    def take(self) -> list[tuple[Member, Header]]:
        sent, self.sent = self.sent, []
        return sent


def headed(routes: Routes, member: Member) -> np.ndarray:
    share = routes.share_of[routes.index_of[member]]
    return routes.range_at[share.start : share.stop]


def test_a_step_is_done_when_every_head_has_reported_ok() -> None:
    wire = Wire()
    step = wire.push()
    (to_a, a), (to_b, b) = wire.take()
    assert (to_a, to_b) == (A, B)
    assert (a.kind, a.flags, a.clock, a.table, a.epoch) == (Kind.PUSH, LAST | ALL_RANGES, 1, 1, 1)
    assert (a.worker, a.first) == (NEVER, 0), "this worker has pushed nothing there before"
    assert wire.pushes.ok(a.request)
    assert not wire.pushes.ok(a.request)
    assert not done(step)
    assert wire.pushes.ok(b.request)
    assert done(step)
    assert (wire.session.committed, wire.pushes.oldest) == (1, 0)


def test_servers_hear_up_to_which_clock_the_worker_knows_its_steps_committed() -> None:
    wire = Wire()
    for _ in range(3):
        wire.push()
    assert [h.table for _, h in wire.take()] == [1, 1, 2, 2, 3, 3]


def test_a_frame_in_pieces_is_answered_when_all_its_pieces_are() -> None:
    wire = Wire()
    step = wire.push(rows=20_000, dim=64)
    pieces = [h for m, h in wire.sent if m == A]
    others = [h for m, h in wire.take() if m == B]
    assert len(pieces) > 2
    assert not any(h.flags & ALL_RANGES for h in pieces)
    for header in others + pieces[1:]:
        wire.pushes.ok(header.request)
    assert not done(step)
    wire.pushes.ok(pieces[0].request)
    assert done(step)


def test_a_stale_piece_makes_the_client_ask_for_the_clocks_of_the_whole_frame() -> None:
    wire = Wire()
    wire.push(rows=20_000, dim=64)
    pieces = [h for m, h in wire.take() if m == A]
    wire.pushes.not_done(pieces[1].request, Status.GAP, 1)
    ((to, ask),) = wire.take()
    assert (to, ask.kind, ask.worker, ask.epoch) == (A, Kind.GET_CLOCKS, 7, 1)
    assert not any(wire.pushes.ok(h.request) for h in pieces)
    none = np.zeros(len(headed(BEFORE, A)), np.int64)
    assert wire.pushes.clocks(ask.request, 1, headed(BEFORE, A), none, none)
    assert len(wire.take()) == len(pieces)


def test_rows_of_moved_ranges_are_sent_to_the_new_head_under_the_new_view() -> None:
    wire = Wire()
    step = wire.push(rows=2000, dim=64)  # too much to send it again before it is known what is lacking
    a, b = (h for _, h in wire.take())
    ranges = headed(BEFORE, A)
    wire.pushes.partly(a.request, 2, ranges[:3], ranges[3:])
    assert wire.pushes.needed_epoch == 2
    wire.pushes.disconnected(A)
    wire.pushes.adopt(AFTER)
    wire.pushes.ok(b.request)  # its ranges changed: what it says of the old frame counts no more
    assert wire.session.owing() == {B: 1}
    ((to, ask),) = wire.take()
    assert (to, ask.kind, ask.epoch) == (B, Kind.GET_CLOCKS, 2)
    everything = headed(AFTER, B)
    applied = np.full(RANGES, 1 << 16, np.int64)
    committed = np.where(np.isin(everything, headed(BEFORE, B)), 1 << 16, 0)
    wire.pushes.clocks(ask.request, 2, everything, applied, committed)
    ((to, again),) = wire.take()
    assert (to, again.flags, again.items) == (B, LAST | REPEAT, 0)
    assert not done(step)
    wire.pushes.ok(again.request)
    assert done(step)


def test_few_rows_of_moved_ranges_are_sent_at_once() -> None:
    wire = Wire()
    step = wire.push()
    _, b = (h for _, h in wire.take())
    wire.pushes.ok(b.request)
    wire.pushes.disconnected(A)
    wire.pushes.adopt(AFTER)
    ((to, again),) = wire.take()
    assert (to, again.epoch, again.clock, again.flags) == (B, 2, 1, LAST), "only what A had: it is named"
    wire.pushes.ok(again.request)
    assert done(step)


def test_a_refusal_is_retained_until_a_caller_has_raised_it() -> None:
    wire = Wire()
    step = wire.push()
    a, b = (h for _, h in wire.take())
    error = ValueError("no")
    assert wire.pushes.refused(a.request, [(error, rows(1, 2))], True)
    wire.pushes.refused(b.request, [(ValueError("later"), rows(3))], True)
    assert done(step)
    assert step.error is error
    assert wire.pushes.failures == {1: error}
    assert step.refused_of(1).tolist() == [1, 2, 3]


def test_an_error_names_the_refused_rows_of_all_servers() -> None:
    wire = Wire()
    wire.pushes.name_of = lambda table: "items"
    step = wire.push()
    a, b = (h for _, h in wire.take())
    wire.pushes.refused(a.request, [(ServerFull("server a is full", "a", "items", 9), rows(5, 1))], True)
    wire.pushes.refused(b.request, [(NotFinite("that of key 3 is not", "items", 3), rows(3))], True)
    assert isinstance(step.error, ServerFull)
    assert step.refused_of(1, ServerFull).tolist() == [1, 5]
    again = copy.copy(step.error)
    for error in (step.error, again):
        assert {name: keys.tolist() for name, keys in error.refused.items()} == {"items": [1, 3, 5]}
        assert str(error).startswith("server a is full. Step 1 counts without these rows: 3 of 'items'.")
        assert "push exactly the rows of error.refused again" in str(error)


def test_rows_of_a_range_that_comes_back_from_a_checkpoint_are_judged_again() -> None:
    wire = Wire()
    step = wire.push()
    a, _ = (h for _, h in wire.take())
    keys = np.arange(10)
    wire.pushes.refused(a.request, [(ServerFull("full", "a", "items", 9), rows(*keys))], True)
    home = np.empty(10, np.int32)
    key_ranges(keys, table_salt(1), BEFORE.shift, home)
    lost = headed(BEFORE, A)[:2]
    assert np.isin(home, lost).any()
    wire.pushes.adopt(Routes(replace(AFTER.view, recovery_epoch=np.where(np.isin(np.arange(RANGES), lost), 2, 0))))
    assert step.refused_of(1).tolist() == keys[~np.isin(home, lost)].tolist()


def test_a_refusal_is_retained_although_the_range_moves() -> None:
    wire = Wire()
    step = wire.push()
    a, b = (h for _, h in wire.take())
    error = ValueError("no")
    assert wire.pushes.refused(a.request, [(error, rows(1))], False)
    assert wire.pushes.partly(a.request, 2, headed(BEFORE, A)[:3], headed(BEFORE, A)[3:])
    wire.pushes.ok(b.request)
    assert not done(step)
    assert step.refused[0][0] is error


def test_a_refusal_is_reported_by_the_successor_of_the_server_that_refused() -> None:
    wire = Wire()
    step = wire.push()
    a, b = (h for _, h in wire.take())
    wire.pushes.ok(b.request)
    wire.pushes.disconnected(A)
    wire.pushes.adopt(AFTER)
    ((_, again),) = wire.take()
    error = ValueError("no")
    assert not wire.pushes.refused(a.request, [(ValueError("who does not live any more"), rows(1))], True)
    assert wire.pushes.refused(again.request, [(error, rows(1))], True)
    assert done(step)
    assert step.error is error


def test_a_refusal_is_reported_before_the_clocks_that_commit_its_step() -> None:
    wire = Wire()
    step, later = wire.push(), wire.push()
    wire.take()
    wire.pushes.disconnected(A)
    wire.pushes.disconnected(B)
    wire.pushes.connected(A)
    wire.pushes.connected(B)
    error, pending = ValueError("no"), list[int]()
    wire.pushes.on_refused = lambda: pending.append(1)
    for member, ask in wire.take():
        ranges = headed(BEFORE, member)
        both = np.full(len(ranges), 2 << 16, np.int64)
        refused = [(1, error, rows(1)), (7, ValueError("of a step that is over"), rows(2))] if member == A else []
        assert wire.pushes.clocks(ask.request, 1, ranges, both, both, refused)
    assert done(step)
    assert done(later)
    assert (step.error, later.error) == (error, None)
    assert pending == [1]


def test_an_open_step_is_not_done_until_a_failure_ends_it() -> None:
    wire = Wire()
    step = wire.push(last=False)
    for _, header in wire.take():
        wire.pushes.ok(header.request)
    assert not done(step)
    wire.pushes.fail(RuntimeError("gone"))
    assert done(step)
    assert isinstance(step.error, RuntimeError)


def test_a_fenced_worker_is_told() -> None:
    wire = Wire()
    wire.push()
    (_, a), _ = wire.take()
    wire.pushes.not_done(a.request, Status.FENCED, 1)
    assert wire.fenced
