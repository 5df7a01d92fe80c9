"""Decisions of the planner and their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from coordinator.core.draft import Draft, Removal
from coordinator.core.planner import Health, Members, Plan, UnsafePlan, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import COMPLETE, CopyState
from tests.coordinator.plans import CONFIG, decide, joiner, lost, names, server, written

FIRST = written(None, server("a"), server("b"), server("c"))


def repaired_once(gone: Health) -> View:
    """FIRST, after the servers that are gone, and with all fillings started."""
    return written(written(FIRST, *FIRST.servers, health=gone), *FIRST.servers, health=gone)


def settled(view: View, members: Sequence[ServerInfo], config: ClusterConfig, gone: Health) -> View:
    """The view when nothing is left to do, with every filling level at once."""
    for _ in range(100):
        level = {r: int(view.since[r]) for r in np.flatnonzero(view.joining >= 0).tolist()}
        decision = decide(view, *members, config=config, health=Health(gone.gone, level))
        if decision is None or decision.view is None:
            return view
        view = decision.view
    raise AssertionError(f"no end of repair: {view.reason}")


def test_the_first_view_waits_for_enough_servers() -> None:
    assert decide(None) == Plan(None, "waiting for servers: 0 of 3 registered")
    assert decide(None, server("a"), server("b")) == Plan(None, "waiting for servers: 2 of 3 registered")


def test_the_first_view_is_whole_and_independent_of_the_order_of_servers() -> None:
    assert FIRST.epoch == 1
    assert (FIRST.cluster, FIRST.ranges, FIRST.replicas) == ("demo", 16, 2)
    assert [member.name for member in FIRST.servers] == ["a", "b", "c"]
    assert FIRST.chains.min() >= 0
    assert FIRST.since.tolist() == [1] * 16
    assert FIRST.joining.tolist() == [-1] * 16
    assert FIRST.reason == "first view: 16 ranges on 3 servers, 2 replicas each"
    assert written(None, server("c"), server("a"), server("b")) == FIRST


def test_fewer_servers_than_replicas_make_short_chains() -> None:
    config = ClusterConfig(ranges=4, replicas=3, min_servers=1)
    view = written(None, server("a"), config=config)
    assert view.chains.tolist() == [[0, -1, -1]] * 4
    assert "1 possible" in view.reason


def test_all_well_means_no_plan() -> None:
    assert decide(FIRST, *FIRST.servers) is None


def test_a_key_that_is_missing_for_a_while_proves_nothing() -> None:
    assert decide(FIRST, server("a"), server("c")) is None


def test_a_death_makes_a_view_of_its_own_with_counts_in_its_reason() -> None:
    headed, held = int((FIRST.heads == 1).sum()), int((FIRST.chains == 1).any(axis=1).sum())
    view = written(FIRST, *FIRST.servers, health=lost(server("b")))
    assert view.reason == f"b lost (killed): {headed} ranges have a new head, 0 fillings start again"
    assert [s.name for s in view.servers] == ["a", "c"]
    assert view.joining.max() == -1
    assert int((view.since == 2).sum()) == held
    assert names(view, 0) == tuple(m for m in names(FIRST, 0) if m.name != "b")
    decision = decide(FIRST, *FIRST.servers, health=lost(server("b")))
    assert decision is not None
    assert decision.lost == (server("b").member,)


def test_repair_follows_and_is_done_some_ranges_at_a_time() -> None:
    gone = lost(server("b"))
    view = written(FIRST, *FIRST.servers, health=gone)
    short = int((view.chains[:, 1] < 0).sum())
    limits = Limits(fills=3, per_server=2)
    plan_ = plan(view, Members("demo", FIRST.servers), CONFIG, gone, limits)
    assert plan_ is not None
    assert plan_.view is not None
    assert plan_.reason == f"repair: 3 fillings started on a, c; 3 under way, {short - 3} to follow"
    assert not plan_.lost
    busy = plan_.view
    assert plan(busy, Members("demo", FIRST.servers), CONFIG, gone, limits) is None
    r = int(np.flatnonzero(busy.joining >= 0)[0])
    level = Health(gone=gone.gone, level={r: int(busy.since[r])})
    after = plan(busy, Members("demo", FIRST.servers), CONFIG, level, limits)
    assert after is not None
    assert after.view is not None
    assert after.reason.startswith("repair: 1 ranges got a level replica, 1 fillings started on ")
    joined = busy.as_chains.joiner_of(r)
    assert joined is not None
    assert names(after.view, r) == (*names(busy, r), joined)


def test_no_server_sends_or_receives_more_fillings_than_its_limit() -> None:
    config = ClusterConfig(ranges=256, replicas=3)
    members = [server(f"s{i}") for i in range(6)]
    first = written(None, *members, config=config)
    gone = lost(server("s1"), server("s2"))
    view = written(first, *members, config=config, health=gone)
    decision = plan(view, Members("demo", tuple(members)), config, gone, Limits(fills=14, per_server=4))
    assert decision is not None
    assert decision.view is not None
    filling = decision.view.joining >= 0
    assert int(filling.sum()) == 14
    assert np.bincount(decision.view.joining[filling]).max() <= 4
    assert np.bincount(decision.view.tails[filling]).max() <= 4
    # From each source, ranges with a single replica come before those with two.
    new = decision.view
    lengths = (new.chains >= 0).sum(axis=1)
    for source in np.unique(new.tails[filling]):
        mine = new.tails == source
        waiting = lengths[mine & ~filling & (lengths < 3)]
        assert lengths[mine & filling].max() <= waiting.min(initial=3)


def test_a_filling_ends_with_its_target_and_starts_again_with_another_source() -> None:
    config = ClusterConfig(ranges=8, replicas=3)
    three = [server(name) for name in "abc"]
    first = written(None, *three[:2], config=config)
    busy = written(first, *three, config=config)
    assert (busy.joining == 2).all()
    target = written(busy, *three, config=config, health=lost(server("c")))
    assert target.reason == (
        "c lost (killed): 0 ranges have a new head, 0 fillings start again, 8 are given up; "
        "waiting: 8 ranges have fewer than 3 replicas, with 2 servers left"
    )
    assert target.joining.max() == -1
    source = written(busy, *three, config=config, health=lost(server("a")))
    heads = int((busy.heads == 0).sum())
    assert source.reason == (
        f"a lost (killed): {heads} ranges have a new head, 8 fillings start again; "
        "waiting: 8 ranges have fewer than 3 replicas, with 2 servers left"
    )
    assert source.since.tolist() == [busy.epoch + 1] * 8
    stale = Health(gone=lost(server("a")).gone, level=dict.fromkeys(range(8), busy.epoch))
    waits = decide(source, *three, config=config, health=stale)
    assert waits == Plan(None, "8 ranges have fewer than 3 replicas, with 2 servers left")


def test_a_level_report_of_another_filling_promotes_no_joiner() -> None:
    gone = lost(server("b"))
    busy = repaired_once(gone)
    r = int(np.flatnonzero(busy.joining >= 0)[0])
    stale = Health(gone=gone.gone, level={r: int(busy.since[r]) - 1})
    assert decide(busy, *FIRST.servers, health=stale) is None


def test_a_level_joiner_saves_the_range_whose_last_replica_dies() -> None:
    config = ClusterConfig(ranges=8, replicas=2)
    first = written(None, server("a"), config=config)
    busy = written(first, server("a"), server("b"), config=config)
    assert busy.reason == "repair: 8 fillings started on b; 8 under way, 0 to follow"
    both = (server("a"), server("b"))
    level = {0: 2, 1: 2}
    view = written(busy, *both, config=config, health=Health(gone={server("a").member: "killed"}, level=level))
    assert [str(m) for m in names(view, 0)] == ["b#1"]
    assert [str(m) for m in names(view, 2)] == ["a#1"]
    assert view.reason == (
        "a lost (killed): 2 ranges have a new head, 0 fillings start again; 2 level replicas take their capacity; "
        "waiting: a is gone (killed): 6 ranges wait for it; "
        "8 ranges have fewer than 2 replicas, with 1 server left"
    )
    assert view.joining.tolist() == [-1, -1] + [view.index("b")] * 6
    back = decide(view, *both, server("c"), config=config, health=Health(level={2: 2}))
    assert back is not None
    assert "1 ranges got a level replica" in back.reason


def test_a_range_waits_for_its_last_replica_and_the_reason_names_the_server() -> None:
    config = ClusterConfig(ranges=4, replicas=1)
    first = written(None, server("a"), server("b"), config=config)
    headed = int((first.heads == 0).sum())
    gone = written(first, server("b"), config=config, health=lost(server("a")))
    assert gone.reason == f"nothing has changed; waiting: a is gone (killed): {headed} ranges wait for it"
    assert np.array_equal(gone.chains, first.chains)
    assert np.array_equal(gone.since, first.since)
    waits = f"a is gone (killed): {headed} ranges wait for it"
    assert decide(gone, server("b"), config=config, health=lost(server("a"))) == Plan(None, waits), "said once"
    again = written(gone, server("a", 2), server("b"), config=config)
    assert again.reason.endswith(
        f"; waiting: a came back as incarnation 2 without the data of incarnation 1: {headed} ranges wait"
    )
    assert (gone.empty, again.empty) == ((), (("a", 2),))
    assert written(again, server("a", 3), server("b"), config=config).empty == (("a", 3),)
    well = written(gone, server("a"), server("b"), config=config)
    assert well.reason == "nothing waits any more"
    assert well.empty == ()
    assert decide(well, server("a"), server("b"), config=config) is None


def test_a_new_incarnation_proves_the_old_one_gone_and_starts_empty() -> None:
    again = (server("a"), server("b", 2), server("c"))
    view = written(FIRST, *again)
    assert view.servers == again
    assert not (view.chains == 1).any()
    assert view.reason.startswith("b lost (came back as incarnation 2): ")
    assert view.reason.endswith("; b came back, spare")
    filled = written(view, *again)
    assert (filled.joining == 1).any()
    older = decide(view, *FIRST.servers)
    assert older is not None  # a listing from before: the old incarnation is not taken for a newer one
    assert older.view is not None
    assert older.view.servers == again


B_SILENT = Health(gone={server("b").member: "silent"}, silent=frozenset({server("b").member}))
ALONE = {s.member: 2 for s in FIRST.servers}
CUT = Health(cut=frozenset({(server("a").member, server("b").member)}))
LEFT = written(FIRST, *FIRST.servers, health=B_SILENT)


def test_a_silent_server_keeps_its_copy_if_one_replica_is_left() -> None:
    had = (FIRST.chains == 1).any(axis=1)
    assert had.any()
    assert [joiner(LEFT, r) for r in np.flatnonzero(had).tolist()] == [server("b").member] * int(had.sum())
    successor = FIRST.chains[:, 1] == 1
    assert np.array_equal(
        LEFT.copy_state, np.where(had, np.where(successor, CopyState.SUCCESSOR, CopyState.PREDECESSOR), CopyState.NONE)
    )
    assert f"{had.sum()} ranges wait until the replica that is left is confirmed" in LEFT.reason
    assert decide(LEFT, *LEFT.servers, health=B_SILENT) is None, "nobody has lived on for long enough"
    assert not written(FIRST, *FIRST.servers, health=lost(server("b"))).copy_state.any(), "who is dead keeps nothing"


def test_the_remaining_replica_is_confirmed_after_serving_alone_or_a_death() -> None:
    lived = written(LEFT, *LEFT.servers, health=replace(B_SILENT, alone=ALONE))
    ended = written(LEFT, *LEFT.servers, health=lost(server("b")))
    for view in (lived, ended):
        assert not np.isin(view.copy_state, COMPLETE).any()
        assert "ranges go on with the replica that is left" in view.reason
    assert np.array_equal(lived.copy_state, np.where(LEFT.copy_state > 0, CopyState.LATE, CopyState.NONE)), (
        "it may be heard again"
    )
    assert np.array_equal(lived.joining, LEFT.joining)
    assert decide(lived, *lived.servers, health=B_SILENT) is None, "it is waited for"
    earlier = dict.fromkeys(ALONE, 1)
    assert decide(LEFT, *LEFT.servers, health=replace(B_SILENT, alone=earlier)) is None, "of an earlier time alone"
    late = dict.fromkeys(np.flatnonzero(lived.copy_state > 0).tolist(), 3)
    cut = frozenset((b.member, a.member) for a, b in [(server("a"), server("b")), (server("b"), server("c"))])
    for health in (
        lost(server("b")),
        replace(B_SILENT, overdue=B_SILENT.silent),
        replace(B_SILENT, spent=late),
        Health(cut=cut),
    ):
        view = written(lived, *lived.servers, health=health)
        view = written(view, *lived.servers, health=health) if health.cut else view
        assert not view.copy_state.any()
        assert "late copies are given up" in view.reason or health.cut
    for view in (ended, written(lived, *lived.servers, health=replace(B_SILENT, overdue=B_SILENT.silent))):
        assert view.index("b") < 0
        assert (view.joining[LEFT.copy_state > 0] >= 0).all(), "they are being filled elsewhere"
    earlier_fill = dict.fromkeys(late, 2)
    assert decide(lived, *lived.servers, health=replace(B_SILENT, spent=earlier_fill)) is None


def test_a_late_copy_catches_up_once_its_server_reports_and_then_is_a_replica() -> None:
    late = written(LEFT, *LEFT.servers, health=replace(B_SILENT, alone=ALONE))
    back = written(late, *late.servers)
    had = np.flatnonzero(LEFT.copy_state > 0)
    assert set(back.copy_state[had].tolist()) == {CopyState.CATCHING_UP}
    assert np.array_equal(back.joining, late.joining)
    assert f"{had.size} ranges have their second copy again" in back.reason
    assert decide(back, *back.servers) is None, "it is not level"
    level = dict.fromkeys(had.tolist(), back.epoch)
    again = written(back, *back.servers, health=Health(level=level))
    assert [names(again, r) for r in had.tolist()] == [(*names(back, r), server("b").member) for r in had.tolist()]
    silent = written(back, *back.servers, health=B_SILENT)
    assert not silent.copy_state.any(), "acknowledgements may wait for it by now"
    assert (silent.joining[had] < 0).all()


def test_a_late_copy_replaces_no_replica_and_is_kept_while_it_is_the_only_one() -> None:
    late = written(LEFT, *LEFT.servers, health=replace(B_SILENT, alone=ALONE))
    alone = (late.copy_state > 0) & (late.heads == 0)
    dead = lost(server("a"))
    waits = written(late, *late.servers, health=dead)
    assert np.array_equal(waits.chains[alone], late.chains[alone])
    assert set(waits.copy_state[alone].tolist()) == {CopyState.LATE}
    assert f"a is gone (killed): {alone.sum()} ranges wait for it" in waits.reason
    assert f"b has a copy of {alone.sum()} of them, without what was acknowledged since it fell silent" in waits.reason
    level = dict.fromkeys(np.flatnonzero(alone).tolist(), 3)
    overdue = replace(dead, gone={**dead.gone, **B_SILENT.gone}, silent=B_SILENT.silent, overdue=B_SILENT.silent)
    for health in (dead, replace(dead, level=level, spent=level), overdue):
        decision = decide(waits, *waits.servers, health=health)
        view = waits if decision is None or decision.view is None else decision.view
        assert np.array_equal(view.copy_state[alone], waits.copy_state[alone])
        assert np.array_equal(view.chains[alone], waits.chains[alone])


def test_a_retained_copy_replaces_a_last_replica_that_dies() -> None:
    view = written(LEFT, *LEFT.servers, health=lost(server("a")))
    for r in np.flatnonzero((LEFT.copy_state > 0) & (LEFT.heads == 0)).tolist():
        assert names(view, r) == (server("b").member,)
    both = Health({**B_SILENT.gone, server("a").member: "killed"}, silent=B_SILENT.silent)
    waits = written(LEFT, *LEFT.servers, health=both)
    alone = (LEFT.copy_state > 0) & (LEFT.heads == 0)
    assert np.array_equal(waits.chains[alone], LEFT.chains[alone]), "nobody is there"
    assert f"a is gone (killed): {alone.sum()} ranges wait for it; b is gone (silent): " in waits.reason
    assert np.array_equal(waits.copy_state[alone], LEFT.copy_state[alone])


def test_a_silent_server_keeps_its_copy_if_a_level_joiner_takes_over() -> None:
    """That one was dead already, and the only other copy was thrown away."""
    single = written(FIRST, *FIRST.servers, health=lost(server("b")))
    filled = written(single, *(s for s in single.servers if s.name != "b"))
    r = next(r for r in range(filled.ranges) if names(filled, r) == (server("a").member,) and filled.joining[r] >= 0)
    other = joiner(filled, r)
    assert other is not None
    silent = Health(
        gone={server("a").member: "silent"}, silent=frozenset({server("a").member}), level={r: int(filled.since[r])}
    )
    view = written(filled, *filled.servers, health=silent)
    assert names(view, r) == (other,)
    assert (joiner(view, r), view.copy_state[r]) == (server("a").member, CopyState.PREDECESSOR)
    assert names(written(view, *view.servers, health=Health({other: "killed"})), r) == (server("a").member,)
    ended = written(filled, *filled.servers, health=replace(silent, silent=frozenset()))
    assert (names(ended, r), ended.copy_state[r]) == ((other,), CopyState.NONE), "who is dead keeps nothing"


def test_a_server_heard_again_is_tail_or_catches_up_by_its_former_role() -> None:
    health = Health(alone=ALONE)
    view = written(LEFT, *LEFT.servers, health=health)
    for r in range(view.ranges):
        if LEFT.copy_state[r] == CopyState.SUCCESSOR:
            assert names(view, r) == (names(LEFT, r)[0], server("b").member)
        elif LEFT.copy_state[r] == CopyState.PREDECESSOR:
            assert names(view, r) == names(LEFT, r)
            assert joiner(view, r) == server("b").member
            assert view.copy_state[r] == CopyState.CATCHING_UP
    view = written(LEFT, *LEFT.servers, health=replace(CUT, alone=ALONE))
    assert [names(view, r) for r in np.flatnonzero(LEFT.heads == 0).tolist() if LEFT.copy_state[r]] == [
        (server("a").member,) for r in np.flatnonzero(LEFT.heads == 0).tolist() if LEFT.copy_state[r]
    ]


def test_servers_that_cannot_reach_each_other_stop_being_neighbours() -> None:
    view = written(FIRST, *FIRST.servers, health=CUT)
    assert view.reason.startswith("a and b cannot reach each other: ")
    pairs = {(0, 1), (1, 0)}
    assert not pairs & {tuple(chain) for chain in view.chains.tolist()}
    assert np.array_equal(view.heads, FIRST.heads)
    repairing = written(view, *FIRST.servers, health=replace(CUT, alone=ALONE))
    filling = np.flatnonzero(repairing.joining >= 0)
    assert filling.size
    assert set(repairing.joining[filling].tolist()) == {2}


def test_a_server_left_out_for_a_cut_keeps_its_copy_and_takes_over_after_a_death() -> None:
    view = written(FIRST, *FIRST.servers, health=CUT)
    (parted,) = np.nonzero(view.copy_state)
    assert parted.size
    assert [(*names(view, r), joiner(view, r)) for r in parted.tolist()] == [names(FIRST, r) for r in parted.tolist()]
    assert set(view.copy_state[parted].tolist()) == {CopyState.SUCCESSOR}
    assert f"{parted.size} ranges go on without the second; {parted.size} ranges wait until" in view.reason
    assert decide(view, *view.servers, health=CUT) is None, "who is left has not lived on for long enough"
    for r in parted.tolist():
        dead = lost(*(s for s in view.servers if s.member == names(view, r)[0]))
        after = written(view, *view.servers, health=replace(CUT, gone=dead.gone))
        assert names(after, r) == (joiner(view, r),)


def test_a_level_joiner_replaces_a_server_left_out_for_a_cut() -> None:
    chains, joining = np.array([[0, 1], [0, 1], [0, 1], [0, 2]]), np.array([2, 2, -1, 1])
    moving = View("demo", 2, 4, 2, FIRST.servers, chains, joining, np.array([2, 2, 1, 1]), "test")
    view = written(moving, *FIRST.servers, health=replace(CUT, level={0: 2}))
    a, b, c = (s.member for s in FIRST.servers)
    found = [(names(view, r), joiner(view, r)) for r in range(4)]
    assert found == [((a, c), None), ((a,), b), ((a,), b), ((a, c), b)]


def test_a_filling_between_servers_that_are_cut_off_is_given_up() -> None:
    gone = lost(server("b"))
    busy = repaired_once(gone)
    r = int(np.flatnonzero(busy.joining >= 0)[0])
    source, target = names(busy, r)[-1], busy.as_chains.joiner_of(r)
    assert target is not None
    cut = Health(gone=gone.gone, cut=frozenset({(min(source, target), max(source, target))}))
    view = written(busy, *FIRST.servers, health=cut)
    assert view.as_chains.joiner_of(r) is None
    assert names(view, r) == names(busy, r)


def test_servers_not_heard_yet_are_not_listed() -> None:
    config = ClusterConfig(ranges=8, replicas=2)
    first = written(None, server("a"), config=config)
    pending = Health(pending=frozenset({server("b").member}))
    waits = decide(first, server("a"), server("b"), config=config, health=pending)
    assert waits is not None
    assert waits.view is None
    assert (written(first, server("a"), server("b"), config=config).joining == 1).all()


def test_zones_are_respected_where_there_are_enough() -> None:
    config = ClusterConfig(ranges=64, replicas=2)
    members = [ServerInfo(f"s{i}", 1, "h:1", zone=f"z{i % 2}") for i in range(6)]
    view = written(None, *members, config=config)
    gone = lost(members[0], members[3])
    view = settled(view, members, config, gone)
    assert view.chains.min() >= 0
    for chain in view.chains.tolist():
        assert len({view.servers[i].zone for i in chain}) == 2


def test_loads_stay_even_and_successors_few_through_repair() -> None:
    config = ClusterConfig(ranges=1024, replicas=2)
    members = [server(f"s{i}") for i in range(20)]
    view = written(None, *members, config=config)
    gone = lost(*members[:3])
    view = settled(view, members, config, gone)
    assert view.chains.min() >= 0
    held = np.bincount(view.chains.ravel(), minlength=17)
    assert held.max() <= 1.3 * held.mean()
    successors = [len(np.unique(view.chains[view.heads == i, 1])) for i in range(17)]
    assert sum(successors) / 17 <= 5


def test_a_new_server_is_listed_while_others_are_not_heard_and_moves_nothing() -> None:
    pending = Health(pending=frozenset({server("a").member}))
    view = written(FIRST, *FIRST.servers, server("aa"), health=pending)
    assert view.epoch == 2
    assert [member.name for member in view.servers] == ["a", "b", "c", "aa"]
    assert np.array_equal(view.chains, FIRST.chains)
    assert np.array_equal(view.since, FIRST.since)
    assert view.reason == "aa joined"
    again = written(view, *FIRST.servers, server("aa", 2), health=pending)
    assert again.servers[3] == server("aa", 2)
    assert again.reason == "aa came back, spare"
    gone = written(again, *FIRST.servers, health=lost(server("aa", 2)))
    assert gone.servers == FIRST.servers
    assert gone.reason == "aa left, spare (killed)"
    assert gone.epoch == 4


def test_reasons_stay_short() -> None:
    config = ClusterConfig(ranges=1024, replicas=1, min_servers=1)
    many = [server(f"server-with-a-long-name-{i}") for i in range(300)]
    view = written(None, *many, config=config)
    assert len(written(view, server("new"), config=config).reason) <= 1000
    assert len(written(view, *many[:200], config=config, health=lost(*many[200:])).reason) <= 1000
    spares = [server(f"spare-{i}") for i in range(300)]
    pending = Health(pending=frozenset(s.member for s in many))
    assert written(view, *many, *spares, config=config, health=pending).reason.endswith("and 295 more joined")


def test_a_plan_that_breaks_the_law_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: Draft, *_: object) -> Removal:
        self.chains = np.roll(self.chains, 1, axis=1)
        return Removal((), 0, 0, 0, 0, 0, 0, np.empty(0, np.int64))

    monkeypatch.setattr(Draft, "lose", everything)
    with pytest.raises(UnsafePlan, match="cannot become"):
        decide(FIRST, *FIRST.servers)


def test_no_ranges_are_rebalanced_during_a_restore() -> None:
    four = (*FIRST.servers, server("d"))
    came = plan(FIRST, Members("c", four, restores=True), CONFIG)
    assert came is not None
    assert came.view is not None
    assert came.reason == "d joined"
    assert plan(came.view, Members("c", four, restores=True), CONFIG) is None
    drained = plan(came.view, Members("c", four, frozenset({server("a").member}), restores=True), CONFIG)
    assert drained is not None
    assert drained.view is not None
    assert (drained.view.joining >= 0).any()
    after = plan(came.view, Members("c", four), CONFIG)
    assert after is not None
    assert after.view is not None
    assert (after.view.joining >= 0).any()
