"""A silent replica keeps its copy until the other is confirmed: whichever continues has every acknowledged push."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.draft import Draft
from replication.chain import Chains, CopyState, Member, unsafe_transition
from replication.effects import CaughtUp, Erase, Reply, SnapshotRange, Status
from tests.replication.cluster import Cluster, P


def without(view: Chains, silent: Member, level: Mapping[int, int] | None = None) -> Chains:
    draft = Draft(view)
    draft.lose({silent}, level or {}, silent={silent})
    return draft.build(view.members)


def confirmed(view: Chains) -> Chains:
    draft = Draft(view)
    draft.confirm(dict.fromkeys(view.members, view.epoch), (), ())
    return draft.build(view.members)


def back(view: Chains) -> Chains:
    draft = Draft(view)
    draft.promote(draft.returned((), ()))
    return draft.build(view.members) if draft.changed.any() else view


def taken(view: Chains, dead: Member) -> Chains:
    draft = Draft(view)
    draft.lose({dead}, {})
    return draft.build(view.members)


def two() -> tuple[Cluster, Member, Member]:
    """All ranges have the same two replicas."""
    c = Cluster(servers=2, alike=True)
    head, tail = c.view.members_of(0)
    return c, head, tail


def joined() -> tuple[Cluster, Member, Member, dict[int, int]]:
    """All ranges have one replica, and another one that is level: as was reported."""
    c, head, other = two()
    c.adopt(taken(c.view, other))
    draft = Draft(c.view)
    for r in range(P):
        draft.fill(r, draft.members.index(other))
    c.adopt(draft.build(c.view.members))
    c.settle()
    for fill in [e for _, e in c.effects if isinstance(e, SnapshotRange)]:
        c.take(head, c.replicas[head].piece(fill.range, fill.serial, 1 << 62, True, cast(Any, None)))
    c.settle()
    return c, head, other, {e.range: e.fill for _, e in c.effects if isinstance(e, CaughtUp)}


def test_the_remaining_replica_acknowledges_nothing_until_it_is_confirmed() -> None:
    c, head, tail = two()
    c.push(head, 1)
    c.adopt(without(c.view, tail), head)
    c.push(head, 2)
    left = c.replicas[head]
    assert c.view.copy_state.tolist() == [CopyState.SUCCESSOR] * P
    assert c.replies() == []
    assert left.waiting.all()
    c.adopt(confirmed(c.view), head)
    assert c.replies() == [(("t", 1), Status.COMMITTED), (("t", 2), Status.COMMITTED)]
    assert not left.waiting.any()
    assert left.log.nbytes == 0


def test_a_silent_replica_replaces_one_that_was_never_confirmed() -> None:
    c, head, tail = two()
    c.push(head, 1)
    c.settle()
    c.adopt(without(c.view, tail), head)
    c.push(head, 2)
    c.adopt(c.view, tail)
    c.adopt(taken(c.view, head), tail)
    assert c.view.members_of(0) == (tail,)
    assert [e for m, e in c.effects if m == tail and isinstance(e, Erase)] == []
    assert c.replies() == [(("t", 1), Status.COMMITTED)]
    c.push(tail, 2, token="again")
    assert c.replies()[-1] == ("again", Status.COMMITTED)


def test_a_former_successor_continues_from_the_log_when_it_is_back() -> None:
    c, head, tail = two()
    c.adopt(without(c.view, tail), head)
    c.push(head, 1)
    c.adopt(c.view, tail)
    c.settle()
    assert c.replies() == [(("t", 1), Status.COMMITTED)], "it has it, whatever becomes of it in the next view"
    c.adopt(back(c.view))
    c.push(head, 2)
    c.settle()
    assert c.view.members_of(0) == (head, tail)
    assert c.replies()[-1] == (("t", 2), Status.COMMITTED)
    assert c.applied[head] == c.applied[tail]
    assert not any(isinstance(e, SnapshotRange) for _, e in c.effects)


def test_a_former_predecessor_is_refilled_as_it_may_have_unreplicated_operations() -> None:
    c, head, tail = two()
    c.push(head, 1)
    c.adopt(without(c.view, head), tail)
    c.push(tail, 1, worker=2)
    c.adopt(c.view, head)
    c.settle()
    assert c.view.copy_state.tolist() == [CopyState.PREDECESSOR] * P
    assert Draft(c.view).returned((), ()) == {}
    assert not any(isinstance(e, Erase) for _, e in c.effects), "until the other is confirmed it is the only sure copy"
    draft = Draft(confirmed(c.view))
    for r in range(P):
        draft.fill(r, draft.members.index(head))
    c.adopt(confirmed(c.view))
    c.adopt(draft.build(c.view.members))
    c.settle()
    assert sorted(e.range for _, e in c.effects if isinstance(e, SnapshotRange)) == list(range(P))


OUTCOMES: dict[str, Callable[[Chains, Member], Chains]] = {
    "the other dies": taken,
    "it is back": lambda view, left: back(view),
    "the other is confirmed": lambda view, left: confirmed(view),
}
ACTIONS = st.lists(st.sampled_from(["push to s0", "push to s1", "down", "up"]), max_size=12)


def by_range(applied: tuple[int, int, int]) -> int:
    return applied[2]


@pytest.mark.parametrize("outcome", OUTCOMES)
@settings(deadline=None)
@given(before=ACTIONS, apart=ACTIONS, together=ACTIONS, where=st.sampled_from(["behind", "before", "joined"]))
def test_acknowledged_operations_are_in_every_copy_that_continues(
    outcome: str, before: Sequence[str], apart: Sequence[str], together: Sequence[str], where: str
) -> None:
    """apart: only the one that is left knows the view; together: both do. where: the silent one stood, or the other one
    had only joined. Links work all the time: who is silent towards the leader may be well."""
    level: dict[int, int] = {}
    if where == "joined":
        c, head, tail, level = joined()
        assert sorted(level) == list(range(P))
    else:
        c, head, tail = two()
    successor = where == "behind"
    silent, left = (tail, head) if successor else (head, tail)
    clocks = dict.fromkeys(c.members, 0)

    def act(actions: Sequence[str]) -> None:
        for action in actions:
            if action == "down":
                c.deliver(head, tail)
            elif action == "up":
                c.deliver(tail, head)
            else:
                member = Member(action[-2:], 1)
                worker, clock, epoch = c.members.index(member) + 1, clocks[member] + 1, c.replicas[member].epoch
                pushed = c.push(member, clock, worker=worker, epoch=epoch, token=(worker, clock))
                refused = any(isinstance(e, Reply) and e.status != Status.COMMITTED for e in pushed)
                clocks[member] += not refused

    act(before)
    before_it = c.view
    c.adopt(without(c.view, silent, level), left)
    assert unsafe_transition(before_it, c.view, level) == ""
    assert c.view.copy_state.tolist() == [CopyState.SUCCESSOR if successor else CopyState.PREDECESSOR] * P
    act(apart)
    c.adopt(c.view, silent)
    act(together)
    view = OUTCOMES[outcome](c.view, left)
    assert (view.epoch > c.view.epoch) == (outcome != "it is back" or successor)
    if outcome == "the other dies":
        c.kill(left)
    c.adopt(view)
    c.settle()
    full = view.members_of(0)
    for member in full:
        assert len(c.applied[member]) == len(set(c.applied[member])), "applied once"
        assert sorted(c.applied[member], key=by_range) == sorted(c.applied[full[0]], key=by_range), "in the same order"
    for _, effect in c.effects:
        if isinstance(effect, Reply) and effect.status == Status.COMMITTED:
            assert isinstance(effect.token, tuple)
            worker, clock = effect.token
            there = {(worker, clock << 16, r) for r in effect.committed.tolist()}
            assert there <= set(c.applied[full[0]]), f"{effect.token} was acknowledged, and {full[0]} lacks it"
