"""A script of one's own in the place of the example's, as docs/guides/kubernetes.md has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

import elasticps as eps
from tests.conftest import NewCluster
from tests.deploy.manifests import ROOT, render

PAGE = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")


def block(language: str, beginning: str) -> str:
    """The page's block of code that begins so."""
    (found,) = re.findall(rf"^```{language}\n({re.escape(beginning)}.*?)^```$", PAGE, re.M | re.S)
    return str(found)


def test_ten_lines_of_python_and_five_of_yaml_train_in_the_examples_pods(
    tmp_path: Path, local_cluster: NewCluster
) -> None:
    script, overlay = block("python", "import os"), block("yaml", "namespace: elasticps")
    assert len(script.strip().splitlines()) <= 10
    assert len(overlay.strip().splitlines()) <= 5
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(script)
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    found = {each["kind"]: each for each in yaml.safe_load_all(render(tmp_path / "mine"))}
    (settings,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert settings["command"] == ["python", "/train/train.py"]
    assert {"ELASTICPS_URL", "WORKER"} <= {each["name"] for each in settings["env"]}
    assert found["ConfigMap"]["metadata"] == {"name": "elasticps-train", "namespace": "elasticps"}
    assert found["ConfigMap"]["data"] == {"train.py": script}

    cluster = local_cluster(servers=1, replicas=1)
    variables = {**os.environ, "ELASTICPS_URL": cluster.url, "WORKER": "w0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "mine" / "train.py"], env=variables, check=True)
    with eps.connect(cluster.url, worker="check") as ps:
        clicks = ps.table("clicks", dim=1, optimizer=eps.Accumulate())
        assert (clicks.pull(np.arange(500)) == 40).all()
