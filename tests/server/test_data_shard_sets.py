"""Shard sets beside a twin with an entry for each shard, and the arithmetic of shuffling."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.errors import InputError
from elasticps.kernels.hashing import group_range
from elasticps.model.sharding import ShardSpec, checked_spec, permuted
from elasticps.server.core.barrier_state import RangeRounds
from elasticps.server.core.data_shards import UNUSED, Claim, ShardLedger, ShardMark, Used, group_of
from elasticps.server.core.operations import ChunkContent
from elasticps.server.core.snapshot import decode_content, encode_content

P = 16
SPEC = ShardSpec(23, 2, 2, None)
WORKERS = (3, 4, 5)


@dataclass
class Twin:
    """state: "todo", "done", or the worker that has it; used: the clock that uses it; before: who had used it."""

    state: list[object] = field(default_factory=lambda: ["todo"] * SPEC.total)
    used: list[int] = field(default_factory=lambda: [0] * SPEC.total)
    before: list[Used] = field(default_factory=lambda: [UNUSED] * SPEC.total)
    touched: set[int] = field(default_factory=set)

    def take(self, step: Claim) -> None:
        for i, state in enumerate(self.state):
            mine = state == step.worker
            if (mine and 0 < self.used[i] <= step.committed) or (mine and not self.used[i] and i in step.done):
                self.state[i] = "done"
            elif mine and not self.used[i] and i in step.back:
                self.state[i] = "todo"
            elif state in step.lost and state != step.worker:
                self.state[i] = "todo"
                if self.used[i]:
                    self.before[i] = Used(state, self.used[i])
                self.used[i] = 0
        if step.want:
            owners = {state for state in self.state if isinstance(state, int)} | {step.worker}
            todo = [i for i, state in enumerate(self.state) if state == "todo"]
            todo.sort(key=lambda i: (i not in self.touched, i))  # those that came back first
            want = min(step.want, max(1, len(todo) // (2 * len(owners))))
            have = sum(s == step.worker and not u for s, u in zip(self.state, self.used, strict=True))
            for i in todo[: max(0, want - have)]:
                self.state[i] = step.worker
                self.touched.add(i)

    def note(self, shard: int, worker: int, clock: int) -> None:
        if self.state[shard] == worker:
            self.used[shard] = self.used[shard] or clock

    def held(self, worker: int) -> list[tuple[int, Used]]:
        mine = [i for i, state in enumerate(self.state) if state == worker and not self.used[i]]
        return [(i, self.before[i]) for i in mine]


numbers = st.lists(st.integers(0, SPEC.total - 1), max_size=4).map(tuple)
takes = st.builds(
    Claim, st.just("app"), st.just("train"), st.just(SPEC), st.sampled_from(WORKERS), st.integers(0, 9),
    st.integers(0, 5), st.sets(st.sampled_from(WORKERS), max_size=2).map(tuple), numbers, numbers,
)  # fmt: skip
notes = st.tuples(st.integers(0, SPEC.total - 1), st.sampled_from(WORKERS), st.integers(1, 9))


@given(st.lists(takes | notes | st.just("move"), max_size=60))
@settings(deadline=None)
def test_a_shard_ledger_agrees_with_a_twin(events: list[object]) -> None:
    shards, twin = ShardLedger(P), Twin()
    shards.take(Claim("app", "train", SPEC, 3, 0, 0, (), (), ()))
    group = group_range("app", P)
    for event in events:
        if isinstance(event, Claim):
            found = shards.find("app", "train")
            assert found is not None
            idle, before = found.idle(event), copy.deepcopy(found)
            shards.take(event)
            twin.take(event)
            assert not idle or (found == before and not found.held(event.worker))
        elif event == "move":
            shards = moved(shards, group)
        else:
            assert isinstance(event, tuple)
            found = shards.find("app", "train")
            assert found is not None
            shards.note(ShardMark(found.id, event[0]), event[1], event[2])
            twin.note(*event)
        found = shards.find("app", "train")
        assert found is not None
        assert found.done == twin.state.count("done")
        for worker in WORKERS:
            assert found.held(worker) == twin.held(worker)


def moved(shards: ShardLedger, group: int) -> ShardLedger:
    """The same state in another replica, by way of the wire."""
    content = ChunkContent([], RangeRounds({}, {}, []), shards.dump(group))
    body = b"".join(map(bytes, encode_content(content)))
    other = ShardLedger(P)
    other.load(decode_content(0, np.frombuffer(body, np.uint8), 0).shards)
    assert other.words(group) == shards.words(group)
    assert shards.dump((group + 1) % P) == {}
    return other


def test_a_lost_workers_shards_go_to_others_with_their_history() -> None:
    shards = ShardLedger(P)

    def take(worker: int, committed: int = 0, want: int = 4, **more: tuple[int, ...]) -> list[tuple[int, Used]]:
        empty: dict[str, tuple[int, ...]] = {"lost": (), "done": (), "back": ()}
        shards.take(Claim("app", "train", SPEC, worker, committed, want, **(empty | more)))
        found = shards.find("app", "train")
        assert found is not None
        return found.held(worker)

    assert take(3) == [(i, UNUSED) for i in range(4)]
    number = next(iter(shards.dump(group_range("app", P))["app"].values())).id
    for shard, clock in ((0, 1), (1, 2)):
        shards.note(ShardMark(number, shard), 3, clock)
    assert take(3, committed=1) == [(i, UNUSED) for i in range(2, 6)]  # 0 is done, 1 under way
    assert take(4, lost=(3,)) == [(1, Used(3, 2)), *((i, UNUSED) for i in (2, 3, 4))]
    shards.note(ShardMark(number, 5), 3, 9)  # it is no longer among those who hold it
    assert take(5, lost=(4,)) == [(1, Used(3, 2)), *((i, UNUSED) for i in (2, 3, 4))]  # what is known is not lost
    assert take(5, done=(1,), back=(2, 3, 4), want=0) == []
    found = shards.find("app", "train")
    assert found is not None
    assert (found.done, sorted(found.returned), found.upcoming) == (2, [2, 3, 4, 5], 6)


def test_sets_belong_to_their_application_and_home_range() -> None:
    shards = ShardLedger(P)
    spec = ShardSpec(4, 1, 1, None)
    apps = [f"app{i}" for i in range(40)]
    for app in apps:
        for name in ("train", "test"):
            shards.take(Claim(app, name, spec, 3, 0, 1, (), (), ()))
    for app in apps:
        found = shards.find(app, "train")
        assert found is not None
        assert group_of(ShardMark(found.id, 0)) == group_range(app, P)
        assert [other for other in apps if shards.owns(other, found.id)] == [app]
    group = group_range("app0", P)
    shards.erase([group])
    assert [app for app in apps if shards.find(app, "train") is None] == [a for a in apps if group_range(a, P) == group]


def test_a_claim_with_another_shard_size_changes_nothing() -> None:
    shards = ShardLedger(P)
    shards.take(Claim("app", "train", SPEC, 3, 0, 2, (), (), ()))
    shards.take(Claim("app", "train", SPEC._replace(size=3), 4, 0, 2, (), (), ()))
    found = shards.find("app", "train")
    assert found is not None
    assert (found.spec, found.held(4)) == (SPEC, [])


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_every_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(samples), samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(samples))
    assert permuted(np.arange(samples)[3:7], samples, seed, epoch).tolist() == order[3:7].tolist()


def test_orders_differ_by_seed_and_epoch_and_look_shuffled() -> None:
    orders = {tuple(permuted(np.arange(1000), 1000, seed, epoch).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4
    for order in orders:
        steps = np.abs(np.diff(order))
        assert 200 < steps.mean() < 470  # a third of 1000 on average
        assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.15


def test_arguments_that_cannot_be_are_refused() -> None:
    assert checked_spec(np.int64(10), 4, 2, None) == ShardSpec(10, 4, 2, None)
    assert checked_spec(10, 4, 2, 0).total == 6
    for bad in ((0, 1, 1, None), (1, 1.0, 1, None), (1, 1, True, None), (1, 1, 1, -1), (1 << 40, 1, 1, None)):
        with pytest.raises(InputError):
            checked_spec(*bad)
