"""The registry and entries of the store that other workers or versions have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

import elasticps as eps
from coordinator.adoption import adopt, plan_adoption
from coordinator.core.keys import config_of
from coordinator.core.store import Entry
from coordinator.core.view import View, WorkerInfo
from coordinator.membership import last_workers, new_number
from coordinator.memory import MemoryStore
from elasticps.client.core.join import PastRun
from elasticps.client.registrations import Registration, TableToRegister
from elasticps.client.registry import ASK_VIEW_TIMEOUT_S, Registry
from elasticps.client.runtime import Runtime
from tests.coordinator.test_adoption import witness

SPEC = eps.TableSpec("t", 4, eps.Accumulate())
STRANGE = [b"", b"\xff", b"[]", b"[" * 100_000, b'{"id": "x"}', b'{"id": 1e999, "base": -1, "spec": 7, "cut": "x"}']


class Scene:
    """A worker, and the store that it is registered in."""

    def __init__(self) -> None:
        self.runtime, self.store = Runtime(), MemoryStore("test")
        self.runtime.run(adopt(self.store, plan_adoption([witness("a"), witness("b")], (), "x")), 30.0)
        self.registry = Registry(self.store, self.runtime, "memory")
        self.worker = self.registry.register("w", "default", lambda why: None, 30.0, "")

    def put(self, key: str, value: bytes) -> None:
        self.runtime.run(self.store.put(key, value), 30.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.registry.close()


@pytest.mark.parametrize("value", STRANGE)
def test_an_error_names_the_key_of_a_value_that_we_have_not_written(scene: Scene, value: bytes) -> None:
    registry = scene.registry
    for key in ("last-worker/default/w", "tables/default/t", "wanted-checkpoints/1", "restoring"):
        scene.put(key, value)
    with pytest.raises(eps.Error, match=r"last-worker/default/w .*delete it"):
        registry.past(30.0)
    with pytest.raises(eps.Error, match=r"tables/default/t .*delete it"):
        registry.open_tables("default", [TableToRegister(SPEC, False)], scene.worker.id, 30.0)
    with pytest.raises(eps.Error, match=r"restoring .*delete it"):
        registry.first_view(0.0)
    if value[:1] != b"{" or b"cut" in value:
        with pytest.raises(eps.Error, match=r"wanted-checkpoints/1 .*delete it"):
            registry.checkpoint_made("wanted-checkpoints/1", 30.0)


def test_a_worker_goes_on_after_its_record_of_an_earlier_version(scene: Scene) -> None:
    """Its key had no application; nobody may write such a key where etcd asks."""
    record = b'{"id": 1, "base": 3, "trained": 9, "steps": 8}'
    scene.put("last-worker/w", record)
    past = scene.registry.past(30.0)
    assert past == PastRun(1, 3, 9, 8, 0)
    assert scene.registry.keep(past._replace(id=scene.worker.id), 30.0) is not None
    entries = scene.runtime.run(last_workers(scene.store), 30.0)
    assert json.loads(entries["w"].value)["id"] == scene.worker.id


def test_an_error_names_the_key_of_a_table_of_a_newer_version(scene: Scene) -> None:
    """What exports all tables is not to leave it out."""
    scene.put("tables/default/t", b'{"id": 1, "spec": "{}", "creator": 1, "ready": true}')
    with pytest.raises(eps.SpecError, match="tables/default/t cannot be read here"):
        scene.registry.open_tables("default", [TableToRegister(SPEC, False)], scene.worker.id, 30.0)
    with pytest.raises(eps.SpecError, match="tables/default/t cannot be read here"):
        scene.registry.tables("default", 30.0)


@pytest.mark.parametrize("by", ["q", "a\nb", 7])
def test_a_creator_that_is_no_worker_is_not_waited_for(scene: Scene, by: object) -> None:
    scene.put("workers/default/q", b"[]")
    record = {"id": 1, "spec": SPEC.to_json(), "creator": 5, "by": by, "ready": False}
    scene.put("tables/default/t", json.dumps(record).encode())
    table = Registration(1, SPEC, 5, str(by), False, 1)
    assert scene.registry.wait_ready("default", [table], 30.0) == [table]


def _registered(scene: Scene, creator: WorkerInfo) -> Registration:
    record = {"id": 1, "spec": SPEC.to_json(), "creator": creator.id, "by": creator.name, "ready": True}
    scene.put("tables/default/t", json.dumps(record).encode())
    return scene.registry.open_tables("default", [TableToRegister(SPEC, True)], scene.worker.id, 30.0)[0]


def test_a_new_table_is_waited_for_until_its_creator_says_that_heads_have_it(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    other = Registry(scene.store, scene.runtime, "memory")
    table, looks = _registered(scene, other.register("creator", "default", lambda why: None, 30.0, "")), 0
    alive = Registry._is_alive

    async def mark_at_the_third_look(self: Registry, worker: int, name: str) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            await other._write_marks({"tables/default/t": replace(table, created=7)})
        return await alive(self, worker, name)

    monkeypatch.setattr(Registry, "_is_alive", mark_at_the_third_look)
    assert [one.created for one in scene.registry.wait_created("default", [table], 600.0, 30.0)] == [7]
    assert looks == 3
    other.close()


def test_a_creator_that_dies_before_it_says_so_is_not_waited_for(scene: Scene) -> None:
    table = _registered(scene, WorkerInfo(99, "gone", 99, "default"))
    assert scene.registry.wait_created("default", [table], 600.0, 30.0) == [table]


def test_a_creator_that_never_says_so_is_waited_for_no_longer_than_wanted(scene: Scene) -> None:
    table = _registered(scene, scene.worker)
    assert scene.registry.wait_created("default", [table], 0.1, 30.0) == [table]


def test_a_table_that_is_dropped_or_made_again_is_not_waited_for(scene: Scene) -> None:
    table = _registered(scene, scene.worker)
    assert scene.registry.wait_created("default", [replace(table, id=2)], 600.0, 30.0) == []
    dropped = scene.registry.begin_drop("default", table, 30.0)
    assert dropped is not None
    assert scene.registry.wait_created("default", [table], 600.0, 30.0) == [dropped]
    scene.registry.end_drop("default", dropped, 30.0)
    assert scene.registry.wait_created("default", [table], 600.0, 30.0) == []


def test_many_tables_are_registered_in_few_requests_even_in_a_race(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    """Each was read, numbered and written alone: six requests for a table, of 4,500 of a model."""
    specs = [eps.TableSpec(f"t{i}", 4, eps.Accumulate()) for i in range(300)]
    reads, other = list[str](), Registry(scene.store, scene.runtime, "memory")
    get, swap = scene.store.get, scene.store.compare_and_set_all

    async def counted(key: str, *, timeout_s: float = 0.0) -> Entry | None:
        reads.append(key)
        return await get(key)

    async def beside(writes: Any, *, unchanged: Entry | None = None) -> int | None:
        if "tables/default/t60" in writes and await get("tables/default/t99") is None:
            await swap({"tables/default/t99": (json.dumps(theirs).encode(), 0)})
        return await swap(writes, unchanged=unchanged)

    theirs = {"id": 7, "spec": specs[99].to_json(), "creator": 5, "by": "x", "ready": True}
    monkeypatch.setattr(scene.store, "get", counted)
    monkeypatch.setattr(scene.store, "compare_and_set_all", beside)
    tables = [TableToRegister(spec, True) for spec in specs]
    found = scene.registry.open_tables("default", tables, scene.worker.id, 30.0)
    assert [table.spec for table in found] == specs
    assert [table.made for table in found] == [i != 99 for i in range(300)]
    assert (len({table.id for table in found}), found[99].id) == (300, 7)
    assert len(reads) < 20
    again = other.open_tables("default", tables, scene.worker.id, 30.0)
    assert [(table.id, table.made) for table in again] == [(table.id, False) for table in found]


def test_a_question_for_the_view_has_a_limit_for_the_store_too(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Else its first endpoint has all the time there is, and servers are believed though others would answer."""
    limits: list[float] = []
    got = scene.store.get

    async def get(key: str, *, timeout_s: float = 0.0) -> Entry | None:
        limits.append(timeout_s)
        return await got(key)

    monkeypatch.setattr(scene.store, "get", get)
    views: Queue[View | None] = Queue()
    scene.registry.ask_view(views.put)
    assert views.get(timeout=60) is not None
    assert limits == [ASK_VIEW_TIMEOUT_S]


@pytest.mark.parametrize("value", STRANGE)
def test_damaged_table_entries_hide_no_others(scene: Scene, value: bytes) -> None:
    scene.registry.open_tables("default", [TableToRegister(SPEC, False)], scene.worker.id, 30.0)
    scene.put("tables/default/strange", value)
    (entry,) = scene.runtime.run(scene.store.list("tables/default/t"), 30.0).entries
    scene.put("tables/default/another", entry.value)  # it has the spec of t
    assert list(scene.registry.tables("default", 30.0)) == ["t"]


def test_each_further_table_is_registered_with_one_request(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Its number is that of the write before, which nobody else gets: it was asked for, behind two reads of the config
    and one of the key."""
    calls = list[str]()

    def count(name: str) -> None:
        call = getattr(scene.store, name)

        async def counted(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return await call(*arguments, **named)

        monkeypatch.setattr(scene.store, name, counted)

    for name in ("get", "list", "put", "compare_and_set", "compare_and_set_all"):
        count(name)

    def register(name: str) -> Registration:
        calls.clear()
        spec = eps.TableSpec(name, 4, eps.Accumulate())
        return scene.registry.open_tables("default", [TableToRegister(spec, True)], scene.worker.id, 30.0)[0]

    def other_number() -> int:
        return scene.runtime.run(new_number(scene.store), 30.0)

    numbers = [register("a").id, other_number()]
    for i in range(20):
        numbers += [register(f"t{i}").id, other_number()]
        assert i == 0 or calls[:1] == ["compare_and_set_all"]
        register(f"u{i}")
        assert calls == ["compare_and_set_all"]
    again = register("u7")
    assert not again.made  # one that exists is found
    assert len({*numbers}) == len(numbers)
    found = scene.registry.tables("default", 30.0)
    assert len({table.id for table in found.values()} | {*numbers}) == 41 + 21


def test_a_number_of_a_store_that_was_replaced_is_not_used(scene: Scene) -> None:
    """The config of the other one may be as old, at the same revision."""
    first = scene.registry.open_tables("default", [TableToRegister(SPEC, True)], scene.worker.id, 30.0)[0]
    entries = scene.store._data.entries
    before = entries["config"]
    entries["config"] = replace(before, value=replace(config_of(before), base=1000).to_json())
    spec = eps.TableSpec("u", 4, eps.Accumulate())
    second = scene.registry.open_tables("default", [TableToRegister(spec, True)], scene.worker.id, 30.0)[0]
    assert first.id < 1000 < second.id
