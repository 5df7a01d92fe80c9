"""Groups of real processes on real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from tests.conftest import NewCluster

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 180
STEPS = 12


def environment() -> dict[str, str]:
    found = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return found | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(url: str, meeting: Path, die_at: int) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.torch.group.rank_process",
             url, str(meeting), str(rank), "2", str(STEPS), str(die_at)],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [each.communicate(timeout=TIMEOUT_S)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return [each.returncode for each in ranks], outputs


@pytest.mark.slow
def test_a_group_that_loses_a_rank_counts_every_step_once(local_cluster: NewCluster, tmp_path: Path) -> None:
    url = local_cluster(servers=2).url
    codes, outputs = run(url, tmp_path / "first", die_at=5)
    assert codes == [3, -9]
    assert "lost rank 1 of the group has ended" in outputs[0]
    codes, outputs = run(url, tmp_path / "second", die_at=STEPS)
    assert codes == [0, 0]
    assert outputs == ["started 5 True\n"] * 2
    with eps.connect(url, worker="reader", app="sums") as ps:
        rows, tensor = ps.open("rows"), ps.open("tensor")
        assert isinstance(rows, eps.SparseTable)
        np.testing.assert_array_equal(rows.pull(np.arange(STEPS)), np.full((STEPS, 2), 2.0))
        each = sum(range(STEPS))
        np.testing.assert_array_equal(rows.pull([1_000_000, 1_000_001]), [[0, each], [STEPS, each]])
        np.testing.assert_array_equal(tensor.pull(), np.full(50_000, 3.0 * STEPS))  # type: ignore[call-arg]


@pytest.mark.slow
def test_torchrun_starts_the_example(local_cluster: NewCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "local_group.py"), "--url", local_cluster(servers=1).url, "--steps", "150"]
    done = subprocess.run(
        command + script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    losses = {line.split(":")[0]: float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()}
    assert losses.keys() == {"step 50", "step 100", "step 150", "rank 0 of 2", "rank 1 of 2"}
    assert losses["step 150"] < losses["step 50"] < 0.8


@pytest.mark.slow
def test_torchrun_restarts_a_group_and_every_step_counts_once(local_cluster: NewCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(Path(__file__).parent / "restarted_rank.py"), local_cluster(servers=1).url, str(STEPS), "5"]
    done = subprocess.run(
        [*command, "--max-restarts", "3", *script],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[2.0 * STEPS] * 2] * 4
    expected = [f"rank {rank} {part}" for rank in range(2) for part in ("from 0", "from 5", f"has {rows}")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
