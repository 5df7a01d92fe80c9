from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.core.data_loss import find_loss
from elasticps.cli.status import _fullness, _short
from tests.client.views import view

MIB = 1 << 20


def server(name: str, used: int, mark: int = 800, limit: int = 1000) -> dict[str, Any]:
    return {"id": name, "memory_used": used * MIB, "memory_mark": mark * MIB, "memory_limit": limit * MIB}


def test_status_warns_long_before_a_server_is_full_and_when_it_is() -> None:
    servers = [server("s0", 600), server("s1", 700), server("s2", 900), server("s3", 900, 0, 0)]
    silent = {"id": "s4", "memory_used": None, "memory_mark": None, "memory_limit": None}
    soon, full = [line.plain for line in _fullness([*servers, silent])]
    assert soon == "s1 uses 700.0 MiB, and takes new rows up to 800.0 MiB of its limit of 1000.0 MiB: add servers"
    assert full.startswith("s2 is full: it uses 900.0 MiB")
    assert "pushes that add rows are refused" in full


def test_ranges_that_only_silent_servers_have_are_shown_before_their_leases_end() -> None:
    now = view([[0, 1], [1, -1], [1, -1], [0, -1]])
    s0, s1, *_ = now.servers
    every = find_loss(now, [s0, s1])
    assert _short(now, every, []) == {"ranges_short": 3, "ranges_repairing": 3, "ranges_filling": 0, "silent": []}
    found = _short(now, every, ["s1"])
    assert found["silent"] == ["2 ranges (1-2) are only at s1: no answer"]
    assert found["ranges_repairing"] == 1
    both = _short(now, every, ["s0", "s1"])
    assert both["silent"] == ["4 ranges (0-3) are only at s0, s1: no answer"]
    assert both["ranges_repairing"] == 0


def test_ranges_without_any_replica_are_not_counted_as_ranges_with_few() -> None:
    now = replace(view([[0, 1], [1, -1], [1, -1], [0, -1]]), joining=np.array([-1, 0, -1, 1], np.int32))
    s0, *_ = now.servers
    loss = find_loss(now, [s0])
    assert loss.waiting.tolist() == [1, 2]
    assert _short(now, loss, ["s1"]) == {
        "ranges_short": 3, "ranges_repairing": 1, "ranges_filling": 1, "silent": []
    }  # fmt: skip
    assert _short(None, None, [])["ranges_repairing"] == 0
