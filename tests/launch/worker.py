"""A worker of tests: adds one to each row at every step; prints what it has done. Worker 0 waits for all, and prints sums.

worker.py NAME STEPS TOTAL [--stop-at STEP]: stands still there, if it has not been there in an earlier life.
"""

from __future__ import annotations

import argparse
import signal
import time

import numpy as np

import elasticps as eps

ROWS = 100
DEADLINE_S = 120.0


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
        print(f"{options.name} begins at step {first}", flush=True)
        for step in range(first, options.steps):
            if step == options.stop_at != first:
                ps.flush()
                print(f"{options.name} stands at step {step}", flush=True)
                signal.pause()
            ps.push({table: (keys, ones)})
        ps.flush()
        if options.name == "w0":
            until = time.monotonic() + DEADLINE_S
            while (sums := table.pull(keys)).min() < options.total and time.monotonic() < until:
                time.sleep(0.05)  # others push meanwhile
            print(f"sums {int(sums.min())} to {int(sums.max())}", flush=True)
    print(f"{options.name} ends", flush=True)


if __name__ == "__main__":
    main()
