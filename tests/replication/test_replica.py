"""Three replicas joined by hand-carried messages, one scenario at a time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from replication.chain import Chains
from replication.core import ProtocolError
from replication.effects import (
    Apply,
    Ask,
    CaughtUp,
    ClocksReply,
    Distrust,
    Erase,
    Hold,
    Install,
    NeedView,
    NextChunk,
    Release,
    Reply,
    Send,
    SnapshotRange,
    Status,
)
from replication.log import Log
from replication.messages import Ack, Forward, Message, OperationKind, Resync
from replication.progress import FIRST_ROWS
from replication.step_records import record_of
from tests.replication.cluster import Cluster, P
from tests.replication.views import plan_failover, plan_move, plan_repair


def test_a_push_goes_down_the_chain_and_is_answered_when_the_tail_has_it() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    effects = c.push(head, 1)
    assert [type(e) for e in effects] == [Send, Apply]
    assert isinstance(effects[0].message, Forward)
    assert c.replies() == []
    c.deliver(head, tail)
    assert c.replies() == []
    c.deliver(tail, head)
    assert c.replies() == [(("t", 1), Status.COMMITTED)]
    assert sorted(c.applied[head]) == sorted(c.applied[tail])
    assert c.replicas[head].log.nbytes == 0


def test_an_event_that_ends_in_the_midst_leaves_nothing_for_the_next_which_is_refused() -> None:
    """Its forwards are in no log: a successor that got them with another event would have what no head remembers."""
    c = Cluster()
    head, tail = c.view.members_of(0)
    replica = c.replicas[head]
    with patch.object(Log, "add", side_effect=MemoryError("no room")), pytest.raises(MemoryError):
        c.push(head, 1)
    with pytest.raises(ProtocolError, match=r"takes no more events: push ended in the midst, by MemoryError"):
        replica.peer_down(tail)
    with pytest.raises(ProtocolError, match="takes no more events"):
        c.push(head, 2)
    assert not c.queues.get((head, tail))


def test_alone_a_head_commits_at_once() -> None:
    c = Cluster(servers=2, replicas=1)
    effects = c.push(c.head(0), 1)
    assert [type(e) for e in effects] == [Apply, Reply]


def test_a_duplicate_is_answered_only_when_the_tail_has_the_original() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    assert [type(e) for e in c.push(head, 1, token="again")] == []
    c.settle()
    assert c.replies() == [(("t", 1), Status.COMMITTED), ("again", Status.COMMITTED)]
    assert len(c.applied[tail]) == len(set(c.applied[tail]))
    c.push(head, 1, token="late", repeat=True)
    assert c.replies()[-1] == ("late", Status.COMMITTED)


def test_parts_must_come_in_order_and_a_gap_changes_nothing() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 2)
    c.push(head, 1, part=1)
    c.push(head, 1, repeat=True)
    assert [status for _, status in c.replies()] == [Status.GAP] * 3
    assert c.applied[head] == []
    c.push(head, 1, part=0, last=False)
    c.push(head, 1, part=1)
    c.push(head, 2)
    c.settle()
    assert [status for _, status in c.replies()[3:]] == [Status.COMMITTED] * 3


def test_the_first_step_of_a_worker_that_starts_above_a_base_follows_nothing() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 8, prev=0)
    c.push(head, 7, prev=0)
    c.settle()
    assert [status for _, status in c.replies()] == [Status.COMMITTED, Status.COMMITTED]
    assert {after for _, after, _ in c.applied[head]} == {8 << 16}


def test_a_step_follows_the_last_one_that_its_worker_pushed_there_and_not_the_clock_before() -> None:
    c = Cluster()
    head = c.head(0)
    for clock, prev in ((1, 0), (5, 1), (5, 1), (9, 7), (9, 4), (9, 5)):
        c.push(head, clock, prev=prev << 16)
    c.settle()
    answers = [status for token, status in c.replies() if token == ("t", 9)]
    assert sorted(answers) == sorted([Status.GAP, Status.GAP, Status.COMMITTED])
    assert [status for token, status in c.replies() if token != ("t", 9)] == [Status.COMMITTED] * 3
    assert [after for _, after, r in c.applied[head] if r == 0] == [1 << 16, 5 << 16, 9 << 16]


def test_a_step_may_follow_a_lost_one_if_all_up_to_that_was_committed() -> None:
    """A range came back from a checkpoint without steps 3 to 7, of which its worker knows that they were committed."""
    c = Cluster()
    head = c.head(0)
    c.push(head, 2, prev=0)
    for committed in (1, 6, 7):  # of what it has; of what the step follows; enough
        c.push(head, 9, prev=7 << 16, committed=committed)
    c.push(head, 10, prev=9 << 16, committed=7)
    c.settle()
    answers = [status for token, status in c.replies() if token == ("t", 9)]
    assert sorted(answers) == sorted([Status.GAP, Status.GAP, Status.COMMITTED])
    assert [after for _, after, r in c.applied[head] if r == 0] == [2 << 16, 9 << 16, 10 << 16]


def test_frames_of_a_future_view_wait_and_those_of_a_past_view_are_refused() -> None:
    c = Cluster()
    head = c.head(0)
    effects = c.push(head, 1, epoch=2)
    assert [type(e) for e in effects] == [NeedView, Hold]
    decision = plan_failover(c.view, {c.view.members_of(0)[1]}, {})
    assert decision is not None
    c.adopt(decision.chains)
    assert any(isinstance(e, Release) for _, e in c.effects)
    c.push(head, 2, epoch=1)
    assert c.replies()[-1] == (("t", 2), Status.STALE_VIEW)


def test_the_next_head_needs_nothing_from_a_dead_one() -> None:
    c = Cluster(servers=4, replicas=3)
    first, middle, last = c.view.members_of(0)
    c.push(first, 1)
    c.deliver(first, middle)
    c.kill(first)
    decision = plan_failover(c.view, {first}, {})
    assert decision is not None
    c.adopt(decision.chains)
    c.settle()
    assert (1, 1 << 16, 0) in c.applied[last]
    c.push(middle, 1, token="resent", ranges=np.array([0]))
    assert c.replies()[-1] == ("resent", Status.COMMITTED)
    assert c.applied[middle].count((1, 1 << 16, 0)) == 1


def test_clocks_tell_applied_from_committed() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 1)
    c.settle()
    c.push(head, 2)
    c.take(head, c.replicas[head].ask(Ask("ask", 1, c.view.epoch)))
    answer = c.effects[-1][1]
    assert isinstance(answer, ClocksReply)
    assert set(answer.applied.tolist()) == {2 << 16}
    assert set(answer.committed.tolist()) == {1 << 16}


def test_a_lost_link_is_repaired_from_the_log() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    c.queues.clear()
    for a, b in ((head, tail), (tail, head)):
        c.take(a, c.replicas[a].peer_down(b))
    c.push(head, 2)
    for a, b in ((head, tail), (tail, head)):
        c.take(a, c.replicas[a].peer_up(b))
    c.settle()
    assert [status for _, status in c.replies()] == [Status.COMMITTED] * 2
    assert [after for _, after, r in c.applied[tail] if r == 0] == [1 << 16, 2 << 16]


def test_messages_of_a_former_neighbour_are_ignored() -> None:
    c = Cluster(servers=4, replicas=3)
    first, middle, last = c.view.members_of(0)
    c.push(first, 1)
    decision = plan_failover(c.view, {first}, {})
    assert decision is not None
    c.adopt(decision.chains, middle, last)
    c.deliver(first, middle)
    assert (1, 1 << 16, 0) not in c.applied[middle]
    (effect,) = c.replicas[last].receive(middle, Forward(2, np.array([0]), np.array([9]), _operation()))
    assert isinstance(effect, Distrust)
    assert effect.peer == middle
    assert "left out" in effect.why


def test_messages_of_a_neighbour_from_before_its_refilling_are_ignored() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    c.settle()
    for a, b in ((head, tail), (tail, head)):
        c.take(a, c.replicas[a].peer_up(b))
    lost = plan_failover(c.view, {tail}, {})
    assert lost is not None
    c.adopt(lost.chains, head)
    filled = plan_repair(c.view, [head, tail], {}, 2, 8)
    assert filled is not None
    c.adopt(filled.chains)
    c.settle()
    assert c.replicas[head].levels() == []
    assert sorted(e.range for _, e in c.effects if isinstance(e, SnapshotRange)) == list(range(P))


def test_ignored_messages_are_not_validated() -> None:
    """Found by the simulator (seed 332): a deposed head came back and sent again what it had in its log, of a table
    that had been dropped and forgotten meanwhile. Its link was cut, as if it had said what no correct server can."""
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    lost = plan_failover(c.view, {head}, {})
    assert lost is not None
    c.adopt(lost.chains, tail)
    c.replicas[tail].core.wrong = lambda message: "it has no table with id 36"
    c.deliver(head, tail)
    assert c.applied[tail] == []
    filled = plan_repair(c.view, [head, tail], {}, 2, 8)
    assert filled is not None
    c.adopt(filled.chains)
    c.replicas[tail].core.wrong = lambda message: ""
    c.settle()
    assert sorted(e.range for _, e in c.effects if isinstance(e, SnapshotRange)) == list(range(P))
    assert not [e for _, e in c.effects if isinstance(e, Distrust)]


def test_a_message_that_cannot_be_applied_changes_nothing() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    replica = c.replicas[tail]
    before = replica.seq.copy()
    replica.core.wrong = lambda message: "it has no table with id 36"
    c.deliver(head, tail)
    (effect,) = [e for _, e in c.effects if isinstance(e, Distrust)]
    assert effect.peer == head
    assert "sent what cannot be: it has no table with id 36" in effect.why
    assert np.array_equal(before, replica.seq)
    assert c.applied[tail] == []


def _operation() -> Any:
    from replication.messages import Operation

    return Operation(OperationKind.PUSH, 1, 1 << 16, None, 0)


def test_a_move_fills_the_joiner_in_pieces_and_then_delays_acknowledgements() -> None:
    c = Cluster()
    joiner = c.members[-1]
    decision = plan_move(c.view, 0, joiner)
    assert decision is not None
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    c.settle()
    c.adopt(decision.chains)
    c.settle()
    start = next(e for _, e in c.effects if isinstance(e, SnapshotRange))
    assert (start.peer, start.range, start.fill) == (joiner, 0, 2)
    source = c.replicas[tail]
    c.take(tail, source.piece(0, start.serial, 50, False, _content()))
    c.push(head, 2)
    c.settle()
    assert isinstance(c.effects[-1][1], Apply | NextChunk | Install | Reply)
    inside = [e.inside for m, e in c.effects if m == joiner and isinstance(e, Apply)]
    assert inside == [{0: 50}]
    assert not c.replicas[joiner].filled[0]
    c.take(tail, source.piece(0, start.serial, 100, True, _content()))
    c.settle()
    assert [e for _, e in c.effects if isinstance(e, CaughtUp)] == [CaughtUp(0, 2, joiner)]
    assert source.levels() == [CaughtUp(0, 2, joiner)]
    c.push(head, 3)
    c.deliver(head, tail)
    assert (("t", 3), Status.COMMITTED) not in c.replies()
    c.settle()
    assert (("t", 3), Status.COMMITTED) in c.replies()
    repaired = plan_repair(c.view, c.members, {0: 2}, 2, 8)
    assert repaired is not None
    c.adopt(repaired.chains)
    c.settle()
    assert c.view.members_of(0) == (tail, joiner)
    assert any(isinstance(e, Erase) and m == head for m, e in c.effects)
    c.push(tail, 4, ranges=np.array([0]))
    c.settle()
    assert (("t", 4), Status.COMMITTED) in c.replies()


def _content() -> Any:
    return object()


def test_a_full_log_holds_pushes_and_lets_them_go_in_order() -> None:
    c = Cluster(budget_bytes=5)
    head = c.head(0)
    c.push(head, 1)
    assert [type(e) for e in c.push(head, 2)] == [Hold]
    assert [type(e) for e in c.push(head, 3)] == [Hold]
    c.settle()
    assert [token for token, _ in c.replies()] == [("t", 1), ("t", 2), ("t", 3)]
    assert [e.token for _, e in c.effects if isinstance(e, Release)] == [("t", 2), ("t", 3)]


def test_a_worker_that_left_the_roster_is_fenced_and_a_new_one_is_waited_for() -> None:
    c = Cluster()
    head = c.head(0)
    c.take(head, c.replicas[head].adopt_roster(1, frozenset({1})))
    c.push(head, 1)
    c.push(head, 1, worker=2, roster=2, token="new")
    c.take(head, c.replicas[head].adopt_roster(2, frozenset({2})))
    c.push(head, 2, token="old")
    c.settle()
    assert dict(c.replies()) == {("t", 1): Status.COMMITTED, "new": Status.COMMITTED, "old": Status.FENCED}


def test_departed_workers_take_no_row_and_their_late_repeats_are_recognised() -> None:
    c = Cluster(servers=3, replicas=2, alike=True)
    head, tail = c.view.members_of(0)

    def roster(version: int, *workers: int) -> None:
        for member in c.replicas:
            c.take(member, c.replicas[member].adopt_roster(version, frozenset(workers)))

    for worker in range(1, 101):
        roster(worker, worker)
        c.push(head, 1, worker=worker)
        c.settle()
    roster(101)
    assert [len(c.replicas[m].clocks.workers) for m in (head, tail)] == [FIRST_ROWS] * 2
    c.push(head, 1, worker=7, token="late")
    assert c.replies()[-1] == ("late", Status.FENCED)
    joining = np.full(P, c.members.index(c.members[-1]), np.int32)
    c.adopt(Chains(2, tuple(c.members), c.view.chains, joining, np.full(P, 2)))
    c.settle()
    for begun in [e for _, e in c.effects if isinstance(e, SnapshotRange)]:
        c.take(tail, c.replicas[tail].piece(begun.range, begun.serial, 1 << 62, True, _content()))
    c.settle()
    taken = plan_repair(c.view, c.members, dict.fromkeys(range(P), 2), 2, 8)
    assert taken is not None
    c.adopt(taken.chains)
    roster(102, 7)
    applied = {member: list(ops) for member, ops in c.applied.items()}
    for r in range(P):
        now = c.view.members_of(r)[0]
        c.push(now, 1, worker=7, ranges=np.array([r]), token="back again")
        c.settle()
        assert c.replies()[-1] == ("back again", Status.COMMITTED)
    assert c.applied == applied
    filled = c.replicas[c.members[-1]]
    assert filled.clocks.newest == 100
    assert len(filled.clocks.workers) == FIRST_ROWS


def test_an_operation_of_the_ranges_is_logged_like_a_push_and_a_retired_worker_is_forgotten() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    for member in (head, tail):
        c.replicas[member].records.note(1, record_of(1, 0, np.ones(c.replicas[member].ranges, np.bool_)))
    c.push(head, 0, worker=-1, kind=OperationKind.CREATE, token="create")
    c.push(head, 0, worker=1, kind=OperationKind.RETIRE, after=0, token="retire")
    c.settle()
    assert [status for _, status in c.replies()] == [Status.COMMITTED] * 3
    assert c.replicas[tail].seq[0] == 3
    assert not c.replicas[head].clocks.known(1)
    assert c.replicas[head].records.of(1) == c.replicas[tail].records.of(1) == []


@pytest.mark.parametrize(
    "message",
    [
        Resync(1, np.array([0]), np.array([0]), np.array([0])),
        Resync(1, np.array([0]), np.array([2]), np.array([1])),
        Resync(1, np.array([0]), np.array([1]), np.array([2])),
        Ack(1, np.array([0]), np.array([2])),
    ],
    ids=["lost", "ahead", "acknowledged", "ack"],
)
def test_an_impossible_message_of_a_successor_ends_its_link(message: Message) -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.push(head, 1)
    c.settle()
    replica = c.replicas[head]
    before = replica.seq.copy(), replica.acked.copy()
    (effect,) = replica.receive(tail, message)
    assert isinstance(effect, Distrust)
    assert np.array_equal(before, (replica.seq, replica.acked))
    assert replica.receive(tail, Ack(1, np.array([0]), np.array([1]))) == []  # nothing more is heard on that link
    replica.peer_up(tail)
    c.push(head, 2)
    assert replica.seq[0] == 2


def test_ranges_that_leave_go_back_to_the_worker() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 1)
    decision = plan_failover(c.view, {head}, {})
    assert decision is not None
    c.adopt(decision.chains, head)
    reply = next(e for _, e in c.effects if isinstance(e, Reply))
    assert reply.epoch == 2
    assert reply.committed.tolist() == []
    assert 0 in reply.moved.tolist()


def test_a_neighbour_gets_and_answers_each_operation_with_one_message() -> None:
    c = Cluster(servers=3, replicas=3, alike=True)
    head, middle, tail = c.view.members_of(0)
    chains, joining, since = c.view.chains.copy(), c.view.joining.copy(), c.view.since.copy()
    chains[3, 2], joining[3], since[3] = -1, c.view.members.index(tail), c.view.epoch + 1
    c.adopt(Chains(c.view.epoch + 1, c.view.members, chains, joining, since))
    c.settle()
    begun = next(e for _, e in c.effects if isinstance(e, SnapshotRange))
    c.take(middle, c.replicas[middle].piece(3, begun.serial, 1, last=False, payload="first piece"))
    c.settle()
    c.push(head, 1)
    c.deliver(head, middle)
    assert [sorted(m.ranges.tolist()) for m in c.queues[middle, tail]] == [[0, 1, 2, 3]]
    c.deliver(middle, tail)
    assert [m.ranges.tolist() for m in c.queues[tail, middle]] == [[0, 1, 2]]
    c.settle()
    assert c.replies() == [(("t", 1), Status.COMMITTED)]
