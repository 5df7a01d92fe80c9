"""A number requested while a new store adopts the cluster is given only once."""

from __future__ import annotations

from dataclasses import replace

from coordinator.adoption import adopt, plan_adoption
from coordinator.core.store import Entry
from coordinator.core.view import ClusterConfig
from coordinator.membership import create_cluster, new_number
from coordinator.memory import MemoryStore
from tests.coordinator.support import FaultyStore
from tests.coordinator.test_adoption import witness


class Remade(FaultyStore):
    """Its store is lost, made anew and adopted between the first answer and the next request, which is tried until it
    answers again."""

    def __init__(self, store: MemoryStore, then: MemoryStore) -> None:
        super().__init__(store)
        self.then = then

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        found = await super().get(key, timeout_s=timeout_s)
        self.store = self.then
        return found


async def test_a_number_requested_while_the_store_is_replaced_is_given_only_once() -> None:
    before, after = MemoryStore("test"), MemoryStore("test")
    await create_cluster(before, ClusterConfig(2, 2, id="one"))
    given = [await new_number(before) for _ in range(40)]
    knows = replace(witness("a"), newest=max(given))
    await adopt(after, plan_adoption([knows, replace(knows, name="b", incarnation=1)], (), "x"))
    number = await new_number(Remade(before, after))
    assert number > max(given), "somebody had it before"
