"""One rank of a group: `python -m tests.torch.group.rank_process URL MEETING RANK SIZE STEPS DIE_AT`.

Step i pushes 1 for row i, and (number of the rank, i) for a row of each rank's own; for a tensor the number of the rank
and 1. Rank 1 kills itself before step DIE_AT. Says where it has started, or the error that ended it.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
from torch import distributed

import elasticps as eps
from elasticps.torch import LocalGroup


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    url, meeting = sys.argv[1:3]
    rank, size, steps, die_at = map(int, sys.argv[3:])
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    group = LocalGroup()
    try:
        with group.connect(url, worker="group", app="sums") as ps:
            rows = ps.table("rows", dim=2, optimizer=eps.Accumulate())
            tensor = ps.tensor("tensor", init=np.zeros(50_000, np.float32), optimizer=eps.Accumulate())
            at = ps.resume()
            say(f"started {at.steps} {at.predecessor}")
            for step in range(at.steps, steps):
                if (step, rank) == (die_at, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                keys = np.array([step, 1_000_000 + rank])
                grads = np.array([[1, 1], [rank, step]], np.float32)
                ps.push({rows: (keys, grads), tensor: np.full(50_000, rank + 1, np.float32)})
                assert rows.pull(keys).shape == (2, 2)
    except eps.GroupLost as error:
        say(f"lost {error}")
        os._exit(3)


if __name__ == "__main__":
    main()
