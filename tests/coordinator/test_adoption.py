"""Plans that let a new store adopt a running cluster, and the reset of a dead one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.adoption import CannotAdopt, Witness, adopt, look_at_dead, plan_adoption, reset, restore_config
from coordinator.core.lost_keys import UNHEARD
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster, new_number, newest_roster, newest_view
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server, register_worker
from tests.coordinator.support import until_key

SERVERS = (ServerInfo("a", 3, "h:1"), ServerInfo("b", 1, "h:2"))


def view(epoch: int, cluster: str = "test@one") -> View:
    chains, nobody = np.array([[0, 1], [1, 0]], np.int32), np.full(2, -1, np.int32)
    return View(cluster, epoch, 2, 2, SERVERS, chains, nobody, np.ones(2, np.int64), "by hand")


def witness(name: str, epoch: int = 7, newest: int = 40, tables: dict[int, str] | None = None) -> Witness:
    incarnation = {"a": 3, "b": 1}[name]
    roster = Roster(epoch, (WorkerInfo(epoch, "w", epoch, "x"),), "test@one")
    return Witness(name, incarnation, view(epoch), roster, newest, tables or {})


def spec(name: str) -> str:
    return json.dumps({"name": name})


def test_adopted_numbers_are_above_those_of_every_server() -> None:
    found = plan_adoption([witness("a", 7, 40, {9: spec("t")}), witness("b", 8, 55)], (), "x")
    assert list(found.writes)[-1] == "config"
    config = ClusterConfig.from_json(found.writes["config"])
    assert (config.identity("test"), config.ranges, config.replicas) == ("test@one", 2, 2)
    assert config.base > 55
    adopted = View.decode(found.writes["view"])
    assert adopted.epoch > 8
    assert replace(adopted, epoch=8) == view(8)
    assert Roster.decode(found.writes["roster"]).version == 9
    assert found.writes["incarnations/servers/a"] == b"3"
    assert json.loads(found.writes["tables/x/t"])["id"] == 9


def test_a_server_that_does_not_answer_may_know_a_newer_view() -> None:
    with pytest.raises(CannotAdopt, match="no answer from b: "):
        plan_adoption([witness("a")], (), "x")
    assert plan_adoption([witness("a")], ("b",), "x").writes


def test_servers_of_two_clusters_are_not_mixed() -> None:
    other = replace(witness("b"), view=view(7, "test@two"))
    with pytest.raises(CannotAdopt, match="2 clusters: test@one, test@two"):
        plan_adoption([witness("a"), other], (), "x")


def test_tables_with_an_ambiguous_name_are_left_to_their_workers() -> None:
    tables = {1: spec("t"), 2: spec("u"), 3: spec("t")}
    found = plan_adoption([witness("a", tables=tables), witness("b")], (), "x")
    assert found.unclear == ("t",)
    assert [key for key in found.writes if key.startswith("tables/")] == ["tables/x/u"]


def test_a_table_belongs_to_the_application_that_servers_name_or_to_the_default() -> None:
    tables = {1: spec("t"), 2: spec("t"), 3: spec("u"), 4: spec("v"), 5: spec("v")}
    knows = replace(witness("a", tables=tables), apps={1: "ads", 3: "", 4: "ads"})
    found = plan_adoption([knows, replace(knows, name="b", incarnation=1, apps={1: "", 2: "", 5: "ads"})], (), "x")
    ids = {key: json.loads(value)["id"] for key, value in found.writes.items() if key.startswith("tables/")}
    assert ids == {"tables/ads/t": 1, "tables/x/t": 2, "tables/x/u": 3}
    assert found.unclear == ("v",)


async def test_a_store_whose_cluster_has_servers_is_left_unchanged() -> None:
    store = MemoryStore("test")
    await create_cluster(store, ClusterConfig(2, id="two"))
    session = await register_server(store, name="new", address="h:1", on_lost=lambda reason: None)
    adoption = plan_adoption([witness("a"), witness("b")], (), "x")
    with pytest.raises(CannotAdopt, match="holds test@two with servers new"):
        await adopt(store, adoption)
    await session.close()
    await adopt(store, adoption)
    with pytest.raises(CannotAdopt, match="holds test@one already"):
        await adopt(store, adoption)
    assert await new_number(store) > 41


async def test_a_leader_continues_an_adopted_cluster_and_starts_over_after_a_reset() -> None:
    store = MemoryStore("test")
    await create_cluster(store, ClusterConfig(2, id="two"))
    stop = asyncio.Event()
    leading = asyncio.create_task(run_coordinator(store, name="c0", stop=stop))
    await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))
    sessions = [
        await register_server(store, name=name, address="h:1", on_lost=lambda reason: None) for name in ("a", "b", "c")
    ]
    assert [session.info.incarnation for session in sessions] == [4, 2, 1]
    entry = await until_key(store, "view", lambda e: e is not None and View.decode(e.value).epoch > UNHEARD + 7)
    assert entry is not None
    assert View.decode(entry.value).cluster == "test@one"
    with pytest.raises(CannotAdopt, match="not dead: a, b, c are registered"):
        await look_at_dead(store)
    for session in sessions:
        await session.close()
    await store.put("tables/x/t", b"a table")
    assert (await look_at_dead(store)).tables == ("x/t",)
    before = await new_number(store)
    made = await reset(store, "three")
    assert made.identity("test") == "test@three"
    assert await store.get("tables/x/t") is None
    assert await new_number(store) > before
    again = await register_server(store, name="a", address="h:1", on_lost=lambda reason: None)
    entry = await until_key(store, "view", lambda e: e is not None and View.decode(e.value).cluster == "test@three")
    assert entry is not None
    assert View.decode(entry.value).epoch == 1
    stop.set()
    await leading
    await again.close()


async def test_a_worker_survives_a_second_new_store_even_if_no_number_was_given_out_since_the_first() -> None:
    store = MemoryStore("test")
    first = plan_adoption([witness("a"), witness("b")], (), "x")
    await adopt(store, first)
    lost: list[str] = []
    session = await register_worker(store, name="w", app="default", ttl_s=0.3, on_lost=lost.append)
    session.took_part = True
    session.belongings["last-worker/default/w"] = str(session.info.id).encode()
    known = replace(witness("a"), roster=Roster.decode(first.writes["roster"]), newest=session.info.id)
    for _ in range(2):
        second = plan_adoption([known, replace(known, name="b", incarnation=1)], (), "x")
        for entry in (await store.list("")).entries:
            await store.delete(entry.key)
        await adopt(store, second)
        await until_key(store, "last-worker/default/w", lambda entry: entry is not None)
        known = replace(known, roster=Roster.decode(second.writes["roster"]))
    assert not lost
    await session.close()


class _LeaderIsFaster(MemoryStore):
    """A leader that has not heard of it yet writes between a reset's look and its write, and after that."""

    async def compare_and_set(self, key: str, value: bytes, **how: Any) -> int | None:
        if key == "config":
            await self._write_on()
        done = await super().compare_and_set(key, value, **how)
        if key == "config":
            await self._write_on()
        return done

    async def _write_on(self) -> None:
        for key, newer in (("view", _newer_view), ("roster", _newer_roster)):
            entry = await self.get(key)
            assert entry is not None
            assert await super().compare_and_set(key, newer(entry.value), expect=entry.revision) is not None


def _newer_view(value: bytes) -> bytes:
    view = View.decode(value)
    return replace(view, epoch=view.epoch + 1).encode()


def _newer_roster(value: bytes) -> bytes:
    roster = Roster.decode(value)
    return replace(roster, version=roster.version + 1).encode()


async def test_a_reset_leaves_nothing_that_a_leader_wrote_meanwhile() -> None:
    """The new cluster would have no view, or no worker, for ever: what is there is another cluster's."""
    store = _LeaderIsFaster("test", shared=(plain := MemoryStore("test"))._data)
    await adopt(plain, plan_adoption([witness("a"), witness("b")], (), "x"))
    await reset(store, "three")
    assert [await store.get(key) for key in ("view", "roster")] == [None, None]


async def test_after_a_reset_nobody_takes_what_they_know_for_the_newest() -> None:
    store = MemoryStore("test")
    adoption = plan_adoption([witness("a"), witness("b")], (), "x")
    await adopt(store, adoption)
    known = View.decode(adoption.writes["view"]), Roster.decode(adoption.writes["roster"])
    await reset(store, "three")
    assert (await newest_view(store, known[0]), await newest_roster(store, known[1])) == (None, None)


async def test_a_reset_ends_a_restore_and_a_request_for_range_recovery() -> None:
    """Workers of the new cluster would wait for what was to come back into the old one."""
    store = MemoryStore("test")
    await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))
    gone = ("restoring", "begin-anew", "losses/000000000003", "losses-known/000000000003/5", "losses-held-up")
    for key in (*gone, "rates/x/t"):
        await store.put(key, b"{}")
    await reset(store, "three")
    assert {entry.key for entry in (await store.list("")).entries} & {*gone, "rates/x/t"} == {"rates/x/t"}


async def damaged_cluster(*, lost: tuple[str, ...], value: bytes | None = None) -> MemoryStore:
    """A cluster with registered servers whose store has lost or damaged keys."""
    store = MemoryStore("test")
    await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))
    for info in SERVERS:
        await store.put(f"servers/{info.name}", info.to_json())
    for key in lost:
        if value is None:
            await store.delete(key)
        else:
            await store.put(key, value)
    return store


@pytest.mark.parametrize("value", [None, b"\0" * 40])
@pytest.mark.parametrize("lost", [("view",), ("roster",), ("config",), ("view", "roster", "config")])
async def test_lost_keys_of_a_cluster_are_restored_by_adopting_it(lost: tuple[str, ...], value: bytes | None) -> None:
    store = await damaged_cluster(lost=lost, value=value)
    before = await new_number(store) if "config" not in lost else 0
    tables = {9: spec("t")}
    await adopt(store, plan_adoption([witness("a", 70_000, tables=tables), witness("b", 70_000)], (), "x"))
    found = {entry.key: entry.value for entry in (await store.list("")).entries}
    assert ClusterConfig.from_json(found["config"]).identity("test") == "test@one"
    assert View.decode(found["view"]).epoch >= (70_000 if "view" in lost else 7)
    assert Roster.decode(found["roster"]).workers
    assert await store.get("tables/x/t") is not None
    assert await new_number(store) > max(before, 40)
    await store.delete("tables/x/t")
    await adopt(store, plan_adoption([witness("a", tables=tables), witness("b")], (), "x"))
    assert await store.get("tables/x/t") is not None
    with pytest.raises(CannotAdopt, match="nothing of it is lost"):
        await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))


async def test_a_lost_config_is_made_again_from_the_view() -> None:
    store = await damaged_cluster(lost=("config",))
    found = await restore_config(store)
    assert found is not None
    assert (found.identity("test"), found.ranges, found.replicas) == ("test@one", 2, 2)
    assert found.base > 40
    assert await restore_config(store) == found
    assert await restore_config(MemoryStore("new")) is None


@pytest.mark.parametrize("value", [None, b"\0" * 40])
async def test_no_second_cluster_is_made_if_config_and_view_are_lost(value: bytes | None) -> None:
    store = await damaged_cluster(lost=("config", "view"), value=value)
    with pytest.raises(CannotAdopt, match="`elasticps cluster adopt` puts them back"):
        await restore_config(store)


async def test_a_dead_cluster_whose_view_makes_no_sense_is_reset() -> None:
    store = MemoryStore("test")
    await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))
    for key in ("view", "roster"):
        await store.put(key, b"\0" * 40)
    assert (await look_at_dead(store)).ranges == 0
    await reset(store, "three")
    assert [await store.get(key) for key in ("view", "roster")] == [None, None]


async def test_a_registration_that_makes_no_sense_is_no_server() -> None:
    """It has no lease that ends: nobody could end that server first."""
    store = MemoryStore("test")
    await create_cluster(store, ClusterConfig(2, id="two"))
    await store.put("servers/x", b'{"name": "x"')
    assert (await look_at_dead(store)).servers == ()
    await adopt(store, plan_adoption([witness("a"), witness("b")], (), "x"))
    assert (await reset(store, "three")).id == "three"
