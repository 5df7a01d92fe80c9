"""Full links: which pushes wait for them."""

from __future__ import annotations

import pytest

from replication.chain import Member
from replication.effects import (
    Apply,
    Hold,
    Push,
    SnapshotRange,
    Status,
)
from replication.messages import OperationKind
from tests.replication.cluster import Cluster
from tests.replication.views import plan_move


def feeding(replicas: int) -> tuple[Cluster, Member, Member, Member]:
    """A cluster whose joiner of range 0 has a first piece, and a full link: with its head, tail and joiner."""
    c = Cluster(replicas=replicas, alike=True)
    chain = c.view.members_of(0)
    head, tail = chain[0], chain[-1]
    joiner = next(m for m in c.members if m not in chain)
    c.push(head, 1)
    c.settle()
    move = plan_move(c.view, 0, joiner)
    assert move is not None
    c.adopt(move.chains)
    c.settle()
    start = next(e for _, e in c.effects if isinstance(e, SnapshotRange))
    c.take(tail, c.replicas[tail].piece(0, start.serial, 1 << 61, False, None))
    assert not c.replicas[tail].congested
    c.take(tail, c.replicas[tail].peer_full(joiner, True))
    assert c.replicas[tail].congested
    c.effects.clear()
    return c, head, tail, joiner


def test_while_the_link_to_a_joiner_is_full_pushes_wait_at_its_tail() -> None:
    c, head, tail, joiner = feeding(1)
    assert head == tail
    assert [type(e) for e in c.push(head, 2)] == [Hold]
    c.settle()
    assert c.replies() == []
    c.take(tail, c.replicas[tail].peer_full(joiner, False))
    assert c.replies() == [(("t", 2), Status.COMMITTED)]


@pytest.mark.parametrize("lost", [False, True])
def test_while_the_link_to_a_joiner_is_full_its_tail_acknowledges_nothing(lost: bool) -> None:
    c, head, tail, joiner = feeding(2)
    c.push(head, 2)
    c.settle()
    assert c.replies() == []
    assert c.replicas[head].log.nbytes
    c.take(tail, c.replicas[tail].peer_down(joiner) if lost else c.replicas[tail].peer_full(joiner, False))
    c.settle()
    assert c.replies() == [(("t", 2), Status.COMMITTED)]
    assert not c.replicas[head].log.nbytes


def test_each_replica_logs_a_push_until_the_tail_has_it_and_not_only_its_successor() -> None:
    c = Cluster(servers=4, replicas=3, alike=True)
    a, b, tail = c.view.members_of(0)
    c.push(a, 1)
    c.deliver(a, b)  # the link from b to the tail is held up
    c.deliver(b, a)
    assert c.replicas[b].seq[0] == 1
    for member in (a, b):
        assert c.replicas[member].acked[0] == 0
        assert len(c.replicas[member].log) > 0
    assert c.replies() == []
    c.settle()
    for member in (a, b, tail):
        assert c.replicas[member].acked[0] == 1
        assert len(c.replicas[member].log) == 0
    assert c.replies() == [(("t", 1), Status.COMMITTED)]


def test_a_full_link_without_a_filling_delays_no_push() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    c.take(head, c.replicas[head].peer_full(tail, True))
    c.push(head, 1)
    c.settle()
    assert c.replies() == [(("t", 1), Status.COMMITTED)]


def test_no_push_is_admitted_after_a_cut_before_the_cut_is_applied() -> None:
    c = Cluster()
    head = c.head(0)
    c.take(head, c.replicas[head].limit_log(0))
    c.push(head, 0, kind=OperationKind.CUT, worker=-1, token="cut")
    c.push(head, 1)
    c.effects.clear()
    c.take(head, c.replicas[head].limit_log(1 << 20))
    assert [e.operation.kind for _, e in c.effects if isinstance(e, Apply)] == [OperationKind.CUT]
    assert c.replicas[head].unsettled
    c.take(head, c.replicas[head].go_on())
    assert [e.operation.kind for _, e in c.effects if isinstance(e, Apply)][-1] == OperationKind.PUSH


def test_a_push_that_waited_for_the_drop_of_a_table_is_checked_again_once_the_table_is_dropped() -> None:
    """Found by stories in which tables come and go: by then all may have forgotten the table, and who applied the push,
    or was sent it, ended."""
    c = Cluster()
    head = c.head(0)
    replica, looked = c.replicas[head], list[tuple[object, bool]]()

    def look_again(push: Push) -> None:
        applied = [e.operation.kind for _, e in c.effects if isinstance(e, Apply)]
        looked.append((push.token, OperationKind.DROP in applied))

    replica.admission.look_again = look_again
    c.take(head, replica.limit_log(0))
    c.push(head, 0, kind=OperationKind.DROP, worker=-1, token="drop")
    c.push(head, 1, token="push")
    c.effects.clear()
    c.take(head, replica.limit_log(1 << 20))
    c.take(head, replica.go_on())
    assert looked == [("drop", False), ("push", True)]
    c.push(head, 2, token="at once")
    assert len(looked) == 2


def test_waiting_pushes_are_admitted_a_few_at_a_time() -> None:
    c, head, tail, joiner = feeding(1)
    for worker in range(2, 6):
        c.push(head, 1, worker=worker, token=worker, nbytes=1 << 19)
    c.take(tail, c.replicas[tail].peer_full(joiner, False))
    assert c.replies() == [(2, Status.COMMITTED), (3, Status.COMMITTED)]
    assert c.replicas[tail].unsettled
    c.take(tail, c.replicas[tail].peer_full(joiner, True))
    assert c.take(tail, c.replicas[tail].go_on()) == []
    assert not c.replicas[tail].unsettled
    c.take(tail, c.replicas[tail].peer_full(joiner, False))
    assert [token for token, _ in c.replies()] == [2, 3, 4, 5]
