"""Frequent keys: the sketch against a counter, and what is sampled of a server's frames."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticps.server.core.frequent_keys import Sketch
from elasticps.server.roles.hot_keys import HotKeys
from elasticps.wire.clocks import encode_record
from elasticps.wire.frames import Kind
from elasticps.wire.headers import PullHeader, PushHeader
from replication.progress import before_part
from replication.step_records import record_of
from tests.server.conftest import RANGES, TABLE, Group, Run


@given(st.lists(st.lists(st.integers(-3, 12), max_size=30), max_size=12), st.integers(1, 6))
def test_no_frequent_key_is_missing(batches: list[list[int]], capacity: int) -> None:
    sketch, counter = Sketch(capacity), Counter[int]()
    for batch in batches:
        sketch.add(np.array(batch, np.int64))
        counter.update(batch)
        top = sketch.top(100)
        assert sketch.total == counter.total()
        assert len(top) <= capacity
        assert sketch.lost * (capacity + 1) <= sketch.total
        assert all(each.least <= counter[each.key] <= each.most == each.least + sketch.lost for each in top)
        assert [each.least for each in top] == sorted((each.least for each in top), reverse=True)
        found = {each.key for each in top}
        assert all(key in found for key, count in counter.items() if count > sketch.lost)
        assert sketch.top(1) == top[:1]


def test_frames_are_looked_at_once_and_their_keys_are_counted(run: Run) -> None:
    async def story(group: Group) -> None:
        await group.start("a")
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        worker = await group.connect("a")
        server = group.servers["a"]
        hot = HotKeys(server.fast, server.executor.store, view.ranges)
        await asyncio.wait_for(worker.push(view, "a", 1, [5, 6, 7], 1.0), 10)
        pushed = list(hot.sample())
        assert [(table, sorted(keys.tolist())) for table, keys in pushed] == [(TABLE, [5, 6, 7])]
        assert list(hot.sample()) == []  # the same frame
        record = encode_record(record_of(2, 1, np.arange(RANGES) < 3))
        sparse = PushHeader(0, view.epoch, 2, before_part(2, 0), 1, record=True).header(0)
        await asyncio.wait_for(worker.ask(sparse, worker._block(view, "a", [8], 1.0), record), 10)
        assert [(table, keys.tolist()) for table, keys in hot.sample()] == [(TABLE, [8])]
        keys = np.array([5, 5, 9])
        ask = PullHeader(0, view.epoch, 1, 0, TABLE, len(keys)).header()
        await asyncio.wait_for(worker.ask(ask, keys.tobytes()), 10)
        assert [(table, mine.tolist()) for table, mine in hot.sample()] == [(TABLE, [5, 5, 9])]
        for table, mine in [*pushed, (TABLE, keys), (99, keys)]:
            hot._count(table, mine)
        found = hot.found()
        assert (found["pulls"], found["pushes"], found["sampled"]) == (1, 2, 6)
        (one,) = found["tables"]
        assert dict(zip(one["keys"], one["counts"], strict=True)) == {5: 3, 6: 1, 7: 1, 9: 1}
        assert one["keys"][0] == 5
        rows = server.executor.store.live[TABLE]
        ranges: Counter[int] = Counter(rows.ranges_of(np.array([5, 5, 5, 6, 7, 9])).tolist())
        assert dict(zip(found["ranges"], found["range_counts"], strict=True)) == ranges
        assert Kind.PULL in hot._frames

    run(story)
