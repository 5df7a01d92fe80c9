"""Waits for conditions, each with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.005


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until a condition holds; fails the test if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true within {seconds:g} s"
        time.sleep(LOOK_S)
