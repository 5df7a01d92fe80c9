"""A call comes after everything that the same worker did before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import elasticps as eps
from elasticps.torch import Embedding, Optimizer, full_state_dict
from tests.e2e.conftest import Connect

MODES = [eps.ASP(), eps.SSP(staleness=1), eps.BSP()]
EACH_MODE = pytest.mark.parametrize("consistency", MODES, ids=lambda c: c.kind)
KEYS = np.arange(3_000)
ONES = np.ones((len(KEYS), 4), np.float32)
OPEN = r"step [0-9]+ is still open: commit it, .*before "


@EACH_MODE
def test_a_load_is_applied_after_the_workers_own_push(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    rows = ps.table("rows", dim=4, optimizer=eps.Accumulate())
    tensor = ps.tensor("tensor", init=np.zeros(20_000, np.float32), optimizer=eps.Accumulate())
    for turn in range(3):
        ps.push({rows: (KEYS, ONES), tensor: np.ones(20_000, np.float32)})
        rows.load(KEYS, 100 * ONES)
        tensor.load(np.full(20_000, 100, np.float32))
        ps.flush()
        assert (rows.pull(KEYS) == 100).all(), turn
        assert (tensor.pull() == 100).all(), turn


@EACH_MODE
def test_a_listing_includes_the_workers_own_rows(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    asks: list[Callable[[], int]] = [
        lambda: len(table),
        lambda: sum(len(some) for some in table.keys()),  # noqa: SIM118  # it is no mapping
        lambda: sum(int(rows.sum()) // 4 for _, rows in table.items()),
        lambda: table.reduce("count"),
        lambda: ps.tables()["t"].rows,
    ]
    for turn, ask in enumerate(asks, start=1):
        ps.push({table: (KEYS + turn * 10_000, ONES)})
        assert ask() == turn * len(KEYS), turn


@EACH_MODE
def test_a_listing_leaves_out_an_open_step(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    ps.push({table: (KEYS, ONES)})
    with ps.step() as step:
        step.push({table: (KEYS + 10_000, ONES)})
        ps.flush()
        assert len(KEYS) <= len(table) <= 2 * len(KEYS)
        assert ps.tables()["t"].rows >= len(KEYS)
        assert np.isin(KEYS, np.concatenate(list(table.keys()))).all()
    assert len(table) == 2 * len(KEYS)


@EACH_MODE
def test_changes_inside_an_open_step_are_refused_at_once(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())
    tensor = ps.tensor("w", init=np.zeros(8, np.float32), optimizer=eps.Accumulate())
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: table.load(KEYS, ONES), "loading 't'"),
        (lambda: tensor.load(np.ones(8, np.float32)), "loading 'w'"),
        (lambda: table.delete(KEYS), "deleting rows of 't'"),
        (table.clear, "clearing 't'"),
        (lambda: ps.clear_table("t"), "clearing 't'"),
        (lambda: ps.drop_table("t"), "dropping 't'"),
        (lambda: ps.push({table: (KEYS, ONES)}), "pushing another"),
    ]
    with ps.step() as step:
        step.push({table: (KEYS, ONES), tensor: np.ones(8, np.float32)})
        for change, what in changes:
            with pytest.raises(eps.InputError, match=OPEN + what):
                change()
    assert (table.pull(KEYS) == 1).all()
    assert (tensor.pull() == 1).all()
    ps.drop_table("t")
    assert list(ps.tables()) == ["w"]


@EACH_MODE
def test_a_refused_change_forgets_no_retained_gradients(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    keep: dict[str, Any] = {"optimizer": eps.Accumulate(), "push": [eps.Threshold(5.0)]}
    table, tensor = ps.table("t", dim=4, **keep), ps.tensor("w", init=np.zeros(8, np.float32), **keep)
    ps.push({table: (KEYS, 2 * ONES), tensor: np.full(8, 2, np.float32)})  # kept
    with ps.step() as step:
        step.push({})
        with pytest.raises(eps.InputError, match=OPEN):
            table.load(KEYS, ONES)
        with pytest.raises(eps.InputError, match=OPEN):
            table.clear()
        with pytest.raises(eps.InputError, match=OPEN):
            tensor.load(np.ones(8, np.float32))
    ps.push({table: (KEYS, 4 * ONES), tensor: np.full(8, 4, np.float32)})
    assert (table.pull(KEYS) == 6).all()
    assert (tensor.pull() == 6).all()


@EACH_MODE
def test_waiting_for_shards_is_refused_while_a_step_is_open(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    shards = ps.shards(4, 2)
    next(shards)
    ps.push({})
    next(shards)
    step = ps.step()
    step.push({})
    for end in (lambda: next(shards), shards.close):
        with pytest.raises(eps.InputError, match=OPEN + "waiting for shards 'train'"):
            end()
    step.commit()
    assert list(shards) == []


@EACH_MODE
def test_a_client_can_be_closed_while_a_step_is_open(connect: Connect, consistency: Any) -> None:
    with connect("leaving", consistency=consistency) as ps:
        table = ps.table("t", dim=4, optimizer=eps.Accumulate())
        ps.push({table: (KEYS, ONES)})
        ps.step().push({table: (KEYS, ONES)})
    assert connect("w1").table("t", dim=4, optimizer=eps.Accumulate()).pull(KEYS).min() >= 1


@EACH_MODE
def test_dropping_a_table_keeps_the_rows_of_others(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    retained = ps.table("kept", dim=4, optimizer=eps.Accumulate())
    for turn in range(1, 5):
        gone = ps.table("gone", dim=4, optimizer=eps.Accumulate())
        ps.push({gone: (KEYS, ONES)}).result()
        for _ in range(3):
            ps.push({retained: (KEYS, ONES), gone: (KEYS, ONES)})
        ps.drop_table("gone")
        ps.flush()
        assert (retained.pull(KEYS) == 3 * turn).all(), turn


def test_workers_in_rounds_wait_only_for_each_other(connect: Connect) -> None:
    """Each asks behind its own step what the table holds: the round has to close, which takes the other one's share."""
    workers = [connect(name, consistency=eps.BSP()) for name in ("a", "b")]
    tables = [ps.table("t", dim=4, optimizer=eps.Accumulate()) for ps in workers]
    for ps in workers:
        ps.resume()
    reported: list[list[int]] = [[], []]
    errors: list[BaseException] = []

    def train(number: int) -> None:
        ps, table = workers[number], tables[number]
        try:
            for turn in range(4):
                ps.push({table: (KEYS + 10_000 * (2 * turn + number), ONES)})
                reported[number] += [len(table), sum(map(len, table.keys())), ps.tables()["t"].rows]
                if number == 0:
                    table.load(KEYS, ONES)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rows = [2 * len(KEYS) * turn for turn in range(1, 5) for _ in range(3)]
    assert reported == [rows, rows]


@EACH_MODE
def test_a_whole_model_has_the_rows_of_the_last_step(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    model = Embedding(ps, "items", 4, optimizer=eps.SGD(lr=1.0))
    optimizer = Optimizer(ps, model, optimizer=eps.SGD(lr=1.0))
    for turn in range(1, 4):
        ids = torch.arange(turn * len(KEYS), (turn + 1) * len(KEYS))
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
        assert len(full_state_dict(model)["keys"]) == turn * len(KEYS), turn
