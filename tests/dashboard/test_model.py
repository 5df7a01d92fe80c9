"""The model behind the page, made of the store's keys and the servers' answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.keys import DRAINS, ELECTION, NEWEST_CHECKPOINT, ROSTER, SERVERS, VIEW
from coordinator.core.store import Entry, Listing, Reset
from coordinator.core.view import Roster, WorkerInfo
from elasticps.admin.attached_readers import merge_readers
from elasticps.dashboard.core.history import History
from elasticps.dashboard.core.samples import CLUSTER_COLUMNS, SERVER_COLUMNS, percentile
from elasticps.dashboard.core.tables import TableStates
from elasticps.dashboard.core.timeline import DETECTED, Timeline
from elasticps.model.policies import IdleFor, MinCount
from elasticps.model.spec import Accumulate, TableSpec
from tests.dashboard.scene import FOUND_S, Scene, activity, status, use


def server(scene: Scene, name: str) -> dict[str, Any]:
    return next(s for s in scene.model.snapshot(scene.now)["servers"] if s["id"] == name)


def entries(scene: Scene, kind: str) -> list[dict[str, Any]]:
    return [e for e in scene.model.snapshot(scene.now)["entries"] if e["kind"] == kind]


def test_a_lost_server_is_shown_until_it_comes_back() -> None:
    scene = Scene(servers=3)
    scene.tick(3)
    assert {s["state"] for s in scene.model.snapshot(scene.now)["servers"]} == {"serving"}
    died = scene.now
    scene.kill("s1")
    lost = server(scene, "s1")
    assert lost["state"] == "lost"
    assert "s1 lost (connection closed)" in lost["reason"]
    assert lost["since"] == died
    [entry] = entries(scene, "loss")
    assert entry["t"] == died
    assert entry["until"] is None
    assert [name for name, _ in entry["parts"]] == ["connection broke", DETECTED, "view written"]

    assert scene.model.urgent(scene.now) == {"s0", "s2"}
    scene.answer("s0")
    assert dict(entry["parts"])[DETECTED] == pytest.approx(scene.now - FOUND_S)
    assert len(entries(scene, "loss")[0]["parts"]) == 3  # s2 has not adopted the view
    scene.answer("s2")
    scene.answer(pushes=0)
    assert len(entries(scene, "loss")[0]["parts"]) == 4  # nobody has pushed since
    scene.answer()
    assert [name for name, _ in entries(scene, "loss")[0]["parts"]][3:] == ["adopted by all", "first push"]
    assert not scene.model.urgent(scene.now)

    while scene.view is not None and (scene.view.chains < 0).any():
        scene.tick()
        scene.plan(level=True)
    [entry] = entries(scene, "loss")
    assert entry["parts"][-1] == ("all replicas there", scene.now)
    assert entry["until"] == scene.now
    scene.register("s1", incarnation=2)
    scene.tick()
    assert server(scene, "s1")["state"] == "spare"
    scene.plan()
    assert server(scene, "s1")["state"] == "filling"
    assert server(scene, "s1")["peak"] == server(scene, "s1")["joining"] > 0


def test_a_reader_is_as_old_as_its_oldest_server() -> None:
    def servers(*ages: tuple[str, float]) -> list[dict[str, Any]]:
        return [
            {"readers": [{"name": name, "app": "default", "age_s": age_s, "unread_bytes": 5}]} for name, age_s in ages
        ]

    merged = merge_readers([*servers(("r1", 0.5), ("r1", 2.0), ("r0", 1.0)), {}])
    assert [(one["name"], one["age_s"], one["unread_bytes"]) for one in merged] == [("r0", 1.0, 5), ("r1", 2.0, 10)]
    (new,) = merge_readers(servers(("r0", 1.0), ("r0", -1.0), ("r0", 3.0)))
    assert new["age_s"] is None


def test_a_drained_server_is_not_lost() -> None:
    scene = Scene(servers=3)
    scene.put(DRAINS + "s2", json.dumps({"incarnation": 1}).encode())
    assert server(scene, "s2")["state"] == "draining"
    scene.kill("s2")
    assert not entries(scene, "loss")
    assert [e["title"] for e in entries(scene, "drain")] == ["drain of s2 asked"]


def test_a_drained_server_that_ends_after_its_view_is_gone_from_the_page() -> None:
    scene = Scene(servers=3)
    scene.tick()
    scene.put(DRAINS + "s2", json.dumps({"incarnation": 1}).encode())
    scene.plan("s2")
    assert server(scene, "s2")["held"] == 0
    assert server(scene, "s2")["state"] == "draining"  # it holds nothing, and has not ended yet
    scene.model.silent(scene.now, "s2", 1, "connection refused")
    scene.delete(SERVERS + "s2")
    scene.model.tick(scene.now)
    assert [s["id"] for s in scene.model.snapshot(scene.now)["servers"]] == ["s0", "s1"]


def test_a_server_that_does_not_answer_is_shown_as_silent() -> None:
    scene = Scene(servers=3)
    scene.tick()
    scene.model.silent(scene.now, "s0", 1, "no answer")
    assert (server(scene, "s0")["state"], server(scene, "s0")["reason"]) == ("silent", "no answer")
    scene.now += 4
    scene.model.status(scene.now, "s0", 1, status("s0", 1, 1, 0))
    assert server(scene, "s0")["state"] == "serving"
    assert [e["title"] for e in entries(scene, "server")] == ["s0 did not answer for 4.0 s"]
    scene.model.status(scene.now, "s0", 7, status("s0", 7, 1, 0))  # another process at its address
    assert server(scene, "s0")["incarnation"] == 1


def test_rates_are_counted_between_two_answers_of_one_process() -> None:
    scene = Scene(servers=2, replicas=1)
    scene.tick(2)
    sample = scene.model.snapshot(scene.now)["sample"]
    row = dict(zip(SERVER_COLUMNS, sample["servers"]["s0"], strict=True))
    assert (row["push_s"], row["pull_s"], row["rows_pulled_s"]) == (100, 200, 2000)
    assert row["received_s"] == 100_000
    assert 0 < row["push_p50"] < row["push_p99"] <= 0.01
    scene.register("s0", incarnation=2)  # counts from 0 again
    scene.tick()
    row = dict(zip(SERVER_COLUMNS, scene.model.snapshot(scene.now)["sample"]["servers"]["s0"], strict=True))
    assert row["push_s"] is None


def test_workers_are_shown_at_their_lowest_clock() -> None:
    scene = Scene(servers=2, workers=3)
    scene.tick(5)
    workers = scene.model.snapshot(scene.now)["sample"]["workers"]
    clocks = [workers[i][0] for i in (1, 2, 3)]
    assert clocks == [clocks[0], clocks[0] - 1, clocks[0] - 2]
    assert [workers[i][1] for i in (1, 2, 3)] == [0, 1, 2]
    assert workers[1][2] == 0.01  # a hundred steps a second
    scene.put(ROSTER, Roster(2, (*scene.workers[:1], WorkerInfo(9, "w1", 9, "default")), "demo").encode())
    assert [e["title"] for e in entries(scene, "worker")] == ["worker w1 came back", "worker w2 left"]


def test_reports_of_workers_are_shown_as_rates_between_the_last_two() -> None:
    scene = Scene(servers=2, workers=2)

    def send(name: str, *reports: dict[str, int]) -> None:
        answer = {**activity(1, [1, 2], 50, 100), "uses": list(reports)}
        scene.model.activity(scene.now, name, answer)
        scene.model.tick(scene.now)

    def shown() -> list[Any]:
        found: list[Any] = scene.model.snapshot(scene.now)["sample"]["workers"][2]
        return found[3:]

    send("s0", use(2, clock=10, committed=9, sent=1000, received=500, wanted=10, kept=0, shards=3))
    assert shown() == [1, None, None, 3]  # one step is outstanding; of the rest there is no second word yet
    scene.now += 4
    send("s0", use(2, clock=20, committed=20, sent=3000, received=1500, wanted=110, kept=75, shards=2))
    assert shown() == [0, 0.75, 300, 2]
    scene.now += 1
    send(
        "s0", use(2, clock=20, committed=20, sent=3000, received=1500, wanted=110, kept=75, shards=2)
    )  # not asked anew
    assert shown() == [0, 0.75, 300, 2]
    scene.now += 4
    send("s1", use(2, clock=21, committed=20, sent=3100, received=1600, wanted=110, kept=75, shards=0))  # another asks
    send("s0")
    assert shown() == [1, None, 200, 0]  # it has pulled nothing
    scene.now += 4
    send("s0", use(2, clock=20, committed=20, sent=3000, received=1500, wanted=110, kept=75, shards=2))  # it did before
    assert shown() == [1, None, 200, 0]
    sample = scene.model.snapshot(scene.now)["sample"]
    assert dict(zip(CLUSTER_COLUMNS, sample["cluster"], strict=True))["outstanding"] == 1


def test_an_outage_of_the_store_is_shown_and_changes_nothing_else() -> None:
    scene = Scene()
    before = scene.model.snapshot(scene.now)
    scene.model.store_fails(scene.now + 1, "connection refused")
    scene.model.store_fails(scene.now + 2, "connection refused")
    assert scene.model.snapshot(scene.now)["state"]["store_error"] == "connection refused"
    assert scene.model.snapshot(scene.now)["state"]["store_since"] == scene.now + 1
    assert scene.model.snapshot(scene.now)["servers"] == before["servers"]
    scene.model.store_answers(scene.now + 5)
    assert [(e["t"], e["until"]) for e in entries(scene, "outage")] == [(scene.now + 1, scene.now + 5)]
    assert scene.model.snapshot(scene.now)["state"]["store_error"] == ""


def test_views_of_one_cause_are_one_entry() -> None:
    timeline = Timeline()
    for epoch, reason in enumerate(
        ("s1 silent: 9 kept", "repair: 3 to follow", "repair: 2 to follow", "balance: 1 moved")
    ):
        timeline.repeat("repair", 10.0 + epoch, f"view {epoch}", reason, epoch)
    assert [(e.title, e.reason, e.count, e.until) for e in timeline.entries] == [
        ("view 0", "s1 silent: 9 kept", 1, 10.0),
        ("view 2", "repair: 2 to follow", 2, 12.0),
        ("view 3", "balance: 1 moved", 1, 13.0),
    ]
    timeline.repeat("repair", 30.0, "view 9", "balance: 1 moved", 9)
    assert len(timeline.entries) == 4


def test_leaders_and_checkpoints_are_in_the_timeline() -> None:
    scene = Scene()
    scene.delete(ELECTION)
    scene.put(ELECTION, b'{"name": "c1"}')
    assert [e["title"] for e in entries(scene, "election")] == ["c0 leads", "no coordinator leads", "c1 leads"]
    for cut in (0, 4, 5):
        scene.put(NEWEST_CHECKPOINT, json.dumps({"cut": cut, "time": scene.now}).encode())
    assert [e["title"] for e in entries(scene, "checkpoint")] == ["checkpoint 5 made"]  # 4 may be an old one
    assert scene.model.snapshot(scene.now)["checkpoints"]["newest"]["cut"] == 5


def test_a_new_cluster_of_the_same_name_starts_empty() -> None:
    scene, other = Scene(servers=3), Scene(servers=2)
    assert other.view is not None
    object.__setattr__(other.view, "cluster", "demo@other")
    other.view.__dict__.pop("_encoded", None)
    scene.put(VIEW, other.view.encode())
    assert scene.model.snapshot(scene.now)["view"]["cluster"] == "demo@other"
    assert not entries(scene, "loss")


def test_entries_missing_after_a_reset_are_removed() -> None:
    scene = Scene(servers=3)
    left = [Entry(SERVERS + n, i.to_json(), 1, 1) for n, i in scene.infos.items() if n != "s2"]
    scene.model.follow(scene.now, Reset(Listing(tuple(left), scene.revision)))
    assert set(scene.model.fleet.registered) == {"s0", "s1"}
    assert scene.model.snapshot(scene.now)["state"]["leader"] == ""


def test_updates_are_sent_once_and_only_for_changes() -> None:
    scene = Scene()
    assert dict(scene.model.take_updates())
    assert scene.model.take_updates() == []
    scene.tick()
    assert [kind for kind, _ in scene.model.take_updates()] == ["sample"]
    scene.kill("s0")
    assert {"view", "servers", "state", "entry"} <= {kind for kind, _ in scene.model.take_updates()}


def test_the_model_is_bounded() -> None:
    scene = Scene(ranges=2)
    for i in range(3000):
        scene.now += 1
        scene.put(ELECTION, json.dumps({"name": f"c{i}"}).encode())
        scene.register(f"x{i}")
        scene.delete(SERVERS + f"x{i}")
        scene.model.tick(scene.now)
    found = scene.model.snapshot(scene.now)
    assert len(found["entries"]) <= 2000
    assert len(found["history"]["time"]) <= 3600
    assert len(found["servers"]) == 3


KEYS = st.sampled_from(["view", "roster", "config", "election", "checkpoints/newest", "restoring", "servers/s0",
                        "servers/<b>", "drains/s0", "tables/default/t", "rates/default/t", "other"])  # fmt: skip
VALUES = st.one_of(st.binary(max_size=40), st.sampled_from([b"{}", b"[]", b"null", b"1", b'{"name": 3}', b'"x"']))


@given(st.lists(st.tuples(KEYS, VALUES), max_size=20))
def test_damaged_entries_in_the_store_are_left_out(puts: list[tuple[str, bytes]]) -> None:
    scene = Scene(ranges=2)
    for key, value in puts:
        scene.put(key, value)
        scene.delete(key)
    json.dumps(scene.model.snapshot(scene.now), allow_nan=False)
    json.dumps(scene.model.take_updates(), allow_nan=False)


@given(st.integers(1, 9), st.lists(st.floats(-1e6, 1e6) | st.none(), max_size=40))
def test_a_history_is_its_newest_samples(capacity: int, values: list[float | None]) -> None:
    history = History(["a"], capacity)
    for t, value in enumerate(values):
        history.add(float(t), {"a": value})
    newest = list(enumerate(values))[-capacity:]
    found = history.document()
    assert found["time"] == [t for t, _ in newest]
    expected = [np.nan if v is None else v for _, v in newest]
    np.testing.assert_allclose([np.nan if v is None else v for v in found["a"]], expected, rtol=1e-4, atol=1e-30)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1.0))
def test_percentiles_are_where_so_many_values_are_below(counts: list[int], share: float) -> None:
    bounds = [1.0, 2.0, 4.0]
    found = percentile(bounds, counts, share)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    below = np.interp(found, [0.0, *bounds], np.cumsum([0, *counts[:3]]))
    assert below >= min(share * sum(counts), sum(counts[:3])) - 1e-6


def test_a_growing_table_shows_what_waits_and_why_rows_went() -> None:
    """Numbers of its servers are added up; unknown before one has answered."""
    spec = TableSpec("t", 8, Accumulate(), admission=MinCount(5), eviction=[IdleFor("30d")]).to_json()
    tables = TableStates()
    value = json.dumps({"id": 7, "spec": spec}).encode()
    tables.follow({"tables/default/t": Entry("tables/default/t", value, 1, 1)}, {})
    (before,) = tables.document()
    assert (before["policies"], before["waiting"], before["evicted"]) == (["min_count", "idle_for"], None, {})
    held = {"id": 7, "rows_headed": 3, "bytes": 100, "candidates": 2, "evicted": {"idle": 4, "capacity": 0}}
    tables.count({"s0": [held], "s1": [held | {"evicted": {"idle": 1}}], "s2": []})
    (after,) = tables.document()
    assert (after["rows"], after["waiting"], after["servers"]) == (6, 4, 2)
    assert after["evicted"] == {"idle": 5, "capacity": 0}
