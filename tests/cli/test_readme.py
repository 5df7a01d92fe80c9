from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"


def test_the_table_of_commands_lists_every_command() -> None:
    table = set(re.findall(r"`elasticps (\w+)", PAGE.read_text(encoding="utf-8")))
    help_text = subprocess.run(
        [sys.executable, "-m", "elasticps", "--help"], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    commands = set(re.findall(r"^[│|]\s+([a-z]+)\s{2,}", help_text, re.M))
    assert table == commands - {"version"}
