"""Restores that are late, repeated or aborted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from elasticps.admin.interface import RestoreSpec
from elasticps.checkpoint.contents import to_bits
from elasticps.checkpoint.storage import Storage
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.system import fatal
from tests.checkpoint.writer import Change, row, write
from tests.server.conftest import RANGES, Group, Run, until

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))
ROWS = {key: row(TABLE, key) for key in range(400)}


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    errors: list[str] = []
    monkeypatch.setattr(fatal, "end", lambda me, error: errors.append(f"{me.name}: {error!r}"))
    return errors


def place(path: Path) -> RestoreSpec:
    write(Storage(str(path)), 1, {"default/t": (7, TABLE)}, {"default/t": Change(ROWS)}, ranges=RANGES)
    return RestoreSpec(path.as_uri(), 1, ((7, 7),), True)


async def all_done(group: Group, serial: int, spec: RestoreSpec) -> str:
    done: set[int] = set()
    async with asyncio.timeout(60):
        while len(done) < RANGES:
            for server in group.servers.values():
                answer = server.restoring.go_on(serial, spec, to_bits(done, RANGES))
                if answer.failed:
                    return answer.failed
                done |= set(answer.ranges)
            await asyncio.sleep(0.01)
    return ""


async def two_with_all(group: Group, spec: RestoreSpec) -> None:
    """s0 and s1, each at the head of every other range, have brought everything back."""
    for name in ("s0", "s1"):
        await group.start(name)
    group.adopt(group.make_view(lambda r: ["s0", "s1"] if r % 2 else ["s1", "s0"]))
    assert await all_done(group, 1, spec) == ""


def test_a_restore_repeated_after_its_undo_ends_no_server(run: Run, tmp_path: Path, ended: list[str]) -> None:
    """Whoever undid it was killed before `restoring` went: the next one goes on with tables that were dropped."""
    spec = place(tmp_path)

    async def test(group: Group) -> None:
        await two_with_all(group, spec)
        for server in group.servers.values():
            assert await server.restoring.end(1, [7])
        await until(lambda: not any(server.store.tables for server in group.servers.values()))
        errors = await all_done(group, 2, spec)
        assert ended == []
        assert "dropped" in errors

    run(test)


def test_an_aborted_restore_followed_by_a_failover_ends_no_server(run: Run, tmp_path: Path, ended: list[str]) -> None:
    """s1 headed ranges as it was asked, and then only followed; s0 has ended it and dropped the table; s0 dies."""
    spec = place(tmp_path)

    async def test(group: Group) -> None:
        await two_with_all(group, spec)
        group.adopt(group.make_view(lambda r: ["s0", "s1"]))  # say, s1 was away for a moment
        await asyncio.sleep(0.1)
        assert await group.servers["s0"].restoring.end(1, [7])
        await until(lambda: 7 not in group.servers["s1"].store.tables)
        group.stop("s0")
        s1 = group.servers["s1"].restoring
        assert s1._work is not None
        s1._work.done.clear()  # its ranges were done by s0, say
        group.adopt(group.make_view(lambda r: ["s1"]))
        await asyncio.sleep(1.0)
        assert ended == []

    run(test)


def test_a_server_absent_at_the_end_of_a_restore_restores_nothing(run: Run, tmp_path: Path, ended: list[str]) -> None:
    """s2 headed some ranges, was frozen and left out; the others have done all, and workers have trained since. It
    comes back, and heads them."""
    spec = place(tmp_path)

    async def test(group: Group) -> None:
        for name in ("s0", "s2"):
            await group.start(name)
        s0, s2 = (group.servers[name] for name in ("s0", "s2"))
        group.adopt(group.make_view(lambda r: ["s2", "s0"] if r < 4 else ["s0", "s2"]))
        assert not s2.restoring.go_on(1, spec).failed
        group.adopt(group.make_view(lambda r: ["s0"]))  # s2 is left out, as its lease has ended
        del group.servers["s2"]
        assert await all_done(group, 1, spec) == ""
        assert await s0.restoring.end(1, ())
        s0.store.tables[7].put(np.array([7]), np.full((1, 3), 5.0, np.float32))  # workers train
        group.servers["s2"] = s2
        group.adopt(group.make_view(lambda r: ["s0"], lambda r: "s2"))
        await until(lambda: s2.replica.filled.all())
        group.adopt(group.make_view(lambda r: ["s0", "s2"]))
        await asyncio.sleep(0.2)
        group.adopt(group.make_view(lambda r: ["s2"]))
        await asyncio.sleep(1.0)
        found = np.zeros((1, 3), np.float32)
        s2.store.tables[7].gather(np.array([7]), found)
        assert found.tolist() == [[5.0] * 3]
        assert ended == []

    run(test)


def test_a_late_end_of_an_older_restore_is_ignored(run: Run, tmp_path: Path, ended: list[str]) -> None:
    """Said by a driver that has died, to a server that was frozen."""
    spec = place(tmp_path)

    async def test(group: Group) -> None:
        await group.start("s0")
        group.adopt(group.make_view(lambda r: ["s0"]))
        restorer = group.servers["s0"].restoring
        assert await all_done(group, 4, spec) == ""
        assert await restorer.end(2, [7])
        assert group.servers["s0"].store.tables[7].rows == 400
        assert await restorer.end(4, [7])
        assert await restorer.end(4, [7])
        await until(lambda: not group.servers["s0"].store.tables)
        assert ended == []

    run(test)
