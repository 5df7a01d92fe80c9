"""The parsed state of a cluster: immutable, the same however it came about, and never spoilt by an entry."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from coordinator.core.cluster_state import ClusterState, Drain, Record
from coordinator.core.keys import (
    CONFIG,
    DRAINS,
    ELECTION,
    LAST_WORKER,
    RANGE_RECOVERY,
    RESTORE_FILLS,
    ROSTER,
    SERVERS,
    SIGNED_OFF,
    VIEW,
    WORKERS,
    RangeRecovery,
)
from coordinator.core.store import Delete, Entry, Listing, Put, Reset
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, WorkerInfo
from coordinator.memory import MemoryStore
from replication.chain import Member

WORKER = WorkerInfo(5, "w", 5, "default")
VALUES = {
    CONFIG: ClusterConfig(16, 2, id="x").to_json(),
    ROSTER: Roster(3, (WORKER,), "test@x").encode(),
    ELECTION: b'{"name": "c0"}',
    SERVERS + "a": ServerInfo("a", 1, "h:1").to_json(),
    WORKERS + "default/w": WORKER.to_json(),
    WORKERS + "default/v": SIGNED_OFF,
    LAST_WORKER + "default/w": b'{"id": 5}',
    DRAINS + "a": b'{"incarnation": 1, "leaves": true}',
    RANGE_RECOVERY: json.dumps({"ranges": [1, 2], "given_up": [["b", 3]]}).encode(),
    RESTORE_FILLS: b"",
}


def test_every_key_is_parsed() -> None:
    state = ClusterState.parse("test", Listing(tuple(Entry(key, VALUES[key], 7, 4) for key in sorted(VALUES)), 9))
    assert (state.revision, state.term, state.leader, state.config_created) == (9, 4, "c0", 4)
    assert state.config == ClusterConfig(16, 2, id="x")
    assert (state.view, state.revisions) == (None, {CONFIG: 7, VIEW: 0, ROSTER: 7})
    assert [server.name for server in state.registered] == ["a"]
    assert (list(state.workers.values()), state.signed_off) == ([WORKER], frozenset({"v"}))
    assert list(state.records.values()) == [Record(5, 7)]
    assert state.drains == {"a": Drain(Member("a", 1), 7, leaves=True)}
    assert state.draining == state.leaving == {Member("a", 1)}
    assert state.recovery == RangeRecovery(frozenset({1, 2}), frozenset({Member("b", 3)}))
    assert state.restores
    assert not state.nonsense


def test_a_state_followed_change_by_change_is_the_state_of_a_new_listing() -> None:
    async def story() -> None:
        store = MemoryStore()
        state = ClusterState.parse("test", await store.list(""))
        watch, seen = store.watch("", after=state.revision), state
        for key, value in [*VALUES.items(), *((key, b"?") for key in VALUES if key not in (CONFIG, ROSTER))]:
            await store.put(key, value)
            seen = seen.apply(await anext(watch))
            assert seen == ClusterState.parse("test", await store.list(""), seen)
        for key in VALUES:
            await store.delete(key)
            seen = seen.apply(await anext(watch))
        listing = await store.list("")
        assert seen == replace(ClusterState.parse("test", listing), signed_off=seen.signed_off)
        await watch.aclose()

    asyncio.run(story())


def test_applying_a_change_leaves_the_old_state_unchanged() -> None:
    before = ClusterState("test").apply(Put(Entry(SERVERS + "a", VALUES[SERVERS + "a"], 1, 1)))
    after = before.apply(Delete(SERVERS + "a", 2))
    assert list(before.servers) == ["a"]
    assert not after.servers


def test_a_damaged_entry_is_left_out_with_the_reason() -> None:
    state = ClusterState("test").apply(Put(Entry(SERVERS + "a", VALUES[SERVERS + "a"], 1, 1)))
    state = state.apply(Put(Entry(SERVERS + "a", b"{", 2, 1)))
    assert not state.servers
    assert "holds b'{'" in state.nonsense[SERVERS + "a"]
    state = state.apply(Put(Entry(SERVERS + "a", VALUES[SERVERS + "a"], 3, 1)))
    assert list(state.servers) == ["a"]
    assert not state.nonsense


def test_a_damaged_roster_leaves_the_last_good_one() -> None:
    state = ClusterState("test").apply(Put(Entry(ROSTER, VALUES[ROSTER], 1, 1)))
    damaged = Entry(ROSTER, b"?", 2, 1)
    for change in (Put(damaged), Reset(Listing((damaged,), 2))):
        after = state.apply(change)
        assert after.roster == state.roster
        assert ROSTER in after.nonsense
        assert after.revisions[ROSTER] == 2
        assert after.apply(Delete(ROSTER, 3)).roster is None
