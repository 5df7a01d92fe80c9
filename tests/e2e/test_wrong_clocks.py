"""Real processes, one of which has a clock that is days ahead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from tests.conftest import NewCluster

SKEW_S = 30 * 86_400
KEYS = np.arange(600)
WRONG_CLOCK = f'''
"""Python imports this as it starts: in the process of one name, `time.time` is ahead."""
import os, sys, time
true = time.time
time.time = lambda: true() + {SKEW_S} * (os.environ["WRONG_CLOCK"] in getattr(sys, "argv", ()))
'''


@pytest.mark.parametrize("wrong", ["s1", "c0"])
def test_a_clock_that_is_days_ahead_neither_evicts_nor_moves_the_time_of_rows(
    local_cluster: NewCluster, tmp_path: Path, eventually: Callable[[Callable[[], bool]], None], wrong: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    cluster = local_cluster(servers=3, ranges=16, environment={"PYTHONPATH": path, "WRONG_CLOCK": wrong})
    policies = [eps.IdleFor("1d"), eps.Capacity(10_000, keep="most_used", half_life="1d")]
    with eps.connect(cluster.url, worker="w0", timeout=60) as ps:
        table = ps.table("t", dim=1, optimizer=eps.SGD(lr=0.1), eviction=policies)
        begun = time.time()

        def goes_on() -> bool:
            ps.push({table: (KEYS, np.ones((len(KEYS), 1), np.float32))}).result()
            used = table.usage(KEYS).last_use
            assert (abs(used - time.time()) < 3_600).all()
            assert not any(table.evict().values())
            return bool((used > begun + 1).all())  # all heads have logged another time since

        eventually(goes_on)
        assert len(table) == len(KEYS)
        assert (table.usage(KEYS).count > 1.9).all(), "counts have not fallen by days"
    text = (cluster.directory / "c0.log").read_text()
    assert "a clock differs from the others" in text
    assert ("this coordinator" if wrong == "c0" else "server s1") in text
