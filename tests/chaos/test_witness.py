"""What readers may show: sums of the load's steps, compared with a search through all of them, and what ledgers say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from chaos.live import churn
from chaos.live.follower import ReaderProcess
from chaos.live.legal import Steps, StepSums, dense_is_legal, is_sum, row_is_legal
from chaos.live.load import BEGUN, BLOCK, COMMITTED, DIM, RECORD, Job, part, ranges_of
from chaos.live.witness import REPLACED_S, LifeLog, ShownRows, Witness
from elasticps.kernels.hashing import table_salt

RANGES = 4
KEYS = 60
SALTS = {"counted": 3, "filtered": 4, "summed": 5, "passing": 6}
LIFE, OTHER = (Job("", 11, worker, 1, KEYS, 4, 0.0, RANGES, "") for worker in (0, 1))
NOW = 1e9  # after all that is in a ledger


def salts() -> dict[str, int]:
    return {name: int(table_salt(number)) for name, number in SALTS.items()}


def sums_of(name: str = "counted") -> StepSums:
    found = salts()
    where = ranges_of(np.arange(KEYS, dtype=np.int64), RANGES, np.uint64(found[name]))
    dense = ranges_of(np.array([BLOCK], np.int64), RANGES, np.uint64(found["summed"]))
    return StepSums(Steps(), where, int(dense[0]), RANGES)


def prefix(life: Job, key: int, steps: int) -> np.ndarray:
    """What the first steps of a life add to a row."""
    made = [part(life, step) for step in range(1, steps + 1)]
    rows = [each.rows[each.keys == key].sum(axis=0) for each in made]
    return np.asarray(np.sum([np.zeros(DIM), *rows], axis=0))


def test_a_row_is_legal_if_some_numbers_of_steps_make_it() -> None:
    """As a search through all numbers of steps says."""
    sums, random = sums_of(), np.random.default_rng(3)
    sums.advance(LIFE, np.array([4, 5, 6, 7]))
    sums.advance(OTHER, np.array([2, 2, 3, 3]))
    spans = {LIFE: (3, 9), OTHER: (2, 5)}
    outcomes = set()
    for key in range(40):
        every = {
            tuple(prefix(LIFE, key, a) + prefix(OTHER, key, b)) for a in range(3, 10) for b in range(2, 6)
        }  # fmt: skip
        tried = [*every, *(tuple(np.add(one, random.integers(-1, 2, DIM))) for one in every)]
        for value in tried:
            legal = row_is_legal(sums, key, np.array(value, np.float32), spans)
            assert legal == (value in every)
            outcomes.add(legal)
    assert outcomes == {True, False}
    assert not row_is_legal(sums, 0, np.full(DIM, 0.5, np.float32), spans)


def test_the_tensor_is_legal_if_some_numbers_of_steps_make_it() -> None:
    sums = sums_of()
    sums.advance(LIFE, np.full(RANGES, 4))
    sums.advance(OTHER, np.full(RANGES, 1))
    at = {n: np.sum([part(LIFE, step).dense for step in range(1, n + 1)], axis=0) for n in (3, 6)}
    of_other = np.sum([part(OTHER, step).dense for step in (1, 2)], axis=0)
    assert dense_is_legal(sums, at[6] + of_other, {LIFE: (4, 6), OTHER: (1, 2)})
    assert not dense_is_legal(sums, at[6] + of_other, {LIFE: (4, 5), OTHER: (1, 2)})
    assert not dense_is_legal(sums, at[3] + of_other, {LIFE: (4, 6), OTHER: (1, 2)})


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_found_as_by_trying_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    chains = [random.integers(-4, 5, (random.integers(1, 5), 2)) for _ in range(random.integers(0, 4))]
    every = {tuple(np.sum([np.zeros(2, np.int64), *chosen], axis=0)) for chosen in itertools.product(*chains)}
    for value in itertools.product(range(-6, 7), repeat=2):
        assert is_sum(np.array(value), chains) == (value in every)


def test_too_many_sums_are_left_open() -> None:
    many = np.arange(5000)[:, None] * np.ones((1, 2), np.int64)
    assert is_sum(np.zeros(2, np.int64), [many, many, many]) is None


def test_sums_go_on_range_by_range_as_if_made_at_once() -> None:
    random, step_by_step, at_once = np.random.default_rng(1), sums_of(), sums_of()
    counts = np.zeros(RANGES, np.int64)
    for _ in range(20):
        counts = counts + random.integers(0, 4, RANGES)
        step_by_step.advance(LIFE, counts)
    at_once.advance(LIFE, counts)
    assert (step_by_step.rows == at_once.rows).all()
    assert (step_by_step.dense == at_once.dense).all()


# ------------------------------------------------------------------------------------------------------------- witness


def note(path: Path, *records: tuple[int, int, float]) -> None:
    with path.open("ab") as file:
        file.write(np.array(list(records), RECORD).tobytes())


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    """Of one life that has begun six steps, of which four were committed at 10 s."""
    note(tmp_path / "w0.1.ledger", *((BEGUN, step, 1.0) for step in range(1, 7)), (COMMITTED, 4, 10.0))
    (tmp_path / "w0.1.id").write_text("7")
    return Witness(tmp_path, salts(), LIFE, tmp_path / "r0.shown")


def rows_at(counts: list[int]) -> np.ndarray:
    """What a pull of the life's rows and the shared ones shows with so many steps in each range."""
    sums = sums_of()
    sums.advance(LIFE, np.array(counts))
    own = np.repeat(np.array(counts, np.float32)[:, None], DIM, axis=1)
    return np.concatenate([own, sums.rows]).astype(np.float32)


def look(witness: Witness, rows: np.ndarray, since_s: float = 5.0, whole: bool = False) -> str:
    pulled = witness.keys({"counted": 0})
    assert len(pulled["counted"]) == len(rows)  # type: ignore[arg-type]
    return witness.check(ShownRows({"counted": rows}, since_s + REPLACED_S, [7] if whole else None))


def test_steps_that_were_begun_may_be_shown_range_by_range(witness: Witness) -> None:
    assert look(witness, rows_at([0, 1, 2, 3])) == ""
    assert look(witness, rows_at([4, 1, 6, 3])) == ""
    assert look(witness, rows_at([6, 4, 6, 5]), 20.0) == ""


def test_what_cannot_be_is_named(witness: Witness) -> None:
    assert "begun" in look(witness, rows_at([0, 7, 0, 0]))
    assert "acknowledged" in look(witness, rows_at([4, 4, 3, 4]), since_s=10.0)
    torn = rows_at([4, 4, 4, 4])
    torn[1, 2] = 5
    assert "half a push" in look(witness, torn)


def test_shown_is_never_older_than_before_also_by_the_next_process(witness: Witness, tmp_path: Path) -> None:
    assert look(witness, rows_at([2, 3, 4, 5])) == ""
    again = Witness(tmp_path, salts(), LIFE, tmp_path / "r0.shown")
    assert "fewer steps than were shown" in look(again, rows_at([2, 3, 3, 5]))
    assert "shown in range 3" in again.check_rest("counted", {"w0.1": np.array([6, 6, 6, 4])})
    assert not again.check_rest("counted", {"w0.1": np.array([6, 6, 6, 5])})


def test_a_shared_row_may_be_of_other_steps_than_its_range_but_not_in_a_moment(witness: Witness) -> None:
    older, newer = rows_at([2, 2, 2, 2]), rows_at([5, 5, 5, 5])
    older[RANGES:] = newer[RANGES:]
    assert look(witness, older) == ""
    older[RANGES + 1] += 1
    assert "key 1 is" in look(witness, older)
    mixed = rows_at([5, 5, 5, 5])
    mixed[RANGES:] = rows_at([6, 6, 6, 6])[RANGES:]
    assert "a moment has" in look(witness, mixed, whole=True)


def with_a_step_of(life: Job, rows: np.ndarray, step: int = 1) -> np.ndarray:
    """The rows, with what a step of another life adds to the shared ones."""
    made = part(life, step)
    rows = rows.copy()
    rows[len(rows) - KEYS + made.keys] += made.rows
    return rows


def test_rows_may_have_steps_of_a_life_that_has_begun_since_they_were_asked_for(
    witness: Witness, tmp_path: Path
) -> None:
    shown, keys = with_a_step_of(OTHER, rows_at([5, 5, 5, 5])), witness.keys({"counted": 0})["counted"]
    assert keys is not None
    assert len(keys) == len(shown)
    note(tmp_path / "w1.1.ledger", (BEGUN, 1, 6.0))
    assert witness.check(ShownRows({"counted": shown}, 5.0 + REPLACED_S)) == ""
    assert witness.undecided == len(part(OTHER, 1).keys)
    own = np.repeat(np.array([5] * RANGES + [1] * RANGES, np.float32)[:, None], DIM, axis=1)
    assert look(witness, np.concatenate([own, shown[RANGES:]])) == ""
    assert "which no steps make" in look(witness, np.concatenate([own, with_a_step_of(OTHER, shown, 2)[RANGES:]]))


def test_a_moment_is_looked_at_with_all_lives_that_have_begun_before_it(witness: Witness, tmp_path: Path) -> None:
    """Also those that begin while the reader looks for it: the search takes up to seconds."""
    own = np.repeat(np.array([5] * RANGES + [1] * RANGES, np.float32)[:, None], DIM, axis=1)
    rows = np.concatenate([own, with_a_step_of(OTHER, rows_at([5, 5, 5, 5]))[RANGES:]])

    class Model:
        tables: ClassVar = {"counted": 0}

        def hold(self, patience_s: float) -> SimpleNamespace:
            note(tmp_path / "w1.1.ledger", (BEGUN, 1, 6.0))
            return SimpleNamespace(time_s=5.0, steps={7: 5})

        def pull(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"counted": rows[: len(keys["counted"])]}

        def release(self) -> None:
            pass

    found = list[dict[str, object]]()
    process = ReaderProcess.__new__(ReaderProcess)
    process._witness, process._random = witness, np.random.default_rng(1)
    process._note = lambda **what: found.append(what)  # type: ignore[method-assign]
    process._hold(Model())  # type: ignore[arg-type]
    assert [one["wrong"] for one in found] == [""]


def test_a_moment_has_the_same_steps_in_all_ranges_of_a_life_that_was_alive(
    witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 11.0)
    assert look(witness, rows_at([4, 5, 5, 5]), whole=True) == ""  # nobody knows yet whether it lives
    note(tmp_path / "w0.1.ledger", (COMMITTED, 5, 12.0))
    assert "a moment has 4 to 5 steps" in look(witness, rows_at([5, 5, 5, 5]))


def test_a_moment_says_nothing_of_a_life_that_was_given_up(
    witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 11.0)
    assert look(witness, rows_at([4, 5, 5, 5]), whole=True) == ""
    note(tmp_path / "w0.1.ledger", (COMMITTED, 5, 19.0))
    assert look(witness, rows_at([5, 5, 5, 5])) == ""


def test_a_ledger_says_what_was_committed_when(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.ledger"
    note(path, (BEGUN, 1, 1.0), (BEGUN, 2, 1.5), (COMMITTED, 1, 2.0))
    log = LifeLog(path)
    log.read()
    assert (log.begun, log.newest, log.committed(1.9), log.committed(2.0)) == (2, 1, 0, 1)
    note(path, (COMMITTED, 2, 3.0))
    log.read()
    assert log.committed(NOW) == 2


def test_rows_that_come_and_go_show_a_value_since_then(witness: Witness, tmp_path: Path) -> None:
    records = np.zeros(5, churn.record_type(RANGES))
    records["kind"] = COMMITTED, BEGUN, COMMITTED, BEGUN, COMMITTED
    records["time"] = 1, 2, 3, 4, 5
    records["values"][:, 0] = 0, 1, 1, 0, 0  # pushed, and deleted
    churn.ledger_of(tmp_path, 1).write_bytes(records[:4].tobytes())

    def shows(value: int, since_s: float) -> str:
        rows = np.zeros((RANGES, DIM), np.float32)
        rows[0] = value
        pulled = witness.keys({"passing": 0})
        assert len(pulled["passing"]) == RANGES  # type: ignore[arg-type]
        return witness.check(ShownRows({"passing": rows}, since_s + REPLACED_S))

    assert shows(0, 0.0) == shows(1, 0.0) == shows(0, 3.5) == ""
    churn.ledger_of(tmp_path, 1).write_bytes(records.tobytes())
    assert shows(0, 5.0) == ""
    assert "is 1 (0: none), and can be [0]" in shows(1, 5.0)


def test_a_moment_says_nothing_of_a_worker_that_is_not_in_it(witness: Witness, tmp_path: Path) -> None:
    (tmp_path / "w0.1.id").write_text("8")
    assert look(witness, rows_at([4, 5, 5, 5]), whole=True) == ""
    note(tmp_path / "w0.1.ledger", (COMMITTED, 5, NOW * 10))
    assert look(witness, rows_at([5, 5, 5, 5])) == ""


def test_it_says_for_how_long_something_was_missing(witness: Witness, tmp_path: Path) -> None:
    """Four steps were committed at 10 s: whoever shows three then lacks one since, whatever its age says."""
    witness.keys({"counted": None})
    assert witness.check(ShownRows({"counted": rows_at([3, 4, 4, 4])}, 9.0)) == ""
    assert witness.delays.lag_s > 1e6
    assert witness.delays.late_s == 0.0
    assert witness.check(ShownRows({"counted": rows_at([3, 4, 4, 4])}, 11.0)) == ""
    assert witness.delays.late_s == 1.0
    assert witness.check(ShownRows({"counted": rows_at([4, 4, 4, 4])}, 11.0)) == ""
    assert witness.delays.lag_s == 0.0


def test_a_tail_that_was_replaced_longer_ago_has_to_know_it(witness: Witness) -> None:
    witness.keys({"counted": None})
    assert "fewer steps than the 4" in witness.check(ShownRows({"counted": rows_at([3] * 4)}, 10.1 + REPLACED_S))
