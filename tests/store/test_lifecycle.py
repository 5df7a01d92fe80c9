"""Random pushes, sweeps and moves leave a table as a dictionary with counts and times says, candidates included."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elasticps.errors import SpecError
from elasticps.kernels.hashing import HASH_END
from elasticps.model import spec
from elasticps.model.policies import Admission, Capacity, IdleFor, MinCount, MinCountSketch, Probability, SmallNorm
from elasticps.store import Table
from elasticps.store.admission import ADDS_CANDIDATE, ADDS_ROW
from elasticps.store.cuts import Deletions
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep, threshold
from elasticps.store.lifecycle import MeasuredSweep
from elasticps.store.waiting import Waiting

RANGES, DIM = 2, 3
WIDTH = HASH_END // RANGES
keys = st.lists(st.integers(0, 30), max_size=20)
f32 = np.float32


@dataclass
class Row:
    """What the model knows of a row."""

    weights: np.ndarray
    last: int
    count: np.float32
    score: np.float32


@dataclass
class Model:
    """A table by the letter of the contract: a dictionary of rows, and one of candidates (count, last push)."""

    admission: Admission | None
    half_life: float | None
    scores: bool
    now: int = 1000
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def fallen(self, value: np.float32, last: int) -> np.float32:
        if self.half_life is None or self.now <= last:
            return value
        return f32(float(value) * 0.5 ** ((self.now - last) / self.half_life))

    def push(self, key: int, score: float) -> None:
        if key not in self.rows:
            before = self.waiting.get(key, (0, 0))[0]
            if isinstance(self.admission, MinCount) and before + 1 < self.admission.count:
                self.waiting[key] = before + 1, self.now
                return
            self.waiting.pop(key, None)
            self.rows[key] = Row(np.zeros(DIM, f32), self.now, f32(before), f32(0))
        row = self.rows[key]
        row.weights = row.weights + f32(1)
        row.count = self.fallen(row.count, row.last) + f32(1)
        row.score = self.fallen(row.score, row.last) + f32(score)
        row.last = self.now

    def rank(self, row: Row, measure: Measure) -> float:
        if measure == Measure.LAST_USE:
            return row.last
        if measure == Measure.NORM:
            return float(np.sum(row.weights * row.weights, dtype=f32))
        return float(self.fallen(row.count if measure == Measure.COUNT else row.score, row.last))


class LifecycleMachine(RuleBasedStateMachine):
    @initialize(
        count=st.sampled_from([0, 1, 2, 3]), half_life=st.sampled_from([None, 7.0, 1000.0]), scores=st.booleans(),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    )  # fmt: skip
    def create(self, count: int, half_life: float | None, scores: bool, dtype: str) -> None:
        admission = MinCount(count) if count else None
        eviction = (Capacity(10, "score" if scores else "most_used", half_life),)
        self.spec = spec.TableSpec(
            "t", DIM, spec.Accumulate(), dtype=dtype, admission=admission, eviction=eviction
        )  # fmt: skip
        self.times = np.full(RANGES, 1000, np.int64)
        self.model = Model(admission, half_life, scores)
        self.table = Table(self.spec, 3, RANGES, times=self.times)

    @rule(seconds=st.integers(0, 40))
    def time_goes_on(self, seconds: int) -> None:
        self.model.now += seconds
        self.times += seconds

    @rule(keys=keys, seed=st.integers(0, 5))
    def push(self, keys: list[int], seed: int) -> None:
        scores = np.random.default_rng(seed).integers(0, 4, len(keys)).astype(f32)
        grads = np.ones((len(keys), self.spec.push_width), f32)
        if self.model.scores:
            grads[:, -1] = scores
        self.table.apply(np.array(keys, np.int64), grads, np.empty(0, f32), 7, 1)
        for key, score in zip(keys, scores, strict=True):
            self.model.push(key, float(score))

    @rule(keys=keys)
    def delete(self, keys: list[int]) -> None:
        self.table.delete(np.array(keys, np.int64))
        for key in keys:
            self.model.rows.pop(key, None)
            self.model.waiting.pop(key, None)

    @rule(keys=st.lists(st.integers(0, 30), max_size=5, unique=True))
    def load(self, keys: list[int]) -> None:
        self.table.put(np.array(keys, np.int64), np.full((len(keys), DIM), 2, f32))
        for key in keys:
            self.model.waiting.pop(key, None)
            self.model.rows[key] = Row(np.full(DIM, 2, f32), self.model.now, f32(0), f32(0))

    @rule(
        measure=st.sampled_from([Measure.LAST_USE, Measure.COUNT, Measure.SCORE, Measure.NORM]),
        share=st.floats(0.1, 1), cut=st.integers(0, WIDTH),
    )  # fmt: skip
    def sweep(self, measure: Measure, share: float, cut: int) -> None:
        """The share that is smallest goes, of one interval of one range."""
        if measure == Measure.SCORE and not self.model.scores:
            return
        lifecycle = self.table.lifecycle
        assert lifecycle is not None
        decay = 1 / self.model.half_life if self.model.half_life else 0.0
        by = Predicate(measure, Reason.CAPACITY, 0, 0, self.model.now, decay)
        found, _, ranks = lifecycle.measure(self.table, 0, 0, cut, by)
        going = round(share * len(found))
        if not going:
            return
        below, tie = threshold(found, ranks, going)
        by = by._replace(below=below, tie=tie)
        chosen = set(found[by.chosen(found, ranks)].tolist())
        assert len(chosen) == going
        values = {key: self.model.rank(self.model.rows[key], measure) for key in found.tolist()}
        least_left = min((values[key] for key in values.keys() - chosen), default=np.inf)
        assert all(values[key] <= least_left * (1 + 1e-5) for key in chosen)
        assert self.table.evict(0, 0, cut, by) == going
        for key in chosen:
            del self.model.rows[key]

    @rule(age=st.integers(0, 60), by_count=st.booleans())
    def forget_candidates(self, age: int, by_count: bool) -> None:
        if by_count:
            by = Predicate(Measure.CANDIDATE, Reason.FORGOTTEN, 2 << 32)
            gone = [key for key, (count, _) in self.model.waiting.items() if count < 2]
        else:
            by = Predicate(Measure.CANDIDATE_AGE, Reason.FORGOTTEN, max(0, self.model.now - age))
            gone = [key for key, (_, last) in self.model.waiting.items() if last < self.model.now - age]
        assert sum(self.table.evict(r, 0, HASH_END, by) for r in range(RANGES)) == len(gone)
        for key in gone:
            del self.model.waiting[key]

    @rule(rows=st.integers(1, 40))
    def exchange_sparse_segments(self, rows: int) -> None:
        self.table.shrink(rows)

    @rule(r=st.integers(0, RANGES - 1), parts=st.integers(1, 3))
    def move_range(self, r: int, parts: int) -> None:
        """A joiner that is filled piece by piece has the same digest."""
        assert self.table.lifecycle is not None
        other = Table(self.spec, 3, RANGES, times=self.times)
        assert other.lifecycle is not None
        for part in range(parts):
            low, high = r * WIDTH + WIDTH * part // parts, r * WIDTH + WIDTH * (part + 1) // parts
            waiting, words = self.table.lifecycle.waiting.list_interval(r, low, high)
            other.load_range(r, *self.table.dump_stamped(r, low, high))
            other.lifecycle.load(r, waiting, words, low, self.table.lifecycle.waiting.read_blocks(r, low, high))
        assert other.digest_range(r) == self.table.digest_range(r)
        assert other.lifecycle.words(r) == self.table.lifecycle.words(r)
        self.table.drop_range(r)
        self.table.load_range(r, *other.dump_stamped(r, 0, HASH_END))
        self.table.lifecycle.load(
            r, *other.lifecycle.waiting.list_interval(r, 0, HASH_END), 0, np.empty((0, 0), np.uint8)
        )

    @invariant()
    def table_is_as_the_model(self) -> None:
        lifecycle = self.table.lifecycle
        assert lifecycle is not None
        assert self.table.rows == len(self.model.rows)
        found: dict[int, tuple[int, int]] = {}
        for r in range(RANGES):
            waiting, words = lifecycle.waiting.list_interval(r, 0, HASH_END)
            found |= {k: (w & 0xFFFF, w >> 16) for k, w in zip(waiting.tolist(), words.tolist(), strict=True)}
        assert found == self.model.waiting
        there = np.array(list(self.model.rows), np.int64)
        usage = self.table.read_usage(there)
        assert usage[:, 0].tolist() == [row.last for row in self.model.rows.values()]
        counts = [row.count for row in self.model.rows.values()]
        np.testing.assert_allclose(usage[:, 1].view(f32), counts, rtol=1e-5)
        if self.model.scores:
            np.testing.assert_allclose(
                usage[:, 2].view(f32), [row.score for row in self.model.rows.values()], rtol=1e-5
            )
        weights = np.empty((len(there), DIM), f32)
        self.table.gather(there, weights)
        np.testing.assert_array_equal(weights, [row.weights for row in self.model.rows.values()] or np.empty((0, DIM)))

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()


TestLifecycle = LifecycleMachine.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_key_that_comes_often_in_one_batch_gets_its_row_in_the_midst_of_it() -> None:
    described = spec.TableSpec("t", 1, spec.Accumulate(), admission=MinCount(3))
    table = Table(described, 1, RANGES, times=np.full(RANGES, 5, np.int64))
    table.apply(np.full(5, 9, np.int64), np.ones((5, 1), f32), np.empty(0, f32))
    weights = np.empty((1, 1), f32)
    table.gather(np.array([9]), weights)
    assert weights[0, 0] == 3  # the third push is the first that is applied
    assert table.read_usage(np.array([9])).view(f32)[0, 1] == 5


def test_chance_admits_a_share_and_decides_a_retried_push_as_before() -> None:
    described = spec.TableSpec("t", 1, spec.Accumulate(), admission=Probability(0.1))
    many = np.arange(20_000)
    rows = []
    for _ in range(2):
        table = Table(described, 1, RANGES, times=np.full(RANGES, 5, np.int64))
        table.apply(many, np.ones((len(many), 1), f32), np.empty(0, f32), 3, 17)
        rows.append(set(np.concatenate([table.range_keys(r) for r in range(RANGES)]).tolist()))
    assert rows[0] == rows[1]
    assert 0.08 < len(rows[0]) / len(many) < 0.12


def test_a_sketch_admits_never_late_and_moves_by_blocks() -> None:
    described = spec.TableSpec("t", 1, spec.Accumulate(), admission=MinCountSketch(4, nbytes=64 << 10))
    times = np.full(RANGES, 5, np.int64)
    table, other = Table(described, 1, RANGES, times=times), Table(described, 1, RANGES, times=times)
    assert table.lifecycle is not None
    assert other.lifecycle is not None
    for one in (table.lifecycle, other.lifecycle):
        one.begin(np.arange(RANGES), described)
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(range(500), 0)
    for _ in range(60):
        batch = rng.integers(0, 500, 40)
        table.apply(batch, np.ones((40, 1), f32), np.empty(0, f32))
        for key in batch.tolist():
            counts[key] += 1
    often = np.array([key for key, count in counts.items() if count >= 4])
    assert not table.missing(often).any()
    seldom = np.array([key for key, count in counts.items() if count < 4])
    assert table.missing(seldom).mean() > 0.8
    for r in range(RANGES):
        for part in range(4):
            low, high = r * WIDTH + WIDTH * part // 4, r * WIDTH + WIDTH * (part + 1) // 4
            other.lifecycle.load(
                r, *table.lifecycle.waiting.list_interval(r, low, high), low,
                table.lifecycle.waiting.read_blocks(r, low, high),
            )  # fmt: skip
        assert other.lifecycle.words(r) == table.lifecycle.words(r)


def waiting_table(count: int, ranges: int = 8) -> tuple[Table, Waiting]:
    """A table with so many keys that wait for a row."""
    described = spec.TableSpec("t", 1, spec.Accumulate(), admission=MinCount(3))
    table = Table(described, 1, ranges, times=np.full(ranges, 5, np.int64))
    table.apply(np.arange(count), np.ones((count, 1), f32), np.empty(0, f32))
    assert table.lifecycle is not None
    return table, table.lifecycle.waiting


def contents(waiting: Waiting, ranges: int = 8) -> list[dict[int, int]]:
    found = (waiting.list_interval(r, 0, HASH_END) for r in range(ranges))
    return [dict(zip(keys.tolist(), words.tolist(), strict=True)) for keys, words in found]


@pytest.mark.parametrize("waiting_keys", [0, 1, 40, 2000])
def test_the_index_of_waiting_keys_shrinks_when_they_are_forgotten_or_get_rows(waiting_keys: int) -> None:
    table, waiting = waiting_table(20_000)
    full = waiting.nbytes
    waiting.remove(np.arange(waiting_keys, 10_000))
    for _ in range(2):  # the others get their rows
        table.apply(np.arange(10_000, 20_000), np.ones((10_000, 1), f32), np.empty(0, f32))
    assert (waiting.candidates, waiting.nbytes, table.rows) == (waiting_keys, full, 10_000)
    expected, calls = contents(waiting), 0
    while table.shrink(1) < 1:
        assert calls < 8
        assert contents(waiting) == expected
        calls += 1
    assert calls == 8  # one range at a time
    assert waiting.nbytes <= (28 * waiting_keys if waiting_keys > 1000 else 2048 * (waiting_keys > 0))
    waiting.put(np.arange(10**6, 10**6 + 5000), np.full(5000, 7 << 16 | 1))
    assert waiting.candidates == waiting_keys + 5000
    table.close()


def test_a_waiting_key_takes_no_more_than_28_bytes() -> None:
    table, waiting = waiting_table(20_000, 2)
    for begin in range(20_000, 100_000, 500):
        table.apply(np.arange(begin, begin + 500), np.ones((500, 1), f32), np.empty(0, f32))
        assert waiting.nbytes <= 28 * waiting.candidates
    table.close()


def test_the_index_of_a_table_shrinks_when_its_rows_are_evicted() -> None:
    described = spec.TableSpec("t", 1, spec.Accumulate(), eviction=(IdleFor(10.0),))
    table = Table(described, 1, RANGES, times=np.full(RANGES, 5, np.int64))
    table.apply(np.arange(9000), np.ones((9000, 1), f32), np.empty(0, f32))
    table.forget(np.arange(100, 9000))
    before = table.nbytes
    assert table.shrink(10**6) < 10**6
    assert table.nbytes < before - 9000 * 16
    weights = np.empty((200, 1), f32)
    table.gather(np.arange(200), weights)
    assert weights[:, 0].tolist() == [1.0] * 100 + [0.0] * 100
    table.close()


def test_a_sweep_recalls_what_was_measured_unless_anything_was_applied_since() -> None:
    described = spec.TableSpec("t", 1, spec.Accumulate(), eviction=(IdleFor(10.0),))
    times = np.full(RANGES, 5, np.int64)
    table, by = Table(described, 1, RANGES, times=times), Predicate(Measure.LAST_USE, Reason.IDLE, 9)
    lifecycle = table.lifecycle
    assert lifecycle is not None
    keys = np.arange(50)
    keys = keys[table.ranges_of(keys) == 0]
    table.apply(keys, np.ones((len(keys), 1), f32), np.empty(0, f32))
    lifecycle.measured = MeasuredSweep(7, 0, HASH_END, by, {0: lifecycle.measure(table, 0, 0, HASH_END, by)})
    times[:] = 20
    table.apply(keys[:1], np.ones((1, 1), f32), np.empty(0, f32))
    assert lifecycle.measured.recall(7, 0, 0, HASH_END, by) is not None
    for changed in ((8, 0, 0, HASH_END), (7, 1, 0, HASH_END), (7, 0, 1, HASH_END), (7, 0, 0, HASH_END - 1)):
        assert lifecycle.measured.recall(*changed, by) is None
    assert lifecycle.measured.recall(7, 0, 0, HASH_END, by._replace(below=8)) is None
    assert table.evict(0, 0, HASH_END, by, applied=8) == len(keys) - 1  # the row that was used since stays
    table.close()


def test_policies_that_need_more_than_rows_keep_are_refused() -> None:
    plain = spec.TableSpec("t", 2, spec.SGD(0.1))
    counted = spec.TableSpec("t", 2, spec.SGD(0.1), eviction=[IdleFor("7d")])
    with pytest.raises(SpecError, match="keep no usage"):
        plain.with_policies(None, [IdleFor("7d")])
    with pytest.raises(SpecError, match="need usage='score'"):
        counted.with_policies(None, [Capacity(10, "score")])
    changed = counted.with_policies(MinCount(2), [SmallNorm(1e-3)])
    assert (changed.usage, changed.difference(counted)) == ("count", "")
    assert spec.TableSpec.from_json(changed.to_json()) == changed
    assert plain.to_json() == spec.TableSpec.from_json(plain.to_json()).to_json()
    assert "usage" not in plain.to_json()


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (lambda: MinCount(0), "MinCount.count must be from 1"),
        (lambda: MinCount(3, forget_after="7 days"), "must be seconds or a text"),
        (lambda: Probability(0), "above 0 and at most 1"),
        (lambda: Probability(1.5), "above 0 and at most 1"),
        (lambda: IdleFor(0), "IdleFor.idle must be finite and at least 1"),
        (lambda: Capacity(0), "Capacity.rows must be from 1"),
        (lambda: Capacity(5, "newest"), "Capacity.keep must be"),
        (lambda: Capacity(5, "last_used", 3), "the last use has none"),
        (lambda: SmallNorm(float("nan")), "SmallNorm.below must be finite"),
        (lambda: spec.TableSpec("t", 2, spec.SGD(0.1), admission=IdleFor(3)), "admission must be one of"),  # type: ignore[arg-type]
        (lambda: spec.TableSpec("t", 2, spec.SGD(0.1), eviction=[MinCount(3)]), "eviction must be"),  # type: ignore[list-item]
        (lambda: spec.TableSpec("t", 2, spec.SGD(0.1), shape=(4,), usage="count"), "a dense tensor's rows"),
        (
            lambda: spec.TableSpec("t", 2, spec.SGD(0.1), eviction=[Capacity(5, "score", 3), Capacity(5, "score", 4)]),
            "one half-life",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy: object, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        policy()  # type: ignore[operator]


@pytest.mark.parametrize("admission", [None, MinCount(3), MinCountSketch(3, nbytes=4096), Probability(0.4)])
def test_what_a_push_would_make_is_foreseen_without_a_change(admission: Admission | None) -> None:
    """Which keys get a row, which wait anew, and which were counted before: by memory they differ."""
    table = Table(spec.TableSpec("t", DIM, spec.Accumulate(), admission=admission, usage="count"), 1, RANGES)
    assert table.lifecycle is not None
    waiting, random = table.lifecycle.waiting, np.random.default_rng(5)
    for clock in range(30):
        pushed = np.sort(random.choice(60, 20, replace=False))
        missing = pushed[table.missing(pushed)]
        before = table.rows, waiting.candidates
        foreseen = waiting.foresee(missing, 7, clock)
        assert (table.rows, waiting.candidates) == before
        table.apply(pushed, np.ones((len(pushed), DIM), f32), np.empty(0, f32), 7, clock)
        assert np.array_equal(foreseen == ADDS_ROW, ~table.missing(missing))
        candidates = int(np.count_nonzero(foreseen == ADDS_CANDIDATE))
        assert table.rows == before[0] + np.count_nonzero(foreseen == ADDS_ROW)
        assert candidates == 0 or isinstance(admission, MinCount)
        assert waiting.candidates <= before[1] + candidates
        admitted = int(table.lifecycle.admitted.sum())
        assert admitted == (0 if admission is None else table.rows)


def test_a_range_with_many_sweeps_has_a_digest_of_64_bits() -> None:
    """Their sum is larger: numpy warned of that for single numbers."""
    deletions = Deletions(RANGES)
    for cut in range(1, 9):
        deletions.note(0, np.array([cut]), cut)
        deletions.sweep(0, Sweep(cut, Predicate(Measure.NORM, Reason.SMALL_NORM, 100 * cut)))
        floor, word = deletions.words(0)
        assert floor == 0
        assert -(1 << 63) <= word < 1 << 63
