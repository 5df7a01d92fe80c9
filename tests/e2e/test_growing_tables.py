"""Tables that admit keys, keep the usage of rows and forget rows, as their users see them."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import elasticps as eps
from elasticps.admin.audit import audit
from elasticps.cli.app import app as command_line
from elasticps.errors import InputError, SpecError
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect
from tests.e2e.oracle import audited

DIM = 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "growing_vocabulary.py"
Keys = np.ndarray[Any, np.dtype[np.int64]]


def ones(keys: Keys, value: float = 1.0) -> np.ndarray:
    return np.full((len(keys), DIM), value, np.float32)


class CountedRows:
    """A dictionary that does what a table with `MinCount` does: the pushes of each key, those before its row included,
    and the sums of those that were applied."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.counts: Counter[int] = Counter()
        self.sums: Counter[int] = Counter()

    def push(self, keys: Keys) -> None:
        for key in keys.tolist():
            self.counts[key] += 1
            if self.counts[key] >= self.least:
                self.sums[key] += 1

    def check(self, table: eps.SparseTable, keys: Keys) -> None:
        """Compares the rows and the counts of keys with the dictionary."""
        rows, counts = table.pull(keys), table.usage(keys).count
        assert rows[:, 0].tolist() == [self.sums[key] for key in keys.tolist()]
        expected = [self.counts[key] if self.counts[key] >= self.least else np.nan for key in keys.tolist()]
        np.testing.assert_array_equal(counts, np.array(expected, np.float32))


def test_a_key_gets_its_row_with_the_push_that_its_policy_names(connect: Connect) -> None:
    ps, model, random = connect(), CountedRows(3), np.random.default_rng(1)
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(3))
    keys = np.arange(40)
    for _ in range(12):
        some = random.choice(keys, 15, replace=False)
        ps.push({table: (some, ones(some))}).result()
        model.push(some)
        model.check(table, keys)
    rows = sum(count >= 3 for count in model.counts.values())
    state = table.state()
    assert (state.rows, state.candidates) == (rows, len(model.counts) - rows)
    assert (len(table), state.admitted, sum(state.counts)) == (rows, rows, rows)


def test_workers_count_the_same_key_together(connect: Connect) -> None:
    first, second = connect("w0"), connect("w1", consistency=eps.SSP(2))
    table = first.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(3))
    other = second.table("t", dim=DIM, optimizer=eps.Accumulate())  # need not repeat the policies
    assert other.spec == table.spec
    key = np.array([5])
    for ps, handle in ((first, table), (second, other), (first, table)):
        ps.push({handle: (key, ones(key))}).result()
    assert other.pull(key).tolist() == [[1, 1, 1]]
    assert other.usage(key).count.tolist() == table.usage(key).count.tolist() == [3]


def test_scores_travel_beside_gradients_and_are_added_up(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), usage="score")
    plain = ps.table("plain", dim=DIM, optimizer=eps.Accumulate())
    keys = np.array([1, 2, 3])
    ps.push({table: (keys, ones(keys), np.array([0.5, 2, 0], np.float32)), plain: (keys, ones(keys))})
    ps.push({table: (keys[:2], ones(keys[:2]))})  # without scores
    ps.push({table: ([1, 1], ones(keys[:2]), [1.0, 2.0])})  # of a key that repeats they are summed, as gradients are
    usage = table.usage([1, 2, 3, 4])
    np.testing.assert_array_equal(usage.score, np.array([3.5, 2, 0, np.nan], np.float32))
    np.testing.assert_array_equal(usage.count, np.array([3, 2, 1, np.nan], np.float32))
    assert np.isnan(usage.last_use).tolist() == [False, False, False, True]
    assert table.pull([1, 2, 3, 4])[:, 0].tolist() == [4, 2, 1, 0]
    assert plain.pull(keys)[:, 0].tolist() == [1, 1, 1]


def test_unusable_scores_are_refused_before_anything_is_sent(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), usage="score")
    counted = ps.table("counted", dim=DIM, optimizer=eps.Accumulate(), usage="count")
    keys = np.array([1, 2])
    for scores, text in (
        ([1.0, -1.0], "at least 0, that of key 2 is -1"),
        ([np.nan, 1.0], "that of key 1 is nan"),
        ([1.0, np.inf], "finite"),
        (np.ones((2, 1), np.float32), "one for each key"),
        (np.ones(2, np.float64), "must be float32"),
        (None, "got None"),
    ):
        with pytest.raises(InputError, match=text):
            ps.push({table: (keys, ones(keys), scores)})
    step = ps.push({table: ([1, 1, 2], ones(np.arange(3)), np.array([3e38, 3e38, 1], np.float32))})
    with pytest.raises(eps.NotFinite, match="takes finite scores of at least 0 only; that of key 1 is inf"):
        step.result()  # the sum of what was given for one key
    with pytest.raises(InputError, match=r'keeps no scores.*usage="score"'):
        ps.push({counted: (keys, ones(keys), np.ones(2, np.float32))})
    assert ps.clock == 1


def test_a_sweep_forgets_the_rows_with_the_least_scores(connect: Connect, cluster: eps.LocalCluster) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), usage="score", cache=eps.Cache(rows=5_000, staleness=9))
    keys = np.arange(4_000)
    scores = (keys % 100).astype(np.float32)
    ps.push({table: (keys, ones(keys), scores)}).result()
    assert table.pull(keys[:5])[:, 0].tolist() == [1] * 5
    assert sum(table.evict(dry_run=True).values()) == 0
    table.set_eviction(eps.Capacity(1_000, keep="score"))
    assert 0 <= table.evict(dry_run=True)["capacity"] <= 3_100  # servers sweep by themselves meanwhile
    table.evict()
    left = np.concatenate([*table.keys()])
    assert 900 <= len(left) <= 1_100
    assert table.state().evicted["capacity"] == 4_000 - len(left)
    assert table.usage(left).score.min() >= 50  # those with the most
    gone = np.setdiff1d(keys, left)
    assert not table.pull(gone).any()  # also past the worker's cache
    assert np.isnan(table.usage(gone).count).all()
    assert audited(cluster.url).clean


def test_a_table_loses_no_row_before_it_is_above_its_capacity(connect: Connect) -> None:
    """However small it is: servers once had a part of the capacity each, and a full table of ten went down to six."""
    ps = connect()
    for capacity in (1, 10, 300):
        table = ps.table(f"t{capacity}", dim=DIM, optimizer=eps.Accumulate(), eviction=eps.Capacity(capacity))
        keys = np.arange(capacity)
        ps.push({table: (keys, ones(keys))}).result()
        assert not any(table.evict(dry_run=True).values())
        assert not any(table.evict().values())
        time.sleep(1)
        assert len(table) == capacity
        more = np.arange(1_000, 1_000 + capacity)
        ps.push({table: (more, ones(more))}).result()
        assert table.evict()["capacity"] <= 2 * capacity - int(0.98 * capacity)
        assert 0.98 * capacity <= len(table) <= capacity
        assert not any(table.evict().values())


def test_sweeps_that_one_worker_asks_for_at_once_wait_for_each_other(connect: Connect) -> None:
    """The second one was refused; so was the first, where the view changed while it was under way, as it is asked
    again then."""
    ps, keys, capacity, errors = connect(), np.arange(40_000), 100, list[Exception]()
    tables = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate(), eviction=eps.Capacity(capacity)) for i in range(4)]
    ps.push({table: (keys, ones(keys)) for table in tables}).result()
    together = threading.Barrier(len(tables))

    def evict(table: eps.SparseTable) -> None:
        together.wait()
        try:
            for _ in range(3):
                table.evict()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=evict, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for table in tables:
        assert 0.98 * capacity <= len(table) <= capacity
        rows = table.pull(keys)
        assert (rows.any(axis=1).sum(), rows.max()) == (len(table), 1)


def test_small_tables_are_held_to_their_capacity_while_they_grow(
    connect: Connect, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), eviction=eps.Capacity(20))
    for step in range(200):
        keys = np.arange(step, step + 3)
        ps.push({table: (keys, ones(keys))}).result()
    eventually(lambda: len(table) == 20)


def test_policies_change_while_workers_train(connect: Connect) -> None:
    ps, other = connect("w0"), connect("w1")
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), usage="count")
    handle = other.table("t", dim=DIM, optimizer=eps.Accumulate())
    model, keys = CountedRows(1), np.arange(10)
    ps.push({table: (keys, ones(keys))}).result()
    model.push(keys)
    table.set_admission(eps.MinCount(2))
    more = np.arange(20)
    ps.push({table: (more, ones(more))}).result()
    other.push({handle: (more[5:15], ones(more[5:15]))}).result()
    model.push(keys)
    model.push(np.arange(5, 15))
    model.counts.update(range(10, 20))  # waited
    np.testing.assert_array_equal(
        handle.usage(more).count, np.array([2] * 5 + [3] * 5 + [2] * 5 + [np.nan] * 5, np.float32)
    )
    assert handle.pull(more)[:, 0].tolist() == [2] * 5 + [3] * 5 + [1] * 5 + [0] * 5
    handle.set_admission(None)  # by whichever worker
    ps.push({table: (more, ones(more))}).result()
    assert table.pull(more)[15:, 0].tolist() == [1] * 5
    third = connect("w2").table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(9))
    assert third.spec.admission is None  # a table that is there keeps its own


def test_policies_that_a_table_cannot_have_are_refused_before_anything_changes(connect: Connect) -> None:
    ps = connect()
    counted = ps.table("counted", dim=DIM, optimizer=eps.Accumulate(), eviction=eps.IdleFor("30d"))
    plain = ps.table("plain", dim=DIM, optimizer=eps.Accumulate())
    with pytest.raises(SpecError, match=r"keep usage='count'.*need usage='score'"):
        counted.set_eviction(eps.Capacity(10, keep="score"))
    assert ps.open("counted").spec.eviction == (eps.IdleFor("30d"),)
    calls: list[Callable[[], object]] = [
        lambda: plain.usage([1]), plain.state, plain.evict, lambda: plain.set_eviction([eps.IdleFor("1d")]),
        lambda: plain.set_admission(eps.MinCount(2)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SpecError, match="'plain' keeps no usage of its rows: make a table with"):
            call()
    for wrong in (lambda: eps.IdleFor("soon"), lambda: eps.Capacity(0), lambda: eps.MinCount(float("nan"))):  # type: ignore[arg-type]
        with pytest.raises(SpecError):
            wrong()
    with pytest.raises(SpecError, match="admission must be one of"):
        counted.set_admission("often")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="usage is '', not 'count'"):
        ps.table("plain", dim=DIM, optimizer=eps.Accumulate(), eviction=eps.IdleFor("30d"))


def test_a_policy_that_a_newer_version_has_written_is_told(connect: Connect, cluster: eps.LocalCluster) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(2))
    registry, key = ps._parts.registry, f"tables/{ps.app}/t"
    entry = registry.read(lambda store: store.get(key), 10.0)
    assert entry is not None
    registry.put(key, entry.value.replace(b"min_count", b"min_dwell"), 10.0)
    with pytest.raises(SpecError, match="unknown admission policy kind 'min_dwell'; this version knows min_count"):
        table.set_eviction([eps.IdleFor("1d")])
    with pytest.raises(SpecError, match="min_dwell"):
        connect("w1").table("t", dim=DIM, optimizer=eps.Accumulate())
    ps.push({table: ([1], ones(np.array([1])))}).result()  # nothing is lost
    registry.put(key, entry.value, 10.0)
    table.set_eviction([eps.IdleFor("1d")])


def test_a_cached_row_of_a_key_that_waits_shows_no_push_that_was_only_counted(connect: Connect) -> None:
    ps = connect()
    table = ps.table(
        "t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(2), cache=eps.Cache(rows=10, staleness=50)
    )
    key = np.array([7])
    for expected in (0, 1, 2, 3):
        table.pull(key)
        ps.push({table: (key, ones(key))}).result()
        assert table.pull(key)[0, 0] == table.pull(key, exact=True)[0, 0] == expected


def test_workers_of_a_round_see_the_same_rows(connect: Connect) -> None:
    """Under BSP sweeps wait for a round to close, and a round is one push."""
    workers = [connect(f"w{i}", consistency=eps.BSP()) for i in range(2)]
    tables = [
        ps.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(2), eviction=eps.Capacity(500))
        for ps in workers
    ]
    keys, seen = np.arange(2_000), {}

    def train(i: int) -> None:
        ps, table = workers[i], tables[i]
        for step in range(6):
            mine = keys[step * 300 : step * 300 + 600]
            ps.push({table: (mine, ones(mine))})
            seen[i, step] = table.pull(keys).tobytes()
            if i == 0:
                table.evict()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen[0, step] == seen[1, step] for step in range(6))
    assert len(set(seen.values())) > 1
    assert tables[0].state().evicted["capacity"] > 0


def test_counts_are_exact_through_a_killed_server() -> None:
    """Two workers push while a server is killed and another takes its place: each push is counted once, at every
    replica."""
    with eps.LocalCluster(servers=3, ranges=32) as cluster, contextlib.ExitStack() as clients:
        workers = [clients.enter_context(eps.connect(cluster.url, worker=f"w{i}", timeout=60.0)) for i in range(2)]
        tables = [
            ps.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(4), eviction=eps.IdleFor("1d"))
            for ps in workers
        ]
        keys, model, random = np.arange(500), CountedRows(4), np.random.default_rng(3)
        for step in range(30):
            if step == 10:
                cluster.kill("s0")
            for ps, table in zip(workers, tables, strict=True):
                some = random.choice(keys, 120, replace=False)
                ps.push({table: (some, ones(some))})
                model.push(some)
                # In turns: which of two pushes makes the row decides which is applied.
                ps.flush()
        for table in tables:
            model.check(table, keys)
        report = audit(cluster.url, 30.0)
        assert report.compared > 0
        assert not report.differences


def test_commands_show_sweep_and_set_a_growing_table(connect: Connect, cluster: eps.LocalCluster) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Accumulate(), admission=eps.MinCount(2))
    keys = np.arange(3_000)
    ps.push({table: (keys, ones(keys))})
    ps.push({table: (keys[:2_000], ones(keys[:2_000]))}).result()

    def run(command: str, *arguments: str, code: int = 0) -> str:
        where = ["--url", cluster.url, "--app", ps.app]
        done = CliRunner().invoke(command_line, ["tables", command, *arguments, *where])
        assert done.exit_code == code, done.output
        return done.output

    shown = json.loads(run("show", "t"))
    assert (shown["rows"], shown["candidates"], shown["admitted"]) == (2_000, 1_000, 2_000)
    assert shown["evicted"] == dict.fromkeys(("idle", "capacity", "small_norm", "forgotten"), 0)
    assert sum(shown["counts"]) == sum(shown["ages"]) == 2_000
    assert "waiting" in CliRunner().invoke(command_line, ["tables", "list", "--url", cluster.url]).output
    assert "nothing would go" in run("evict", "t", "--dry-run")
    changed = run(
        "set", "t", "--admission", "none", "--eviction", "idle_for:1d", "--eviction", "capacity:1000", "--json"
    )
    assert json.loads(changed) == {
        "table": "t", "app": ps.app, "admission": None,
        "eviction": [eps.IdleFor("1d").to_dict(), eps.Capacity(1_000).to_dict()],
    }  # fmt: skip
    assert ps.open("t").spec.eviction == (eps.IdleFor("1d"), eps.Capacity(1_000))
    run("evict", "t", "--json")
    shown = json.loads(run("show", "t"))
    assert shown["evicted"]["capacity"] == 2_000 - shown["rows"] >= 900
    assert "need usage='score'" in run("set", "t", "--eviction", "capacity:10,keep=score", code=2)
    assert "set: t, admission min_count:3" in run("set", "t", "--admission", "min_count:3")
    for wrong in (("--admission", "often"), ("--eviction", "capacity:none"), ()):
        run("set", "t", *wrong, code=2)
    run("evict", "none", code=2)
    ps.table("plain", dim=DIM, optimizer=eps.Accumulate())
    assert "keeps no usage of its rows" in run("evict", "plain", code=2)
    assert "keeps no usage of its rows" in run("set", "plain", "--eviction", "idle_for:1d", code=2)


def test_tables_list_says_which_entries_cannot_be_read(connect: Connect, cluster: eps.LocalCluster) -> None:
    ps = connect()
    ps.table("t", dim=DIM, optimizer=eps.Accumulate())
    registry, key = ps._parts.registry, f"tables/{ps.app}/t"
    entry = registry.read(lambda store: store.get(key), 10.0)
    assert entry is not None
    try:
        for garbled in (b"{", entry.value.replace(b"dim", b"dam")):
            registry.put(key, garbled, 10.0)
            done = CliRunner().invoke(command_line, ["tables", "list", "--url", cluster.url])
            assert done.exit_code == 4
            text = " ".join(done.output.split())
            assert f"{key} cannot be read" in text
            assert "delete this key" in text
            done = CliRunner().invoke(command_line, ["tables", "list", "--json", "--url", cluster.url])
            assert key in json.loads(done.output)["unreadable"]
    finally:
        registry.put(key, entry.value, 10.0)


def test_the_example_of_a_growing_vocabulary_holds_its_table_to_a_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "2"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *hours, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in hours[-2:]] == ["hour  1", "hour  2"]
    assert "keys wait" in hours[-1]
    assert last.startswith("would go now: {'idle': ")


def test_without_a_leading_coordinator_nothing_is_evicted(local_cluster: NewCluster) -> None:
    """Not by `evict()` either, which once compared counts at the time 0."""
    cluster = local_cluster(servers=2, replicas=1, ranges=16, plugins=["tests.e2e.forgetful"])
    keys = np.arange(400)
    with eps.connect(cluster.url, worker="w0", timeout=60) as ps:
        full = ps.table("full", dim=DIM, optimizer=eps.SGD(lr=0.1), eviction=[eps.Capacity(100)])
        small = ps.table("small", dim=DIM, optimizer=eps.SGD(lr=0.1), eviction=[eps.SmallNorm(1.0)])
        cluster.kill("c0")
        time.sleep(1.0)  # twice what servers with that plug-in wait
        ps.push({full: (keys, ones(keys)), small: (keys, ones(keys))}).result()
        for table in (full, small):
            assert sum(table.evict(dry_run=True).values()) >= 300
            assert not any(table.evict().values())
            assert table.state().rows == 400
