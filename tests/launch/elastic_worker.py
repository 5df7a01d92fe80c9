"""A worker that torchrun starts: adds one to each row at every step. Rank 1 kills itself once.

torchrun then ends rank 0 by SIGTERM, which finishes its step first. A step of a worker that is killed while it pushes
may count in some ranges and not in others; it is trained again, and the sums would not be exact.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

import elasticps as eps

RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
STEPS, KEYS, DEADLINE_S = 100, np.arange(100), 120.0


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with eps.connect(worker=f"w{RANK}", timeout=DEADLINE_S) as ps:
        table = ps.table("sums", dim=1, optimizer=eps.Accumulate())
        first = ps.resume().steps
        sys.stdout.write(f"restart {RESTART} of rank {RANK} begins at step {first}\n")
        for step in range(first, STEPS):
            if stop.is_set():
                break
            if (RANK, RESTART, step) == (1, 0, 50):
                ps.flush()
                sys.stdout.write(f"rank {RANK} kills itself at step {step}\n")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            ps.push({table: (KEYS, np.ones((len(KEYS), 1), np.float32))})
        ps.flush()
        until = time.monotonic() + DEADLINE_S
        while (sums := table.pull(KEYS)).min() < 2 * STEPS and time.monotonic() < until and not stop.is_set():
            time.sleep(0.05)  # the other rank pushes meanwhile
        sys.stdout.write(f"sums {int(sums.min())} to {int(sums.max())}\n")


if __name__ == "__main__":
    main()
