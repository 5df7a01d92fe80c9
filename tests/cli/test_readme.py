from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_command_table_lists_what_there_is() -> None:
    table = set(re.findall(r"`elasticps (\w+)", README.read_text(encoding="utf-8")))
    help_text = subprocess.run(
        [sys.executable, "-m", "elasticps", "--help"], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    commands = set(re.findall(r"^[│|]\s+([a-z]+)\s{2,}", help_text, re.M))
    assert table == commands - {"version"}
