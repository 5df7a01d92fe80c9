"""Ranges of which nobody is left come back from a checkpoint, and meanwhile nobody heads them: what a worker changes
then is changed there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from chaos.sim.checkpointer import Checkpointer
from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from tests.sim.conftest import begun, wait_for

KEYS = np.arange(64)
ONES = np.ones((len(KEYS), 1), np.float32)


@pytest.fixture
def three() -> Iterator[Cluster]:
    with begun(3, 16, replicas=1, admin=True) as found:
        yield found


def coming(cluster: Cluster) -> bool:
    return cluster.view is not None and bool((cluster.view.heads < 0).any())


def while_ranges_come(cluster: Cluster, change: Callable[[Any, Any], Any], look: Callable[[Any, Any], Any]) -> Any:
    """What `look` shows when all is back, after a worker has made a change while ranges of s0 had no head."""
    reported, found, on = list[str](), list[Any](), [True]
    checkpointer = Checkpointer(cluster, lambda: on[0])

    def program(threads: Threads) -> None:
        with cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate(), on_loss="restore")
            ps.push({table: (KEYS, ONES)}).result()
            reported.append("pushed")
            while not (ps.view.heads < 0).any():
                threads.sleep(0.001)
            change(ps, table)
            reported.append("changed")
            while "over" not in reported:
                threads.sleep(0.01)
            found.append(look(ps, table))

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: "pushed" in reported)
    checkpointer.start()
    wait_for(cluster, lambda: bool(checkpointer.made))
    on[0] = False
    cluster.clock.run(cluster.clock.now + 1.0)
    cluster.kill(cluster.servers["s0"].process, power=False)
    cluster.clock.after(0.5, cluster.start_server, "s0")
    wait_for(cluster, lambda: coming(cluster))
    wait_for(cluster, lambda: not coming(cluster) and "changed" in reported)
    wait_for(cluster, cluster.whole)
    reported.append("over")
    wait_for(cluster, lambda: bool(found))
    return found[0]


def pulled(ps: Any, table: Any) -> list[float]:
    found: list[float] = table.pull(KEYS)[:, 0].tolist()
    return found


def test_a_table_is_opened_without_waiting_for_lost_ranges(three: Cluster) -> None:
    reported: list[bool] = []

    def opens(threads: Threads) -> None:
        with three.connect(threads, "w1", ASP(), 4, "app") as ps:
            while not (ps.view.heads < 0).any():
                threads.sleep(0.001)
            ps.table("t", dim=1, optimizer=Accumulate())
            reported.append(coming(three))

    three.start_worker("w1", opens)
    assert while_ranges_come(three, lambda ps, table: None, pulled) == [1.0] * len(KEYS)
    assert reported == [True]


def test_rows_that_were_cleared_during_a_recovery_do_not_come_back(three: Cluster) -> None:
    assert while_ranges_come(three, lambda ps, table: table.clear(), pulled) == [0.0] * len(KEYS)


def test_rows_that_were_deleted_during_a_recovery_do_not_come_back(three: Cluster) -> None:
    assert while_ranges_come(three, lambda ps, table: table.delete(KEYS), pulled) == [0.0] * len(KEYS)


def test_rows_that_were_loaded_during_a_recovery_are_there(three: Cluster) -> None:
    def change(ps: Any, table: Any) -> None:
        table.load(KEYS, 5 * ONES)

    assert while_ranges_come(three, change, pulled) == [5.0] * len(KEYS)


def test_a_tensor_made_during_a_recovery_has_all_its_values(three: Cluster) -> None:
    values = np.arange(300_000, dtype=np.float32)

    def change(ps: Any, table: Any) -> None:
        ps.tensor("dense", init=values, optimizer=Accumulate())

    def look(ps: Any, table: Any) -> bool:
        return bool((ps.tensor("dense", init=values, optimizer=Accumulate()).pull() == values).all())

    assert while_ranges_come(three, change, look)


def test_a_table_that_was_dropped_during_a_recovery_leaves_no_rows(three: Cluster) -> None:
    def change(ps: Any, table: Any) -> None:
        ps.drop_table("t")

    while_ranges_come(three, change, lambda ps, table: None)
    three.clock.run(three.clock.now + 2.0)
    left = {name: found.now.executor.store.rows for name, found in three.servers.items() if found.now is not None}
    assert not any(left.values()), left


def test_a_table_made_during_a_recovery_is_there(three: Cluster) -> None:
    def change(ps: Any, table: Any) -> None:
        other = ps.table("u", dim=1, optimizer=Accumulate())
        ps.push({other: (KEYS, ONES)}).result()

    def look(ps: Any, table: Any) -> list[float]:
        return pulled(ps, ps.table("u", dim=1, optimizer=Accumulate()))

    assert while_ranges_come(three, change, look) == [1.0] * len(KEYS)
