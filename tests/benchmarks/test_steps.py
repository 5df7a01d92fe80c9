"""`bench steps`: what it counts, beside a plain model of pushes, rounds and bounded delay."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import group_head, steps
from benchmarks.cli import app
from elasticps.errors import Error
from elasticps.kernels.hashing import group_range, key_ranges, range_shift, table_salt
from elasticps.server.core.application_clocks import ApplicationClocks
from replication.step_records import home_range

WORKERS = 12


def run(*servers: int) -> dict[str, Any]:
    options = [text for count in servers for text in ("--servers", str(count))]
    result = CliRunner().invoke(app, ["steps", *options, "--workers", str(WORKERS), "--rounds", "2", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def frames_and_heads(servers: int, ranges: int, pushes: int) -> tuple[float, float]:
    """How many frames pushes make on average, and how many servers head ranges of their keys."""
    random, first, frames, heads = np.random.default_rng(servers), group_range("default", ranges), [], []
    home = (home_range(steps._WORKER, ranges) - first) % servers
    for _ in range(steps._WARM_UP + pushes):
        found = np.empty(steps.ROWS, np.int32)
        key_ranges(random.integers(0, 1 << 40, steps.ROWS), table_salt(steps._TABLE), range_shift(ranges), found)
        touched = {(int(r) - first) % servers for r in found}
        heads.append(len(touched))
        frames.append(len(touched | {home}))
    return float(np.mean(frames)), float(np.mean(heads))


def test_frames_are_as_many_as_a_plain_model_says() -> None:
    found = run(3, 40)
    assert [(each["servers"], each["ranges"]) for each in found["pushes"]] == [(3, 256), (40, 2048)]
    for each in found["pushes"]:
        frames, heads = frames_and_heads(each["servers"], each["ranges"], 40)
        assert (each["frames"], each["heads"]) == pytest.approx((frames, heads), abs=0.01)
        assert each["most_more"] <= 1
    one = found["round"]
    assert (one["servers"], one["received"], one["sent"]) == (40, WORKERS + 39, WORKERS + 39)
    for each in found["delays"]:  # all come at once, so each waits once in so many steps, and all but one are asked
        period = each["staleness"] + 1
        counts = [each[name] for name in ("waits", "asks", "reports")]
        assert counts == pytest.approx([n / period for n in (WORKERS, WORKERS - 1, WORKERS - 1)], abs=0.05)
    assert [each["staleness"] for each in found["delays"]] == [0, 4]


def test_clusters_have_as_many_ranges_as_in_the_documentation() -> None:
    assert [steps.ranges_for(servers) for servers in steps.SERVERS] == [256, 1024, 4096, 16384]


def test_a_clock_that_is_released_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    minimum = ApplicationClocks.minimum
    monkeypatch.setattr(ApplicationClocks, "minimum", lambda clocks: minimum(clocks) + 1)
    monkeypatch.setattr(group_head, "TOGETHER", 4)
    with pytest.raises(Error, match=r"waits for 1 and gets .* all have committed 0"):
        group_head.delays(staleness=0, servers=3, ranges=64, workers=WORKERS, count=1)
