"""Trains on a stream whose ids churn, with a table that admits keys by count and holds itself to a number of rows.

An hour of the stream passes in a second: new ids appear, old ones are seen less and less. Prints what was admitted and
evicted, and why.
"""

import time

import numpy as np

import elasticps as eps
from elasticps.local import LocalCluster

HOURS, BATCH, DIM, ROWS = 12, 512, 8, 4_000
NEW_PER_HOUR, KNOWN = 2_000, 20_000  # ids
rng = np.random.default_rng(0)


def ids_of(hour: float, count: int) -> np.ndarray:
    """Ids of a moment: a power law over those that are known by then, the newest ones most often."""
    newest = int(KNOWN + hour * NEW_PER_HOUR)
    return newest - np.minimum(rng.zipf(1.2, count), KNOWN)


def taste_of(ids: np.ndarray) -> np.ndarray:
    """What is to be learnt of each id: whether it is liked, in [0, 1]."""
    return 1 / (1 + np.exp(-3 * np.sin(ids * 12.9898)))


with LocalCluster(servers=2) as cluster, eps.connect(cluster.url, worker="w0") as ps:
    users = ps.table(
        "users", dim=DIM, optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1),
        admission=eps.MinCount(2, forget_after="3s"),
        eviction=[eps.IdleFor("4s"), eps.Capacity(ROWS, keep="most_used", half_life="2s")],
    )  # fmt: skip
    head = np.ones(DIM, np.float32)
    began, step, losses = time.monotonic(), 0, []
    printed = 0
    while (hour := time.monotonic() - began) < HOURS:
        ids = np.unique(ids_of(hour, BATCH))
        rows = users.pull(ids)
        liked = rng.random(len(ids)) < taste_of(ids)
        guess = 1 / (1 + np.exp(-(rows @ head)))
        losses.append(float(np.mean((guess - liked) ** 2)))
        grads = ((guess - liked)[:, None] * head[None, :]).astype(np.float32)
        ps.push({users: (ids, grads)}).result()
        step += 1
        if int(hour) > printed:
            printed = int(hour)
            state = users.state()
            print(
                f"hour {printed:2d}: {step:5d} steps, error {np.mean(losses):.3f}, {state.rows:,} rows, "
                f"{state.candidates:,} keys wait, admitted {state.admitted:,}, evicted {dict(state.evicted)}"
            )
            losses.clear()
    print("would go now:", users.evict(dry_run=True))
