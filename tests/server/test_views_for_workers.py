"""Of which views a server tells its workers though they do not ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from elasticps.server.core.serving import Serving
from replication.chain import Member, Ranges
from tests.client.views import view


def ranges(*some: int) -> Ranges:
    return np.array(some, np.int64)


def test_workers_hear_of_ranges_that_come_and_go_and_of_those_that_came_back_from_a_checkpoint() -> None:
    """A worker is connected to who heads its home range now, and has to learn who does next."""
    headed = ranges()
    serving = Serving(Member("s0", 1), 4, cast(Any, SimpleNamespace(epoch=1, headed=lambda epoch: headed)))
    serving.view = view([[0], [0], [1], [2]])
    assert not serving.concerns_workers()
    headed = ranges(0, 1)
    assert serving.concerns_workers()
    assert not serving.concerns_workers()
    headed = ranges(0)  # it has lost one, and whoever has got it has no connection of its worker
    assert serving.concerns_workers()
    serving.tailed = ranges(0)
    assert serving.concerns_workers()
    recovered = view([[0], [0], [1], [2]], epoch=5)
    object.__setattr__(recovered, "recovery_epoch", ranges(0, 0, 0, 5))
    serving.view = recovered
    assert serving.concerns_workers()
    assert not serving.concerns_workers()
