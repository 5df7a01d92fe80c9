"""Trains embeddings of users and items with names, exports them, and finds the nearest items of an item.

Each user likes the items of one genre, so items of a genre end up near to each other. NumPy searches all of them;
hnswlib, where it is installed, searches an index of the same files. `python examples/neighbours.py`.
"""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from elasticps.exchange.export import export
from elasticps.keys import Names, decode, hashed
from elasticps.local import LocalCluster

GENRES = ["drama", "comedy", "thriller", "documentary"]
USERS, PER_GENRE, DIM, STEPS, BATCH = 400, 25, 8, 150, 512
USER_NAMES = np.array([f"user:{i}" for i in range(USERS)])
ITEM_NAMES = np.array([f"{genre}:{i}" for genre in GENRES for i in range(PER_GENRE)])
rng = np.random.default_rng(0)


def train(ps: eps.Client) -> None:
    """Learns, by logistic regression on products of rows, who likes what. Names are kept beside, in tables."""
    init, optimizer = eps.Normal(std=0.1, seed=1), eps.Adagrad(lr=0.5)
    users, items = (ps.table(name, dim=DIM, optimizer=optimizer, init=init) for name in ("users", "items"))
    user_names = Names(ps, "user_names", max_bytes=30, namespace="user")
    item_names = Names(ps, "item_names", max_bytes=30, namespace="item")
    for _ in range(STEPS):
        who, what = rng.integers(USERS, size=BATCH), rng.integers(len(ITEM_NAMES), size=BATCH)
        user_keys, item_keys = user_names.add(USER_NAMES[who]), item_names.add(ITEM_NAMES[what])
        liked = who % len(GENRES) == what // PER_GENRE
        rows = ps.pull({users: user_keys, items: item_keys})
        guess = 1 / (1 + np.exp(-(rows[users] * rows[items]).sum(axis=1)))
        error = (guess - liked).astype(np.float32)[:, None] / 10
        ps.push({users: (user_keys, error * rows[items]), items: (item_keys, error * rows[users])}).result()


def neighbours(vectors: NDArray[np.float32], of: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` rows of vectors [n, dim] with the largest cosine with `of` [dim]."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(of)
    return np.argsort(-(vectors @ of) / np.maximum(lengths, 1e-12))[:count]


def main() -> None:
    """Prints the neighbours of an item of each genre."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "model"
        with LocalCluster(servers=2) as cluster, eps.connect(cluster.url, worker="w0") as ps:
            train(ps)
            export(ps, to, kind="npy")
        vectors, keys = np.load(to / "items.weight.npy"), np.load(to / "items.keys.npy")  # float32 [n, dim], int64 [n]
        stored = zip(np.load(to / "item_names.keys.npy"), decode(np.load(to / "item_names.weight.npy")), strict=True)
        name_of = {int(key): name for key, name in stored}
        for genre in GENRES:
            item = np.flatnonzero(keys == hashed(f"{genre}:0", namespace="item"))[0]
            found = [name_of[key] for key in keys[neighbours(vectors, vectors[item], 6)].tolist()]
            print(f"{found[0]} is like {', '.join(map(str, found[1:]))}")
        try:
            import hnswlib
        except ImportError:
            print("hnswlib is not installed: pip install hnswlib")
            return
        index = hnswlib.Index(space="cosine", dim=DIM)
        index.init_index(max_elements=len(vectors), random_seed=1)
        index.add_items(vectors, np.arange(len(vectors)))  # or `keys`, which it takes as labels if none is negative
        found_at, _ = index.knn_query(vectors, k=6)
        exact = np.stack([neighbours(vectors, vector, 6) for vector in vectors])
        same = np.mean([len({*one} & {*other}) for one, other in zip(found_at.tolist(), exact.tolist(), strict=True)])
        print(f"hnswlib finds {same:.1f} of 6 neighbours that NumPy finds")


if __name__ == "__main__":
    main()
