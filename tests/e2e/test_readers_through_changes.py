"""Readers while the cluster changes around them: drains, leaders, etcd, tables, and other readers of the same name."""

from __future__ import annotations

import numpy as np

import elasticps as eps
from elasticps.readers.pull_server import PullServer
from tests.e2e.test_readers import DIM, KEYS, make_again, push, shows, table_of, training
from tests.waiting import eventually


def equals(reader: eps.Reader, table: eps.SparseTable) -> bool:
    """Whether a reader has all rows of a table, and no others, bit for bit."""
    keys = np.sort(np.concatenate([*table.keys(), np.empty(0, np.int64)]))
    with reader.lock:
        rows = reader.table_rows.get(table.name)
        if rows is None:
            return False
        here = np.sort(np.concatenate([rows.list_range(r) for r in range(reader.ranges)]))
    if not np.array_equal(keys, here):
        return False
    return reader.pull({table.name: keys})[table.name].tobytes() == table.pull(keys, exact=True).tobytes()


def test_readers_follow_through_a_drain_a_leader_s_death_and_etcd_s(own: eps.LocalCluster) -> None:
    """Two of the same name, one behind a relay of the other: each has what the servers have in the end."""
    rng = np.random.default_rng(11)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with (
            eps.reader(own.url, every=0.005, name="same") as first,
            eps.reader(own.url, every=0.02, name="same") as second,
            PullServer(first, "127.0.0.1", 0) as relay,
            eps.reader(f"reader://{relay.address}", every=0.005, name="same") as outer,
            PullServer(outer, "127.0.0.1", 0) as further,
            eps.reader(f"reader://{further.address}", every=0.005) as last,
        ):
            readers = (first, second, outer, last)
            with training(ps, users) as count:
                own.drain("s1")
                users.delete(KEYS[:300])
                own.kill("c0")
                before = count()
                eventually(lambda: count() > before + 20)
                own.stop_etcd()
                before = count()
                eventually(lambda: count() > before + 20)
                users.delete(KEYS[300:600])
                own.start_etcd()
                own.start_server()
                before = count()
                eventually(lambda: count() > before + 20)
            users.delete(KEYS[600:700])
            for reader in readers:
                eventually(lambda reader=reader: equals(reader, users), 60.0)  # type: ignore[misc]
                reader.check()
            eventually(lambda: all(reader.as_of.steps == first.as_of.steps for reader in readers))


def test_a_table_that_is_made_again_with_another_shape_while_readers_hold(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(12)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with (
            eps.reader(own.url, every=0.005) as first,
            PullServer(first, "127.0.0.1", 0) as relay,
            eps.reader(f"reader://{relay.address}", every=0.005) as outer,
        ):
            for reader in (first, outer):
                eventually(shows(reader, users))
                reader.hold(30.0)
            held = users.pull(KEYS)
            again = make_again(ps, 2 * DIM, rng)
            for reader in (first, outer):
                assert (reader.pull({"users": KEYS})["users"] == held).all()
            for reader in (first, outer):
                reader.release()
                eventually(lambda reader=reader: reader.tables["users"].dim == 2 * DIM)  # type: ignore[misc]
                eventually(lambda reader=reader: equals(reader, again))  # type: ignore[misc]
