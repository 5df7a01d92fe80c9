"""The oracle itself: what it must accept, and what it must see."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from chaos.live.load import (
    BEGUN,
    COMMITTED,
    DIM,
    READ,
    RECORD,
    SHAPE,
    STALE,
    Job,
    Ledger,
    LedgerFile,
    LoadWorker,
    ServerContent,
    check_content,
    check_filling,
    newest,
    own_keys,
    part,
    ranges_of,
    read_ledger,
)  # fmt: skip
from chaos.live.observer import judge
from elasticps.kernels.hashing import table_salt

RANGES = 8
KEYS = 60
SALT = table_salt(3)
WHERE = ranges_of(np.arange(KEYS, dtype=np.int64), RANGES, SALT)
DENSE_RANGE = 5


def job(worker: int, life: int = 1) -> Job:
    return Job("etcd://nowhere/c", 11, worker, life, KEYS, 4, 0.0, RANGES, "")


LEDGERS = [Ledger(job(0), begun=9, acknowledged=7), Ledger(job(0, 2), begun=3, acknowledged=3), Ledger(job(1), 5, 5)]


def content_after(applied: list[list[int]]) -> ServerContent:
    """The content of the servers once each range has applied so many steps of each incarnation."""
    rows, dense = np.zeros((KEYS, DIM)), np.zeros(SHAPE)
    for ledger, counts in zip(LEDGERS, applied, strict=True):
        for step in range(1, ledger.begun + 1):
            added = part(ledger.job, step)
            there = np.array(counts)[WHERE[added.keys]] >= step
            rows[added.keys[there]] += added.rows[there]
            dense += added.dense * (counts[DENSE_RANGE] >= step)
    own = np.repeat(np.array(applied, np.float64)[:, :, None], DIM, axis=2)
    return ServerContent(own, rows, dense, WHERE, DENSE_RANGE)


def counts(first: int = 7) -> list[list[int]]:
    return [[first] * RANGES, [3] * RANGES, [5] * RANGES]


def test_the_sum_of_the_acknowledged_pushes_is_right() -> None:
    assert check_content(content_after(counts()), LEDGERS) == []


def test_each_range_may_have_some_of_the_unacknowledged_pushes() -> None:
    applied = counts()
    applied[0] = [7, 8, 9, 7, 8, 9, 7, 8]
    assert check_content(content_after(applied), LEDGERS) == []


def test_a_lost_push_is_found() -> None:
    applied = counts()
    applied[2][4] = 4
    (text,) = check_content(content_after(applied), LEDGERS)
    assert text == (
        "w1, life 1: 1 ranges have pushes lost: range 4 has 4 of its steps, 5 are acknowledged and 5 were begun"
    )


def test_a_push_applied_twice_is_found() -> None:
    content = content_after(counts())
    content.own[1, 2] += 1
    assert any("1 ranges have pushes applied twice: range 2 has 4" in text for text in check_content(content, LEDGERS))


def test_half_a_push_is_found() -> None:
    content = content_after(counts())
    content.own[0, 3, 1] += 1
    assert any("half a push" in text for text in check_content(content, LEDGERS))


def test_a_step_applied_in_part_and_a_value_that_is_no_number_are_found() -> None:
    content = content_after(counts())
    content.own[0, 3] += 0.5  # 7 are acknowledged, 9 were begun
    (text,) = check_content(content, LEDGERS)
    assert text.startswith("w0, life 1: 1 ranges have pushes applied in part: range 3 has 7.5 of its steps")
    for value in (np.nan, np.inf):
        content = content_after(counts())
        content.own[1, 2] = value
        assert any("w0, life 2" in text and "range 2" in text for text in check_content(content, LEDGERS))


@pytest.mark.parametrize("wrong", [0.0, 2.0, np.nan])
def test_untouched_rows_must_keep_their_initial_values(wrong: float) -> None:
    rows = np.ones((50, 16), np.float32)
    assert check_filling(rows, 0) == []
    rows[17, 3] = wrong
    (text,) = check_filling(rows, 100)
    assert (
        text
        == f"1 of the 50 rows from key 100 on that nobody touched are not 1, the first is key 117: {rows[17].tolist()}"
    )


class Table(NamedTuple):
    name: str


class Answer:
    """A pull that shows so many steps in every row."""

    def __init__(self, *shown: float) -> None:
        self.shown = shown

    def result(self) -> dict[Any, Any]:
        return {Table(f"t{i}"): np.full((RANGES, DIM), n, np.float32) for i, n in enumerate(self.shown)}


@pytest.mark.parametrize(("shown", "kind"), [((5, 5), READ), ((5, 4), STALE), ((6, 5), STALE)])
def test_a_worker_that_does_not_read_its_own_writes_notes_it(
    tmp_path: Path, shown: tuple[int, ...], kind: int, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = object.__new__(LoadWorker)
    worker.job, worker._begun, worker._ledger = job(0), 5, LedgerFile(tmp_path / "w0.1.ledger")
    worker._read(Answer(*shown))  # type: ignore[arg-type]
    assert read_ledger(tmp_path / "w0.1.ledger")["kind"].tolist() == [kind]
    assert bool(capsys.readouterr().err) == (kind == STALE)


def test_a_wrong_shared_row_or_tensor_is_found() -> None:
    content = content_after(counts())
    content.rows[17, 2] += 1
    content.dense[3, 3] -= 1
    texts = check_content(content, LEDGERS)
    assert any(
        "1 of 60 shared rows are not the sum of the pushes applied, the first is key 17" in text for text in texts
    )
    assert any("1 elements of the tensor" in text for text in texts)


@pytest.mark.parametrize("ranges", [2, 32, 256])
def test_each_incarnation_has_a_row_of_its_own_in_every_range(ranges: int) -> None:
    first, second, third = own_keys(0, 1, ranges, SALT), own_keys(0, 2, ranges, SALT), own_keys(1, 1, ranges, SALT)
    for keys in (first, second, third):
        assert ranges_of(keys, ranges, SALT).tolist() == list(range(ranges))
    assert len({*first.tolist(), *second.tolist(), *third.tolist()}) == 3 * ranges


def test_a_truncated_ledger_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.ledger"
    assert read_ledger(path).size == 0
    records = np.array([(BEGUN, 1, 1.0), (BEGUN, 2, 1.5), (COMMITTED, 1, 2.0), (BEGUN, 3, 2.5)], RECORD)
    path.write_bytes(records.tobytes()[:-3])
    reported = Job("", 0, 0, 1, KEYS, 4, 0.0, RANGES, str(path))
    assert newest(path, COMMITTED) == 1
    assert newest(path, BEGUN) == 2
    assert newest(tmp_path / "nothing", COMMITTED) == 0
    assert Ledger.of(reported) == Ledger(reported, begun=2, acknowledged=1)


@pytest.mark.parametrize(
    ("row", "before", "words"),
    [
        ([5, 5, 5, 5], 5, ""),
        ([7, 7, 7, 7], 5, ""),
        ([5, 5, 5, 6], 5, "half a push"),
        ([4, 4, 4, 4], 4, "fewer steps than the 5 that were acknowledged"),
        ([8, 8, 8, 8], 5, "more steps than the 7 that were begun"),
        ([6, 6, 6, 6], 7, "fewer steps than were shown before"),
        ([5.5, 5.5, 5.5, 5.5], 5, "a part of a step"),
        ([np.nan, np.nan, np.nan, np.nan], 5, "half a push"),
    ],
)
def test_an_observer_finds_values_that_no_order_of_events_explains(row: list[int], before: int, words: str) -> None:
    rows = np.array([[6] * DIM, row], np.float32)
    text = judge(rows, np.array([5, before], np.float32), 5, 7)
    assert text.endswith(words)
    assert bool(text) == bool(words)
