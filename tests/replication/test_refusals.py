"""Refusals are replicated: a new head gives the same answer as the one before it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replication import refusals
from replication.chain import Chains, Member, Ranges
from replication.effects import Ask, ClocksReply, Install, Reply, SnapshotRange, Status
from replication.refusals import Refusal, Refusals, RefusedStep, Rows
from tests.replication.cluster import Cluster, P
from tests.replication.views import plan_failover, plan_move

WHY = '{"code": "memory"}'


class Keys(frozenset[int]):
    """Rows that were refused, by key: key k lies in range k % P."""

    nbytes = 1

    def part(self, ranges: Ranges) -> Keys:
        return Keys(key for key in self if key % P in ranges)

    def joined(self, other: Rows) -> Keys:
        assert isinstance(other, Keys)
        return Keys(self | other)


def answers(c: Cluster) -> list[tuple[object, Status, str]]:
    return [(e.token, e.status, "".join(each.why for each in e.refused)) for _, e in c.effects if isinstance(e, Reply)]


def keys_refused(c: Cluster) -> list[tuple[object, list[int]]]:
    return [
        (e.token, sorted(key for each in e.refused if each.rows is not None for key in _keys(each.rows)))
        for _, e in c.effects
        if isinstance(e, Reply)
    ]


def _keys(rows: Rows) -> Keys:
    assert isinstance(rows, Keys)
    return rows


def requested(c: Cluster, member: Member, worker: int = 1) -> list[tuple[int, str]]:
    c.take(member, c.replicas[member].ask(Ask("ask", worker, c.view.epoch)))
    acknowledged = c.effects[-1][1]
    assert isinstance(acknowledged, ClocksReply)
    return [(clock, why) for clock, why, _ in acknowledged.refused]


def follow(c: Cluster, decision: object) -> None:
    chains = getattr(decision, "chains", None)
    assert isinstance(chains, Chains)
    c.adopt(chains)
    c.settle()


def column(c: Cluster, member: Member, r: int = 0) -> list[RefusedStep]:
    return c.replicas[member].refusals.column(r)


def test_a_repeated_refused_push_gets_the_same_refusal_from_a_new_head() -> None:
    c = Cluster(servers=4, replicas=3, alike=True)
    first, middle, last = c.view.members_of(0)
    c.push(first, 1, refusal=Refusal(WHY))
    c.deliver(first, middle)  # the first one vanishes before anybody is told
    c.kill(first)
    follow(c, plan_failover(c.view, {first}, {}))
    assert column(c, middle) == column(c, last) == [RefusedStep(1, 1, WHY)]
    c.push(middle, 1, token="again")
    c.push(middle, 1, token="repeat", repeat=True)
    c.push(middle, 2, token="next")
    c.settle()
    known = [(t, why) for t, status, why in answers(c) if status == Status.COMMITTED]
    assert known == [("again", WHY), ("repeat", WHY), ("next", "")]
    assert requested(c, middle) == [(1, WHY)]
    assert requested(c, middle, worker=2) == []


def test_a_refusal_is_answered_only_when_the_tail_has_it() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 1, refusal=Refusal(WHY))
    c.push(head, 1, token="again")
    assert answers(c) == []
    c.settle()
    assert answers(c) == [(("t", 1), Status.COMMITTED, WHY), ("again", Status.COMMITTED, WHY)]


def test_a_repeated_applied_push_succeeds_though_it_would_be_refused_now() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 1)
    c.push(head, 1, token="again", refusal=Refusal(WHY))
    c.settle()
    assert [why for _, _, why in answers(c)] == ["", ""]
    assert column(c, head) == []


def test_ranges_that_a_repeated_frame_had_not_reached_are_judged_now() -> None:
    c = Cluster(servers=2, replicas=1)
    head = c.head(0)
    c.push(head, 1, token="a", ranges=np.array([0]), refusal=Refusal(WHY))
    c.push(head, 1, token="b", ranges=np.array([0, 1]))
    c.push(head, 1, token="c", ranges=np.array([1]))
    c.push(head, 1, token="d", ranges=np.array([1, 2]), refusal=Refusal("other"))
    assert answers(c) == [
        ("a", Status.COMMITTED, WHY),
        ("b", Status.COMMITTED, WHY),
        ("c", Status.COMMITTED, ""),
        ("d", Status.COMMITTED, "other"),
    ]
    assert [column(c, head, r) for r in range(3)] == [[RefusedStep(1, 1, WHY)], [], [RefusedStep(1, 1, "other")]]


def test_acknowledged_refusals_and_those_of_retired_workers_are_forgotten() -> None:
    c = Cluster()
    head, tail = c.view.members_of(0)
    for clock in (1, 2, 3, 4):
        c.push(head, clock, refusal=Refusal(str(clock), acknowledged=max(0, clock - 2)))
    c.settle()
    assert column(c, head) == column(c, tail) == [RefusedStep(1, 3, "3"), RefusedStep(1, 4, "4")]
    c.push(head, 0, kind=3, after=0)
    c.settle()
    assert column(c, head) == column(c, tail) == []
    assert not c.replicas[tail].refusals or column(c, tail, 1)


def test_a_part_counts_for_its_step() -> None:
    c = Cluster()
    head = c.head(0)
    c.push(head, 1, part=0, last=False, refusal=Refusal(WHY))
    c.settle()
    assert requested(c, head) == [], "the step is not committed yet"
    c.push(head, 1, part=1, token="last")
    c.push(head, 1, part=1, token="again", repeat=True)
    c.settle()
    assert answers(c)[-2:] == [("last", Status.COMMITTED, WHY), ("again", Status.COMMITTED, WHY)]
    assert requested(c, head) == [(1, WHY)]


def test_the_answer_names_refused_rows_of_committed_ranges_only() -> None:
    c = Cluster(servers=4, replicas=2, alike=True)
    first, second = c.view.members_of(0)
    mine = c.view.headed_by(c.view.index(first))
    assert len(mine) > 1
    c.push(first, 1, token="first", refusal=Refusal(WHY, rows=Keys(range(2 * P))))
    c.settle()
    assert keys_refused(c) == [("first", [key for key in range(2 * P) if key % P in mine])]
    acknowledged = c.replicas[second].refusals.look(1, 1, mine[:1])
    assert [(clock, why, sorted(_keys(rows))) for clock, why, rows in acknowledged if rows] == [
        (1, WHY, [mine[0], mine[0] + P])
    ]


def test_a_new_head_answers_with_its_own_judgement() -> None:
    c = Cluster(servers=4, replicas=2, alike=True)
    first, second = c.view.members_of(0)
    mine = c.view.headed_by(c.view.index(first))
    c.push(first, 1, ranges=mine[:1], refusal=Refusal(WHY, rows=Keys(range(P))))
    c.deliver(first, second)
    c.push(first, 1, ranges=mine[1:], refusal=Refusal(WHY, rows=Keys(range(P))))  # of which nobody hears
    c.kill(first)
    follow(c, plan_failover(c.view, {first}, {}))
    c.push(second, 1, token="all", ranges=mine)  # now there is room
    c.settle()
    assert keys_refused(c)[-1] == ("all", [mine[0]])
    assert [len(column(c, second, int(r))) for r in mine[:2]] == [1, 0]


def test_refusals_move_with_their_range() -> None:
    c = Cluster(servers=4, replicas=2, alike=True)
    head, tail = c.view.members_of(0)
    c.push(head, 1, refusal=Refusal(WHY))
    c.settle()
    new = next(m for m in c.members if m not in (head, tail))
    follow(c, plan_move(c.view, 0, new))
    fill = next(e for _, e in c.effects if isinstance(e, SnapshotRange))
    c.push(head, 2, refusal=Refusal("before"))
    c.take(tail, c.replicas[tail].piece(0, fill.serial, 1 << 62, True, cast(Any, None)))
    c.push(head, 3, refusal=Refusal("behind"))
    c.settle()
    assert any(isinstance(e, Install) for _, e in c.effects)
    known = [RefusedStep(1, 1, WHY), RefusedStep(1, 2, "before"), RefusedStep(1, 3, "behind")]
    assert column(c, head) == column(c, tail) == column(c, new) == known
    assert column(c, new, 1) == []


_WORKERS, _CLOCKS = st.integers(1, 3), st.integers(1, 6)
_SOME = st.sets(st.integers(0, P - 1), min_size=1).map(sorted)
_DO = st.one_of(
    st.tuples(st.just("note"), _WORKERS, _CLOCKS, _SOME, st.sampled_from("xy"), st.integers(0, 5)),
    st.tuples(st.just("clear"), _SOME),
    st.tuples(st.just("forget"), _WORKERS, _SOME),
    st.tuples(st.just("copy"), st.integers(0, P - 1), st.integers(0, P - 1)),
)


@given(st.lists(_DO, max_size=30))
def test_refusals_equal_a_list_of_all_refusals(story: list[tuple[Any, ...]]) -> None:
    found, twin = Refusals(P), set[tuple[int, int, int, str]]()
    for what, *known in story:
        if what == "note":
            worker, clock, ranges, why, acknowledged = known
            found.note(worker, clock, np.array(ranges), Refusal(why, acknowledged))
            twin = {e for e in twin if not (e[0] == worker and e[1] <= acknowledged and e[2] in ranges)}
            twin |= {(worker, clock, r, why) for r in ranges}
        elif what == "clear":
            found.clear(np.array(known[0]))
            twin = {e for e in twin if e[2] not in known[0]}
        elif what == "forget":
            found.forget(known[0], np.array(known[1]))
            twin = {e for e in twin if not (e[0] == known[0] and e[2] in known[1])}
        else:
            source, target = known
            found.set_column(target, found.column(source))
            twin = {e for e in twin if e[2] != target} | {(w, c, target, y) for w, c, r, y in twin if r == source}
        columns = {(w, c, r, why) for r in range(P) for w, c, why, _ in found.column(r)}
        assert columns == twin
        assert len(found) == len({e[:2] for e in twin})
        assert bool(found) == bool(twin)
        for worker in (1, 2, 3):
            some, committed = np.array([0, 2]), np.array([9, 3])
            assert {(c, y) for c, y, _ in found.of(worker, committed, some)} == {
                (c, y) for w, c, r, y in twin if w == worker and (r == 0 or (r == 2 and c <= 3))
            }
            whys = {y for w, c, r, y in twin if (w, c) == (worker, 2) and r in (0, 2)}
            assert {each.why for each in found.look(worker, 2, some)} == whys


_ROWS = st.frozensets(st.integers(0, 3 * P - 1), max_size=8)
_DO_ROWS = st.one_of(
    st.tuples(st.just("note"), _WORKERS, _CLOCKS, _SOME, _ROWS, st.integers(0, 5)),
    st.tuples(st.just("clear"), _SOME),
    st.tuples(st.just("copy"), st.integers(0, P - 1)),
)


@given(st.lists(_DO_ROWS, max_size=30))
def test_refused_rows_equal_a_list_of_all_refused_rows(story: list[tuple[Any, ...]]) -> None:
    found, twin = Refusals(P), set[tuple[int, int, int]]()  # worker, clock, key
    for what, *known in story:
        if what == "note":
            worker, clock, ranges, keys, acknowledged = known
            found.note(worker, clock, np.array(ranges), Refusal("w", acknowledged, Keys(keys)))
            twin = {e for e in twin if not (e[0] == worker and e[1] <= acknowledged and e[2] % P in ranges)}
            twin |= {(worker, clock, key) for key in keys if key % P in ranges}
        elif what == "clear":
            found.clear(np.array(known[0]))
            twin = {e for e in twin if e[2] % P not in known[0]}
        else:
            found.set_column(known[0], found.column(known[0]))
        for r in range(P):
            column = {(w, c, k) for w, c, _, rows in found.column(r) if rows is not None for k in _keys(rows)}
            assert column == {e for e in twin if e[2] % P == r}
        assert bool(found) == bool(twin)


def test_refusals_are_bounded_however_many_workers_there_are() -> None:
    found = Refusals(P)
    one = np.array([0])
    before, refusals.MOST_STEPS = refusals.MOST_STEPS, 4
    try:
        for worker in (1, 2, 1, 3, 4, 1):
            found.note(worker, 10 + len(found), one, Refusal(WHY))
    finally:
        refusals.MOST_STEPS = before
    assert [step.worker for step in found.column(0)] == [1, 1, 1, 4]
