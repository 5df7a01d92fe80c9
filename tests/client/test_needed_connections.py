"""A worker's connections are opened when it has something to ask there, and closed when they are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import View
from elasticps.client.catalog import FEW_HEADS
from elasticps.client.connections import PeerConnections
from elasticps.client.core.join import PastRun
from elasticps.client.core.routing import Routes
from elasticps.client.core.standing import standing_ranges, standing_servers
from elasticps.client.runtime import Runtime
from elasticps.client.transport import LinkReceiver
from elasticps.kernels.hashing import group_range, hash_key, range_shift, table_salt
from elasticps.model.spec import Consistency
from elasticps.wire.frames import Kind
from elasticps.wire.headers import HoldHeader
from replication.chain import Member
from replication.step_records import home_range
from tests.client.fakes import DIM, FakeRegistry, FakeServer
from tests.client.test_checkpoint_hold import eventually
from tests.client.test_many_servers import Driver
from tests.client.test_unreachable_servers import pending
from tests.client.views import view

WORKER = 7  # the id that a fake registry gives
RANGES = 128
SERVERS = 1000
NAMES = tuple(f"s{i}" for i in range(SERVERS))


# ----------------------------------------------------------------------------------------------- links, without sockets


class Links:
    """Links of one worker among 1,000 servers, each of which welcomes it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver, runtime, self.now = Driver(), Runtime(), 100.0
        monkeypatch.setattr(runtime, "monotonic", lambda: self.now)
        receiver = LinkReceiver(lambda *frame: None, lambda header: None, lambda link, data, start, end: start)
        self.gone: list[Member] = []
        self.found = PeerConnections(
            runtime, cast(Any, self.driver), runtime.rlock(), b"", receiver, self.gone.append, None, self.standing
        )
        self.found.follow(self.routes(1))

    def standing(self, routes: Routes) -> list[Member]:
        return [Member("s3", 1), Member("s8", 1)]

    def routes(self, epoch: int, names: tuple[str, ...] = NAMES) -> Routes:
        return Routes(view([[r] for r in range(8)], epoch=epoch, servers=names))

    def welcome(self) -> None:
        for peer in list(self.found.missing.values()):
            peer.link.socket = cast(Any, SimpleNamespace(close=lambda: None))
            assert self.found.welcomed(peer.link, {"incarnation": 1})

    @property
    def names(self) -> list[str]:
        return [peer.info.name for peer in self.found.peers.values()]

    @property
    def lost(self) -> tuple[bool, int]:
        """Whether some server is missed, and how many links are not ready."""
        return self.found.lost, len(self.found.missing)

    def rest(self, *needed: str) -> None:
        """Nothing is sent or received for as long as it takes to be noticed."""
        for _ in range(3):
            self.found.close_unused(lambda: {Member(name, 1) for name in needed})
            self.now += 1000


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    return Links(monkeypatch)


def test_only_servers_that_are_asked_have_links(links: Links) -> None:
    assert links.names == ["s3", "s8"]
    links.welcome()
    links.found.send_all({Member("s5", 1): [b"a question"], Member("s3", 1): [b"another"]})
    assert links.driver.sent == ["s3"]  # the other one is sent when that server has welcomed us
    assert links.names == ["s3", "s8", "s5"]
    assert [peer.info.name for peer in links.found.due()] == ["s5"]
    links.found.send(Member("s6", 1), [b"what it would be told on its next connection"])
    links.found.send_all({Member("nobody", 1): [b"a question of an older view"]})
    assert links.names == ["s3", "s8", "s5"]


def test_unused_links_are_closed_and_that_is_no_break(links: Links) -> None:
    links.found.send_all({Member(f"s{i}", 1): [b"a question"] for i in (5, 6, 7)})
    links.welcome()
    links.rest("s6")
    assert links.names == ["s3", "s8", "s6"]
    assert links.gone == [Member("s5", 1), Member("s7", 1)]
    assert links.found.breaks == 0
    assert not links.found.missing
    links.found.send_all({Member("s5", 1): [b"a question"]})
    assert [peer.info.name for peer in links.found.due()] == ["s5"]  # at once


def test_links_that_carry_something_stay(links: Links) -> None:
    links.found.send_all({Member("s5", 1): [b"a question"]})
    links.welcome()
    for _ in range(4):
        links.found.close_unused(set)
        links.now += 1000
        links.found.peers[Member("s5", 1)].link.received += 1
    assert links.names == ["s3", "s8", "s5"]


def test_what_is_unused_is_looked_for_seldom(links: Links) -> None:
    links.found.send_all({Member("s5", 1): [b"a question"]})
    links.welcome()
    for _ in range(10):
        links.found.close_unused(set)
        links.now += 1
    assert "s5" in links.names


def test_a_server_that_is_tried_and_not_used_is_given_up(links: Links) -> None:
    links.found.send_all({Member("s5", 1): [b"a question"]})
    assert links.lost == (False, 3)  # none was tried yet
    peer = links.found.peers[Member("s5", 1)]
    links.welcome()
    assert links.lost == (False, 0)
    assert links.found.broken(peer.link, ConnectionRefusedError(111, "Connection refused"))
    assert links.lost == (True, 1)
    links.rest()
    assert links.lost == (False, 0)
    assert links.names == ["s3", "s8"]


def test_links_follow_a_view(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    links.found.send_all({Member("s5", 1): [b"a question"]})
    links.welcome()
    monkeypatch.setattr(links.found, "_standing_of", lambda routes: [Member("s9", 1)])
    links.found.follow(links.routes(2, tuple(name for name in NAMES if name != "s8")))
    assert links.names == ["s3", "s5", "s9"]
    links.welcome()
    links.rest()
    assert links.names == ["s9"]


def test_if_nobody_is_connected_some_server_is_to_be_asked_for_a_view(links: Links) -> None:
    links.found.send_to_one([b"a question"], 0.5)
    assert links.names == ["s3", "s8", "s500"]


def test_a_worker_is_always_connected_to_somebody() -> None:
    home, group = standing_ranges(WORKER, "a", 8)
    owners = [[r] for r in range(8)]

    def standing(owners: list[list[int]]) -> list[str]:
        return [m.name for m in standing_servers(WORKER, "a", Routes(view(owners, servers=NAMES[:8])))]

    assert standing(owners) == [f"s{home}", f"s{group}"]
    assert standing([[0]] * 8) == ["s0"]
    owners[home] = [-1]
    assert standing(owners) == [f"s{group}"]
    owners[group] = [-1]
    assert standing(owners) not in ([f"s{home}"], [f"s{group}"], [])
    assert len(standing([[-1]] * 8)) == 1


# ---------------------------------------------------------------------------------------------------- over real sockets


class Many:
    """Fake servers that head the ranges in turn, and a client of theirs."""

    def __init__(self, servers: int, patch: pytest.MonkeyPatch) -> None:
        self.servers = [FakeServer(f"s{i}") for i in range(servers)]
        self.control = FakeRegistry(self.view(0))
        self.control.created = 1
        for server in self.servers:
            server.view = self.control.view
        patch.setattr("elasticps.client.client.Registry", self.control)
        patch.setattr("elasticps.client.parts.LEAVE_S", 0.1)

    def view(self, shift: int) -> View:
        rows = np.array([[(r + shift) % len(self.servers)] for r in range(RANGES)], np.int32)
        infos = tuple(server.info for server in self.servers)
        return View("fake", 1 + shift, RANGES, 1, infos, rows, np.full(RANGES, -1, np.int32),
                    np.full(RANGES, 1 + shift, np.int64), "test")  # fmt: skip

    def connect(self, consistency: Consistency | None = None) -> eps.Client:
        self.client = eps.connect("etcd://127.0.0.1:1/fake", worker="w", timeout=60.0, consistency=consistency)
        self.home = self.servers[home_range(WORKER, RANGES) % len(self.servers)]
        group = group_range(self.client._dispatcher.worker.app, RANGES)
        self.standing = {self.home, self.servers[group % len(self.servers)]}
        return self.client

    def table(self) -> eps.SparseTable:
        return self.client.table("t", dim=DIM, optimizer=eps.Accumulate())

    def heads(self, keys: Any) -> set[FakeServer]:
        shift = np.uint64(range_shift(RANGES))
        found = [int(hash_key(np.int64(key), table_salt(1)) >> shift) for key in keys]
        return {self.servers[r % len(self.servers)] for r in found}

    @property
    def connected(self) -> set[FakeServer]:
        names = {peer.info.name for peer in self.client._dispatcher.connections.ready}
        return {server for server in self.servers if server.name in names}

    def got(self, *kinds: Kind) -> set[FakeServer]:
        return {server for server in self.servers if server.got(*kinds)}

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            server.kill()


@pytest.fixture(params=[30, 100])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    found = Many(request.param, monkeypatch)
    yield found
    found.close()


def test_a_worker_connects_to_the_heads_that_it_touches_and_falls_back_to_two(
    many: Many, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = many.connect()
    table = many.table()
    assert many.connected == many.standing
    keys = np.arange(6)
    for _ in range(3):
        ps.push({table: (keys, np.ones((6, DIM), np.float32))}).result()
        table.pull(keys)
    assert many.heads(keys) <= many.connected <= many.heads(keys) | many.standing
    assert len(many.connected) <= len(many.heads(keys)) + 2
    assert many.got(Kind.HELLO) == many.connected
    assert many.got(Kind.JOIN) == many.connected  # each heard that this worker takes part
    monkeypatch.setattr("elasticps.client.connections.UNUSED_S", 0.1)
    ps._dispatcher.connections._look_at_s = 0.0
    eventually(lambda: many.connected == many.standing)
    assert ps.stats()["servers.connected"] == len(many.standing) <= 2
    assert ps.stats()["servers.reconnects"] == 0
    ps.push({table: (keys, np.ones((6, DIM), np.float32))}).result()  # they are opened again
    assert ps.committed == 4


@pytest.fixture
def thirty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Many]:
    found = Many(30, monkeypatch)
    yield found
    found.close()


def soon(client: eps.Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Unused links are closed at once; returns what waits until they would have been."""
    monkeypatch.setattr("elasticps.client.connections.UNUSED_S", 0.05)
    connections = client._dispatcher.connections
    connections._look_at_s = 0.0

    def looked() -> None:
        for _ in range(3):
            before = connections._look_at_s
            eventually(partial(lambda earlier: connections._look_at_s > earlier, before))

    return looked


def test_a_link_with_a_step_outstanding_is_not_closed(thirty: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = thirty.connect()
    table = thirty.table()
    keys = np.arange(3)
    for server in thirty.heads(keys):
        server.silent.add(Kind.PUSH)
    step = ps.push({table: (keys, np.ones((3, DIM), np.float32))})
    eventually(lambda: thirty.got(Kind.PUSH) >= thirty.heads(keys))
    soon(ps, monkeypatch)()
    assert thirty.heads(keys) <= thirty.connected
    assert not step.done()


def test_a_link_on_which_a_worker_was_told_to_hold_is_not_closed(thirty: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would not hear there that it may go on."""
    ps = thirty.connect()
    table = thirty.table()
    table.pull(np.arange(3))
    (other, *_) = thirty.heads(np.arange(3)) - thirty.standing
    other.say(HoldHeader(1, 60_000).header().pack())
    eventually(lambda: other.got(Kind.HELD))
    soon(ps, monkeypatch)()
    assert other in thirty.connected


def test_the_new_head_of_its_home_is_connected_though_it_has_nothing_to_ask(thirty: Many) -> None:
    ps = thirty.connect()
    after = thirty.view(1)
    for server in thirty.servers:
        server.view = after
    thirty.home.tell(after)
    homes = thirty.servers[(home_range(WORKER, RANGES) + 1) % 30]
    eventually(lambda: homes in thirty.connected)
    eventually(lambda: homes.got(Kind.JOIN))
    assert ps.stats()["view.epoch"] == 2


def test_a_worker_joins_at_two_servers(thirty: Many) -> None:
    ps = thirty.connect()
    assert not ps.resume().predecessor
    assert thirty.got(Kind.HELLO) == thirty.got(Kind.JOIN) == thirty.standing
    ps._steps.pause()
    assert thirty.got(Kind.HELLO) == thirty.standing


def test_a_worker_with_a_predecessor_asks_whoever_has_a_copy_of_anything(thirty: Many) -> None:
    """So all of them have fenced it."""
    thirty.control.last = PastRun(3, 0, 0, 0, 1)
    ps = thirty.connect(eps.ASP())
    assert ps.resume().predecessor
    assert thirty.got(Kind.GET_CLOCKS) == set(thirty.servers)


def test_a_server_that_is_asked_and_cannot_be_reached_is_named(thirty: Many) -> None:
    ps = thirty.connect()
    table = thirty.table()
    (other, *_) = thirty.heads(np.arange(3)) - thirty.standing
    other.kill()
    pending(table.pull_async(np.arange(3)).result, f"server {other.name} at {other.address}, ", "unreachable for")
    assert not ps.stats()["ranges.without_server"]


@pytest.mark.parametrize("found", [0, 1])
def test_of_many_heads_a_new_table_is_asked_for_by_its_creator_alone(many: Many, found: int) -> None:
    """Unless the creator does not say in time that they have it."""
    many.control.created, many.control.creator, many.control.waiting_finds = 0, WORKER + 1, found
    many.connect()
    many.table()
    many.table()
    assert many.control.waited_for == 1, "one that is open here is there"
    assert many.got(Kind.CREATE) == (set() if found else set(many.servers))


def test_few_heads_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Many(FEW_HEADS, monkeypatch)
    few.control.created, few.control.creator = 0, WORKER + 1
    few.connect()
    few.table()
    assert few.control.waited_for == 0
    assert few.got(Kind.CREATE) == set(few.servers)
    few.close()
