"""The examples of other frameworks as a user runs them, killed once where that is what they are about."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.storage import Storage
from elasticps.local import LocalCluster
from elasticps.local.process import Process
from elasticps.local.zygote import OURS

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "lightning_clicks.py": "lightning",
    "huggingface_sentences.py": "transformers",
    "torchrec_dlrm.py": "torchrec",
}
"""The examples, and the package that each needs."""


@pytest.mark.parametrize("name", NEEDED)
def test_at_most_ten_lines_of_an_example_touch_elasticps(name: str) -> None:
    code = (EXAMPLES / name).read_text("utf-8").split('"""\n', 1)[1]
    ours = r"\b(eps|elasticps|elastic)\b|\b(Optimizer|StepSampler)\("
    touching = [line for line in code.splitlines() if re.search(ours, line)]
    assert 0 < len(touching) <= 10, touching


class Run:
    """An example in a process of its own."""

    def __init__(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-u", str(EXAMPLES / name), *arguments]
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> None:
        """Reads on to a line with the pattern; fails if the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        pytest.fail(f"no line with {pattern!r} in\n{''.join(self.lines)}")

    def end(self, *, kill: bool = False) -> str:
        if kill:
            self.process.send_signal(signal.SIGKILL)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        code = self.process.wait()
        assert code == (-signal.SIGKILL if kill else 0), "".join(self.lines)
        return "".join(self.lines)


@contextmanager
def run(name: str, *arguments: str) -> Iterator[Run]:
    if find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    example = Run(name, *arguments)
    try:
        yield example
    finally:
        example.process.kill()
        example.process.wait()
        assert example.process.stdout is not None
        example.process.stdout.close()


@pytest.mark.slow
def test_a_killed_lightning_process_goes_on_and_no_sample_is_trained_twice(tmp_path: Path) -> None:
    place = (tmp_path / "saved").as_uri()
    with LocalCluster(servers=2) as cluster:
        command = [*OURS, "coordinator", "--url", cluster.operator_url, "--name", "c1", "--checkpoint-url", place]
        coordinator = Process.start("c1", "coordinator", command, tmp_path, None, None)
        try:
            cluster.kill("c0")  # the one that makes checkpoints comes to lead
            options = ["--url", cluster.url, "--folder", str(tmp_path / "lightning"), "--checkpoints"]
            with run("lightning_clicks.py", *options) as first:
                first.until(r"step 53\b")  # 40 in an epoch
                first.end(kill=True)
            with run("lightning_clicks.py", *options) as second:
                assert "120 steps" in second.end()
            with eps.connect(cluster.url, worker="w0") as ps:
                assert ps.resume().steps == 120
                seen = ps.open("seen")
                assert isinstance(seen, eps.SparseTable)
                assert (seen.pull(np.arange(2_000)) == -3.0).all()
        finally:
            coordinator.popen.terminate()
            coordinator.popen.wait()
    steps = [int(line.split()[1]) for line in second.lines if line.startswith("step ")]
    assert 53 < steps[0] < 120
    assert steps == list(range(steps[0], 121))
    saved = torch.load(tmp_path / "lightning" / "last.ckpt", weights_only=False)
    assert saved["elasticps"]["steps"] == saved["global_step"] == 120
    assert saved["elasticps"]["checkpoint"] in catalog.cuts_of(Storage(place))


@pytest.mark.slow
def test_a_killed_trainer_of_hugging_face_goes_on(tmp_path: Path) -> None:
    with LocalCluster(servers=2) as cluster:
        options = ["--url", cluster.url, "--folder", str(tmp_path / "out")]
        with run("huggingface_sentences.py", *options) as first:
            first.until(r"'epoch': '?0\.9")  # 30 steps in an epoch, of which 25 were saved
            first.end(kill=True)
        with eps.connect(cluster.url, worker="observer") as ps:
            deadline = time.monotonic() + 60
            while not (tmp_path / "out" / "checkpoint-25").exists():
                assert time.monotonic() < deadline
            assert ps.tables()["words"].rows > 0
        with run("huggingface_sentences.py", *options) as second:
            text = second.end()
        found = re.search(r"60 steps, (\d+) of them by processes before", text)
        assert found is not None, text
        assert 25 < int(found[1]) < 60
        with eps.connect(cluster.url, worker="w0") as ps:
            assert ps.resume().steps == 60


@pytest.mark.slow
def test_a_dlrm_of_torchrec_learns_at_the_servers() -> None:
    with run("torchrec_dlrm.py", "--steps", "150") as example:
        losses = [float(each) for each in re.findall(r"loss ([\d.]+)", example.end())]
    assert losses[-1] < losses[0] - 0.1
