"""Shares of all keys: each key is in exactly one, the same in compiled code, and readers hold and get no others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import elasticps as eps
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.readers.pull_server import PullServer
from elasticps.serving.client import LookupClient, lookup
from elasticps.store.journal import first_outside, keys_within
from tests.e2e.test_readers import KEYS, followed, push, shows, table_of
from tests.processes import reader_process
from tests.waiting import eventually

OF = 3
OWNERS = eps.share_of(KEYS, OF)


def twin(key: int, of: int) -> int:
    """docs/guides/serve.md, in Python's numbers."""
    z, mask = key % (1 << 64) ^ 0x9E3779B97F4A7C15, (1 << 64) - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return ((z >> 32) * of >> 32) + 1


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(1, 1024))
def test_each_key_is_in_one_share_and_compiled_code_agrees(keys: list[int], of: int) -> None:
    some = np.array(keys, np.int64)
    owners = eps.share_of(some, of)
    assert owners.tolist() == [twin(key, of) for key in keys]
    for number in {1, of, *owners.tolist()}:
        share = KeyShare(number, of)
        assert (keys_within(some, share) == some[owners == number]).all()
        outside = np.flatnonzero(owners != number)
        assert first_outside(some, share.ordinal, of) == (outside[0] if len(outside) else -1)


def test_shares_have_about_as_many_keys_each() -> None:
    counts = np.bincount(eps.share_of(np.arange(100_000), 8), minlength=9)
    assert counts[0] == 0
    assert abs(counts[1:] - 12_500).max() < 600


@pytest.mark.parametrize("given", ["0/3", "4/3", "2", "2/", "/3", "a/b", "-1/3", "1/1025", "1/2/3", "²/3"])
def test_what_is_no_share_is_refused(given: str) -> None:
    with pytest.raises(eps.ConfigError, match=rf"a share is written as 2/8.* there is no {given}"):
        KeyShare.parse(given)


def test_shares_are_read_as_they_are_written() -> None:
    assert KeyShare.parse("2/8") == KeyShare.checked((2, 8)) == (2, 8)
    assert KeyShare.parse("") is ALL_KEYS
    assert str(KeyShare(2, 8)) == "2/8"
    for wrong in ((0, 3), (4, 3), (1.0, 3), (True, 3), (1,), "2/8", 7):
        with pytest.raises(eps.ConfigError, match=r"a share is written as 2/8.* there is no "):
            KeyShare.checked(wrong)


def test_keys_that_are_no_integers_are_in_no_share() -> None:
    for wrong in (np.array([1.5]), np.array([2**63], np.uint64), np.array(["a"]), "x"):
        with pytest.raises(eps.InputError, match="keys must be int64"):
            eps.share_of(wrong, 8)  # type: ignore[arg-type]
    assert eps.share_of(np.array([], np.int64), 8).shape == eps.share_of([], 8).shape == (0,)  # type: ignore[arg-type]
    for count in (0, 1025, 1.0):
        with pytest.raises(eps.ConfigError, match=rf"there is no \(1, {count}\)"):
            eps.share_of(KEYS, count)  # type: ignore[arg-type]


def shows_share(reader: Any, table: eps.SparseTable, number: int) -> Callable[[], bool]:
    """Whether it has all rows of its share as servers have them, and no others."""
    return shows(reader, table, KEYS[number == OWNERS])


def test_a_fleet_of_shares_has_every_row_once(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(1)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        weights = ps.tensor("w", init=rng.random((33, 7), np.float32), optimizer=eps.SGD(lr=0.1))
        push(ps, users, rng)
        whole = eps.reader(own.url, every=0.005)
        fleet = [eps.reader(own.url, share=(k + 1, OF), every=0.005) for k in range(OF)]
        try:
            blocks = whole.tables["w"].blocks
            eventually(lambda: sum(one.stats().rows for one in fleet) == whole.stats().rows + (OF - 1) * blocks)
            for _ in range(20):
                push(ps, users, rng)
            own.kill("s1")
            push(ps, users, rng)
            users.delete(KEYS[:700])
            push(ps, users, rng)
            for k, one in enumerate(fleet):
                eventually(shows_share(one, users, k + 1))
                assert (one.pull({"w": None})["w"] == weights.pull()).all()  # tensors are whole
                foreign = KEYS[k + 1 != OWNERS][:1]
                with pytest.raises(eps.OtherShare, match=f"in share {OWNERS[foreign[0]]}/{OF}, and this") as caught:
                    one.pull({"users": foreign})
                assert caught.value.share == OWNERS[foreign[0]]
                one.hold(timeout=60)
                assert shows_share(one, users, k + 1)()
                one.release()
            eventually(lambda: sum(one.stats().rows for one in fleet) == whole.stats().rows + (OF - 1) * blocks)
            # Servers send each only its share: not all rows, for the reader to leave some out.
            assert sum(one.stats().changed for one in fleet) < 1.5 * whole.stats().changed
            users.clear()
            for one in fleet:
                eventually(lambda one=one: one.stats().rows == blocks)  # type: ignore[misc]
        finally:
            for one in (whole, *fleet):
                one.close()


def test_a_relay_feeds_the_shares_that_it_has(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(2)
    with (
        followed(own.url, rng) as (ps, users, first),
        PullServer(first, "127.0.0.1", 0) as relay,
        eps.reader(f"reader://{relay.address}", share=(2, OF), every=0.005) as second,
    ):
        for _ in range(10):
            push(ps, users, rng)
        users.delete(KEYS[:300])
        eventually(shows_share(second, users, 2))
        eventually(lambda: second.stats().rows == int((~missing(first)[OWNERS == 2]).sum()))
        with PullServer(second, "127.0.0.1", 0) as part:
            for share in (None, (1, OF), (2, OF + 1)):
                with pytest.raises(eps.ConfigError, match="has share 2/3 of all keys, and not"):
                    eps.reader(f"reader://{part.address}", share=share, timeout=10)
            with eps.reader(f"reader://{part.address}", share=(2, OF), every=0.005) as third:
                push(ps, users, rng)
                eventually(shows_share(third, users, 2))


def missing(reader: eps.Reader) -> NDArray[np.bool_]:
    """Which of the keys have no row."""
    with reader.lock:
        return reader.table_rows["users"].stored.missing(KEYS)


async def ask_twice(address: str, keys: NDArray[np.int64], expected: NDArray[np.float32]) -> None:
    """Over one channel."""
    async with LookupClient(address) as client:
        channels = set()
        for some in (slice(None), slice(0, 10)):
            answer = await client.lookup({"users": keys[some]})
            assert (answer.rows["users"] == expected[some]).all()
            channels.add(client._channel)
        assert len(channels) == 1


def test_clients_of_a_fleet_find_the_process_of_each_key(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(3)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        expected = users.pull(KEYS)
        with (
            reader_process(own.url, "--share", "1/2") as (_, one),
            reader_process(own.url, "--share", "2/2") as (_, two),
        ):
            owners, found = eps.share_of(KEYS, 2), np.empty_like(expected)
            for ready in (one, two):
                with eps.remote_reader(ready["pulls"]) as remote:
                    number, of = remote.share
                    assert ready["share"] == f"{number}/{of}"
                    mine = owners == number
                    found[mine] = remote.pull({"users": KEYS[mine]})["users"]
                    with pytest.raises(eps.OtherShare, match=f"this reader has {number}/2") as caught:
                        remote.pull({"users": KEYS})
                    assert caught.value.share == 3 - number
                asyncio.run(ask_twice(ready["grpc"], KEYS[mine], expected[mine]))
                with pytest.raises(eps.OtherShare) as refused:
                    asyncio.run(lookup(ready["grpc"], {"users": KEYS}, 30))
                assert refused.value.share == 3 - number
            assert (found == expected).all()
            status = subprocess.run(
                [sys.executable, "-m", "elasticps", "readers", "status", two["grpc"], "--json"],
                stdout=subprocess.PIPE, check=True,
            ).stdout  # fmt: skip
            assert json.loads(status)["share"] == "2/2"
    done = subprocess.run(
        [sys.executable, "-m", "elasticps", "reader", "--url", own.url, "--share", "9/8"], capture_output=True
    )
    assert done.returncode == 2
    assert b"there is no 9/8" in done.stderr


def test_a_share_is_published_into_a_folder_of_its_own(own: eps.LocalCluster, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        there = KEYS[~missing_at(own, ps)]
        for number in (1, 2):
            with eps.publish(own.url, to=f"file://{tmp_path}/{number}", share=(number, 2)) as publisher:
                publisher.wait()
            rows = eps.read_increments(tmp_path / str(number))
            mine = there[eps.share_of(there, 2) == number]
            assert (rows.pull({"users": mine})["users"] == users.pull(mine)).all()
        with (
            eps.publish(own.url, to=f"file://{tmp_path}/1", share=(2, 2)) as publisher,
            pytest.raises(eps.ConfigError, match="has share 1/2 of the rows, and share 2/2"),
        ):
            publisher.wait()


def missing_at(own: eps.LocalCluster, ps: eps.Client) -> NDArray[np.bool_]:
    with eps.reader(own.url) as reader:
        return missing(reader)
