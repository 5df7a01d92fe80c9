"""Relays: readers that feed readers, whatever those do."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import elasticps as eps
from elasticps.readers import relay_registry
from elasticps.readers.core import relay_choice
from elasticps.readers.core.following import Feed, Following
from elasticps.readers.pull_server import PullServer
from elasticps.wire.range_parts import ReadCursor, ReadRange
from elasticps.wire.windows import Subscribe
from tests.e2e.test_readers import DIM, KEYS, make_again, push, shows, table_of, training
from tests.e2e.test_readers_stopped import ForgetfulNetwork
from tests.e2e.test_readers_through_changes import equals
from tests.processes import reader_process
from tests.waiting import eventually

RANGES = 32


@pytest.fixture
def own() -> Iterator[eps.LocalCluster]:
    with eps.LocalCluster(servers=2, ranges=RANGES) as cluster:
        yield cluster


def test_a_reader_that_takes_nothing_does_not_hold_up_its_relay(own: eps.LocalCluster) -> None:
    """It asks for more than sockets take, and does not read: pulls from the relay go on, as does what it follows."""
    rng = np.random.default_rng(1)
    with eps.connect(own.url, worker="w0") as ps:
        wide = ps.table("wide", dim=512, optimizer=eps.SGD(lr=0.1))
        ps.push({wide: (np.arange(8000), np.ones((8000, 512), np.float32))}).result()
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(own.url, every=0.005) as first, PullServer(first, "127.0.0.1", 0) as relay:
            host, _, port = relay.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as greedy:
                every, nothing = np.arange(RANGES), np.full(RANGES, -1)
                greedy.sendall(b"".join(Subscribe(1, 1, every, nothing, nothing * 0, None, "", 5).frame()))
                number = first.table_rows["wide"].number
                for i in range(400):
                    greedy.sendall(b"".join(ReadRange(i + 1, 1, i % RANGES, 8192, ReadCursor(number)).frame()))
                push(ps, users, rng)
                eventually(shows(first, users))
                with eps.remote_reader(relay.address) as remote:
                    assert (remote.pull({"users": KEYS})["users"] == users.pull(KEYS)).all()


def test_readers_of_many_tables_read_them_together(own: eps.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them are tiny or empty in a range. So do those behind a relay; what went while nobody followed goes."""
    rng, questions = np.random.default_rng(3), list[ReadRange]()

    def request(self: Following, feed: Feed, r: int, start: ReadCursor) -> ReadRange:
        questions.append(requests(self, feed, r, start))
        return questions[-1]

    requests = Following._request
    monkeypatch.setattr(Following, "_request", request)
    with eps.connect(own.url, worker="w0") as ps:
        tables = [ps.table(f"t{i}", dim=1 + i % 5, optimizer=eps.SGD(lr=0.1)) for i in range(50)]
        ps.push({
            table: (np.arange(rows), rng.random((rows, table.spec.dim), np.float32))
            for i, table in enumerate(tables) if (rows := (0, 1, 40, 3000)[i % 4])
        }).result()  # fmt: skip
        with eps.reader(own.url) as first:
            assert len(questions) < 5 * RANGES  # one for each range; a server may have moved some
            assert all(equals(first, table) for table in tables)
            with PullServer(first, "127.0.0.1", 0) as relay, eps.reader(f"reader://{relay.address}") as second:
                assert len(questions) < 10 * RANGES
                assert all(equals(second, table) for table in tables)
                filled = second.stats().filled
                # Nothing is known of the time before: all is read again, by digests.
                tables[2].delete(np.arange(40))
                tables[3].delete(np.arange(0, 3000, 7))
                ps.push({tables[5]: (np.arange(9), np.ones((9, tables[5].spec.dim), np.float32))}).result()
                fills = first.stats().fills, second.stats().fills
                for reader in (first, second):  # the relay may still be reading its ranges
                    with reader.lock:
                        reader._following.have[:] = -1
                        for member in list(reader._following.feeds):
                            reader._links._connections.cut(member, "again")
                eventually(lambda: first.stats().fills >= fills[0] + RANGES and first._following.filled)
                eventually(lambda: second.stats().fills >= fills[1] + RANGES and second._following.filled)
                eventually(lambda: all(equals(first, table) for table in tables))
                eventually(lambda: all(equals(second, table) for table in tables))
                assert second.stats().filled - filled < 0.7 * filled  # it had most of it


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_goes_on_at_another_relay(own: eps.LocalCluster, ends: signal.Signals) -> None:
    """Its relay is gone, or says nothing: the reader compares what it has with another's, and reads what differs."""
    rng = np.random.default_rng(2)
    with eps.connect(own.url, worker="w0") as ps:
        users, still = table_of(ps), ps.table("still", dim=64, optimizer=eps.SGD(lr=0.1))
        many = np.arange(20_000)
        ps.push({still: (many, rng.random((len(many), 64), np.float32))}).result()
        push(ps, users, rng)
        with (
            reader_process(own.url) as (first, one),
            reader_process(own.url) as (_, other),
            eps.reader(f"reader://{one['pulls']},{other['pulls']}", every=0.005) as outer,
        ):
            eventually(shows(outer, users))
            filled = outer.stats().fill_bytes
            os.kill(first.pid, ends)
            with training(ps, users) as count:
                eventually(lambda: count() > 50)
            users.delete(KEYS[:300])
            eventually(lambda: equals(outer, users), 60.0)
            eventually(lambda: equals(outer, still), 60.0)
            eventually(lambda: outer.age < 2.0)
            assert outer.stats().fill_bytes - filled < still.spec.dim * 4 * len(many) / 4  # most of it was here
            outer.hold(timeout=30)
            outer.release()


def test_a_reader_leaves_a_relay_that_is_cut_off_from_the_servers(
    own: eps.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as ever, and its rows grow old. When the other one is cut off as well, nobody moves any more."""
    for name, seconds in (("STALE_S", 2.0), ("NEWER_S", 1.0), ("COMPARE_S", 0.5)):
        monkeypatch.setattr(relay_choice, name, seconds)
    rng = np.random.default_rng(4)
    with ExitStack() as stack, eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        relays, networks = [], list[ForgetfulNetwork]()
        for _ in range(2):  # each behind a network of its own
            source = stack.enter_context(eps.reader(own.url, every=0.005))
            feed = stack.enter_context(PullServer(source, "127.0.0.1", 0))
            networks.append(ForgetfulNetwork(feed.address))
            stack.callback(networks[-1].close)
            follower = stack.enter_context(eps.reader(f"reader://{networks[-1].address}", every=0.005))
            relays.append(stack.enter_context(PullServer(follower, "127.0.0.1", 0)))
        outer = stack.enter_context(eps.reader(f"reader://{relays[0].address},{relays[1].address}", every=0.005))
        eventually(shows(outer, users))
        epoch = outer.as_of.epoch
        networks[0].close()
        push(ps, users, rng)
        users.delete(KEYS[:300])
        eventually(lambda: equals(outer, users), 60.0)
        eventually(lambda: outer.age < 2.0)
        assert outer.as_of.epoch == epoch + 1
        networks[1].close()
        shown = outer.pull({"users": KEYS})["users"]
        push(ps, users, rng)
        eventually(lambda: outer.age > 6.0)
        assert outer.as_of.epoch == epoch + 1
        assert (outer.pull({"users": KEYS})["users"] == shown).all()
        outer.check()


def test_tables_that_are_dropped_while_the_relay_is_away_go(own: eps.LocalCluster) -> None:
    """No window says later that they are gone. Made again under its name meanwhile, a table is the new one alone."""
    rng = np.random.default_rng(6)
    with eps.connect(own.url, worker="w0") as ps, eps.reader(own.url, every=0.005) as first, ExitStack() as stack:
        users, items = table_of(ps), table_of(ps, "items")
        push(ps, users, rng)
        push(ps, items, rng)
        with PullServer(first, "127.0.0.1", 0) as relay:
            port = int(relay.address.rpartition(":")[2])
            outer = stack.enter_context(eps.reader(f"reader://{relay.address}", every=0.005))
            eventually(lambda: equals(outer, users) and equals(outer, items))
        again = make_again(ps, 2 * DIM, rng)
        eventually(lambda: equals(first, again))
        with PullServer(first, "127.0.0.1", port):
            eventually(lambda: equals(outer, again), 60.0)
            eventually(lambda: outer.stats().rows == first.stats().rows)
        ps.drop_table("users")
        eventually(lambda: "users" not in first.tables)
        push(ps, items, rng)
        with PullServer(first, "127.0.0.1", port):
            eventually(lambda: equals(outer, items), 60.0)
            eventually(lambda: set(outer.tables) == {"items"})


def test_a_reader_begins_at_the_relay_that_answers(own: eps.LocalCluster) -> None:
    """The first of those that its URL names is gone, the second keeps rows in another type."""
    rng = np.random.default_rng(3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with (
            eps.reader(own.url, every=0.005) as first,
            PullServer(first, "127.0.0.1", 0) as relay,
            eps.reader(own.url, dtype="int8") as short,
            PullServer(short, "127.0.0.1", 0) as unlike,
        ):
            with eps.reader(f"reader://{gone},{relay.address}", every=0.005) as outer:
                eventually(lambda: equals(outer, users))
            with pytest.raises(eps.ConfigError, match="the same dtype"):
                eps.reader(f"reader://{gone},{unlike.address}", timeout=10)
            with pytest.raises(eps.ClusterUnreachable, match=gone):
                eps.reader(f"reader://{gone},127.0.0.1:1", timeout=1)


def test_a_relay_that_is_behind_takes_no_tables_away(own: eps.LocalCluster) -> None:
    """It has not heard of two new tables. One is dropped before it has, and goes; so do rows of the other."""
    rng = np.random.default_rng(8)
    with eps.connect(own.url, worker="w0") as ps, ExitStack() as stack:
        users = table_of(ps)
        push(ps, users, rng)
        first, source = (stack.enter_context(eps.reader(own.url, every=0.005)) for _ in range(2))
        one, above = PullServer(first, "127.0.0.1", 0), PullServer(source, "127.0.0.1", 0)
        stack.callback(one.close)
        follower = stack.enter_context(eps.reader(f"reader://{above.address}", every=0.005))
        other = stack.enter_context(PullServer(follower, "127.0.0.1", 0))
        outer = stack.enter_context(eps.reader(f"reader://{one.address},{other.address}", every=0.005))
        above.close()
        late, brief = table_of(ps, "late"), table_of(ps, "brief")
        push(ps, late, rng)
        push(ps, brief, rng)
        eventually(lambda: equals(outer, late) and equals(outer, brief))
        shown = outer.pull({"late": KEYS, "brief": KEYS})
        before, windows = outer.as_of.epoch, outer.stats().windows
        one.close()
        late.delete(np.concatenate([*late.keys()])[:20])
        ps.drop_table("brief")
        eventually(lambda: equals(source, late) and "brief" not in source.tables)

        def follows() -> bool:
            now = outer.pull({"late": KEYS, "brief": KEYS})
            assert all((now[name] == rows).all() for name, rows in shown.items())
            return outer.as_of.epoch > before and outer.stats().windows > windows + 5

        eventually(follows)
        assert set(follower.tables) == {"users"}
        with PullServer(source, "127.0.0.1", int(above.address.rpartition(":")[2])):
            eventually(lambda: equals(follower, late), 60.0)
            eventually(lambda: equals(outer, late), 60.0)
            eventually(lambda: set(outer.tables) == {"users", "late"}, 60.0)
            push(ps, late, rng)
            eventually(lambda: equals(outer, late))
            eventually(lambda: outer.stats().rows == source.stats().rows)


def test_rows_go_that_went_before_their_relay_heard_of_the_table(
    own: eps.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a window now and then, so the table and the deletion come in one; the reader has the rows from another
    relay."""
    monkeypatch.setattr(relay_registry, "TRY_S", 0.1)  # so that it is followed before that window comes
    rng = np.random.default_rng(9)
    with eps.connect(own.url, worker="w0") as ps, ExitStack() as stack:
        users = table_of(ps)
        push(ps, users, rng)
        first, slow = (stack.enter_context(eps.reader(own.url, every=every)) for every in (0.005, 3.0))
        one, other = (stack.enter_context(PullServer(source, "127.0.0.1", 0)) for source in (first, slow))
        outer = stack.enter_context(eps.reader(f"reader://{one.address},{other.address}", every=0.005))
        before, windows = outer.as_of.epoch, slow.stats().windows
        eventually(lambda: slow.stats().windows >= windows + 2)  # of both servers: the next ones come in three seconds
        late = table_of(ps, "late")
        push(ps, late, rng)
        eventually(lambda: equals(outer, late))
        one.close()
        late.delete(np.concatenate([*late.keys()])[:20])
        eventually(lambda: outer.as_of.epoch > before)
        eventually(lambda: equals(slow, late), 60.0)
        eventually(lambda: equals(outer, late), 60.0)
        push(ps, late, rng)
        eventually(lambda: equals(outer, late), 60.0)
