"""An example worker: learns the weights of 10,000 items from samples that the servers hand out.

Takes its place from the environment: ELASTICPS_URL, WORKER (a name that it keeps when it is started again) and
METRICS_PORT. When this process dies, the next one of the same name takes its place, and the samples that it was
training are handed out again.
"""

import logging
import os

import numpy as np

import elasticps as eps
from elasticps.metrics import serve_client

ITEMS, SAMPLES, SHARD = 10_000, 200_000, 500

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("train")


def batch(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples first … last - 1: which item each is of, and how much it was liked."""
    numbers = np.arange(first, last)
    items = (numbers * 2654435761) % ITEMS
    return items, np.sin(items).astype(np.float32)


def main() -> None:
    with eps.connect(os.environ["ELASTICPS_URL"], worker=os.environ["WORKER"], consistency=eps.SSP(staleness=4)) as ps:
        close = serve_client(ps, int(os.environ["METRICS_PORT"]), host="0.0.0.0")
        table = ps.table("items", dim=1, optimizer=eps.Adagrad(lr=0.5), init=eps.Zeros())
        for shard in ps.shards(int(os.environ.get("SAMPLES", SAMPLES)), SHARD, shuffle_seed=1):
            items, liked = batch(shard.start, shard.stop)
            error = table.pull(items)[:, 0] - liked
            ps.push({table: (items, error[:, None])})
            if ps.clock % 50 == 0:
                log.info("step %d: mean error %.4f", ps.clock, np.abs(error).mean())
        ps.flush()
        log.info("done after %d steps", ps.clock)
        close()


if __name__ == "__main__":
    main()
