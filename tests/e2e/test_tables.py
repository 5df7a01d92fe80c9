"""Tables are listed, emptied and dropped, while servers come and go."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import elasticps as eps
from elasticps.cli.app import app as command_line
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect
from tests.e2e.oracle import audited

KEYS = np.arange(3_000)
ONES = np.ones((len(KEYS), 2), np.float32)


def test_tables_are_listed_with_their_specs_and_rows(connect: Connect) -> None:
    ps = connect()
    assert ps.tables() == {}
    table = ps.table("t", dim=2, optimizer=eps.Adagrad(lr=0.1))
    ps.tensor("d", init=np.ones((3, 4), np.float32), optimizer=eps.SGD(lr=0.1))
    ps.push({table: (KEYS, ONES)}).result()
    found = ps.tables()
    assert {name: (one.spec.dim, one.spec.shape, one.rows) for name, one in found.items()} == {
        "t": (2, None, len(KEYS)),
        "d": (12, (3, 4), 1),
    }
    other = connect("w1")
    there = other.open("t")
    assert isinstance(there, eps.SparseTable)
    np.testing.assert_array_equal(there.pull(KEYS), table.pull(KEYS))
    tensor = other.open("d")
    assert isinstance(tensor, eps.DenseTensor)
    np.testing.assert_array_equal(tensor.pull(), np.ones((3, 4)))
    with pytest.raises(eps.UnknownTable, match="no table 'x'"):
        other.open("x")


def test_the_tensors_of_a_model_are_opened_together(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    sgd, adam = eps.SGD(lr=0.5), eps.Adam(lr=0.1)
    values = {f"layer{i}": np.full((i % 5 + 1, 3), i, np.float32) for i in range(150)}
    theirs = other.tensor("layer7", init=np.zeros(values["layer7"].shape, np.float32), optimizer=sgd)
    tensors = ps.tensors(values, optimizer=sgd)
    assert list(tensors) == list(values)
    assert tensors["layer7"].id == theirs.id
    for name, read in zip(values, ps.pull_many(list(tensors.values())), strict=True):
        np.testing.assert_array_equal(read.result(), values[name] if name != "layer7" else 0 * values[name])
    assert ps.tensors({"layer3": values["layer3"]}, optimizer=sgd)["layer3"] is tensors["layer3"]
    ps.push({tensors["layer9"]: np.ones(values["layer9"].shape, np.float32)}).result()
    again = other.tensors(values, optimizer=sgd)
    np.testing.assert_array_equal(again["layer9"].pull(), values["layer9"] - 0.5)
    new = {"new": values["layer2"], "layer4": values["layer4"]}
    with pytest.raises(eps.SpecError, match="tensor 'layer4' exists with another spec: its optimizer"):
        ps.tensors(new, optimizer=adam)
    with pytest.raises(eps.UnknownTable):  # none of them was made
        ps.open("new")


def test_slots_are_read_by_name(connect: Connect) -> None:
    ps = connect()
    adam = ps.table("adam", dim=3, optimizer=eps.Adam(lr=0.1))
    keys, grads = np.arange(70_000), np.full((70_000, 3), 2.0, np.float32)
    ps.push({adam: (keys[:-1], grads[:-1])}).result()
    slots = adam.slots(keys)
    assert list(slots) == ["step", "exp_avg", "exp_avg_sq"]
    np.testing.assert_array_equal(slots["step"][:, 0], [1.0] * 69_999 + [0.0])
    np.testing.assert_allclose(slots["exp_avg"][:-1], 0.2, rtol=1e-6)
    np.testing.assert_allclose(slots["exp_avg_sq"][:-1], 0.004, rtol=1e-5)
    assert not slots["exp_avg"][-1].any()
    sums = ps.table("row", dim=3, optimizer=eps.RowAdagrad(lr=0.1)).slots([5])
    np.testing.assert_array_equal(sums["sum"], [[0.0]])
    assert ps.table("none", dim=3, optimizer=eps.SGD(lr=0.1)).slots([5]) == {}


def test_deleted_rows_start_again_with_initial_values(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.Adagrad(lr=1.0), init=eps.Constant(3.0))
    step = ps.push({table: (KEYS, ONES)})
    table.delete(np.concatenate([KEYS[::2], [77_777], KEYS[:10:2]]))  # behind the step, without waiting for it
    assert step.done()
    assert len(table) == len(KEYS) // 2
    np.testing.assert_allclose(table.pull(KEYS)[:2], [[3.0, 3.0], [2.0, 2.0]])
    ps.push({table: (KEYS, ONES)}).result()
    np.testing.assert_allclose(table.slots(KEYS)["sum"][:2, 0], [1.0, 2.0])
    table.clear()
    assert (len(table), list(table.keys())) == (0, [])
    table.delete([])


def test_a_table_can_be_dropped_and_its_name_used_again(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    table = ps.table("t", dim=2, optimizer=eps.Accumulate())
    theirs = other.table("t", dim=2, optimizer=eps.Accumulate())
    ps.push({table: (KEYS, ONES)}).result()
    ps.drop_table("t")
    with pytest.raises(eps.UnknownTable, match="no table 't'"):
        ps.drop_table("t")
    with pytest.raises(eps.UnknownTable):
        theirs.pull(KEYS)
    with pytest.raises(eps.UnknownTable):
        other.push({theirs: (KEYS, ONES)}).result()
    with pytest.raises(eps.InputError, match="is not open on this client: it was dropped"):
        ps.push({table: (KEYS, ONES)})
    again = ps.table("t", dim=5, optimizer=eps.Adagrad(lr=0.1))
    assert again.id > table.id
    assert len(again) == 0
    found = other.table("t", dim=5, optimizer=eps.Adagrad(lr=0.1))
    other.push({found: (KEYS, np.ones((len(KEYS), 5), np.float32))}).result()
    assert len(again) == len(KEYS)


def test_a_table_that_servers_do_not_take_leaves_no_name_behind(connect: Connect) -> None:
    ps = connect()
    with pytest.raises(eps.SpecError, match="no optimizer is registered as 'liom'"):
        ps.table("t", dim=2, optimizer=eps.Custom("liom", lr=0.1))
    with pytest.raises(eps.SpecError, match="no optimizer is registered as 'liom'"):
        ps.tensor("t", init=np.ones(2, np.float32), optimizer=eps.Custom("liom", lr=0.1))
    assert ps.tables() == {}
    ps.table("t", dim=2, optimizer=eps.SGD(lr=0.1))


def test_a_tensor_that_cannot_be_filled_leaves_no_name_behind(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = connect()
    with monkeypatch.context() as patched:
        patched.setattr("elasticps.client.writes.MAX_BODY_BYTES", 1_000)
        with pytest.raises(eps.InputError, match="for one of the cluster's"):
            ps.tensor("d", init=np.ones(1_000, np.float32), optimizer=eps.SGD(lr=0.1))
    assert ps.tables() == {}
    assert ps.tensor("d", init=np.ones(3, np.float32), optimizer=eps.SGD(lr=0.1)).pull().tolist() == [1.0] * 3


def test_rows_begin_with_values_of_the_users_own(connect: Connect) -> None:
    """As docs/guides/custom.md says."""
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/guides/custom.md").read_text(), re.S)
    table = connect().table("t", dim=4, optimizer=eps.SGD(lr=0.1))
    exec(blocks[4], {"table": table, "np": np})
    assert len(table) == 10_000
    rows = table.pull(np.arange(10_000))
    assert np.abs(rows).max() == np.float32(0.04)
    assert 0.01 < rows.std() < 0.02


def test_learning_rates_are_not_part_of_a_tables_spec(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    theirs = other.table("t", dim=2, optimizer=eps.SGD(lr=10.0))
    ps.push({table: (KEYS, ONES)}).result()
    other.push({theirs: (KEYS, ONES)}).result()
    np.testing.assert_array_equal(table.pull([0]), [[-11.0, -11.0]])


def test_opening_a_table_again_with_another_rate_warns(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    assert ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0)) is ps.open("t") is table
    schedule, other = (lambda clock: 10.0), (lambda clock: 100.0)
    rates: list[Any] = [2.0, schedule, other]
    changes = ("1.0: from now on 2.0", "2.0: from now on <s", "<schedule>: from now on <s")
    for rate, change in zip(rates, changes, strict=True):
        with pytest.warns(UserWarning, match=f"'t' is open here with learning rate {change}") as warned:
            assert ps.table("t", dim=2, optimizer=eps.SGD(lr=rate)) is table
        assert warned[0].filename == __file__
    assert ps.table("t", dim=2, optimizer=eps.SGD(lr=other)) is table
    assert ps.open("t") is table  # as it is
    ps.push({table: (KEYS, ONES)}).result()
    np.testing.assert_array_equal(table.pull([0]), [[-100.0, -100.0]])


def moved(ps: eps.Client, table: eps.SparseTable) -> float:
    """By how much a step of gradient 1 moves it."""
    before = table.pull([0])[0, 0]
    ps.push({table: (KEYS, ONES)}).result()
    return float(before - table.pull([0])[0, 0])


def until_it_moves(by: float, ps: eps.Client, table: eps.SparseTable) -> None:
    until = time.monotonic() + 30.0
    while (seen := moved(ps, table)) != by:
        assert time.monotonic() < until, f"{seen}, not {by}"


def test_a_rate_that_is_set_applies_to_all_workers(cluster: eps.LocalCluster, connect: Connect) -> None:
    one, other = connect("w0"), connect("w1")
    table, theirs = (ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0)) for ps in (one, other))
    assert moved(other, theirs) == 1.0
    table.set_lr(0.5)
    assert moved(one, table) == 0.5  # at once
    until_it_moves(0.5, other, theirs)
    assert {name: found.lr for name, found in other.tables().items()} == {"t": 0.5}
    with connect("w2") as late:  # whatever its script says
        with pytest.warns(UserWarning, match=r"rate 0.5, which set_lr\(\) gave all workers, not the 1.0 that"):
            mine = late.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
        assert moved(late, mine) == 0.5
        late.push({mine: (KEYS, ONES)}, lr=4.0).result()  # that is said of one step
        where = ["--url", cluster.url, "--app", one.app]
        done = CliRunner().invoke(command_line, ["tables", "set-lr", "t", "0.25", *where])
        assert (done.exit_code, "t, 0.25 for all workers" in done.output) == (0, True), done.output
        until_it_moves(0.25, late, mine)
        until_it_moves(0.25, one, table)
        done = CliRunner().invoke(command_line, ["tables", "list", "--url", cluster.url], env={"COLUMNS": "200"})
        assert "sgd lr=0.25, set for all" in done.output
        done = CliRunner().invoke(command_line, ["tables", "set-lr", "t", "none", *where])
        assert done.exit_code == 0, done.output
        until_it_moves(1.0, late, mine)
        until_it_moves(1.0, other, theirs)
    for table_and_rate in (["x", "0.1"], ["t", "fast"], ["t", "-1"], ["t", "nan"]):
        assert CliRunner().invoke(command_line, ["tables", "set-lr", *table_and_rate, *where]).exit_code == 2
    table.set_lr(0.125)
    one.drop_table("t")
    again = other.table("t", dim=2, optimizer=eps.SGD(lr=1.0))  # another table
    assert moved(other, again) == 1.0


def test_rates_that_cannot_be_set_are_refused(connect: Connect) -> None:
    ps = connect()
    table: Any = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    with pytest.raises(eps.InputError, match=r"a schedule is for ps.table"):
        table.set_lr(lambda clock: 0.1)
    for wrong in (-1.0, float("nan"), "fast"):
        with pytest.raises(eps.SpecError, match=r"SGD.lr must be"):
            table.set_lr(wrong)
    with pytest.raises(eps.InputError, match="knows no learning rate"):
        ps.table("sums", dim=1, optimizer=eps.Accumulate()).set_lr(0.1)
    assert moved(ps, table) == 1.0


def test_a_client_prints_its_name_and_state(connect: Connect) -> None:
    ps = connect("w0", app="introduced")
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    ps.push({table: (KEYS, ONES)}).result()
    who = f"<Client 'introduced/w0' of cluster {ps.cluster!r}"
    assert repr(ps) == f"{who}: ASP, tables open: 1, steps: 1, committed: 1>"
    ps.close()
    assert repr(ps) == f"{who}: closed>"


def test_tables_tensors_and_steps_print_their_properties(connect: Connect, cluster: eps.LocalCluster) -> None:
    ps = connect("w0", app="introduced")
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    tensor = ps.tensor("w", init=np.zeros((2, 3), np.float32), optimizer=eps.Accumulate())
    assert repr(table).endswith(f": dim=2, {eps.SGD(lr=1.0)}>")
    assert repr(tensor).endswith(f": shape=(2, 3), {eps.Accumulate()}>")
    step = ps.push({table: (KEYS, ONES)})
    assert repr(step).startswith(f"<Step {step.clock}: ")
    step.result()
    assert repr(step) == f"<Step {step.clock}: committed>"
    with ps.step() as parts:
        assert repr(parts) == "<OpenStep: empty>"
        parts.push({table: (KEYS, ONES)})
        assert repr(parts) == "<OpenStep: sent in part>"
    assert repr(parts).startswith(f"<OpenStep: <Step {ps.clock}: ")
    assert repr(ps.view).startswith(
        f"<View {ps.view.epoch} of cluster {ps.view.cluster!r}: {ps.view.ranges} ranges of "
    )
    assert len(repr(ps.view)) < 300
    assert repr(cluster).startswith(f"<LocalCluster {cluster.name!r}: servers s0")


def test_handles_of_another_client_are_refused_with_advice(connect: Connect) -> None:
    old = connect("w0", app="notebook")
    table = old.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
    tensor: Any = old.tensor("w", init=np.zeros(2, np.float32), optimizer=eps.SGD(lr=1.0))
    old.close()
    ps: Any = connect("w0", app="notebook")
    with pytest.raises(eps.InputError, match=r"another client opened it.*ps\.table\('t', …\)"):
        ps.push({table: (KEYS, ONES)})
    with pytest.raises(eps.InputError, match=r"another client opened it.*ps\.tensor\('w', …\)"):
        ps.pull({tensor: None})
    with pytest.raises(eps.InputError, match="tables and tensors as keys"):
        ps.push({"t": (KEYS, ONES)})
    for call in (ps.pull, ps.push):
        with pytest.raises(eps.InputError, match=f"{call.__name__} takes a mapping"):
            call(3)
        with pytest.raises(TypeError, match=rf"Client\.{call.__name__}\(\) missing"):
            call()


def test_a_table_dropped_in_a_round_is_gone_when_the_round_closes(connect: Connect) -> None:
    a, b = connect("a", consistency=eps.BSP()), connect("b", consistency=eps.BSP())
    table, retained = (a.table(name, dim=2, optimizer=eps.SGD(lr=1.0)) for name in ("t", "kept"))
    theirs = b.table("kept", dim=2, optimizer=eps.SGD(lr=1.0))
    a.resume()
    b.resume()
    step = a.push({table: (KEYS, ONES), retained: (KEYS, ONES)})  # waits for the other's
    until = time.monotonic() + 30.0
    while a.committed < step.clock and time.monotonic() < until:
        time.sleep(0.01)
    b.drop_table("t")
    closing = threading.Thread(target=step.result)
    closing.start()
    b.push({theirs: (KEYS, ONES)}).result()
    closing.join()
    np.testing.assert_array_equal(b.table("kept", dim=2, optimizer=eps.SGD(lr=1.0)).pull(KEYS), -ONES)


def test_deletions_happen_once_while_servers_die_and_join(local_cluster: NewCluster) -> None:
    """A round of each key: pushed, deleted, pushed again. Whatever is lost or done twice shows in its sum."""
    cluster = local_cluster(servers=3, replicas=2)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps, eps.connect(cluster.url, worker="w1") as other:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        gone = other.table("gone", dim=2, optimizer=eps.Accumulate())
        other.push({gone: (KEYS, ONES)}).result()
        for turn in range(40):
            if turn == 10:
                cluster.kill("s1")
            if turn == 12:
                other.drop_table("gone")
            if turn == 20:
                cluster.start_server()
            ps.push({table: (KEYS, ONES)})
            if turn % 8 == 7:
                table.clear()
            else:
                table.delete(KEYS[turn % 3 :: 3])
        expected = np.zeros(len(KEYS), np.float32)
        for turn in range(40):
            expected += 1
            expected[turn % 3 :: 3] = 0
            if turn % 8 == 7:
                expected[:] = 0
        assert len(table) == np.count_nonzero(expected)
        np.testing.assert_array_equal(table.pull(KEYS)[:, 0], expected)
        assert ps.tables().keys() == {"t"}
        report = audited(cluster.operator_url)
        assert report.clean, report
