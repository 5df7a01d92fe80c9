"""A copy whose server was away gets all missing operations from the retained log, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.draft import Draft
from replication.chain import Chains, CopyState, Member, unsafe_transition
from replication.effects import Erase, Reply, Send, SnapshotRange, Status
from replication.messages import OperationKind, Resync
from tests.replication.cluster import Cluster, P
from tests.replication.test_retained_copies import by_range, confirmed, taken, without

ALL = list(range(P))


def catching_up(view: Chains, spent: Sequence[tuple[int, int]] = ()) -> Chains:
    draft = Draft(view)
    draft.fetch((), (), (), (), dict(spent))
    return draft.build(view.members)


def whole(c: Cluster, left: Member) -> Chains:
    """The view in which whatever is level is the tail, as it has to be allowed."""
    level = {found.range: found.fill for found in c.replicas[left].levels()}
    draft = Draft(c.view)
    draft.promote(level)
    view = draft.build(c.view.members) if draft.changed.any() else c.view
    assert not (draft.changed.any() and unsafe_transition(c.view, view, level))
    return view


class Story:
    """One replica of all ranges falls silent, the other is confirmed."""

    def __init__(self, successor: bool, budget_bytes: int = 1 << 20) -> None:
        self.c = c = Cluster(servers=2, alike=True, budget_bytes=budget_bytes)
        head, tail = c.view.members_of(0)
        self.silent, self.left = (tail, head) if successor else (head, tail)

    def leave(self) -> None:
        """Only who is left hears of it."""
        self.c.adopt(without(self.c.view, self.silent), self.left)
        self.c.adopt(confirmed(self.c.view), self.left)
        assert self.c.view.copy_state.tolist() == [CopyState.LATE] * P

    def come_back(self) -> None:
        self.c.adopt(self.c.view, self.silent)
        self.c.adopt(catching_up(self.c.view))
        self.c.settle()

    def end(self) -> list[int]:
        """Level copies become tails; returns their ranges."""
        self.c.adopt(whole(self.c, self.left))
        return [r for r in ALL if self.c.view.members_of(r) == (self.left, self.silent)]

    @property
    def moved(self) -> list[object]:
        return [e for _, e in self.c.effects if isinstance(e, SnapshotRange | Erase)]


@pytest.mark.parametrize("successor", [True, False])
def test_a_late_copy_gets_the_missing_operations_without_a_snapshot(successor: bool) -> None:
    story = Story(successor)
    c, left = story.c, story.left
    c.push(c.head(0), 1)
    c.settle()
    story.leave()
    for clock in (2, 3):
        c.push(left, clock)
    assert c.replies()[-1] == (("t", 3), Status.COMMITTED), "nobody is waited for"
    story.come_back()
    c.push(left, 4)
    c.settle()
    assert story.end() == ALL
    assert sorted(c.applied[story.silent], key=by_range) == sorted(c.applied[left], key=by_range)
    assert len(c.applied[left]) == 4 * P
    assert story.moved == []
    assert not c.replicas[left].retained.active
    assert c.replicas[left].retained.nbytes == 0
    c.adopt(taken(c.view, left), story.silent)
    c.push(story.silent, 4, token="again")
    assert c.replies()[-1] == ("again", Status.COMMITTED)


def test_a_former_head_with_operations_of_its_own_cannot_catch_up_and_is_reported() -> None:
    story = Story(successor=False)
    c, left = story.c, story.left
    c.push(c.head(0), 1, ranges=np.array([0, 1]))
    c.queues.clear()  # it never left
    story.leave()
    c.push(left, 1, worker=2)
    story.come_back()
    found = c.replicas[left].spent()
    assert found == [(r, c.view.epoch) for r in (0, 1)], "also where both have as many operations"
    assert story.end() == [2, 3]
    assert story.moved == []
    c.adopt(catching_up(c.view, found))
    assert [c.view.joiner_of(r) for r in ALL] == [None] * P
    assert [e.ranges.tolist() for _, e in c.effects if isinstance(e, Erase)] == [[0, 1]]


@pytest.mark.parametrize("how", ["too many bytes", "a table ends", "memory is short"])
def test_operations_that_are_partly_dropped_are_not_sent_at_all(how: str) -> None:
    story = Story(successor=True, budget_bytes=35)
    c, left = story.c, story.left
    story.leave()
    c.push(left, 1)
    if how == "a table ends":
        c.push(left, 0, worker=-1, kind=OperationKind.DROP, token="drop")
    if how == "memory is short":
        c.take(left, c.replicas[left].let_go())
    for clock in (2, 3, 4) if how == "too many bytes" else (2, 3):
        c.push(left, clock)
    assert c.replicas[left].spent() == [(r, c.view.epoch) for r in ALL]
    assert c.replicas[left].retained.nbytes == 0
    story.come_back()
    assert story.end() == []
    assert c.applied[story.silent] == []
    assert c.replicas[left].spent() == [(r, c.view.epoch) for r in ALL]
    assert catching_up(c.view, c.replicas[left].spent()).joining.tolist() == [-1] * P


@pytest.mark.parametrize("successor", [True, False])
def test_nothing_is_retained_where_a_table_was_dropped_before_the_copy_became_late(successor: bool) -> None:
    """What came before its end is in the log, and can be sent no more once the table is forgotten."""
    story = Story(successor)
    c, left = story.c, story.left
    c.adopt(without(c.view, story.silent), left)
    c.push(left, 1)
    c.push(left, 0, worker=-1, kind=OperationKind.DROP, token="drop")
    c.adopt(confirmed(c.view), left)
    assert c.replies()[-1] == ("drop", Status.COMMITTED)
    assert c.replicas[left].spent() == [(r, c.view.epoch) for r in ALL]
    assert c.replicas[left].retained.nbytes == 0
    story.come_back()
    assert story.end() == []
    assert c.applied[story.silent] == []


def test_a_link_lost_while_catching_up_is_repaired() -> None:
    story = Story(successor=True)
    c, left, silent = story.c, story.left, story.silent
    story.leave()
    c.push(left, 1)
    c.push(left, 2)
    c.adopt(c.view, silent)
    c.adopt(catching_up(c.view))
    c.deliver(silent, left)
    c.take(silent, c.replicas[silent].receive(left, c.queues[left, silent].popleft()))
    c.queues.clear()
    for a, b in ((left, silent), (silent, left)):
        c.take(a, c.replicas[a].peer_down(b))
    c.push(left, 3)
    for a, b in ((left, silent), (silent, left)):
        c.take(a, c.replicas[a].peer_up(b))
    c.settle()
    assert story.end() == ALL
    assert [after >> 16 for _, after, r in c.applied[silent] if r == 0] == [1, 2, 3]


def test_messages_of_a_late_copy_are_ignored_before_it_catches_up() -> None:
    story = Story(successor=True)
    c, left, silent = story.c, story.left, story.silent
    story.leave()
    c.adopt(c.view, silent)
    report = [e.message for m, e in c.effects if m == silent and isinstance(e, Send)]
    assert not any(isinstance(message, Resync) and message.epoch == c.view.epoch for message in report)
    none = np.zeros(P, np.int64)
    assert c.take(left, c.replicas[left].receive(silent, Resync(c.view.epoch, np.arange(P), none, none))) == []
    assert c.replicas[left].levels() == []


ACTIONS = st.lists(st.sampled_from(["push to s0", "push to s1", "down", "up", "break"]), max_size=12)


@settings(deadline=None)
@given(ACTIONS, ACTIONS, ACTIONS, ACTIONS, st.booleans(), st.booleans(), st.sampled_from([25, 65, 1 << 20]))
def test_a_copy_that_is_level_has_all_that_was_acknowledged_in_the_same_order(
    before: Sequence[str],
    waiting: Sequence[str],
    alone: Sequence[str],
    together: Sequence[str],
    successor: bool,
    hears: bool,
    budget_bytes: int,
) -> None:
    """waiting: before the one that is left is confirmed; hears: the silent one knows of that. Links work all the time,
    but for those that break: who is silent towards the leader may be well."""
    story = Story(successor, budget_bytes)
    c, left, silent = story.c, story.left, story.silent
    head, tail = c.view.members_of(0)
    clocks = dict.fromkeys(c.members, 0)

    def act(actions: Sequence[str]) -> None:
        for action in actions:
            if action in ("down", "up"):
                c.deliver(*((head, tail) if action == "down" else (tail, head)))
            elif action == "break":
                c.queues.clear()
                for member, other in ((head, tail), (tail, head)):
                    c.take(member, c.replicas[member].peer_up(other))
            else:
                member = Member(action[-2:], 1)
                worker, clock, epoch = c.members.index(member) + 1, clocks[member] + 1, c.replicas[member].epoch
                pushed = c.push(member, clock, worker=worker, epoch=epoch, token=(worker, clock))
                clocks[member] += not any(isinstance(e, Reply) and e.status != Status.COMMITTED for e in pushed)

    act(before)
    c.adopt(without(c.view, silent), left, *[silent] * hears)
    act(waiting)
    c.adopt(confirmed(c.view), left)
    act(alone)
    c.adopt(c.view, silent)
    c.adopt(catching_up(c.view), left)
    act(together)
    c.adopt(c.view, silent)
    act(together)
    c.settle()
    spent = {r for r, _ in c.replicas[left].spent()}
    there = story.end()
    assert set(ALL) == spent | set(there)
    assert not spent & set(there)
    assert not successor or budget_bytes < 1 << 20 or there == ALL
    assert not any(isinstance(e, SnapshotRange) for _, e in c.effects)
    for member in (left, silent):
        assert len(c.applied[member]) == len(set(c.applied[member])), "applied once"
    for r in there:
        assert [a for a in c.applied[silent] if a[2] == r] == [a for a in c.applied[left] if a[2] == r]
    c.adopt(c.view)
    act(["push to s0", "push to s1"])
    c.settle()
    for _, effect in c.effects:
        if isinstance(effect, Reply) and effect.status == Status.COMMITTED:
            assert isinstance(effect.token, tuple)
            worker, clock = effect.token
            acknowledged = {(worker, clock << 16, r) for r in effect.committed.tolist()}
            assert acknowledged <= set(c.applied[left])
            assert {a for a in acknowledged if a[2] in there} <= set(c.applied[silent])
