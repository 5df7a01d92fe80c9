"""L1 logistic regression on sparse data with planted weights: FTRL at the servers, and the KKT filter at the workers.

python examples/l1_logreg.py                                   starts a cluster on this machine
python examples/l1_logreg.py --url etcd://127.0.0.1:2379/demo  uses one that is there

Beside it, scikit-learn's result for the same data, if it is installed. Needs `pip install 'elasticps[sparse]'`.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse as scipy_sparse

import elasticps as eps
from elasticps import sparse

Floats = NDArray[np.floating[Any]]


class Data(NamedTuple):
    """samples: scipy.sparse.csr_array [n, features] of zeros and ones; labels: 0 or 1, float32 [n]; weights: those that
    were planted, most of them zero."""

    samples: Any
    labels: Floats
    weights: Floats


def plant(samples: int, features: int, seed: int = 0, entries: int = 20) -> Data:
    """A fiftieth of the weights matter, and labels follow them by chance."""
    random = np.random.default_rng(seed)
    columns = random.integers(0, features, samples * entries, dtype=np.int32)
    ends = np.arange(0, samples * entries + 1, entries, dtype=np.int32)
    shape = samples, features
    matrix = scipy_sparse.csr_array((np.ones(len(columns), np.float32), columns, ends), shape=shape)
    matrix.sum_duplicates()
    weights = np.zeros(features)
    some = random.choice(features, features // 50, replace=False)
    weights[some] = random.choice([-1, 1], len(some)) * random.uniform(1.5, 3, len(some))
    labels = random.random(samples) < 1 / (1 + np.exp(-(matrix @ weights)))
    return Data(matrix, labels.astype(np.float32), weights)


def log_loss(data: Data, weights: Floats) -> float:
    """The mean over samples."""
    margins = data.samples @ weights
    return float(np.mean(np.logaddexp(0, margins) - data.labels * margins))


def train(ps: eps.Client, table: eps.SparseTable, data: Data, epochs: int, batch_size: int, seed: int = 0) -> None:
    """Pushes a batch's gradient, summed over its samples, `epochs` times over all of them."""
    random, w = np.random.default_rng(seed), sparse.Vector(table)
    for _ in range(epochs):
        order = random.permutation(len(data.labels))
        for some in np.array_split(order, max(1, len(order) // batch_size)):
            batch = sparse.localize(data.samples[some])
            says = 1 / (1 + np.exp(-(batch @ w)))  # pulls the weights of the batch's keys
            ps.push(w.step(batch, batch.gradient(says - data.labels[some])))
    ps.flush()


def compare(data: Data, l1: float, epochs: int) -> Floats | None:
    """What scikit-learn finds, None without it. FTRL counts l1 once for all passes, this one in each."""
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return None
    model = LogisticRegression(l1_ratio=1.0, C=epochs / l1, solver="liblinear", fit_intercept=False)
    found: Floats = model.fit(data.samples, data.labels).coef_[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a cluster; without it one is started here")
    parser.add_argument("--samples", type=int, default=8_000)
    parser.add_argument("--features", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--l1", type=float, default=20.0)
    args = parser.parse_args()

    data = plant(args.samples + 2_000, args.features)
    seen = Data(data.samples[: args.samples], data.labels[: args.samples], data.weights)
    unseen = Data(data.samples[args.samples :], data.labels[args.samples :], data.weights)
    with ExitStack() as stack:
        url = args.url or stack.enter_context(eps.LocalCluster(servers=2)).url
        ps = stack.enter_context(eps.connect(url, worker="w0", app="l1-logreg"))
        table = ps.table("w", dim=1, optimizer=eps.FTRL(lr=0.3, l1=args.l1), push=[eps.KKT()])
        train(ps, table, seen, args.epochs, args.batch)
        floats, dropped = table.screened
        ours, found = table.pull(np.arange(args.features), exact=True)[:, 0], table.reduce("nonzero")
        print(f"{found} weights of {args.features} are not zero, their L1 norm is {table.reduce('l1'):.1f}")
        print(f"planted ones among them: {np.count_nonzero(ours[data.weights != 0])} of {args.features // 50}")
        print(f"the KKT filter left out {dropped / max(floats, 1):.0%} of the gradients")
        print(f"log loss of samples not seen: {log_loss(unseen, ours):.4f}, of planted weights "
              f"{log_loss(unseen, data.weights):.4f}, of zeros {np.log(2):.4f}")  # fmt: skip
    theirs = compare(seen, args.l1, args.epochs)
    if theirs is None:
        print("scikit-learn is not installed: nothing to compare with")
    else:
        loss, count = log_loss(unseen, theirs), np.count_nonzero(theirs)
        like = np.corrcoef(ours, theirs)[0, 1]
        print(f"scikit-learn: log loss {loss:.4f}, {count} weights are not zero, correlation with ours {like:.3f}")


if __name__ == "__main__":
    main()
