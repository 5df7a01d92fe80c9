"""The script of docs/guides/slurm.md, as it is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_launch import LAUNCH, PATIENCE_S, folder, srun  # noqa: F401  # the fixture

PAGE = Path(__file__).parents[2] / "docs/guides/slurm.md"
CHECK = """
import numpy as np
import elasticps as eps

with eps.connect(worker="check") as ps:
    clicks = ps.table("clicks", dim=1, optimizer=eps.Accumulate())
    print("sums", {int(count) for count in clicks.pull(np.arange(500)).ravel()})
"""


def script() -> str:
    """The page's script."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(str(found).strip().splitlines()) <= 10
    return str(found)


def test_the_script_of_the_guide_trains_every_sample_once_and_its_exit_code_is_passed_on(
    folder: Path,  # noqa: F811
) -> None:
    (folder / "train.py").write_text(f"{script()}{CHECK}")
    both = f"{sys.executable} train.py && exit 7"
    done = subprocess.run(
        [*LAUNCH, "--servers", "1", "--replicas", "1", "--", "sh", "-c", both],
        cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert "sums {40}" in done.stdout
    assert "cluster: etcd://127.0.0.1:" in done.stderr
    assert "no TLS" not in done.stderr  # on one machine nobody else reaches it


@pytest.mark.slow
def test_a_job_that_was_ended_as_a_whole_resumes_from_its_checkpoint(folder: Path) -> None:  # noqa: F811
    (folder / "train.py").write_text(script().replace("    ps.flush()", "    ps.checkpoint().result(60)"))
    (folder / "check.py").write_text(CHECK)
    place = ["--checkpoint-url", str(folder / "checkpoints"), "--resume"]
    for name, text in (("train.py", ""), ("check.py", "sums {40}")):
        done = subprocess.run(
            [*LAUNCH, "--servers", "1", "--replicas", "1", *place, "--", sys.executable, name],
            cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
