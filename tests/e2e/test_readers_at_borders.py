"""Readers at borders: shares through drains and growth, pins while servers die and come, an etcd that lost all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import elasticps as eps
from tests.e2e.test_readers import KEYS, followed, push, shows, table_of, training
from tests.e2e.test_readers_through_changes import equals
from tests.waiting import eventually

SHARES = ((1, 2), (2, 2))


def rows_of(reader: eps.Reader, table: eps.SparseTable) -> dict[int, bytes]:
    with reader.lock:
        rows = reader.table_rows[table.name]
        keys = np.concatenate([rows.list_range(r) for r in range(reader.ranges)])
    return dict(zip(keys.tolist(), map(bytes, reader.pull({table.name: keys})[table.name]), strict=True))


def test_two_shares_have_every_row_once_through_a_drain_and_growth(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(21)
    with (
        eps.connect(own.url, worker="w0") as ps,
        eps.reader(own.url, every=0.005, share=SHARES[0]) as first,
        eps.reader(own.url, every=0.005, share=SHARES[1]) as second,
    ):
        users = table_of(ps)
        push(ps, users, rng, 3000)

        def together() -> bool:
            """Every row of the servers is in the reader of its share, bit for bit, and in no other."""
            keys = np.sort(np.concatenate(list(users.keys())))
            model = dict(zip(keys.tolist(), map(bytes, users.pull(keys, exact=True)), strict=True))
            owners = dict(zip(keys.tolist(), eps.share_of(keys, 2).tolist(), strict=True))
            for reader, (number, _) in zip((first, second), SHARES, strict=True):
                if rows_of(reader, users) != {key: row for key, row in model.items() if owners[key] == number}:
                    return False
            return True

        eventually(lambda: all("users" in reader.tables for reader in (first, second)))
        eventually(together)
        changes: list[Callable[[], object]] = [lambda: own.drain("s1"), lambda: own.scale(4)]
        for step, change in enumerate(changes):
            with training(ps, users) as count:
                eventually(lambda: count() > 10)
                change()
                before = count()
                eventually(lambda before=before: count() > before + 10)  # type: ignore[misc]
            users.delete(KEYS[100 * step : 100 * step + 100])
            eventually(together, 60.0)
            for reader in (first, second):
                reader.check()


def test_an_empty_etcd_is_followed_when_the_cluster_is_there_again(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(22)
    with followed(own.url, rng) as (ps, users, reader):
        eventually(shows(reader, users))
        last, admin = users.pull(KEYS), own.servers[0].admin
        own.stop_etcd()
        shutil.rmtree(own.directory / "etcd")
        assert (reader.pull({"users": KEYS})["users"] == last).all()
        own.start_etcd()
        with training(ps, users) as count:
            eventually(lambda: count() > 20, 60.0)
            adopt = [sys.executable, "-m", "elasticps", "cluster", "adopt", "--url", own.url, "--server", admin]
            subprocess.run(adopt, check=True, capture_output=True)
            own.kill("s1")  # the view without it is in the new etcd
            before = count()
            eventually(lambda: count() > before + 20, 60.0)
        eventually(lambda: equals(reader, users), 60.0)
        eventually(lambda: reader.age < 1.0)
        reader.check()


def test_a_pinned_reader_follows_what_a_death_and_a_new_server_left(own: eps.LocalCluster, tmp_path: Path) -> None:
    """Pinned, it shows the checkpoint's rows, whatever dies meanwhile; then what the tails have."""
    rng = np.random.default_rng(23)
    place = f"file://{tmp_path}/checkpoints"
    with eps.connect(own.url, worker="w0") as ps, eps.reader(own.url, every=0.005) as reader:
        users = table_of(ps)
        push(ps, users, rng, 3000)
        in_checkpoint = users.pull(KEYS)
        made = [sys.executable, "-m", "elasticps", "checkpoint", "create", place, "--url", own.url]
        subprocess.run(made, check=True, capture_output=True)
        push(ps, users, rng, 3000)
        eventually(lambda: "users" in reader.tables)
        eventually(shows(reader, users))
        reader.pin(place)
        with training(ps, users) as count:
            own.kill("s1")
            before = count()
            eventually(lambda: count() > before + 10)
            assert (reader.pull({"users": KEYS})["users"] == in_checkpoint).all()
            own.start_server()
            users.delete(KEYS[:200])
            assert (reader.pull({"users": KEYS})["users"] == in_checkpoint).all()
            reader.follow()  # a server comes, and ranges go to it
            assert not (reader.pull({"users": KEYS})["users"] == in_checkpoint).all()
            assert not reader.pinned
        users.delete(KEYS[200:300])
        eventually(lambda: equals(reader, users), 60.0)
        reader.check()
