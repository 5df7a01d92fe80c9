"""Functions over all rows, computed by servers, beside numpy's of what was pushed."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.store import register_reduction
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect


def twin(rows: np.ndarray) -> dict[str, float]:
    wide = rows.astype(np.float64)
    return {
        "sum": wide.sum(), "l1": abs(wide).sum(), "l2": math.sqrt((wide**2).sum()), "linf": abs(wide).max(),
        "max": wide.max(), "min": wide.min(), "nonzero": np.count_nonzero(wide), "count": len(rows),
    }  # fmt: skip


def check(handle: eps.SparseTable | eps.DenseTensor, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert handle.reduce(name) == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_reductions_of_tables_and_tensors_agree_with_numpy(connect: Connect) -> None:
    ps, random = connect(), np.random.default_rng(1)
    table = ps.table("t", dim=3, optimizer=eps.Assign())
    assert [table.reduce(name) for name in ("sum", "l1", "l2", "linf", "nonzero", "count")] == [0] * 6
    assert (table.reduce("max"), table.reduce("min")) == (-math.inf, math.inf)
    keys = np.unique(random.integers(-(2**63), 2**63 - 1, 5_000))
    rows = np.where(random.random((len(keys), 3)) < 0.5, 0, random.normal(size=(len(keys), 3))).astype(np.float32)
    ps.push({table: (keys, rows)})  # its own steps are in it
    check(table, twin(rows))
    tensor = ps.tensor("w", init=random.normal(size=(130, 517)).astype(np.float32), optimizer=eps.Accumulate())
    values = tensor.pull()
    check(tensor, twin(values.reshape(-1)))
    ps.push({tensor: -values})
    check(tensor, dict.fromkeys(("sum", "l1", "l2", "linf", "max", "min", "nonzero"), 0.0) | {"count": values.size})


def no_rows(keys: Any, w: Any, s: Any, c: Any) -> None:
    s[0] = 1


def no_merge(s: Any, later: Any) -> None:
    pass


def test_impossible_reductions_are_refused(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.Assign())
    with pytest.raises(eps.SpecError, match=r"no reduction is registered as .l3. .*plugin module"):
        table.reduce("l3")
    for wrong in (3, None, b"l2"):
        with pytest.raises(eps.InputError, match="reduce takes a name"):
            table.reduce(wrong)  # type: ignore[call-overload]
    for unusable in (math.nan, 10**400, True, "1", 1j):
        with pytest.raises(eps.InputError, match="finite numbers"):
            table.reduce("l2", unusable)  # type: ignore[arg-type]
    with pytest.raises(eps.InputError, match="takes no constants"):
        table.reduce("count", 1.0)
    register_reduction("only here", no_rows, no_merge)
    with pytest.raises(eps.SpecError, match=r"server s[0-9]+: no reduction is registered as 'only here'"):
        table.reduce("only here")
    ps.drop_table("t")
    with pytest.raises(eps.UnknownTable):
        table.reduce("l2")


def test_several_threads_reduce_beside_pushes(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=1, optimizer=eps.Accumulate())
    keys, ones = np.arange(2_000), np.ones((2_000, 1), np.float32)
    ps.push({table: (keys, ones)}).result()
    found: list[list[float]] = [[] for _ in range(3)]

    def ask(mine: list[float]) -> None:
        mine.extend(table.reduce("sum") for _ in range(4))

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for _ in range(20):
        ps.push({table: (keys, ones)})
    for thread in threads:
        thread.join()
    for mine in found:
        assert len(mine) == 4
        assert mine == sorted(mine)
    assert table.reduce("sum") == 2_000 * 21


@pytest.mark.parametrize("consistency", [eps.ASP(), eps.SSP(staleness=0), eps.BSP()], ids=lambda c: c.kind)
def test_reductions_include_the_workers_own_steps_except_an_open_one(connect: Connect, consistency: Any) -> None:
    ps = connect(consistency=consistency)
    table = ps.table("t", dim=1, optimizer=eps.Accumulate())
    assert table.reduce("sum") == 0
    keys, ones = np.arange(300), np.ones((300, 1), np.float32)
    for step in range(1, 4):
        ps.push({table: (keys, ones)})
        assert table.reduce("sum") == 300 * step
    with ps.step() as open_step:
        open_step.push({table: (keys, ones)})
        assert 900 <= table.reduce("sum") <= 1_200
    assert table.reduce("sum") == 1_200


PLUGIN = """
from elasticps.store import register_reduction

def chunk(keys, w, s, c):
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            at = int((w[i, j] - c[0]) / (c[1] - c[0]) * s.shape[0])
            s[min(max(at, 0), s.shape[0] - 1)] += 1.0

def merge(s, later):
    for j in range(s.shape[0]):
        s[j] += later[j]

register_reduction("histogram", chunk, merge, size=8, constants=2)
"""


@pytest.mark.slow
def test_a_registered_reduction_survives_the_death_of_a_server(
    local_cluster: NewCluster, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reductions.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    cluster = local_cluster(servers=3, replicas=2, plugins=["my_reductions"])
    __import__("my_reductions")
    with eps.connect(cluster.url, worker="w0", timeout=30.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Assign())
        keys, rows = np.arange(20_000), np.random.default_rng(1).normal(size=(20_000, 2)).astype(np.float32)
        ps.push({table: (keys, rows)}).result()
        expected = np.histogram(np.clip(rows.astype(np.float64), -3.999, 3.999), 8, (-4.0, 4.0))[0]
        before = table.reduce("l2")
        assert table.reduce("histogram", -4.0, 4.0).tolist() == expected.tolist()
        stop, results, failures = threading.Event(), [], []

        def ask() -> None:
            try:
                while not stop.is_set():
                    results.append((table.reduce("l2"), table.reduce("histogram", -4.0, 4.0).tolist()))
            except eps.Error as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        cluster.kill("s1")
        after = table.reduce("l2")
        stop.set()
        thread.join()
        assert not failures
        assert after == before  # another replica, to the bit
        assert all(found == (before, expected.tolist()) for found in results)
