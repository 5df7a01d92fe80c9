from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_training_script_runs_as_printed_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[0], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert done.stderr == ""


def test_the_command_table_lists_what_there_is() -> None:
    table = set(re.findall(r"`elasticps (\w+)", README.read_text(encoding="utf-8")))
    help_text = subprocess.run(
        [sys.executable, "-m", "elasticps", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    commands = set(re.findall(r"^[│|]\s+([a-z]+)\s{2,}", help_text, re.M))
    assert table == commands - {"version"}
