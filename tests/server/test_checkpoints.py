"""Servers write their rows at a cut while training goes on: random stories beside dumps at the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticps.checkpoint.manifest import FileEntry
from elasticps.checkpoint.row_writer import Done
from elasticps.checkpoint.rows import RowFile, decode
from elasticps.kernels.hashing import HASH_END
from elasticps.server.core import scan
from elasticps.server.core.operations import CutMark
from elasticps.server.roles import checkpoints, snapshots
from elasticps.store import Table, cuts, index, retained
from elasticps.store.native import H_CURSOR, H_STALE
from elasticps.store.retained import RetainedRows
from elasticps.store.swept import RowUsage
from replication.chain import Role
from replication.effects import Push
from replication.messages import OperationKind
from tests.server.conftest import RANGES
from tests.server.story import SERVERS, TABLES, Story

Rows = dict[tuple[int, int], bytes]
"""Whole rows, by table and key."""


@dataclass
class FakeRowWriter:
    """Keeps files, and is as slow as the test likes."""

    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    refuses: bool = False
    stuck: bool = False

    def put(self, url: str, folder: str, path: str, table: int, file: RowFile, done: Done) -> None:
        def write() -> None:
            encoded = file.encode()
            if self.refuses:
                done(OSError("No space left on device"))
                return
            self.files[f"{folder}/{path}"] = table, b"".join(encoded.parts)
            done(FileEntry.of(path, table, encoded))

        self.waiting.append(write)

    def close(self) -> None:
        self.waiting.clear()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BUSY_S", -1.0)
    monkeypatch.setattr(retained, "_PART_ROWS", 4)
    monkeypatch.setattr(retained, "_FIRST_RECORDS", 2)
    monkeypatch.setattr(scan, "FILE_BYTES", 2000)
    monkeypatch.setattr(checkpoints, "PARTS_AT_ONCE", 2)
    monkeypatch.setattr(cuts, "LEAST", 3)


class CheckpointStory(Story):
    """Cuts are operations here, and one server or the other writes them."""

    def __init__(self, seed: int, compiled: bool = True) -> None:
        self.writers: dict[str, FakeRowWriter] = {}
        self.at_cuts: dict[int, tuple[int, Rows]] = {}  # since, and what there was
        self.published: dict[int, Rows] = {}
        self.failures: list[str] = []
        self.incremental = 0
        super().__init__(seed, compiled)
        for name, server in self.wires.servers.items():
            self.writers[name] = FakeRowWriter()
            server.checkpoints._row_writer = self.writers[name]
            server.checkpoints._last_served = cast(Any, SimpleNamespace(within=lambda seconds: True))
            server.checkpoints._aside_bytes = self.random.choice((1 << 20, 1 << 20, 4000))
        deliver = self.wires.deliver

        def later() -> bool:
            """Time goes on a little, and some file is there."""
            self.wires.clock.now += self.random.choice((0, 1e-6, 1e-5))
            for writer in self.writers.values():
                if writer.waiting and not writer.stuck and self.random.random() < 0.2:
                    writer.waiting.pop(0)()
            return deliver()

        self.wires.deliver = later  # type: ignore[method-assign]

    def acts(self) -> list[Callable[[], None]]:
        return super().acts() + [self.take_cut] * 3

    def write(self, name: str) -> list[Any]:
        """Nothing by hand."""
        return []

    def take_cut(self) -> None:
        """A cut through all ranges, of which nobody pushes meanwhile; then heads write it."""
        self.collect()
        self.wires.settle()
        self.cut_number += self.random.choice((1, 1, 3, 40_000))
        since = self.random.choice((0, max(self.published, default=0)))
        rows: Rows = {}
        for name in SERVERS:
            server = self.wires.servers[name]
            headed = np.array([r for r in range(RANGES) if self.chains[r][0] == name], np.int64)
            for number, table in server.store.live.items():
                for r in headed.tolist():
                    keys, found, _ = table.dump_stamped(r, 0, HASH_END)
                    for key, row in zip(keys.tolist(), found, strict=True):
                        rows[number, key] = row.tobytes()
            mark = CutMark(self.cut_number, since, name, 1, "x://")
            push = Push(_Nobody(), -1, server.serving.epoch, 0, 0, True, headed, mark, 64, kind=OperationKind.CUT)
            if len(headed):
                server.executor.perform(server.replica.push, push)
        self.wires.settle()
        self.at_cuts[self.cut_number] = since, rows
        self.poll()

    def check_replicas(self) -> None:
        """The stamps of their rows, too."""
        super().check_replicas()
        for r in range(RANGES):
            found: dict[int, Any] = {}
            for server in map(self.wires.servers.__getitem__, self.chains[r]):
                if server.replica.role[r] == Role.FULL:
                    stamps = {n: _stamps(table, r) for n, table in server.store.live.items()}
                    assert found.setdefault(int(server.replica.seq[r]), stamps) == stamps

    def poll(self) -> None:
        for server in self.wires.servers.values():
            server.checkpoints.writing(self.cut_number)

    def collect(self) -> None:
        """Finishes the checkpoint at hand, and publishes it unless a server failed."""
        if self.cut_number not in self.at_cuts or self.cut_number in self.published:
            return
        for _ in range(100_000):
            self.poll()
            states = [s.checkpoints.writing(self.cut_number) for s in self.wires.servers.values()]
            open_ = [s for s in self.wires.servers.values() if s.checkpoints._scan is not None]
            if not open_:
                break
            self.wires.deliver()
        assert not open_
        failed = [state.failed for state in states if state is not None and state.failed]
        self.failures += failed
        since, expected = self.at_cuts.pop(self.cut_number)
        if not failed:
            dropped = {n for s in self.wires.servers.values() for n in s.store.dropped}
            found = self.read(self.cut_number, since, dropped)
            assert found == {key: row for key, row in expected.items() if key[0] not in dropped}
            self.published[self.cut_number] = found
            self.incremental += since > 0
        for server in self.wires.servers.values():
            assert server.checkpoints.aside_bytes == 0
            assert all(table.retained is None for table in server.store.tables.values())

    def read(self, cut: int, since: int, dropped: set[int]) -> Rows:
        rows: Rows = dict(self.published[since]) if since else {}
        seen: set[tuple[int, int]] = set()
        written: Rows = {}
        for writer in self.writers.values():
            for path, (number, data) in writer.files.items():
                if int(path.split("/")[0]) != cut or number in dropped:
                    continue
                table = next(s.store.live[number] for s in self.wires.servers.values() if number in s.store.live)
                for piece in decode(TABLES[number], data):
                    ranged = table.ranges_of(np.array([key for n, key in rows if n == number], np.int64)).tolist()
                    if piece.segment.full and (number, piece.segment.range) not in seen:
                        seen.add((number, piece.segment.range))
                        mine = [key for n, key in rows if n == number]
                        for key, r in zip(mine, ranged, strict=True):
                            if r == piece.segment.range:
                                del rows[number, key]
                    for key in piece.deleted.tolist():
                        rows.pop((number, key), None)
                    keys = np.array([key for n, key in rows if n == number], np.int64)
                    keys = keys[table.ranges_of(keys) == piece.segment.range]
                    if len(keys) and piece.usage is not None:
                        older = np.frombuffer(b"".join(rows[number, key] for key in keys.tolist()), np.uint8)
                        gone = RowUsage(TABLES[number], number).swept(
                            keys, older.reshape(len(keys), -1), piece.usage.sweeps
                        )
                        for key in keys[gone].tolist():
                            del rows[number, key]
                    for key, row, stamp in zip(piece.keys.tolist(), piece.rows, piece.stamps.tolist(), strict=True):
                        assert (number, key) not in written, "a row comes once"
                        assert stamp < cut
                        written[number, key] = row.tobytes()
        return {key: row for key, row in (rows | written).items() if key[0] not in dropped}


class _Nobody:
    def reply(self, reply: object) -> None:
        pass

    hold = release = reply


@pytest.mark.parametrize("seed", range(12))
def test_written_rows_are_those_at_the_cut(seed: int) -> None:
    story = CheckpointStory(seed, compiled=seed % 4 > 0)
    story.run(60)
    story.take_cut()
    story.collect()
    assert len(story.published) + len(story.failures) > 2


def a_story(aside_bytes: int = 1 << 20) -> CheckpointStory:
    """A story with many rows, and a cut with no written rows yet."""
    story = CheckpointStory(3)
    for server in story.wires.servers.values():
        server.checkpoints._aside_bytes = aside_bytes
    for _ in range(30):
        story.push(everywhere=True)
    story.take_cut()
    return story


def test_a_storage_that_refuses_ends_only_the_checkpoint() -> None:
    story = a_story()
    for writer in story.writers.values():
        writer.refuses = True
    story.collect()
    assert set(story.failures) == {"No space left on device"}
    story.push()
    for writer in story.writers.values():
        writer.refuses = False
    story.take_cut()
    story.collect()
    assert len(story.published) == 1


def test_a_slow_storage_delays_the_scan_and_a_silent_driver_ends_it() -> None:
    story = a_story()
    for writer in story.writers.values():
        writer.stuck = True
    for _ in range(3000):
        story.wires.deliver()
    assert {len(writer.waiting) for writer in story.writers.values()} == {checkpoints.FILES_AT_ONCE}
    story.wires.clock.now += checkpoints.SILENT_S + 1
    story.wires.settle()
    for server in story.wires.servers.values():
        writing = server.checkpoints.writing(story.cut_number)
        assert writing is not None
        assert "nobody has asked" in writing.failed
        assert server.checkpoints.aside_bytes == 0


def test_pushes_wait_while_too_many_old_rows_are_kept_for_a_checkpoint() -> None:
    story = a_story(aside_bytes=8000)
    heads = [server for server in story.wires.servers.values() if server.checkpoints._scan is not None]
    for server in heads:
        story.writers[server.me.name].stuck = True
        for number, table in server.store.live.items():
            grads, values = np.ones((1, TABLES[number].dim), np.float32), TABLES[number].optimizer.step_values(1, None)
            for r in server.serving.headed.tolist():
                for key in table.range_keys(r).tolist():
                    if server.fast.budget == 0:
                        break
                    table.apply(np.array([key]), grads, values)
                    story.wires.settle()
    held = [server for server in heads if server.fast.budget == 0]
    assert held
    story.push(everywhere=True)
    story.wires.settle()
    assert any(server.replica.careful for server in held)
    for server in held:
        assert server.checkpoints.aside_bytes <= 2 * 8000
    for server in heads:
        story.writers[server.me.name].stuck = False
    story.wires.clock.now += 0.1
    story.collect()
    story.wires.settle()
    assert len(story.published) == 1
    assert not any(server.replica.careful or server.fast.budget == 0 for server in heads)
    assert all(server.checkpoints.waited_s > 0 for server in held)


def not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetainedRows, "begin", lambda rows, ranges, since: begin(rows, ranges, since + 1))


def retained_after_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(table: Table, keys: Any, grads: Any, step_values: Any, worker: int = 0, clock: int = 0) -> None:
        rows = np.empty(len(keys), np.int64)
        index.find(table._header, keys, rows)
        stale = int(table._header[H_STALE])
        table._insert(keys, rows, np.empty((0, 0), np.float32), index.INITIALISE)
        table._update(table._header, keys, grads, step_values, rows, True)
        table._header[H_STALE] = stale
        table._touch(keys, rows)

    monkeypatch.setattr(Table, "apply", apply)


def written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*arguments: Any) -> Any:
        return tuple(np.concatenate((array, array[-1:])) for array in take(*arguments))

    monkeypatch.setattr(RetainedRows, "take", twice)


def cursor_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(*arguments: Any) -> Any:
        found, rows = take(*arguments), arguments[0]
        rows._header[H_CURSOR] += 1
        return found

    monkeypatch.setattr(RetainedRows, "take", skip)


def no_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts.Deletions, "note", lambda *_: None)


def _stamps(table: Table, r: int) -> tuple[int, list[tuple[int, int]]]:
    keys, _, stamps = dump_stamped(table, r, 0, HASH_END)
    base = table.retained.base(r) if table.retained is not None and len(keys) else 0
    return base, sorted(zip(keys.tolist(), stamps.tolist(), strict=True))


def moved_without_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts.Deletions, "add", lambda notes, r, some: None if r % 2 else add(notes, r, some))


begin, take, dump_stamped, add = RetainedRows.begin, RetainedRows.take, Table.dump_stamped, cuts.Deletions.add
# Stamps that do not move with their rows are found by tests/store/test_rows_at_a_cut.py.
BUGS = (
    not_retained, retained_after_its_update, written_twice, cursor_too_far, no_deletions, moved_without_deletions,
)  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_stories_find_planted_bugs_of_checkpoints(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(40):
        story = CheckpointStory(seed, compiled=False)
        try:
            story.run(60)
            story.take_cut()
            story.collect()
            story.check_replicas()
        except AssertionError:
            return
    raise AssertionError("no story has found it")
