"""A worker outlives the store: its record there is its own, at whatever revision it was put back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.adoption import adopt, plan_adoption
from coordinator.memory import MemoryStore
from elasticps.client.core.join import PastRun
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.errors import ClusterUnreachable
from tests.coordinator.support import FaultyStore, until_key
from tests.coordinator.test_adoption import witness


def test_a_worker_that_pauses_over_a_new_store_goes_on_as_the_same() -> None:
    runtime, store, lost = Runtime(), MemoryStore("test"), list[str]()

    def run(coroutine: object) -> object:
        return runtime.run(coroutine, 30.0)  # type: ignore[arg-type]

    first = plan_adoption([witness("a"), witness("b")], (), "x")
    run(adopt(store, first))
    registry = Registry(store, runtime, "memory")
    me = registry.register("w", "default", lost.append, 30.0, "")
    past = PastRun(me.id, 5, 5, 5, 0)
    revision = registry.keep(past, 30.0)
    assert revision is not None  # it takes part; then it waits for data, and nobody waits for it

    async def replace_store() -> None:
        for entry in (await store.list("")).entries:
            await store.delete(entry.key)
        knows = replace(witness("a"), newest=me.id)
        await adopt(store, plan_adoption([knows, replace(knows, name="b", incarnation=1)], (), "x"))
        await until_key(store, "last-worker/default/w", lambda entry: entry is not None)

    run(replace_store())
    again = registry.keep(past._replace(base=9, trained=5, revision=revision), 30.0)  # it is given data again
    registry.close()
    assert not lost
    assert again is not None, "it would end, and say that it was started again elsewhere"


def test_a_worker_whose_record_was_written_without_an_answer_goes_on_as_the_same() -> None:
    runtime, lost = Runtime(), list[str]()
    store = FaultyStore(MemoryStore("test"))
    runtime.run(adopt(store, plan_adoption([witness("a"), witness("b")], (), "x")), 30.0)
    registry = Registry(store, runtime, "memory")
    me = registry.register("w", "default", lost.append, 30.0, "")
    past = PastRun(me.id, 5, 5, 5, 0)
    revision = registry.keep(past, 30.0)
    assert revision is not None
    store.lose_next_write = "last-worker/default/w"
    with pytest.raises(ClusterUnreachable):  # after which it goes on where it was, and pauses once more
        registry.keep(past._replace(base=9, revision=revision), 30.0)
    again = registry.keep(past._replace(base=12, revision=revision), 30.0)
    registry.close()
    assert not lost
    assert again is not None, "it would end, and say that it was started again elsewhere"
