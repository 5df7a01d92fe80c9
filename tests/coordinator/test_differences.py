"""Differences of views and rosters: they make of their base what they were made for, and of nothing else anything."""

from __future__ import annotations

import random
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import differences
from coordinator.core.differences import (
    _FIXED,
    _MAGIC,
    REMEMBERED,
    WHOLE_BYTES,
    RosterDifference,
    ViewDifference,
    ViewHistory,
    apply_encoded,
    change_of,
    encoded_difference,
    follow_roster,
)
from coordinator.core.planner import Health, Members, plan
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import CopyState
from tests.coordinator.test_view import small


def random_view(chance: random.Random, servers: list[ServerInfo], ranges: int, replicas: int, epoch: int) -> View:
    """Any valid view of these servers, in any order."""
    chance.shuffle(servers)
    chains, joining = np.full((ranges, replicas), -1, np.int32), np.full(ranges, -1, np.int32)
    for r in range(ranges):
        order = chance.sample(range(len(servers)), len(servers))
        length = chance.randint(0, min(replicas, len(servers)))
        chains[r, :length] = order[:length]
        if length < len(servers) and chance.random() < 0.5:
            joining[r] = order[length]
    since = np.array([chance.randint(1, epoch) for _ in range(ranges)])
    alone = ((chains >= 0).sum(axis=1) == 1) & (joining >= 0)
    copy_state = np.where(alone, chance.choice([CopyState.NONE, CopyState.SUCCESSOR]), CopyState.NONE).astype(np.int32)
    copy_state[(chains[:, 0] < 0) & (joining >= 0)] = CopyState.RECOVERING
    empty = tuple((server.name, server.incarnation + 1) for server in servers if chance.random() < 0.2)
    return View(
        "c", epoch, ranges, replicas, tuple(servers), chains, joining, since, chance.choice(["", "ä", "reason"]),
        copy_state=copy_state, recovery_epoch=np.where(chains[:, 0] < 0, since, 0), empty=empty,
    )  # fmt: skip


@st.composite
def pairs(draw: st.DrawFn) -> tuple[View, View]:
    """Two views of one cluster. Of the second, some servers and most ranges are those of the first."""
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    ranges, replicas, epoch = chance.choice([2, 4, 16, 64]), chance.randint(1, 4), chance.randint(1, 1 << 40)
    servers = [ServerInfo(f"s{i}", chance.randint(1, 3), "h:1", zone=chance.choice(["", "z"])) for i in range(6)]
    base = random_view(chance, servers[: chance.randint(0, 5)], ranges, replicas, epoch)
    left = [server for server in base.servers if chance.random() < 0.9]
    come = [server for server in servers[5:] if chance.random() < 0.5]
    view = random_view(chance, left + come, ranges, replicas, epoch + chance.randint(1, 9))
    moved = np.array([*(view.index(server.name) for server in base.servers), -1], np.int32)
    gone = (moved[base.chains] < 0) & (base.chains >= 0)
    same = ~gone.any(axis=1) & ((base.joining < 0) | (moved[base.joining] >= 0))
    same &= np.array([chance.random() < 0.8 for _ in range(ranges)])
    return base, replace(
        view,
        chains=np.where(same[:, None], moved[base.chains], view.chains),
        joining=np.where(same, moved[base.joining], view.joining),
        leaving=np.where(same, moved[base.leaving], view.leaving),
        **{
            name: np.where(same, getattr(base, name), getattr(view, name))
            for name in ("copy_state", "since", "recovery_epoch")
        },
    )


def cluster(servers: int = 60, ranges: int = 1024) -> tuple[View, Members]:
    """The first view of a cluster, and its servers."""
    infos = tuple(ServerInfo(f"server-{i:04d}", 1, f"10.0.0.{i}:7001", f"10.0.0.{i}:8001") for i in range(servers))
    decision = plan(None, Members("c@x", infos), ClusterConfig(ranges, 2, 1, id="x"), Health())
    assert decision is not None
    assert decision.view is not None
    return decision.view, Members("c@x", infos)


def death(view: View, members: Members) -> View:
    """The view after the death of a server."""
    dead = members.servers[7].member
    left = tuple(server for server in members.servers if server.member != dead)
    decision = plan(view, Members("c@x", left), ClusterConfig(view.ranges, 2, 1, id="x"), Health(gone={dead: "died"}))
    assert decision is not None
    assert decision.view is not None
    return decision.view


@given(pairs())
def test_a_difference_makes_the_newer_view_of_its_base(pair: tuple[View, View]) -> None:
    base, view = pair
    difference = ViewDifference.decode(ViewDifference.between(base, view).encode())
    assert difference.apply(base) == view
    assert difference.apply(view) is None
    assert difference.apply(replace(base, reason=base.reason[:-1] + "?")) is None, "another base of the same epoch"


@given(pairs(), st.data())
def test_bytes_that_were_cut_or_changed_make_no_other_view(pair: tuple[View, View], data: st.DataObject) -> None:
    base, view = pair
    encoded = ViewDifference.between(base, view).encode()
    body = bytearray(zlib.decompress(encoded[len(_MAGIC) :]))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    changed = _MAGIC + zlib.compress(bytes(body), 1)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with suppress(ValueError):
        found = ViewDifference.decode(changed).apply(base)
        assert found is None or found == view  # a JSON text may be written in several ways
    with pytest.raises(ValueError, match="difference of views"):
        ViewDifference.decode(cut)


@pytest.mark.parametrize(
    ("count", "runs", "ranges", "tail"),
    [
        (3, 1, 2, 0), (1, 2, 2, 0), (1, 1, 3, 0), (1, 1, 1 << 17, 0), (1, 1, 2, 4), (1 << 31, 1 << 31, 1 << 16, 0),
    ],
)  # fmt: skip
def test_sizes_are_checked_before_anything_is_allocated(count: int, runs: int, ranges: int, tail: int) -> None:
    meta = b'["",[],[]]'
    fixed = _FIXED.pack(1, bytes(16), 2, bytes(16), ranges, 1, count, runs, len(meta))
    with pytest.raises(ValueError, match=r"difference of views|number of ranges"):
        ViewDifference.decode(_MAGIC + zlib.compress(fixed + meta + bytes(8 + 4 * 4 + 16 + tail)))


@pytest.mark.parametrize(
    "runs",
    [[(-1, 1)], [(0, 0)], [(0, 3)], [(2, 1)], [(0, 1), (0, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, -1), (0, 3)]],
)
def test_runs_of_ranges_lie_in_order_and_apart(runs: list[tuple[int, int]]) -> None:
    meta, count = b'["",[],[]]', max(1, sum(count for _, count in runs))
    fixed = _FIXED.pack(1, bytes(16), 2, bytes(16), 2, 1, count, len(runs), len(meta))
    columns = np.array(runs, "<i4").T.tobytes() + bytes(count * (4 * 4 + 16))
    with pytest.raises(ValueError, match="difference of views"):
        ViewDifference.decode(_MAGIC + zlib.compress(fixed + meta + columns))


@pytest.mark.parametrize(
    "meta", [b"[]", b'["",[[0]],[]]', b'["",[[0,true]],[]]', b'["",[[0,4097]],[]]', b'["",[[-1,1]],[]]', b'["",[5],[]]',
             b'["",[],[[1,2,3]]]', b'["",[[["a"],1,"h:1","","",1.0]],[]]', b'[1,[],[]]', b"{"],
)  # fmt: skip
def test_servers_that_are_none_are_refused(meta: bytes) -> None:
    fixed = _FIXED.pack(1, bytes(16), 2, bytes(16), 2, 1, 0, 0, len(meta))
    with pytest.raises(ValueError, match=r"difference of views|server"):
        ViewDifference.decode(_MAGIC + zlib.compress(fixed + meta))


def test_servers_that_the_base_does_not_have_are_a_gap() -> None:
    base = small()
    difference = ViewDifference.between(base, replace(base, epoch=4))
    assert replace(difference, order=((0, 3),)).apply(base) is None
    assert replace(difference, order=((0, 2), (1, 1))).apply(base) is None
    assert replace(difference, order=()).apply(base) is None


def test_a_result_with_another_digest_is_a_gap() -> None:
    base = small()
    view = replace(base, epoch=4, since=np.array([4, 3]))
    difference = ViewDifference.between(base, view)
    assert difference.apply(base) == view
    assert replace(difference, epochs=np.array([[3, 0]])).apply(base) is None


def test_another_base_is_a_gap_even_of_the_same_epoch() -> None:
    base = small()
    difference = ViewDifference.between(base, replace(base, epoch=4, since=np.array([4, 3])))
    for other in (replace(base, epoch=4), replace(base, reason="another"), replace(base, since=np.array([2, 3]))):
        assert difference.apply(other) is None


def test_views_of_other_clusters_have_no_difference() -> None:
    with pytest.raises(ValueError, match="different clusters"):
        ViewDifference.between(small(), small(cluster="another", epoch=4))


def test_the_death_of_a_server_takes_little_and_a_notice_says_nothing() -> None:
    view, members = cluster()
    after = death(view, members)
    data = encoded_difference(view, after)
    assert data is not None
    assert len(data) < 1000 < len(after.encode())
    assert apply_encoded(view, data) == after
    notice = ViewDifference.decode(ViewDifference.notice(after).encode())
    assert (notice.epoch, notice.apply(view)) == (after.epoch, None)


def test_a_history_has_differences_from_views_that_receivers_may_have() -> None:
    view, members = cluster(20, 1024)
    history, seen = ViewHistory(), [view, death(view, members)]
    seen += [replace(seen[1], epoch=2 + i) for i in range(1, REMEMBERED + 2)]
    for each in seen:
        history.add(each)
    newest = seen[-1]
    known = [history.since(each.epoch) for each in seen]
    assert [data is None for data in known] == [True] * 2 + [False] * REMEMBERED + [True]
    for each, data in zip(seen, known, strict=True):
        assert data is None or apply_encoded(each, data) == newest
    assert history.since(0) is None
    history.add(replace(view, cluster="another"))
    assert history.since(newest.epoch) is None


def test_records_of_the_store_lead_from_a_known_view_to_the_newest() -> None:
    view, members = cluster(20, 256)
    seen = [view, death(view, members)]
    seen += [replace(seen[1], epoch=2 + i, reason=str(i)) for i in range(1, REMEMBERED + 2)]
    records: dict[str, bytes] = {}
    for before, each in pairwise(seen):
        key, value = change_of(each, before)
        records[key] = value
    assert len(records) == REMEMBERED
    follow = differences.follow_view
    assert [follow(each, records.values()) for each in seen[-1 - REMEMBERED :]] == [seen[-1]] * (REMEMBERED + 1)
    assert follow(seen[1], records.values()) is None, "too far behind"
    assert follow(replace(seen[-1], reason="?"), records.values()) is None, "another view of that epoch"
    assert follow(replace(seen[-1], epoch=99), records.values()) is None, "the store has come less far"
    assert follow(view, []) is None
    key, value = change_of(replace(seen[-1], epoch=seen[-1].epoch + 1), None)
    assert follow(seen[-1], [*records.values(), value]) is None, "a notice"


# --- rosters -------------------------------------------------------------------------------------------------------

WORKERS = st.lists(st.integers(1, 40), unique=True).map(
    lambda ids: tuple(WorkerInfo(i, f"w{i}", 1 + i % 3, "default") for i in sorted(ids))
)


@given(WORKERS, WORKERS)
def test_a_difference_of_rosters_makes_the_newer_one_of_its_base(
    before: tuple[WorkerInfo, ...], after: tuple[WorkerInfo, ...]
) -> None:
    base, roster = Roster(5, before, "c"), Roster(6, after, "c")
    difference = RosterDifference.decode(RosterDifference.between(base, roster).encode())
    assert difference.apply(base) == roster
    made = difference.apply(base)
    assert made is not None
    assert made.fingerprint == Roster(6, after, "c").fingerprint
    assert (made.by_id, made.newest, made.ids) == (roster.by_id, roster.newest, roster.ids)
    assert made.change_from(base) == roster.change_from(base)
    assert made.change_from(None) == roster.change_from(None)
    assert made.change_from(roster) == ((), ())
    assert difference.apply(roster) is None
    assert difference.apply(Roster(5, (WorkerInfo(50, "other", 1, "default"),), "c")) is None
    assert replace(difference, print_=difference.print_ ^ 1).apply(base) is None
    for cut in range(0, len(difference.encode()), 7):
        with pytest.raises(ValueError, match="difference of rosters"):
            RosterDifference.decode(difference.encode()[:cut])


def test_who_comes_to_a_large_roster_takes_few_bytes() -> None:
    workers = tuple(WorkerInfo(i, f"worker-{i}", 1, "default") for i in range(1, 5001))
    base, roster = Roster(1, workers[:-1], "c"), Roster(2, workers, "c")
    key, data = change_of(roster, base)
    assert key == "changes/roster/2"
    assert len(data) < 200 < len(roster.encode())
    assert follow_roster(base, [data]) == roster
    assert follow_roster(roster, [data]) == roster
    assert follow_roster(Roster(3, workers, "c"), [data]) is None
    notice = RosterDifference.decode(change_of(roster, None)[1])
    assert (notice.version, notice.apply(base)) == (2, None)


def test_a_roster_that_barely_fits_is_written_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = tuple(WorkerInfo(i, f"worker-{i}", 1, "default") for i in range(1, 1001))
    base, roster = Roster(1, workers[:500], "c"), Roster(2, workers, "c")
    monkeypatch.setattr(differences, "VALUE_MAX", len(roster.encode()) + 200)
    assert len(change_of(roster, base)[1]) < 200


def test_a_short_view_is_sent_whole() -> None:
    """To make a difference, and to apply it, takes more time than the view."""
    view, members = cluster(8, 64)
    after = death(view, members)
    history = ViewHistory()
    history.add(view)
    history.add(after)
    assert encoded_difference(view, after) is not None
    assert len(after.encode()) <= WHOLE_BYTES
    assert history.since(view.epoch) is None
