"""A server that cannot read a checkpoint reports it once and tries again on request."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticps.admin.interface import RestoreProgress, RestoreSpec
from elasticps.checkpoint.contents import RangeRows, to_bits
from elasticps.checkpoint.manifest import Manifest, WorkerEntry
from elasticps.checkpoint.range_usage import RangeUsage
from elasticps.checkpoint.storage import Storage
from elasticps.model import policies, spec
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import RestoredState
from elasticps.server.roles import restoring
from elasticps.server.roles.restoring import (
    PIECE_BYTES,
    PIECES_AT_ONCE,
    Restorer,
    _batches,
    _joined,
    cut_up,
    cut_up_waiting,
    state_of,
    times_of,
)
from elasticps.store.eviction import Measure, Predicate, Reason
from replication.messages import OperationKind
from replication.step_records import home_range, last_whole_step
from tests.checkpoint.growing import NOW, Cluster, Content, content_of
from tests.checkpoint.growing import TABLE as TABLE_ID
from tests.checkpoint.writer import Change, ranges_of, row, write
from tests.server.conftest import RANGES, Group, Run

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))


class Nothing:
    """A server that heads no range."""

    headed = np.empty(0, np.int64)
    replica = view = None
    ranges, epoch = 4, 0

    def note_change(self) -> None:
        pass


async def answered(restorer: Restorer, spec: RestoreSpec) -> RestoreProgress:
    """The answer to a restore request once it was tried."""
    async with asyncio.timeout(60):
        while True:
            answer = restorer.go_on(5, spec)
            if answer.failed or restorer._work is None:
                return answer
            await asyncio.sleep(0.01)


def test_a_failed_restore_is_tried_again() -> None:
    url = f"memory://{uuid.uuid4()}"

    async def story() -> None:
        nothing: Any = Nothing()
        context: Any = SimpleNamespace(loop=asyncio.get_running_loop(), executor=nothing, serving=nothing)
        restorer = Restorer(context, nothing)
        spec = RestoreSpec(url, 1, ((7, 7),), True)
        assert "has no checkpoint 1" in (await answered(restorer, spec)).failed
        write(Storage(url), 1, {"default/t": (7, TABLE)}, {"default/t": Change({1: row(TABLE, 1)})})
        assert restorer.go_on(5, spec).failed == ""
        assert "somebody else" in restorer.go_on(4, spec).failed
        assert restorer.go_on(6, spec).failed == ""
        assert await restorer.end(6, ())
        assert "it has ended" in restorer.go_on(6, spec).failed

    asyncio.run(story())


def test_rows_are_split_by_local_ranges() -> None:
    keys = np.arange(1000)
    rows = np.arange(24_000, dtype=np.uint32).astype(np.uint8).reshape(1000, 24)
    here = np.array([True, False, True, False, False, False, True, False])
    found = list(cut_up(RangeRows(0, keys, rows, np.zeros(1000, np.int32)), 7, here))
    assert {r for r, _ in found} == {0, 2, 6}
    where = ranges_of(7, keys.tolist(), 8)
    assert sorted(key for _, piece in found for key in piece.keys.tolist()) == keys[here[where]].tolist()
    for r, piece in found:
        assert set(where[piece.keys]) == {r}
        assert piece.rows.tobytes() == rows[piece.keys].tobytes()
    assert list(cut_up(RangeRows(0, keys, rows, np.zeros(1000, np.int32)), 7, np.zeros(8, np.bool_))) == []


def test_a_table_with_another_id_takes_few_operations() -> None:
    """Its rows lie in other ranges: one of a file has a row or two for each of them."""
    keys, ranges = np.arange(20_000), 256
    rows = keys.astype(np.uint32).view(np.uint8).reshape(-1, 4)
    old = ranges_of(7, keys.tolist(), ranges)
    parts = [
        RangeRows(r, keys[old == r], rows[old == r], np.full((old == r).sum(), r, np.int32)) for r in range(ranges)
    ]
    here = np.ones(ranges, np.bool_)
    found = [each for part in _joined(iter(parts)) for each in cut_up(part, 8, here)]
    assert len(found) == ranges < sum(len(list(cut_up(part, 8, here))) for part in parts) / 50
    where = ranges_of(8, keys.tolist(), ranges)
    for r, piece in found:
        assert sorted(piece.keys.tolist()) == keys[where == r].tolist()
        assert piece.rows.view(np.uint32).ravel().tolist() == piece.keys.tolist()
    assert [len(some) for some in _batches(iter(found))] == [PIECES_AT_ONCE] * (ranges // PIECES_AT_ONCE)
    assert list(_joined(iter([]))) == []


def test_rows_of_one_range_are_not_copied() -> None:
    keys = np.arange(100_000)
    keys = keys[ranges_of(7, keys.tolist(), 8) == 3]
    rows = np.arange(len(keys) * 64, dtype=np.uint32).astype(np.uint8).reshape(len(keys), 64)
    here = np.arange(8) == 3
    found = list(cut_up(RangeRows(3, keys, rows, np.zeros(len(keys), np.int32)), 7, here))
    assert len(found) > 1
    assert {r for r, _ in found} == {3}
    assert all(np.shares_memory(piece.rows, rows) and piece.nbytes <= PIECE_BYTES for _, piece in found)
    assert np.concatenate([piece.keys for _, piece in found]).tolist() == keys.tolist()
    assert np.concatenate([piece.rows for _, piece in found]).tobytes() == rows.tobytes()
    assert list(cut_up(RangeRows(3, keys, rows, np.zeros(len(keys), np.int32)), 7, ~here)) == []


def test_a_range_gets_the_clocks_of_its_range_in_the_checkpoint() -> None:
    manifest = Manifest(
        "c@1", 5, 0, 4, 0.0, {}, (), {"a": WorkerEntry(3, "default", 7)}, {2: 4}, {9: (0, 1 << 16, 0, 3 << 16)},
        {"default": 7},
    )  # fmt: skip
    for ranges, r, lost in ((4, 1, 1), (4, 0, 0), (8, 2, 1), (8, 7, 3), (8, 1, 0)):
        state = state_of(manifest, r, ranges)
        clocks = dict(zip(state.workers, state.progress, strict=True))
        assert clocks == {2: 4 << 16, 3: 7 << 16} | ({9: lost << 16} if lost else {})
        assert state.records == ()


def test_a_home_range_gets_the_records_of_steps_that_were_under_way() -> None:
    left_out = {9: (5 << 16, 4 << 16, 4 << 16, 4 << 16)}
    manifest = Manifest("c@1", 5, 0, 4, 0.0, {}, (), {}, {3: 7}, left_out, {}, records=((9, 5, 4, (0, 3)),))
    assert Manifest.decode(manifest.encode()) == manifest
    homes = {r: state_of(manifest, r, 8) for r in range(8)}
    assert {r for r, state in homes.items() if state.records} == {home_range(9, 8)}
    ((worker, record),) = homes[home_range(9, 8)].step_records(8)
    assert (worker, record.clock, record.committed, record.ranges.tolist()) == (9, 5, 4, [0, 1, 6, 7])
    assert RestoredState.of(json.loads(json.dumps(homes[home_range(9, 8)].document()))) == homes[home_range(9, 8)]


def test_a_home_range_that_comes_back_alone_says_up_to_where_all_steps_are_whole() -> None:
    """Without it a successor would train again all that ever ticked few ranges."""
    manifest = Manifest("c@1", 5, 0, 4, 0.0, {}, (), {"a": WorkerEntry(3, "default", 7)})
    home = home_range(3, 4)
    state = state_of(manifest, home, 4, {3: 9})
    assert state_of(manifest, home, 4).records == state_of(manifest, home ^ 1, 4, {3: 9}).records == ()
    progress = np.zeros(4, np.int64)  # what it has pushed to other ranges is older, or nothing
    progress[home] = dict(zip(state.workers, state.progress, strict=True))[3]
    assert last_whole_step(0, home, progress, [record for _, record in state.step_records(4)]) == 9
    assert last_whole_step(0, home, progress, []) == 0


def test_committed_ranges_are_not_read_again_after_a_move(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by who has done it, nor by who heads it afterwards."""
    rows = {key: row(TABLE, key) for key in range(400)}
    write(Storage(str(tmp_path)), 1, {"default/t": (7, TABLE)}, {"default/t": Change(rows)}, ranges=RANGES)
    monkeypatch.setattr(restoring, "PORTION_BYTES", 1)
    logged: list[int] = []
    first_done, moved = asyncio.Event(), asyncio.Event()
    log = restoring._logged

    async def slowly(executor: Any, epoch: int, operations: Any) -> None:
        logged.extend(int(r[0]) for kind, _, r in operations if kind == OperationKind.RESTORED)
        if len(logged) > 4:
            first_done.set()
            await moved.wait()
        await log(executor, epoch, operations)

    monkeypatch.setattr(restoring, "_logged", slowly)

    async def test(group: Group) -> None:
        for name in ("s0", "s1"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["s0", "s1"]))
        spec = RestoreSpec(tmp_path.as_uri(), 1, ((7, 7),), True)
        s0, s1 = (group.servers[name].restoring for name in ("s0", "s1"))
        s0.go_on(1, spec)
        await asyncio.wait_for(first_done.wait(), 60)
        done = set(s0.go_on(1, spec).ranges)
        assert 0 < len(done) < RANGES
        group.adopt(group.make_view(lambda r: ["s1", "s0"] if r > 7 else ["s0", "s1"]))
        moved.set()
        async with asyncio.timeout(60):
            while len(done) < RANGES:
                for restorer in (s0, s1):
                    answer = restorer.go_on(1, spec, to_bits(done, RANGES))
                    assert not answer.failed
                    done |= set(answer.ranges)
                await asyncio.sleep(0.01)
        assert sorted(set(logged)) == list(range(RANGES))
        assert len(logged) <= RANGES + 4  # what was under way as ranges moved
        for server in group.servers.values():
            table = server.store.tables[7]
            found: dict[int, bytes] = {}
            for r in range(RANGES):
                keys, data = table.dump_range(r)
                found |= {key: some.tobytes() for key, some in zip(keys.tolist(), data, strict=True)}
            assert found == rows
            assert await server.restoring.end(1, ())

    run(test)


GROWING = TableSpec("t", 3, spec.Accumulate(), spec.Zeros(), admission=policies.MinCount(3))
SKETCHED = TableSpec("t", 3, spec.Accumulate(), spec.Zeros(), admission=policies.MinCountSketch(3, 1 << 16))


def grown(described: TableSpec, ranges: int, url: str) -> Cluster:
    """Two checkpoints of a table some of whose rows were used, some went, and keys wait for one."""
    cluster, keys = Cluster(described, ranges, url), np.arange(2_000, dtype=np.int64)
    for some in (keys, keys, keys[:900], keys[:100]):
        cluster.push(some, np.ones((len(some), 3)))
    cluster.checkpoint(1, 0)
    cluster.advance(NOW + 50)
    for some in (keys[900:1_200], keys[400:700]):
        cluster.push(some, np.ones((len(some), 3)))
    assert cluster.evict(Predicate(Measure.LAST_USE, Reason.IDLE, NOW + 10))
    cluster.push(keys[:300], np.ones((300, 3)))
    cluster.checkpoint(2, 1)
    return cluster


async def restored(group: Group, url: str) -> list[Content]:
    """What two replicas have after a restore, which agree on all else, too."""
    for name in ("s0", "s1"):
        await group.start(name)
    group.adopt(group.make_view(lambda r: ["s0", "s1"]))
    plan, done = RestoreSpec(url, 2, ((TABLE_ID, TABLE_ID),), True), set[int]()
    async with asyncio.timeout(60):
        while len(done) < RANGES:
            answer = group.servers["s0"].restoring.go_on(1, plan, to_bits(done, RANGES))
            assert not answer.failed
            done |= set(answer.ranges)
            await asyncio.sleep(0.01)
    s0, s1 = (group.servers[name] for name in ("s0", "s1"))
    assert [s0.executor.words(r) for r in range(RANGES)] == [s1.executor.words(r) for r in range(RANGES)]
    assert await s0.restoring.end(1, ())
    return [content_of(server.store) for server in (s0, s1)]


@pytest.mark.parametrize(("described", "ranges"), [(GROWING, RANGES), (GROWING, 4), (GROWING, 64), (SKETCHED, RANGES)])
def test_usage_waiting_keys_and_sketches_come_back_in_all_replicas(
    run: Run, tmp_path: Path, described: TableSpec, ranges: int
) -> None:
    expected = content_of(grown(described, ranges, tmp_path.as_uri()).store)

    async def test(group: Group) -> None:
        for found in await restored(group, tmp_path.as_uri()):
            assert found.rows == expected.rows
            assert found.waiting == expected.waiting
            assert ranges != RANGES or found.sketches == expected.sketches
            assert min(found.times.values()) >= max(expected.times.values())

    run(test)


def no_waiting_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring, "cut_up_waiting", lambda *_, **__: iter(()))


def no_usage(patch: pytest.MonkeyPatch) -> None:
    cut = restoring.cut_up

    def mutant(rows: RangeRows, *arguments: Any) -> Any:
        blank = rows.rows.copy()
        blank[:, 12:] = 0
        return cut(rows._replace(rows=blank), *arguments)

    patch.setattr(restoring, "cut_up", mutant)


@pytest.mark.parametrize("plant", [no_waiting_keys, no_usage])
def test_a_restore_without_usage_or_waiting_keys_is_found(
    run: Run, tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content_of(grown(GROWING, RANGES, tmp_path.as_uri()).store)
    plant(monkeypatch)

    async def test(group: Group) -> None:
        (found, _) = await restored(group, tmp_path.as_uri())
        assert (found.rows, found.waiting) != (expected.rows, expected.waiting)

    run(test)


def test_waiting_keys_are_split_by_local_ranges_and_a_sketch_goes_to_its_own() -> None:
    keys, sketch = np.arange(500), np.ones((64, 4), np.uint8)
    rows = RangeRows(
        2, keys[:0], np.empty((0, 24), np.uint8), keys[:0].astype(np.int32), RangeUsage(keys, keys + 1, sketch)
    )
    here = np.array([True, False, True, False])
    found = list(cut_up_waiting(rows, 7, here, sketches=True))
    got = {key: r for r, piece in found for key in piece.keys.tolist()}
    where = ranges_of(7, keys.tolist(), 4)
    assert got == {key: int(r) for key, r in zip(keys.tolist(), where, strict=True) if here[r]}
    assert all((piece.words == piece.keys + 1).all() for _, piece in found)
    assert [r for r, piece in found if piece.sketch.size] == [2]
    assert not any(piece.sketch.size for _, piece in cut_up_waiting(rows, 7, here, sketches=False))


def test_no_range_comes_back_at_a_time_before_its_rows_were_used() -> None:
    times, same, moved = np.array([3, 9, 4, 5]), [(7, 7)], [(7, 7), (8, 12)]
    assert times_of(times, 4, same).tolist() == [3, 9, 4, 5]
    assert times_of(times, 8, same).tolist() == [3, 3, 9, 9, 4, 4, 5, 5]
    assert times_of(times, 2, same).tolist() == [9, 5]
    assert times_of(times, 2, moved).tolist() == [9, 9]


def test_recovered_ranges_are_put_under_the_policies_of_today() -> None:
    """No CREATE or POLICY of theirs comes by a log."""
    specs = (GROWING.to_json(), TABLE.to_json(), SKETCHED.to_json())
    task = restoring._RestoreTask.__new__(restoring._RestoreTask)
    task.spec = RestoreSpec("x://", 1, ((0, 7), (8, 8), (9, 9)), True, True, specs)
    applied: list[Any] = []
    task._apply = applied.extend  # type: ignore[method-assign, assignment]
    task._set_policies(np.array([2, 5]))
    assert [(kind, payload.table, payload.spec, r.tolist()) for kind, payload, r in applied] == [
        (OperationKind.POLICY, number, text, [r]) for number, text in ((7, specs[0]), (9, specs[2])) for r in (2, 5)
    ]
