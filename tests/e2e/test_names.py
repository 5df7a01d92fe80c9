"""Names at the servers: what keys were made of."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from elasticps.exchange.export import export
from elasticps.keys import Names, decode, hashed
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect

USERS = ["user:42", "", "Müller", "東京", "x" * 60]


class Counted:
    """Counts the pulls and loads of a table of names."""

    def __init__(self, names: Names, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for what in ("pull", "load"):
            patch.setattr(names.table, what, self._counting(what, getattr(names.table, what)))

    def _counting(self, what: str, real: object) -> object:
        def call(*given: object, **more: object) -> object:
            self.calls.append(what)
            return real(*given, **more)  # type: ignore[operator]

        return call


def test_names_come_back_for_their_keys(connect: Connect) -> None:
    ps = connect()
    names = Names(ps, "users", namespace="users")
    keys = names.add(USERS)
    assert keys.tolist() == hashed(USERS, namespace="users").tolist()
    assert names.add(np.array([["a", "b"], ["c", "a"]])).shape == (2, 2)
    assert names.look_up(keys) == USERS
    assert names.look_up([*keys.tolist(), 7]) == [*USERS, None]
    assert names.look_up([]) == []
    assert int(names.add("one")) == int(hashed("one", namespace="users"))
    assert ps.clock == 0  # it is no step
    other = Names(connect("w1"), "users", namespace="users")
    assert other.look_up(keys) == USERS
    assert "collisions: 0" in repr(other)


def test_a_name_that_is_known_to_be_stored_costs_no_request(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(connect(), "users", known=1_000)
    seen = Counted(names, monkeypatch)
    names.add(USERS)
    assert seen.calls == ["pull", "load", "pull"]
    names.add(USERS[::-1])
    assert len(seen.calls) == 3
    names.add([*USERS, "new"])
    assert seen.calls[3:] == ["pull", "load", "pull"]
    other = Names(connect("w1"), "users")
    seen = Counted(other, monkeypatch)
    other.add(USERS)
    assert seen.calls == ["pull"]


def test_of_many_names_few_are_remembered_and_all_are_stored(connect: Connect) -> None:
    names = Names(connect(), "users", known=16)
    many = [f"user:{i}" for i in range(2_000)]
    for _ in range(2):
        keys = names.add(many)
    assert names.look_up(keys) == many
    assert len(names.table) == 2_000


def test_names_that_were_forgotten_are_stored_again(connect: Connect) -> None:
    names = Names(connect(), "users")
    keys = names.add(USERS)
    names.table.delete(keys[:2])
    assert names.look_up(keys) == [None, None, *USERS[2:]]
    names.add(USERS)
    assert names.look_up(keys) == USERS


def test_of_two_names_of_one_key_the_first_stays_and_both_are_logged_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def few(texts: list[bytes], seed: int) -> np.ndarray:
        return np.array([len(text) if seed == 0 else hash(text) for text in texts], np.int64)

    monkeypatch.setattr("elasticps.keys._hash", few)
    one, other = Names(connect(), "users"), Names(connect("w1"), "users")
    with caplog.at_level(logging.WARNING):
        assert one.add(["ab", "c", "de", "ab"]).tolist() == [2, 1, 2, 2]
        assert other.add(["fg", "hij"]).tolist() == [2, 3]
        other.add(["fg", "ab"])
    assert one.look_up([2, 1, 3]) == ["ab", "c", "hij"]
    assert (one.collisions, other.collisions) == (1, 1)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        f"two names have one key, 2, in table users: 'ab', which stays, and '{late}'; their rows are one"
        for late in ("de", "fg")
    ]


def test_what_cannot_be_stored_is_refused_before_anything_is(connect: Connect) -> None:
    ps = connect()
    names = Names(ps, "users", max_bytes=6)
    with pytest.raises(eps.InputError, match=r"names\[1\] has 7 bytes, and table 'users' holds names of up to 6: noth"):
        names.add(["a", "Müller"])
    with pytest.raises(eps.InputError, match=r"names\[1\] is no UTF-8 \(invalid start byte\): nothing was stored"):
        names.add([b"a", b"\xff"])
    assert len(names.table) == 0
    step = ps.step()
    step.push({names.table: ([], np.empty((0, 3), np.float32))})
    with pytest.raises(eps.InputError, match="open"):
        names.add(["a"])
    step.commit().result()
    with pytest.raises(eps.SpecError, match="dim"):
        Names(ps, "users", max_bytes=60)
    with pytest.raises(eps.InputError, match="max_bytes is a number from 1 on, got 0"):
        Names(ps, "others", max_bytes=0)
    names.table.load([3], np.full((1, 3), 0.5, np.float32))
    with pytest.raises(eps.InputError, match="row 0 is no name"):
        names.look_up([3])


def test_rows_that_exist_stay_when_only_new_ones_are_loaded(connect: Connect) -> None:
    table = connect().table("t", dim=2, optimizer=eps.Adagrad(lr=0.1), init=eps.Constant(7.0))
    ones = np.ones((3, 2), np.float32)
    reported: list[tuple[int, int | None]] = []
    table.load([1, 2, 3], ones, progress=lambda done, of: reported.append((done, of)))
    assert reported == [(0, 3), (3, 3)]
    table.load([2, 3, 4], 2 * ones, only_new=True)
    assert table.pull([1, 2, 3, 4, 5])[:, 0].tolist() == [1, 1, 1, 2, 7]
    with pytest.raises(eps.InputError, match="takes no slots"):
        table.load([9], ones[:1], slots=table.slots([9]), only_new=True)


def test_names_are_in_exports(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    names = Names(ps, "users")
    names.add(USERS)
    export(ps, tmp_path / "out", kind="npy")
    rows, keys = (np.load(tmp_path / "out" / f"users.{column}.npy", mmap_mode="r") for column in ("weight", "keys"))
    assert dict(zip(keys.tolist(), decode(rows), strict=True)) == dict(zip(hashed(USERS).tolist(), USERS, strict=True))


@pytest.mark.slow  # of restores there are others
def test_names_are_in_checkpoints(local_cluster: NewCluster, tmp_path: Path) -> None:
    from elasticps.checkpoint.create import checkpoint_cluster
    from elasticps.checkpoint.restore import restore_cluster

    cluster, other = local_cluster(servers=2), local_cluster(servers=3)
    with eps.connect(cluster.url, worker="w0") as ps:
        keys = Names(ps, "users").add(USERS)
        checkpoint_cluster(cluster.url, str(tmp_path))
    restore_cluster(other.url, str(tmp_path))
    with eps.connect(other.url, worker="w1") as ps:
        assert Names(ps, "users").look_up(keys) == USERS
