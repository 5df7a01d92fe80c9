"""Stories that do not end as others do. Imports next to nothing: processes are started to play them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

BEGUN = "ELASTICPS_TEST_BEGUN"  # names the file by which `stay` says that it has begun


def vanish(seed: int, **_: Any) -> None:
    """Its process is gone in the middle of it."""
    os._exit(7)


def stay(seed: int, **_: Any) -> None:
    """It has no end."""
    Path(os.environ[BEGUN]).touch()
    while True:
        time.sleep(60.0)
