"""The script of docs/guides/slurm.md, as it is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
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
LAST_CHECKPOINT = """
    import signal, sys, threading
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print("trained", flush=True)
    stop.wait()
    ps.checkpoint().result(60)
    sys.exit(75)
"""
MARK = "ELASTICPS_TEST_JOB"


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
@pytest.mark.ci
def test_a_job_that_is_ended_as_a_whole_makes_a_checkpoint_and_resumes_from_it(
    folder: Path,  # noqa: F811
) -> None:
    (folder / "train.py").write_text(script().replace("    ps.flush()\n", LAST_CHECKPOINT))
    (folder / "check.py").write_text(CHECK)
    place = ["--checkpoint-url", str(folder / "checkpoints"), "--resume"]
    launch = [*LAUNCH, "--servers", "2", *place, "--", sys.executable]
    with subprocess.Popen(
        [*launch, "train.py"], cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, MARK: str(folder)}
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "trained\n"
        processes = [each for each in psutil.process_iter() if environment(each).get(MARK) == str(folder)]
        assert len(processes) >= 6  # launch, its command, etcd, a coordinator, servers
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 75
    done = subprocess.run(
        [*launch, "check.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "sums {40}" in done.stdout


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}
