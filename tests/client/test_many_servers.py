"""What a worker does for each server of a large cluster does not grow with the number of the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticps.client.connections import PeerConnections
from elasticps.client.core.routing import Routes
from elasticps.client.core.session import PushSession
from elasticps.client.push_batch import PackedPart, Packer, PushSource
from elasticps.client.pushes import PushesInFlight, StepState
from elasticps.client.runtime import Runtime
from elasticps.client.transport import Link, LinkReceiver
from elasticps.kernels.hashing import table_salt
from elasticps.wire.frames import HEADER_BYTES, Buffer
from elasticps.wire.pool import Pool
from replication.chain import Chains, Member, Ranges
from tests.client.views import view

RANGES = 256
SALT = int(np.array(table_salt(9), np.uint64).view(np.int64))


class CountedRows(list[list[int]]):
    """Rows of frames that count how often one is looked at."""

    looks = 0

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(i)

    def __iter__(self):  # type: ignore[no-untyped-def]
        for row in super().__iter__():
            self.looks += 1
            yield row


class Client:
    """A worker's pushes to so many servers, and what it sends."""

    def __init__(self, servers: int) -> None:
        names = tuple(f"s{i}" for i in range(servers))
        self.routes = Routes(view([[r % servers, (r + 1) % servers] for r in range(RANGES)], servers=names))
        self.sent: list[Member] = []
        self.pushes = PushesInFlight(PushSession(7, RANGES, 4), 7, itertools.count(1), self._send, lambda: None)
        self.pushes.adopt(self.routes)
        for member in self.routes.members:
            self.pushes.connected(member)
        keys, grads = np.arange(4096), np.ones((4096, 4), np.float32)  # some in each range
        source = PushSource(9, SALT, 4, -1, keys, grads, np.array([0.1], np.float32))
        self.part = Packer(Pool(1 << 20)).pack([source], self.routes)
        self.part._rows = self.rows = CountedRows(self.part._rows)

    def _send(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        self.sent += frames


def looks_per_head(servers: int) -> float:
    client = Client(servers)
    client.pushes.push(client.part, True, StepState(1))
    assert client.sent == list(client.routes.members)
    return client.rows.looks / servers


def test_the_frame_of_a_head_is_found_without_looking_at_those_of_all_others() -> None:
    assert looks_per_head(256) < looks_per_head(4) + 8, "a search halves what is left with each look"


@pytest.mark.parametrize("servers", [2, 3, 200])
def test_every_head_gets_its_own_frames_and_each_is_given_out_once(servers: int) -> None:
    part: PackedPart = Client(servers).part
    found = [part.ready(server, part.routes) for server in range(servers)]
    whole = [list(part.whole(server, part.routes)) for server in range(servers)]
    for server, (ready, (again,)) in enumerate(zip(found, whole, strict=True)):
        assert ready is not None
        assert ready.frame is not None
        assert part.ready(server, part.routes) is None
        assert b"".join(again.buffers) == bytes(ready.frame[HEADER_BYTES:])


def test_a_view_is_adopted_in_one_pass_over_its_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    headed = cast("cached_property[dict[int, Ranges]]", Chains.__dict__["headed"]).func

    def count(chains: Chains) -> dict[int, Ranges]:
        nonlocal passes
        passes += 1
        return headed(chains)

    counted = cached_property(count)
    counted.__set_name__(Chains, "headed")
    monkeypatch.setattr(Chains, "headed", counted)
    monkeypatch.setattr(Chains, "headed_by", lambda chains, index: pytest.fail("a pass for one head"))
    client = Client(200)
    assert passes == 1
    assert len(client.pushes.session.heads) == 200


class Driver:
    """Records who is sent something."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, frames: Iterable[tuple[Link, Sequence[Buffer]]]) -> None:
        self.sent += [link.server.name for link, _ in frames]

    def nudge(self) -> None:
        """Wakes nobody."""

    def remove(self, link: Link) -> None:
        """Reads nothing."""


def connections(servers: int) -> tuple[PeerConnections, Driver]:
    driver, runtime = Driver(), Runtime()
    receiver = LinkReceiver(lambda *frame: None, lambda header: None, lambda link, data, start, end: start)
    found = PeerConnections(runtime, cast(Any, driver), runtime.rlock(), b"", receiver, lambda member: None)
    names = tuple(f"s{i}" for i in range(servers))
    found.follow(Routes(view([[r % servers] for r in range(RANGES)], servers=names)))
    return found, driver


def test_one_server_of_those_that_can_be_reached_is_asked_for_a_view() -> None:
    found, driver = connections(20)
    for i, peer in enumerate(found.peers.values()):
        peer.link.ready = i < 10
    for i in range(100):
        found.send_to_one([b"a question"], i / 100)
        assert len(driver.sent) == i + 1
    assert sorted(set(driver.sent)) == [f"s{i}" for i in range(10)]
    for peer in found.peers.values():
        peer.link.ready = False
    found.send_to_one([b"a question"], 0.5)
    assert len(driver.sent) == 100


def test_only_servers_that_have_not_welcomed_this_worker_are_looked_at_to_connect() -> None:
    found, _ = connections(20)
    assert list(found.missing) == list(found.peers)
    for member in list(found.peers)[:19]:
        link = found.peers[member].link
        link.socket = cast(Any, SimpleNamespace(close=lambda: None))
        assert found.welcomed(link, {"incarnation": 1})
    (last,) = found.missing
    assert [peer.member for peer in found.due()] == [last]
    one = found.peers[list(found.peers)[3]]
    one.link.socket = None
    assert found.broken(one.link, ConnectionResetError("gone"))
    assert list(found.missing) == [last, one.member]
    found.follow(Routes(view([[0]] * RANGES, epoch=2, servers=("s0",))))
    assert not found.missing
