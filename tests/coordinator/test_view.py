"""Views, rosters and configs: their checks and their codecs."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import CopyState

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
SERVERS = st.builds(
    ServerInfo,
    name=NAMES,
    incarnation=st.integers(1, 1 << 40),
    address=st.sampled_from(["127.0.0.1:7001", "[::1]:1", "host.example:65535"]),
    admin=st.sampled_from(["", "127.0.0.1:8001"]),
    zone=st.sampled_from(["", "a", "b"]),
    weight=st.floats(0.01, 64),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any valid view."""
    ranges, replicas = draw(st.sampled_from([2, 4, 16])), draw(st.integers(1, 4))
    servers = tuple(draw(st.lists(SERVERS, max_size=6, unique_by=lambda server: server.name)))
    epoch = draw(st.integers(1, 1 << 60))
    chains = np.full((ranges, replicas), -1, np.int32)
    joining = np.full(ranges, -1, np.int32)
    for r in range(ranges):
        order = draw(st.permutations(range(len(servers))))
        length = draw(st.integers(0, min(replicas, len(servers))))
        chains[r, :length] = order[:length]
        if length < len(servers) and draw(st.booleans()):
            joining[r] = order[length]
    since = np.array(draw(st.lists(st.integers(1, epoch), min_size=ranges, max_size=ranges)), np.int64)
    alone = ((chains >= 0).sum(axis=1) == 1) & (joining >= 0)
    copy_state = np.where(
        alone, draw(st.sampled_from([CopyState.NONE, CopyState.SUCCESSOR, CopyState.PREDECESSOR])), CopyState.NONE
    ).astype(np.int32)
    copy_state[(chains[:, 0] < 0) & (joining >= 0)] = CopyState.RECOVERING
    recovery_epoch = np.where(chains[:, 0] < 0, since, draw(st.sampled_from([0, 1])))
    reason = draw(st.text(max_size=40))
    again = [(s.name, s.incarnation + 1) for s in servers if s.incarnation < 1 << 62 and draw(st.booleans())]
    return View(
        draw(NAMES), epoch, ranges, replicas, servers, chains, joining, since, reason, copy_state=copy_state,
        recovery_epoch=recovery_epoch, empty=tuple(again),
    )  # fmt: skip


def small(**changes: Any) -> View:
    """Two servers, two ranges, two replicas."""
    servers = (ServerInfo("a", 1, "h:1"), ServerInfo("b", 1, "h:2"))
    fields: dict[str, Any] = {
        "cluster": "demo",
        "epoch": 3,
        "ranges": 2,
        "replicas": 2,
        "servers": servers,
        "chains": np.array([[0, 1], [1, -1]], np.int32),
        "joining": np.array([-1, 0], np.int32),
        "since": np.array([1, 3]),
        "reason": "because",
    }
    return View(**(fields | changes))


@given(views())
def test_decoding_undoes_encoding(view: View) -> None:
    again = View.decode(view.encode())
    assert again == view
    assert hash(again) == hash(view)
    assert [array.dtype.name for array in (again.chains, again.joining, again.since)] == ["int32", "int32", "int64"]
    assert again.encode() == view.encode()


@given(views())
def test_heads_and_tails_agree_with_a_loop_over_the_chains(view: View) -> None:
    for r, chain in enumerate(view.chains.tolist()):
        members = [i for i in chain if i >= 0]
        assert view.heads[r] == (members[0] if members else -1)
        assert view.tails[r] == (members[-1] if members else -1)
    for i, server in enumerate(view.servers):
        assert view.index(server.name) == i
    assert view.index("nobody-of-that-name") == -1
    assert view.heads.dtype == view.tails.dtype == np.int32


def test_a_view_cannot_be_changed() -> None:
    chains = np.array([[0, 1], [1, -1]], np.int32)
    view = small(chains=chains)
    chains[0, 0] = 1
    assert view.chains[0, 0] == 0
    for array in (view.chains, view.joining, view.since, view.heads, view.tails):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_views_are_equal_by_value() -> None:
    assert small() == small()
    assert small() != small(reason="another")
    assert small() != small(joining=np.array([-1, -1]))
    assert small() != "a view"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cluster": "a/b"}, "no usable cluster name"),
        ({"epoch": 0}, "epoch"),
        ({"epoch": 2}, "outside epochs 1..2"),
        ({"epoch": True}, "epoch"),
        ({"ranges": 3}, "power of two"),
        ({"ranges": 4}, "shape"),
        ({"replicas": 0}, "replicas"),
        ({"servers": (ServerInfo("a", 1, "h:1"),) * 2}, "each server name once"),
        ({"servers": ()}, "index outside"),
        ({"chains": np.array([[0, 0], [1, -1]])}, "twice in one range"),
        ({"chains": np.array([[-1, 0], [1, -1]])}, "gap"),
        ({"chains": np.array([[0, 2], [1, -1]])}, "index outside"),
        ({"chains": np.array([[0, -2], [1, -1]])}, "index outside"),
        ({"chains": np.array([[0, 1], [1, -1]], np.float32)}, "integers of shape"),
        ({"joining": np.array([-1, 1])}, "twice in one range"),
        ({"joining": np.array([-1])}, "integers of shape"),
        ({"since": np.array([0, 1])}, "outside epochs"),
        ({"copy_state": np.array([1, 0])}, "keeps a copy"),
        ({"copy_state": np.array([0, 5])}, "keeps a copy"),
        ({"copy_state": np.array([0, 1]), "joining": np.array([-1, -1])}, "keeps a copy"),
        ({"copy_state": np.array([0, -1])}, "brought back that has replicas"),
        ({"recovery_epoch": np.array([0, 9])}, "began anew, but is older"),
        ({"reason": "x" * 1001}, "reason"),
        ({"empty": (("a", 1),)}, "no older one"),
        ({"empty": (("c", 2),)}, "no older one"),
        ({"empty": (("a", 2.0),)}, "incarnation"),
        ({"empty": (([], 2),)}, "server name"),
        ({"empty": (("a", 2), ("a", 3))}, "twice"),
        ({"reason": None}, "reason"),
    ],
)
def test_impossible_views_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        small(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": ""}, "no usable server name"),
        ({"incarnation": 0}, "incarnation"),
        ({"incarnation": 1.0}, "incarnation"),
        ({"address": "h"}, "server address"),
        ({"admin": "h"}, "admin address"),
        ({"zone": "a b"}, "zone"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": "1"}, "weight"),
    ],
)
def test_impossible_servers_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(ServerInfo("a", 1, "h:1"), **changes)


@given(views(), st.data())
def test_damaged_bytes_are_refused_or_decode_to_a_valid_view(view: View, data: st.DataObject) -> None:
    good = view.encode()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for bad in (bytes(damaged), cut, good + b"x", good[:-1]):
        with suppress(ValueError):
            assert View.decode(bad).ranges >= 2


@given(views(), st.data())
def test_damaged_content_is_refused_or_decodes_to_a_valid_view(view: View, data: st.DataObject) -> None:
    encoded = view.encode()
    damaged = bytearray(zlib.decompress(encoded[5:]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from([*b'[]{}",0\\9-e.', 255, 128, damaged[at] ^ 1]))
    with suppress(ValueError):
        assert View.decode(encoded[:5] + zlib.compress(bytes(damaged))).ranges >= 2


@pytest.mark.parametrize("row", [[[], 1, "h:1", "", "", 1.0], ["a", 1, {}, "", "", 1.0], ["a", True, "h:1", "", "", 1]])
def test_impossible_servers_are_refused_even_if_a_similar_one_is_cached(row: list[object]) -> None:
    view = small(servers=(ServerInfo("a", 1, "h:1"), ServerInfo("b", 1, "h:2")))
    body = zlib.decompress(view.encode()[5:])
    assert View.decode(view.encode()) == view
    meta_size = int.from_bytes(body[16:20], "little")
    meta = json.loads(body[20 : 20 + meta_size])
    meta[2][0] = row
    text = json.dumps(meta).encode()
    other = body[:16] + len(text).to_bytes(4, "little") + text + body[20 + meta_size :]
    with pytest.raises(ValueError, match=r".+"):
        View.decode(view.encode()[:5] + zlib.compress(other))


def test_a_view_is_encoded_once_and_decoding_keeps_its_bytes() -> None:
    view = small()
    assert view.encode() is view.encode()
    data = view.encode()
    assert View.decode(data).encode() == data
    assert replace(view, reason="another").encode() != data


@given(st.binary(max_size=200))
def test_bytes_that_inflate_to_an_impossible_view_are_refused(body: bytes) -> None:
    for data in (body, small().encode()[:5] + zlib.compress(body)):
        with pytest.raises(ValueError, match=r".+"):
            View.decode(data)


def test_a_small_message_cannot_inflate_without_bound() -> None:
    bomb = small().encode()[:5] + zlib.compress(bytes(100 << 20))
    assert len(bomb) < 200_000
    with pytest.raises(ValueError, match="too long"):
        View.decode(bomb)


def test_a_big_view_is_small() -> None:
    count, ranges = 100, 1024
    rng = np.random.default_rng(0)
    servers = tuple(
        ServerInfo(f"server-{i}", i + 1, f"10.1.2.{i}:7001", f"10.1.2.{i}:7002", f"zone-{i % 3}") for i in range(count)
    )
    chains = np.stack([rng.permutation(count)[:3] for _ in range(ranges)]).astype(np.int32)
    view = View(
        "demo", 77, ranges, 3, servers, chains, np.full(ranges, -1, np.int32), rng.integers(1, 78, ranges), "a reason"
    )
    data = view.encode()
    assert len(data) <= 64 << 10
    assert View.decode(data) == view


WORKERS = st.builds(WorkerInfo, id=st.integers(1, 1 << 31), name=NAMES, incarnation=st.integers(1, 1 << 40), app=NAMES)


@given(st.integers(1, 1 << 40), st.lists(WORKERS, max_size=5, unique_by=(lambda w: w.id, lambda w: w.name)))
def test_rosters_survive_encoding_and_decoding(version: int, workers: list[WorkerInfo]) -> None:
    roster = Roster(version, tuple(sorted(workers, key=lambda worker: worker.id)))
    assert Roster.decode(roster.encode()) == roster


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version":1}',
        b'{"version":0,"workers":[]}',
        b'{"version":1,"workers":[[1,"a",1]]}',
        b'{"version":1,"workers":[[2,"a",1,"x"],[1,"b",1,"x"]]}',
        b'{"version":1,"workers":[[1,"a",1,"x"],[2,"a",1,"x"]]}',
        b'{"version":1,"workers":[[1,"a",1,"x"]],"more":1}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_bad_rosters_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Roster.decode(data)


def test_configs_servers_and_workers_survive_json() -> None:
    config = ClusterConfig(ranges=64, replicas=2, min_servers=3, protocol=2)
    assert ClusterConfig.from_json(config.to_json()) == config
    server = ServerInfo("a", 4, "h:1", "h:2", "z", 2.5)
    assert ServerInfo.from_json(server.to_json()) == server
    worker = WorkerInfo(7, "w", 2, "app")
    assert WorkerInfo.from_json(worker.to_json()) == worker


@pytest.mark.parametrize(
    "fields",
    [
        {"ranges": 100},
        {"ranges": 1},
        {"ranges": "256"},
        {"replicas": 0},
        {"replicas": True},
        {"min_servers": 0},
        {"x": 1},
    ],
)
def test_bad_configs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ClusterConfig.from_json(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"name":"a"}', b'{"name":"a","incarnation":1,"address":"h:1","x":1}']
)
def test_damaged_entries_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ServerInfo.from_json(data)
    with pytest.raises(ValueError, match=r".+"):
        WorkerInfo.from_json(data)
