"""A worker of tests: adds one to each row at every step. Worker w0 waits for what all have added, and prints it.

worker.py NAME STEPS TOTAL [--stop-at STEP]: stands still there, if it has not been there in an earlier life.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

import numpy as np

import elasticps as eps

ROWS = 100
DEADLINE_S = 120.0


def say(text: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("steps", type=int)
    parser.add_argument("total", type=int)
    parser.add_argument("--stop-at", type=int, default=-1)
    options = parser.parse_args()
    keys, ones = np.arange(ROWS), np.ones((ROWS, 1), np.float32)
    with eps.connect(worker=options.name, timeout=DEADLINE_S) as ps:
        table = ps.table("sums", dim=1, optimizer=eps.Accumulate())
        first = ps.resume().steps
        say(f"{options.name} begins at step {first}")
        for step in range(first, options.steps):
            if step == options.stop_at != first:
                ps.flush()
                say(f"{options.name} stands at step {step}")
                signal.pause()
            ps.push({table: (keys, ones)})
        ps.flush()
        if options.name == "w0":
            until = time.monotonic() + DEADLINE_S
            while (sums := table.pull(keys)).min() < options.total and time.monotonic() < until:
                time.sleep(0.05)  # others push meanwhile
            say(f"sums {int(sums.min())} to {int(sums.max())}")
    say(f"{options.name} ends")


if __name__ == "__main__":
    main()
