"""Ray Data and Ray Train with servers on Ray: blocks are trained, checkpoints belong together, wrappers are refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.errors import ConfigError, InputError
from tests.ray.conftest import QUIET

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def train_blocks(url: str, name: str, blocks: Any, dies_after: int) -> int:
    """Adds up the rows of blocks at the servers; returns how many it trained. Dies in the middle, if it is to."""
    trained = 0
    with eps.connect(url, worker=name) as ps:
        table = ps.table("rows", dim=1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        for batch in blocks.batches(ps, epochs=2, shuffle_seed=3):
            ps.push({table: (batch["id"], np.full((len(batch["id"]), 1), -1, np.float32))})
            trained += 1
            if trained == dies_after:
                ps.flush()
                os._exit(1)
    return trained


def test_every_block_of_a_dataset_is_trained_whoever_dies(raylets: Any) -> None:
    import ray

    from elasticps.ray import Cluster, ShardedBlocks

    for _ in range(2):
        raylets.add()
    with Cluster(servers=2, replicas=2) as cluster:
        blocks = ShardedBlocks(ray.data.range(1000), rows=30)
        assert len(blocks) == 34
        run = ray.remote(train_blocks).options(max_retries=0)
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(run.remote(cluster.url, "a", blocks, 5))
        results = [run.remote(cluster.url, name, blocks, 0) for name in ("b", "c")]
        assert sum(ray.get(results)) >= 2 * 34 - 5
        with eps.connect(cluster.url, worker="d") as ps:
            table = ps.table("rows", dim=1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
            counts = ps.pull({table: np.arange(1000)})[table].ravel()
            assert counts.min() == 2
            assert (counts > 2).sum() <= 4 * 30  # what the dead worker had in its hands
            passed = ShardedBlocks(ray.data.range(10), rows=5, name="passed over").batches(ps)
            next(passed)
            with pytest.raises(InputError, match="of epoch 0 was not trained"):
                next(passed)
        with pytest.raises(ConfigError, match="no rows"):
            ShardedBlocks(ray.data.range(10).filter(lambda row: row["id"] > 99))


def wrapped(config: dict[str, Any]) -> None:
    """A training loop that does what it must not."""
    import torch
    from ray.train.torch import prepare_model

    from elasticps.torch import EmbeddingBag, Optimizer

    with eps.connect(config["url"]) as ps:
        items = EmbeddingBag(ps, "items", 4, optimizer=eps.SGD(lr=0.1), init=eps.Zeros())
        model = torch.nn.Sequential(items, torch.nn.Linear(4, 1))
        optimizer = Optimizer(ps, model, optimizer=eps.SGD(lr=0.1))
        both = prepare_model(model)
        both(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        optimizer.step()


def test_a_model_that_ray_train_has_wrapped_is_refused(raylets: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    from elasticps.ray import Cluster

    with Cluster(servers=1, replicas=1) as cluster:
        trainer = TorchTrainer(
            wrapped, train_loop_config={"url": cluster.url}, scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path)),
        )  # fmt: skip
        with pytest.raises(TrainingFailedError, match="With Ray Train, leave out prepare_model"):
            trainer.fit()


def test_the_example_learns_and_makes_a_checkpoint() -> None:
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of sockets are short
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
    script = ROOT / "examples" / "ray_train.py"
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    shutil.rmtree(folder, ignore_errors=True)
    found = re.search(r"^loss (\S+), later (\S+); checkpoint (\d+)$", run.stdout, re.MULTILINE)
    assert found, run.stdout + run.stderr
    assert float(found[2]) < float(found[1]) - 0.1
    assert int(found[3]) > 0
    lines = script.read_text(encoding="utf-8").partition("import elasticps.ray\n")[2].splitlines()
    assert len([line for line in lines if "eps." in line or "elasticps" in line or "Optimizer(" in line]) <= 10
