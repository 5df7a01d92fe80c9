"""A story whose process is gone in the middle of it. Imports next to nothing: processes are started to play it."""

from __future__ import annotations

import os
from typing import Any


def vanish(seed: int, **_: Any) -> None:
    """In place of playing it."""
    os._exit(7)
