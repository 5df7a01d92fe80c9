"""A rank that torchrun starts, and starts again: rank 1 is killed in the middle of its first life. Prints where it
began, and what there is at the end.

python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 restarted_rank.py URL STEPS DIE_AT
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import torch
from torch import distributed

import elasticps as eps
from elasticps.torch import LocalGroup

KEYS = np.arange(4)


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(url: str, steps: int, die_at: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with LocalGroup().connect(url, worker="machine") as ps:
        table = ps.table("rows", dim=2, optimizer=eps.Accumulate())
        at = ps.resume()
        tell(f"rank {ps.rank} from {at.steps}")
        for step in range(at.steps, steps):
            if first and ps.rank == 1 and step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            ps.push({table: (KEYS, np.ones((len(KEYS), 2), np.float32))}).result()
        tell(f"rank {ps.rank} has {table.pull(KEYS).tolist()}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
