"""Trains on a stream whose ids churn, with a table that admits keys by count and holds itself to a number of rows.

An hour of the stream passes in a second: new ids appear, old ones are seen less and less. Prints each hour what was
admitted and evicted, and why. `python examples/growing_vocabulary.py [HOURS]`, 12 unless said otherwise.
"""

import itertools
import sys
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from elasticps.local import LocalCluster

HOURS = float(sys.argv[1]) if len(sys.argv) > 1 else 12
STEPS, BATCH, DIM, ROWS = 100, 512, 8, 4_000  # steps an hour, samples of a step, floats and rows of the table
NEW_PER_HOUR, KNOWN = 2_000, 20_000  # ids
rng = np.random.default_rng(0)


def ids_of(hour: float, count: int) -> NDArray[np.int64]:
    """Ids of a moment: a power law over those that are known by then, the newest ones most often."""
    newest = int(KNOWN + hour * NEW_PER_HOUR)
    return np.asarray(newest - np.minimum(rng.zipf(1.3, count), KNOWN), np.int64)


def taste_of(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """What is to be learnt of each id: how likely it is liked, in [0, 1]."""
    return np.asarray(1 / (1 + np.exp(-3 * np.sin(ids * 12.9898))), np.float64)


def main() -> None:
    """Trains, and prints a line an hour."""
    with LocalCluster(servers=2) as cluster, eps.connect(cluster.url, worker="w0") as ps:
        users = ps.table(
            "users", dim=DIM, optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1),
            admission=eps.MinCount(2, forget_after="3s"),
            eviction=[eps.IdleFor("4s"), eps.Capacity(ROWS, keep="most_used", half_life="2s")],
        )  # fmt: skip
        began, errors = time.monotonic(), deque[float](maxlen=STEPS)
        for step in itertools.count(1):
            hour = step / STEPS
            time.sleep(max(0.0, began + hour - time.monotonic()))
            ids = np.unique(ids_of(hour, BATCH))
            liked = rng.random(len(ids)) < taste_of(ids)
            guess = 1 / (1 + np.exp(-users.pull(ids).sum(axis=1)))
            errors.append(float(np.mean((guess - liked) ** 2)))
            grads = np.repeat((guess - liked).astype(np.float32)[:, None], DIM, axis=1)
            ps.push({users: (ids, grads)}).result()
            if step % STEPS == 0:
                state = users.state()
                why = ", ".join(f"{reason} {count:,}" for reason, count in state.evicted.items() if count)
                print(
                    f"hour {hour:2.0f}: error {np.mean(errors):.3f}, {state.rows:,} rows, {state.candidates:,} keys "
                    f"wait, admitted {state.admitted:,}, gone so far: {why or 'nothing'}"
                )
            if hour >= HOURS:
                break
        print("would go now:", users.evict(dry_run=True))


if __name__ == "__main__":
    main()
