"""A client among servers that come, go, freeze and lie; the servers are fakes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import ServerInfo, View
from elasticps.client.connections import CONNECT_TIMEOUT_S
from elasticps.client.core.new_views import ViewHints
from elasticps.client.core.session import RESEND_BYTES
from elasticps.kernels.hashing import hash_key, range_shift, table_salt
from elasticps.model.spec import Consistency
from elasticps.wire.frames import ANY, BLOCK_BYTES, LAST, REPEAT, TABLES, Kind, view_frame
from tests.client.fakes import DIM, FakeRegistry, FakeServer

RANGES = 8
KEYS = np.arange(40)
ONES = np.ones((40, DIM), np.float32)
Eventually = Callable[[Callable[[], bool]], None]


def chains(servers: list[ServerInfo], owners: list[list[int]], epoch: int = 1) -> View:
    """A view in which range r has the chain owners[r % len(owners)]."""
    replicas = max(map(len, owners))
    rows = [owners[r % len(owners)] for r in range(RANGES)]
    padded = np.array([c + [-1] * (replicas - len(c)) for c in rows], np.int32)
    return View("fake", epoch, RANGES, replicas, tuple(servers), padded, np.full(RANGES, -1, np.int32),
                np.full(RANGES, epoch, np.int64), "test")  # fmt: skip


class Cluster:
    """Two servers a and b; each heads half of the ranges and is the tail of the other half."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.a, self.b = FakeServer("a"), FakeServer("b")
        self.servers = [self.a, self.b]
        self.before = chains([self.a.info, self.b.info], [[0, 1], [1, 0]])
        self.after = chains([self.b.info], [[0]], epoch=2)  # a is gone
        self.a.view = self.b.view = self.before
        self.control = FakeRegistry(self.before)
        self.clients: list[eps.Client] = []
        patch.setattr("elasticps.client.client.Registry", self.control)
        patch.setattr("elasticps.client.parts.LEAVE_S", 0.1)  # some end while they are owed something

    def connect(self, timeout: float = 30.0, consistency: Consistency | None = None) -> eps.Client:
        client = eps.connect("etcd://127.0.0.1:1/fake", worker="w", timeout=timeout, consistency=consistency)
        self.clients.append(client)
        return client

    def table(self, ps: eps.Client) -> eps.SparseTable:
        return ps.table("t", dim=DIM, optimizer=eps.Accumulate())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch)
    yield cluster
    for client in cluster.clients:
        client.close()
    for server in cluster.servers:
        server.kill()


def pending(wait: Callable[[float], object], *words: str) -> str:
    """What a wait that times out again and again says as soon as all of the words are in it."""
    said, deadline_s = "", time.monotonic() + 40
    while not all(word in said for word in words):
        assert time.monotonic() < deadline_s, f"{words} not in: {said}"
        with pytest.raises(eps.Timeout) as error:
            wait(0.2)
        said = str(error.value)
    return said


def test_nobody_gets_the_address_of_a_fake_that_was_killed(cluster: Cluster) -> None:
    """Its like in a test beside did, and answered in its place."""
    host, port = cluster.a.address.split(":")
    cluster.a.kill()
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, int(port)))


def test_a_step_that_a_lost_head_owed_goes_to_its_successor(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.push({table: (KEYS, ONES)}).result()
    cluster.a.silent.add(Kind.PUSH)
    step = ps.push({table: (KEYS, ONES)})
    cluster.b.applied = cluster.b.committed = 1 << 16
    cluster.a.kill()
    cluster.b.view = cluster.after  # told when it is asked
    step.result()
    assert ps.view.epoch == 2
    resent = cluster.b.got(Kind.PUSH)[-1]
    assert (resent.epoch, resent.clock, resent.flags & REPEAT) == (2, 2, 0)
    assert ps.committed == 2


def test_only_the_acknowledgement_is_queried_for_where_the_step_is_applied(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.silent.add(Kind.PUSH)
    keys = np.arange(RESEND_BYTES // 8)
    step = ps.push({cluster.table(ps): (keys, np.ones((len(keys), DIM), np.float32))})
    cluster.b.applied, cluster.b.committed = 2 << 16, 1 << 16
    cluster.a.kill()
    cluster.b.tell(cluster.after)
    step.result()
    resent = cluster.b.got(Kind.PUSH)[-1]
    assert (resent.clock, resent.items, bool(resent.flags & REPEAT)) == (2, 0, True)


def test_every_connection_hears_the_base_before_any_push(cluster: Cluster) -> None:
    ps = cluster.connect()
    for _ in range(3):
        ps.push({}).result()
    for peer in list(ps._dispatcher.connections.peers.values()):
        assert isinstance(peer.link.socket, socket.socket)
        peer.link.socket.shutdown(socket.SHUT_RDWR)
    ps.push({}).result()
    for server in cluster.servers:
        kinds = [(h.kind, h.flags & LAST) for h in server.got(Kind.HELLO, Kind.JOIN, Kind.PUSH)]
        second = len(kinds) - 1 - kinds[::-1].index((Kind.HELLO, 0))
        assert kinds[second + 1] == (Kind.JOIN, LAST)
        first_push = next(i for i, k in enumerate(kinds) if k[0] == Kind.PUSH)
        assert (Kind.JOIN, LAST) in kinds[:first_push]


def test_pulls_are_queried_again_of_the_new_tail(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.silent.add(Kind.PULL)
    cluster.b.value = 5.0
    read = table.pull_async(KEYS)
    cluster.b.tell(cluster.after)
    assert set(read.result().ravel().tolist()) == {5.0}


def test_a_pull_under_an_old_view_is_planned_again(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.value = cluster.b.value = 3.0
    cluster.a.view = cluster.b.view = chains([cluster.a.info, cluster.b.info], [[1], [0]], epoch=2)
    assert set(table.pull(KEYS).ravel().tolist()) == {3.0}
    assert ps.view.epoch == 2


def test_pulls_of_several_tables_are_queried_again_of_the_new_tail(cluster: Cluster) -> None:
    ps = cluster.connect()
    tables = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(3)]
    cluster.a.silent.add(Kind.PULL)
    cluster.a.value, cluster.b.value = 3.0, 5.0
    read = ps.pull_async({table: KEYS[: 10 * i + 1] for i, table in enumerate(tables)})
    assert not read.done()
    cluster.b.tell(cluster.after)
    rows = read.result()
    assert [len(rows[table]) for table in tables] == [1, 11, 21]
    assert all(set(rows[table].ravel().tolist()) == {5.0} for table in tables)
    checked = [h for h in cluster.b.got(Kind.PULL) if h.flags & TABLES]
    assert len(checked) >= 2  # its own part, again if it hears of the view before it answers; and a's
    assert {h.epoch for h in checked} == {1, 2}
    assert sum(h.body - BLOCK_BYTES * h.items for h in checked) >= 8 * 33


def test_pulls_of_several_tables_under_an_old_view_are_planned_again(cluster: Cluster) -> None:
    ps = cluster.connect()
    tables = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(3)]
    cluster.a.value = cluster.b.value = 3.0
    cluster.a.view = cluster.b.view = chains([cluster.a.info, cluster.b.info], [[1], [0]], epoch=2)
    rows = ps.pull(dict.fromkeys(tables, KEYS))
    assert all(set(rows[table].ravel().tolist()) == {3.0} and rows[table].shape == (40, DIM) for table in tables)
    assert ps.view.epoch == 2


def test_late_bytes_of_an_old_answer_of_several_tables_do_not_overwrite_a_new_one(
    cluster: Cluster, eventually: Eventually
) -> None:
    ps = cluster.connect()
    tables, many = [ps.table(f"t{i}", dim=DIM, optimizer=eps.Accumulate()) for i in range(2)], np.arange(100_000)
    out = {table: np.full((len(many), DIM), np.nan, np.float32) for table in tables}
    both = [cluster.a.info, cluster.b.info]
    cluster.a.tell(chains(both, [[0]], epoch=2))  # one server has all: rows come where they belong
    eventually(lambda: ps.view.epoch == 2)
    cluster.a.value, cluster.b.value = -1.0, 2.0
    cluster.a.half.set()
    read = ps.pull_async(dict.fromkeys(tables, many), out)
    eventually(lambda: bool((out[tables[0]] == -1.0).any()))
    cluster.b.tell(chains(both, [[1]], epoch=3))
    rows = read.result()
    assert all(set(rows[table].ravel().tolist()) == {2.0} for table in tables)
    cluster.a.half.clear()
    cluster.a.go.set()
    cluster.a.view = chains(both, [[0]], epoch=4)
    cluster.b.tell(cluster.a.view)
    eventually(lambda: ps.view.epoch == 4)
    assert set(tables[0].pull(KEYS).ravel().tolist()) == {-1.0}  # behind those bytes
    assert all(set(out[table].ravel().tolist()) == {2.0} for table in tables)


def test_late_bytes_of_an_old_answer_do_not_overwrite_a_new_one(cluster: Cluster, eventually: Eventually) -> None:
    ps = cluster.connect()
    size = 300_000
    tensor = ps.tensor("w", init=np.zeros(size, np.float32), optimizer=eps.SGD(lr=1.0))
    assert tensor.spec.dim != DIM  # the fakes answer in rows of DIM floats
    cluster.a.row = cluster.b.row = tensor.spec.dim
    cluster.a.value, cluster.b.value = -1.0, 2.0
    cluster.a.half.set()
    out = np.full(size, np.nan, np.float32)
    read = tensor.pull_async(out)
    eventually(lambda: bool((out == -1.0).any()))
    cluster.b.tell(chains([cluster.a.info, cluster.b.info], [[1]], epoch=2))  # a lives on, and is the tail no more
    assert set(read.result().tolist()) == {2.0}
    cluster.a.go.set()
    cluster.a.view = chains([cluster.a.info, cluster.b.info], [[0]], epoch=3)
    cluster.b.tell(cluster.a.view)
    eventually(lambda: ps.view.epoch == 3)
    assert set(tensor.pull().tolist()) == {-1.0}  # behind those bytes
    assert set(out.tolist()) == {2.0}


def test_with_no_server_left_the_view_comes_from_the_store(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    new = FakeServer("c")
    cluster.servers.append(new)
    new.view = chains([new.info], [[0]], epoch=2)
    new.applied = new.committed = 1 << 16
    cluster.a.kill()
    cluster.b.kill()
    step = ps.push({})
    cluster.control.view = new.view
    step.result()
    assert cluster.control.checked >= 1
    assert ps.view.epoch == 2


def test_a_server_that_was_taken_over_heads_nothing_by_its_word(
    cluster: Cluster, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """With certificates. What it spoke of was believed, and every view that the leader wrote was older from then on."""
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    ps.push({}).result()
    cluster.a.say(view_frame(chains([cluster.a.info], [[0]], epoch=1 << 62)))
    eventually(lambda: "speaks of a view" in caplog.text)
    for epoch in range(2, 50):
        cluster.a.say(view_frame(chains([cluster.a.info], [[0]], epoch=epoch)))
    ps.push({}).result()
    assert (ps.view.epoch, cluster.control.checked) == (1, 1)
    cluster.control.view = cluster.after
    cluster.b.tell(cluster.after)
    eventually(lambda: ps.view.epoch == 2)
    assert ps.view == cluster.after


def test_the_store_has_the_last_word_on_a_view_reported_while_it_is_read(
    cluster: Cluster, eventually: Eventually
) -> None:
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    readers: list[Callable[[View | None], None]] = []
    ps._dispatcher.new_views.read_store = readers.append
    cluster.b.tell(cluster.after)
    eventually(lambda: len(readers) == 1)
    newest = chains([cluster.b.info], [[0]], epoch=3)
    cluster.b.tell(newest)
    eventually(lambda: ps._dispatcher.new_views._hints.pending is not None)
    assert len(readers) == 1
    readers[0](cluster.after)
    assert ps.view.epoch == 2
    eventually(lambda: len(readers) == 2)
    readers[1](newest)
    assert ps.view.epoch == 3
    assert not ps._dispatcher.new_views._hints._deaf_until_s


def test_a_view_that_several_servers_speak_of_is_read_once(cluster: Cluster) -> None:
    """All of them do so when there is one, and in the midst of a failover the store has enough to do."""
    a, b = (server.info.member for server in (cluster.a, cluster.b))
    hints = ViewHints()
    assert hints.hear(1.0, a, cluster.after)
    hints.ask()
    hints.hear(1.0, b, cluster.after)
    assert hints.judge(1.0, 1, cluster.after) == (cluster.after, None)
    assert hints.pending is None
    hints.hear(1.0, b, cluster.after)
    hints.ask()
    newest = chains([cluster.b.info], [[0]], epoch=3)
    hints.hear(1.0, b, newest)
    assert hints.judge(1.0, 1, cluster.after) == (cluster.after, None)
    assert hints.pending is not None, "the store was read before there was that one"


@pytest.mark.parametrize("stored", [None, "other"])
def test_while_the_store_says_nothing_servers_are_believed(
    cluster: Cluster, eventually: Eventually, stored: str | None
) -> None:
    ps = cluster.connect()
    ps._dispatcher.new_views.authenticated = True
    found = None if stored is None else replace(cluster.before, cluster=stored)
    ps._dispatcher.new_views.read_store = lambda on_view: threading.Thread(target=on_view, args=(found,)).start()
    cluster.b.tell(cluster.after)
    eventually(lambda: ps.view.epoch == 2)


def test_servers_are_queried_who_has_ranges_that_nobody_had(cluster: Cluster, eventually: Eventually) -> None:
    """They begin anew, and nobody may have told a worker that was not connected just then."""
    ps = cluster.connect()
    table = cluster.table(ps)
    ps.resume()
    cluster.b.value = 4.0
    cluster.b.tell(chains([cluster.b.info], [[-1], [-1]], epoch=2))
    eventually(lambda: ps.view.epoch == 2)
    read = table.pull_async(KEYS)
    cluster.b.view = chains([cluster.b.info], [[0]], epoch=3)
    assert set(read.result().ravel().tolist()) == {4.0}


def test_a_server_started_again_is_no_reason_to_end(cluster: Cluster) -> None:
    cluster.a.incarnation = 2  # as the view does not know yet
    cluster.b.view = cluster.after
    ps = cluster.connect()
    ps.push({}).result()
    assert ps.view.epoch == 2


def test_a_table_is_created_at_the_heads_of_the_newest_view(cluster: Cluster, eventually: Eventually) -> None:
    ps = cluster.connect()
    cluster.a.silent.add(Kind.CREATE)
    done = threading.Event()

    def create() -> None:
        cluster.table(ps)
        done.set()

    thread = threading.Thread(target=create)
    thread.start()
    eventually(lambda: bool(cluster.b.got(Kind.CREATE)))
    assert not done.is_set()
    cluster.b.tell(cluster.after)
    thread.join(30)
    assert done.is_set()
    assert [h.epoch for h in cluster.b.got(Kind.CREATE)] == [1, 2]


@pytest.mark.parametrize("accepts", [True, False])
def test_a_frozen_server_blocks_nobody_else(cluster: Cluster, accepts: bool) -> None:
    frozen = socket.create_server(("127.0.0.1", 0), backlog=5 if accepts else 0)  # the system accepts, nobody speaks
    waiting = [] if accepts else [socket.socket() for _ in range(3)]
    for sock in waiting:  # with a full backlog connections neither succeed nor fail
        sock.setblocking(False)
        sock.connect_ex(frozen.getsockname())
    info = ServerInfo("z", 1, f"127.0.0.1:{frozen.getsockname()[1]}")
    cluster.control.view = chains([cluster.a.info, cluster.b.info, info], [[0, 1], [1, 0]])
    cluster.a.view = cluster.b.view = cluster.control.view
    ps = cluster.connect()
    table = cluster.table(ps)
    started = time.monotonic()
    for _ in range(20):
        ps.push({table: (KEYS, ONES)}).result()
        table.pull(KEYS)
    assert not next(p for p in ps._dispatcher.connections.peers.values() if p.info.name == "z").link.ready
    assert (
        time.monotonic() - started < 20 * CONNECT_TIMEOUT_S
    )  # what an attempt takes, which is what they would wait for
    for sock in (*waiting, frozen):
        sock.close()


def test_a_timeout_says_who_owes_what_since_when(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.kill()
    step = ps.push({})
    text = pending(step.result, "(connection refused)")
    for part in (f"server a at {cluster.a.address}, head of 4 ranges (0, 2, 4, 6): unreachable for ", "owes step 2",
                 "the cluster's view is at epoch 1"):  # fmt: skip
        assert part in text
    assert "server b" not in text


def test_what_a_server_that_has_come_back_empty_had_alone_is_reported_to_be_lost(cluster: Cluster) -> None:
    alone = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = alone
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.incarnation = 2
    cluster.a.hang_up()
    step = ps.push({})
    text = pending(step.result, "its data are lost")
    assert "has begun empty, and no other server has the rows of ranges 0, 2, 4, 6, of any table" in text
    assert "unreachable" not in text


def test_so_it_is_when_it_has_come_back_at_another_address(cluster: Cluster) -> None:
    """As a pod does: at the old address nobody answers any more, and the view says what has become of it."""
    alone = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = alone
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.kill()
    step = ps.push({})
    pending(step.result, "unreachable for")
    cluster.b.view = cluster.control.view = replace(
        chains([cluster.a.info, cluster.b.info], [[0], [1]], epoch=2), empty=(("a", 2),)
    )
    text = pending(step.result, "its data are lost")
    assert "it came back as incarnation 2 and has begun empty" in text
    assert "`elasticps restore --ranges all-lost` brings them back" in text
    assert "unreachable" not in text


def alone(cluster: Cluster) -> tuple[list[int], list[int]]:
    """Each range has one replica; keys whose rows a has, and b."""
    view = chains([cluster.a.info, cluster.b.info], [[0], [1]])
    cluster.a.view = cluster.b.view = cluster.control.view = view
    found = {key: int(hash_key(np.int64(key), table_salt(1)) >> np.uint64(range_shift(RANGES))) for key in range(40)}
    return [key for key, r in found.items() if r % 2 == 0], [key for key, r in found.items() if r % 2]


@pytest.mark.parametrize(("empty", "consistency"), [(True, eps.ASP()), (False, eps.SSP(staleness=1))])
def test_who_comes_while_ranges_have_no_replica_reads_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, empty: bool, consistency: Consistency
) -> None:
    monkeypatch.setattr("elasticps.client.connections.ABSENT_S", 0.3)
    of_a, of_b = alone(cluster)
    if empty:
        cluster.a.incarnation = 2
    else:
        cluster.a.kill()
    ps = cluster.connect(timeout=4.0, consistency=consistency)
    table = cluster.table(ps)
    cluster.b.value = 7.0
    assert (table.pull(of_b) == 7.0).all()
    why = "its data are lost" if empty else "unreachable for"
    text = pending(lambda timeout: table.pull_async(of_a).result(timeout), why)
    assert f"server a at {cluster.a.address}, head of 4 ranges (0, 2, 4, 6): {why}" in text
    with pytest.raises(eps.Timeout, match=why):
        ps.push({table: (KEYS, ONES)})


def test_who_was_away_hears_of_tables_that_were_opened_meanwhile_before_any_push(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticps.client.connections.ABSENT_S", 0.3)
    alone(cluster)
    cluster.a.incarnation = 2
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.incarnation = 1
    ps.push({table: (KEYS, ONES)}).result()
    kinds = [header.kind for header in cluster.a.got(Kind.CREATE, Kind.PUSH)]
    assert kinds == [Kind.CREATE, Kind.PUSH]


def test_an_error_names_the_servers_that_cannot_be_reached(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.client.connections.ABSENT_S", 0.1)
    cluster.a.kill()
    with pytest.raises(eps.ClusterUnreachable, match="cannot connect to server a at"):
        cluster.connect(timeout=0.5)
    alone(cluster)
    cluster.b.kill()
    with pytest.raises(eps.ClusterUnreachable, match=r"cannot connect to server a at .*, b at "):
        cluster.connect(timeout=0.5)


def test_what_a_neighbour_still_has_is_not_reported_to_be_lost(cluster: Cluster) -> None:
    ps = cluster.connect()
    ps.push({}).result()
    cluster.a.incarnation = 2
    cluster.a.hang_up()
    assert "lost: " not in pending(ps.push({}).result, "it was started again")


def test_a_pull_given_up_stays_given_up(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    cluster.a.silent.add(Kind.PULL)
    read = table.pull_async(KEYS)
    for _ in range(2):
        with pytest.raises(eps.Timeout, match="connected, not answering"):
            read.result(timeout=0.1)


def test_any_replica_may_be_queried(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    table.pull(np.arange(2000), read="any")
    checked = [h for s in cluster.servers for h in s.got(Kind.PULL)]
    assert len(checked) == 2
    assert all(h.flags & ANY and 300 < h.items < 1700 for h in checked)
    table.pull(KEYS)
    assert not any(s.got(Kind.PULL)[-1].flags & ANY for s in cluster.servers)
    with pytest.raises(eps.InputError, match="'tail'"):
        table.pull(KEYS, read="head")


def test_many_pulls_leave_as_one_frame_per_server(cluster: Cluster) -> None:
    ps = cluster.connect()
    tensors = [ps.tensor("w", init=np.zeros(DIM, np.float32), optimizer=eps.SGD(lr=1.0))] * 5
    cluster.a.value = cluster.b.value = 2.0
    reads = ps.pull_many(tensors)
    for read in reads:
        assert read.result().tolist() == [2.0] * DIM
        assert read.done()
    checked = [header for server in cluster.servers for header in server.got(Kind.PULL)]
    assert [(header.items, header.flags & TABLES) for header in checked] == [(5, TABLES)]  # who has it
