"""`bench compare`: all contestants train the same model, and what it says of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from benchmarks import compare as bench
from benchmarks import compare_environment as environment
from benchmarks.cli import app
from benchmarks.compare_rank import Rank
from benchmarks.compare_report import Comparison, Death, Speed, Standing, markdown, shown
from benchmarks.core.criteo import Source
from benchmarks.training import SEED
from elasticps.errors import ConfigError

VALUES, BATCH, STEPS = 40, 64, 4


def trained(system: str) -> tuple[NDArray[np.float64], float]:
    """All rows after a few steps of a contestant in this process, and its AUC."""
    with tempfile.TemporaryDirectory(prefix="eps-", ignore_cleanup_errors=True) as folder:
        meeting = f"{folder}/meeting"
        rank = Rank(system=system, rank=0, ranks=1, trainers=1, threads=1, meeting=meeting, replicas=2, values=VALUES)
        try:
            assert rank.build() == Source(SEED, VALUES).values
            rank.prepare(BATCH, 0, STEPS)
            times = rank.train(STEPS)
            assert times["ended"] > times["began"]
            return np.concatenate([rank.read(category, VALUES) for category in range(26)]), rank.score(256, 2)
        finally:
            rank.close()


@pytest.fixture(scope="module")
def plain() -> tuple[NDArray[np.float64], float]:
    return trained("ddp")


@pytest.mark.filterwarnings("ignore")  # torch's, of its own parts
@pytest.mark.parametrize("system", ["rpc", "elasticps", "fbgemm", "torchrec", "ray"])
def test_a_contestant_learns_what_plain_torch_learns(system: str, plain: tuple[NDArray[np.float64], float]) -> None:
    (found,) = [each for each in bench.CONTESTANTS.values() if each.system == system][:1]
    for module in found.needs:
        pytest.importorskip(module)
    rows, auc = trained(system)
    np.testing.assert_allclose(rows, plain[0], atol=1e-5)
    assert auc == pytest.approx(plain[1], abs=1e-3)


def test_contestants_whose_packages_are_missing_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "look", lambda python, modules: (list(modules), {}))
    with pytest.raises(ConfigError, match="torchrec, fbgemm_gpu, ray are not installed") as raised:
        bench.run(names=["fbgemm", "torchrec", "ray"])
    for line in ("--environment FOLDER", "compare-requirements.txt", "pip install --no-deps"):
        assert line in str(raised.value)
    with pytest.raises(ConfigError, match=r"unknown contestant 'dask': there are fbgemm, .*, elasticps-2"):
        bench.run(names=["dask"])


def test_the_pinned_releases_are_those_of_the_constraints() -> None:
    constraints = (environment.ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [
        line
        for name in ("compare-requirements.txt", "compare-no-deps.txt")
        for line in (environment.HERE / name).read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert len(pins) > 5
    assert [pin for pin in pins if pin not in constraints] == []


@pytest.mark.parametrize(
    ("death", "sequel", "state"),
    [
        (Death(45.0, resumed_s=0.123, same=1.0), "0.12 s, by itself", "whole"),
        (
            Death(45.0, resumed_s=3.0, same=0.25), "3.00 s, by itself",
            "**25% of the trained rows; the others begin again, silently**",
        ),
        (Death(45.0, ended=True), "never: the job is gone", "lost"),
        (Death(45.0), "never: it waits, without an error, for 45 s and more", "none can be read"),
        (
            Death(45.0, error="RuntimeError: gone", error_s=0.2, same=1.0),
            "never: `RuntimeError` after 0.2 s, and at every step from then on",
            "all in the process that is left, which cannot go on",
        ),
    ],
)  # fmt: skip
def test_a_death_is_told_in_words(death: Death, sequel: str, state: str) -> None:
    assert (death.sequel, death.state) == (sequel, state)


def test_a_page_has_a_line_for_each_contestant() -> None:
    speeds = [Speed(256, 12_345.6, 80.4, 1.0), Speed(1024, 23_456.0, 50.0, 0.5)]
    one = Standing("ddp", "torch DDP", "one of both", 2, 5.0, 256.4, speeds, 0.70123, Death(45.0, ended=True))
    found = Comparison("2 cores", {"torch": "2.13.0", "ray": ""}, 1000, 5000, 3, [one], {"Ray": ["ray"]})
    assert markdown(found).splitlines() == [
        "| system | samples/s, batch 256 | samples/s, batch 1,024 | CPU s per million samples, 256 / 1,024 "
        "| bytes per row | AUC |",
        "| --- | --- | --- | --- | --- | --- |",
        "| torch DDP | 12,346 (1.00) | 23,456 (0.50) | 80 / 50 | 256 | 0.7012 |",
        "",
        "| system | killed | training goes on after | rows | starting it takes |",
        "| --- | --- | --- | --- | --- |",
        "| torch DDP | one of both | never: the job is gone | lost | 5 s |",
        "",
        "2 cores; torch 2.13.0; 5,000 samples each.",
    ]
    assert shown(found, "install it")[-2:] == ["left out: Ray, which needs ray", "install it"]


@pytest.mark.slow
def test_processes_are_measured_in_turns_and_killed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = (
        "--contestant ddp --contestant rpc --contestant elasticps-2 --batch 64 --rounds 2 --steps 4 --values 200 --json"
    )
    result = CliRunner().invoke(app, ["compare", *options.split(), "--markdown", str(page)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    standings = {each["name"]: each for each in found["standings"]}
    assert list(standings) == ["ddp", "rpc", "elasticps-2"]
    for each in standings.values():
        (speed,) = each["speeds"]
        assert min(speed["samples_per_s"], speed["cpu_s_per_million"], each["start_s"]) > 0
        assert each["auc"] == pytest.approx(standings["ddp"]["auc"], abs=1e-3)
    assert standings["elasticps-2"]["death"]["resumed_s"] is not None
    assert standings["elasticps-2"]["death"]["same"] == 1.0
    assert standings["ddp"]["death"]["resumed_s"] is None
    assert standings["rpc"]["death"]["resumed_s"] is None
    assert page.read_text("utf-8").count("elasticps, 1 trainer, 3 servers, 2 replicas") == 2
