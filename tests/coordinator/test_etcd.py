"""Behaviour of real etcd: restarts, compaction, TLS, several endpoints, lost answers."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from aetcd import rpc

from coordinator.connect import open_store, release_of
from coordinator.core.errors import StoreUnavailable
from coordinator.core.store import Put, Reset
from coordinator.core.url import TlsFiles
from coordinator.core.view import ClusterConfig
from coordinator.etcd import EtcdStore
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server
from tests.coordinator.support import Etcd, Proxy, dead_port, fresh_url, take, until_key

NewEtcd = Callable[..., Etcd]


async def test_watches_and_leases_outlive_a_restart(new_etcd: NewEtcd) -> None:
    etcd = new_etcd()
    url = fresh_url(etcd)
    store, hasty = EtcdStore(url, timeout_s=20.0), EtcdStore(url, timeout_s=0.5)
    lease = await store.grant(60)  # also while etcd starts again, on a machine that is busy
    first = await store.put("a", b"1", lease=lease)
    async with aclosing(store.watch("", after=first - 1)) as changes:
        assert [change.revision for change in await take(changes, 1)] == [first]
        etcd.kill()
        with pytest.raises(StoreUnavailable, match="gave no answer") as outage:
            await hasty.put("b", b"1")
        assert outage.value.indefinite
        with pytest.raises(StoreUnavailable) as outage:
            await hasty.get("b")
        assert not outage.value.indefinite
        etcd.start()
        assert await store.keep_alive(lease) > 0
        entry = await store.get("a")
        assert entry is not None
        assert entry.revision == first
        await store.put("c", b"1")
        (change,) = await take(changes, 1)
        assert isinstance(change, Put)
        assert change.entry.key == "c"
    await store.close()
    await hasty.close()


async def test_a_call_made_during_an_outage_is_answered_after_it(new_etcd: NewEtcd) -> None:
    etcd = new_etcd()
    store = EtcdStore(fresh_url(etcd), timeout_s=30.0)
    await store.put("a", b"1")
    etcd.kill()
    call = asyncio.create_task(store.put("a", b"2"))
    await asyncio.to_thread(etcd.start)
    await call
    entry = await store.get("a")
    assert entry is not None
    assert entry.value == b"2"
    await store.close()


async def test_a_watch_from_before_a_compaction_is_reset(shared_etcd: Etcd) -> None:
    store = EtcdStore(fresh_url(shared_etcd))
    first = await store.put("servers/a", b"1")
    await store.put("servers/a", b"2")
    await store.put("servers/b", b"1")
    await store.put("else", b"1")
    await shared_etcd.compact()
    async with aclosing(store.watch("servers/", after=first)) as changes:
        (reset,) = await take(changes, 1)
        assert isinstance(reset, Reset)
        assert {entry.key: entry.value for entry in reset.listing.entries} == {"servers/a": b"2", "servers/b": b"1"}
        await store.put("servers/b", b"2")
        (change,) = await take(changes, 1)
        assert isinstance(change, Put)
        assert change.entry.value == b"2"
    await store.close()


async def test_a_watch_that_was_cut_off_over_a_compaction_is_reset(shared_etcd: Etcd) -> None:
    url = fresh_url(shared_etcd)
    writer = EtcdStore(url)
    async with Proxy(shared_etcd.endpoint).running() as proxy:
        store = EtcdStore(replace(url, endpoints=(proxy.endpoint,)))
        async with aclosing(store.watch("a", after=await writer.put("other", b""))) as changes:
            await writer.put("a", b"1")
            await take(changes, 1)
            proxy.refuse = True
            proxy.cut()
            for value in (b"2", b"3"):
                await writer.put("a", value)
            await shared_etcd.compact()
            proxy.refuse = False
            (reset,) = await take(changes, 1)
            assert isinstance(reset, Reset)
            assert [entry.value for entry in reset.listing.entries] == [b"3"]
            await writer.put("a", b"4")
            (change,) = await take(changes, 1)
            assert isinstance(change, Put)
        await store.close()
    await writer.close()


async def test_a_watch_is_reset_when_etcd_has_lost_changes(new_etcd: NewEtcd) -> None:
    etcd = new_etcd()
    store = EtcdStore(fresh_url(etcd))
    for _ in range(5):
        last = await store.put("a", b"old")
    async with aclosing(store.watch("a", after=last - 1)) as changes:
        await take(changes, 1)
        etcd.kill()
        shutil.rmtree(etcd.folder)
        etcd.start()
        (reset,) = await take(changes, 1)
        assert isinstance(reset, Reset)
        assert reset.listing.entries == ()
        await store.put("a", b"new")
        (change,) = await take(changes, 1)
        assert isinstance(change, Put)
        assert change.entry.value == b"new"
    await store.close()


async def test_a_watch_that_was_cut_off_misses_nothing(shared_etcd: Etcd) -> None:
    url = fresh_url(shared_etcd)
    writer = EtcdStore(url)
    async with Proxy(shared_etcd.endpoint).running() as proxy:
        store = EtcdStore(replace(url, endpoints=(proxy.endpoint,)))
        seen = []
        async with aclosing(store.watch("a", after=await writer.put("other", b""))) as changes:
            for i in range(60):
                await writer.put("a", str(i).encode())
                if i % 20 == 10:
                    proxy.cut()
                if i % 7 == 0:
                    seen += await take(changes, 1)
            seen += await take(changes, 60 - len(seen))
        assert [change.entry.value for change in seen if isinstance(change, Put)] == [
            str(i).encode() for i in range(60)
        ]
        await store.close()
    await writer.close()


async def test_a_write_whose_answer_was_lost_is_known_to_be_ours(shared_etcd: Etcd) -> None:
    url = fresh_url(shared_etcd)
    direct = EtcdStore(url)
    async with Proxy(shared_etcd.endpoint).running() as proxy:
        store = EtcdStore(replace(url, endpoints=(proxy.endpoint,)))
        await store.get("warm-up")
        proxy.lose_answer_to(b"7777")
        setting = asyncio.create_task(store.compare_and_set("counter", b"7777", expect=0))
        entry = await until_key(direct, "counter", lambda entry: entry is not None)
        assert not setting.done()
        proxy.cut()
        assert entry is not None
        assert await setting == entry.revision == entry.create_revision
        assert await direct.get("counter") == entry  # it was written once

        # The same bytes by somebody else are not ours.
        await direct.compare_and_set("counter", b"8888", expect=entry.revision)
        assert await store.compare_and_set("counter", b"8888", expect=entry.revision) is None

        proxy.lose_answer_to(b"9999")
        both = {"one": (b"9999", 0), "two": (b"9999", 0)}
        swapping = asyncio.create_task(store.compare_and_set_all(both))
        entry = await until_key(direct, "two", lambda entry: entry is not None)
        assert not swapping.done()
        proxy.cut()
        assert entry is not None
        assert await swapping == entry.revision == entry.create_revision
        assert await store.compare_and_set_all(both) is None

        proxy.lose_answer_to(b"counter")
        deleting = asyncio.create_task(store.delete("counter"))
        await until_key(direct, "counter", lambda entry: entry is None)
        assert not deleting.done()
        proxy.cut()
        assert await deleting
        await store.close()
    await direct.close()


async def test_closing_ends_calls_under_way_as_failed_not_as_cancelled(shared_etcd: Etcd) -> None:
    """gRPC cancels them, and whoever waited looked as if somebody had cancelled him."""
    url = fresh_url(shared_etcd)
    direct = EtcdStore(url)
    async with Proxy(shared_etcd.endpoint).running() as proxy:
        store = EtcdStore(replace(url, endpoints=(proxy.endpoint,)), timeout_s=60.0)
        await store.get("warm-up")
        proxy.lose_answer_to(b"7777")
        putting = asyncio.create_task(store.put("a", b"7777"))
        await until_key(direct, "a", lambda entry: entry is not None)  # nothing comes back from now on
        getting, given_up = asyncio.create_task(store.get("a")), asyncio.create_task(store.get("a"))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await store.close()
        for call, indefinite in ((putting, True), (getting, False)):
            with pytest.raises(StoreUnavailable, match="is closed") as failed:
                await call
            assert failed.value.indefinite is indefinite
    await direct.close()


ODD = (b"workers/\xff", b"drains/\x01", b"last-worker/\xe2\x80\xae", b"/", b"rates/" + b"x" * 600)


async def _put_odd(store: EtcdStore) -> None:
    """Writes a key that our client refuses, as any other client of etcd with a right to the prefix can."""
    (start, _), _ = store.spans("")
    for odd in ODD:
        await store.call(lambda m: m.kv.Put, rpc.PutRequest(key=start + odd, value=b'{"incarnation": 1, "id": 1}'))


async def test_impossible_keys_are_left_out(shared_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    store = EtcdStore(fresh_url(shared_etcd))
    first = await store.put("a", b"1")
    await _put_odd(store)
    for _ in range(2):
        assert [entry.key for entry in (await store.list("")).entries] == ["a"]
    async with aclosing(store.watch("", after=first)) as changes:
        (start, _), _ = store.spans("")
        for odd in ODD:
            await store.call(lambda m: m.kv.DeleteRange, rpc.DeleteRangeRequest(key=start + odd))
        last = await store.put("b", b"2")
        assert [change.revision for change in await take(changes, 1)] == [last]
    found = [record.message for record in caplog.records if "left out" in record.message]
    assert len(found) == len(ODD)
    assert all(line.isprintable() and len(line) < 1000 for line in found)
    await _put_odd(store)
    await shared_etcd.compact()
    async with aclosing(store.watch("", after=first)) as changes:
        (reset,) = await take(changes, 1)
        assert isinstance(reset, Reset)
        assert [entry.key for entry in reset.listing.entries] == ["a", "b"]
    await store.close()


async def test_the_log_names_only_some_of_the_impossible_keys(
    shared_etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    store = EtcdStore(fresh_url(shared_etcd))
    (start, _), _ = store.spans("")
    puts = [rpc.PutRequest(key=start + b"workers/\xff%d" % i, value=b"") for i in range(100)]
    await store.call(lambda m: m.kv.Txn, rpc.TxnRequest(success=[rpc.RequestOp(request_put=put) for put in puts]))
    assert (await store.list("")).entries == ()
    assert sum("left out" in record.message for record in caplog.records) == 64
    await store.close()


@pytest.mark.parametrize("first", [True, False])
async def test_a_coordinator_keeps_leading_beside_impossible_keys(shared_etcd: Etcd, first: bool) -> None:
    """Any worker's certificate may write them: one ended every coordinator, and each that was started."""
    store, stop = EtcdStore(fresh_url(shared_etcd)), asyncio.Event()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
    if first:
        await _put_odd(store)
    leads = asyncio.create_task(run_coordinator(store, name="c", stop=stop))
    try:
        if not first:
            await until_key(store, "election", lambda entry: entry is not None)
            await _put_odd(store)
        session = await register_server(store, name="a", address="h:1", on_lost=lambda reason: None)
        await until_key(store, "view", lambda entry: entry is not None or leads.done())
        assert not leads.done()
        await session.close()
    finally:
        stop.set()
        await asyncio.wait_for(leads, 20)
        await store.close()


async def test_endpoints_that_are_dead_or_silent_are_passed_over(shared_etcd: Etcd) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    url = fresh_url(shared_etcd)
    mute = "{}:{}".format(*silent.sockets[0].getsockname())
    with dead_port() as dead:
        store = await open_store(f"etcd://127.0.0.1:{dead},{mute},{shared_etcd.endpoint}/{url.cluster}", 20.0)
        revision = await store.put("a", b"1")
        async with aclosing(store.watch("a", after=revision - 1)) as changes:
            await take(changes, 1)
        await store.close()
    silent.close()


async def test_a_call_with_a_limit_of_its_own_is_not_spent_on_an_endpoint_that_hangs(
    new_etcd: NewEtcd, shared_etcd: Etcd
) -> None:
    """Whoever gave up before an attempt did asked the same member again, each time in vain."""
    frozen, url = new_etcd(), fresh_url(shared_etcd)
    store = EtcdStore(replace(url, endpoints=(frozen.endpoint, shared_etcd.endpoint)), timeout_s=60.0)
    writer = EtcdStore(url)
    await writer.put("view", b"1")
    assert frozen.process is not None
    frozen.process.send_signal(signal.SIGSTOP)
    entry = await store.get("view", timeout_s=20.0)
    assert entry is not None
    assert entry.value == b"1"
    await store.close()
    await writer.close()


async def test_a_store_moves_to_the_next_endpoint_and_takes_its_watches_along(shared_etcd: Etcd) -> None:
    url = fresh_url(shared_etcd)
    async with Proxy(shared_etcd.endpoint).running() as proxy:
        store = EtcdStore(replace(url, endpoints=(proxy.endpoint, shared_etcd.endpoint)))
        async with aclosing(store.watch("a", after=await store.put("a", b"1"))) as changes:
            await store.put("a", b"2")
            await take(changes, 1)
            proxy.refuse = True
            proxy.cut()
            await store.put("a", b"3")
            (change,) = await take(changes, 1)
            assert isinstance(change, Put)
            assert change.entry.value == b"3"
        await store.close()


async def test_an_unreachable_store_is_reported_with_its_endpoints_in_time() -> None:
    began, seeded = time.monotonic(), random.getstate()
    with dead_port() as dead, pytest.raises(StoreUnavailable, match=f"127.0.0.1:{dead}: .*[Cc]onnection refused"):
        await open_store(f"etcd://127.0.0.1:{dead}/demo", 1.0)
    assert random.getstate() == seeded, "what a program has seeded stays as it is"
    assert time.monotonic() - began < 30  # the point is that it ends; the machine may be busy


async def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the ca file .*missing.pem"):
        await open_store(f"etcd://127.0.0.1/demo?ca={tmp_path}/missing.pem", 1.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A CA, and one certificate for the address 127.0.0.1 that serves both sides."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)

    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca")
    openssl(f"req {key} -keyout etcd.key -out etcd.csr -subj /CN=etcd")
    openssl("x509 -req -in etcd.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out etcd.pem -days 2 -extfile extensions")
    return TlsFiles(*(str(folder / name) for name in ("ca.pem", "etcd.pem", "etcd.key")))


async def test_tls_with_certificates_on_both_sides(new_etcd: NewEtcd, certificates: TlsFiles) -> None:
    etcd = new_etcd(tls=certificates)
    url = replace(fresh_url(etcd), tls=certificates)
    store = await open_store(str(url), 20.0)
    await store.put("a", b"1")
    etcd.kill()
    etcd.start()
    entry = await store.get("a")
    assert entry is not None
    assert entry.value == b"1"
    await store.close()
    for tls, says in ((None, "If it wants TLS, name files in the URL"), (TlsFiles(ca=certificates.ca), etcd.endpoint)):
        with pytest.raises(StoreUnavailable, match=says):
            await open_store(str(replace(url, tls=tls)), 1.0)


@pytest.mark.slow
async def test_a_frozen_endpoint_is_noticed_by_a_silent_watch(new_etcd: NewEtcd, shared_etcd: Etcd) -> None:
    frozen = new_etcd()
    url = fresh_url(frozen)
    store = EtcdStore(replace(url, endpoints=(frozen.endpoint, shared_etcd.endpoint)))
    async with aclosing(store.watch("a", after=await store.put("b", b""))) as changes:
        await store.put("a", b"1")
        await take(changes, 1)
        assert frozen.process is not None
        frozen.process.send_signal(signal.SIGSTOP)
        other = EtcdStore(replace(url, endpoints=(shared_etcd.endpoint,)))
        (moved,) = await take(changes, 1)  # to another etcd, which has none of it
        assert isinstance(moved, Reset)
        await other.close()
    await store.close()


async def test_the_memory_store_forgets_old_changes_and_resets_late_watches() -> None:
    store = MemoryStore()
    for i in range(10_000):
        last = await store.put("a", str(i).encode())
    async with aclosing(store.watch("a", after=1)) as changes:
        (reset,) = await take(changes, 1)
        assert isinstance(reset, Reset)
        assert reset.revision == last
    async with aclosing(store.watch("a", after=last - 10)) as changes:
        assert [change.revision for change in await take(changes, 10)] == list(range(last - 9, last + 1))
    store.compact()
    async with aclosing(store.watch("a", after=last - 1)) as changes:
        assert isinstance((await take(changes, 1))[0], Reset)
    await store.close()


async def test_certificates_that_were_replaced_are_used_and_watches_go_on(
    new_etcd: NewEtcd, certificates: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.etcd.LOOK_S", 0.0)
    mine = TlsFiles(
        *(str(shutil.copy(path, tmp_path)) for path in (certificates.ca, certificates.cert, certificates.key))
    )
    etcd = new_etcd(tls=certificates)
    store = EtcdStore(replace(fresh_url(etcd), tls=mine))
    async with aclosing(store.watch("a", after=await store.put("a", b"1"))) as changes:
        await store.put("a", b"2")
        await take(changes, 1)
        before = store._members[etcd.endpoint].channel
        shutil.copy(certificates.key, mine.cert)  # as if it were half written
        await store.put("a", b"3")
        assert store._members[etcd.endpoint].channel is before
        shutil.copy(certificates.cert, mine.cert)
        await store.put("a", b"4")
        assert store._members[etcd.endpoint].channel is not before
        assert [c.entry.value for c in await take(changes, 2) if isinstance(c, Put)] == [b"3", b"4"]
    await store.close()


async def test_a_watch_is_reset_when_etcd_was_replaced_meanwhile_however_high_its_revision_is(
    new_etcd: NewEtcd,
) -> None:
    """Its revisions had come to where the other's were before the watch was there again: what it had until then was
    never told, and what it lacked neither. A coordinator that stood by waited for ever for a leader that was gone."""
    etcd = new_etcd()
    url = fresh_url(etcd)
    async with Proxy(etcd.endpoint).running() as proxy:
        writer, store = EtcdStore(url), EtcdStore(replace(url, endpoints=(proxy.endpoint,)))
        await writer.put("old", b"1")
        last = await writer.put("a", b"old")
        async with aclosing(store.watch("", after=last - 1)) as changes:
            await take(changes, 1)
            proxy.refuse = True
            proxy.cut()
            etcd.kill()
            shutil.rmtree(etcd.folder)
            await asyncio.to_thread(etcd.start)
            for _ in range(last + 1):
                await writer.put("new", b"1")
            proxy.refuse = False
            (reset,) = await take(changes, 1)
            assert isinstance(reset, Reset)
            assert [entry.key for entry in reset.listing.entries] == ["new"]
        await store.close()
        await writer.close()


async def test_the_release_that_answers_is_known_and_without_an_answer_it_is_not(new_etcd: NewEtcd) -> None:
    etcd = new_etcd()
    store = EtcdStore(fresh_url(etcd), timeout_s=20.0)
    assert re.match(r"\d+\.\d+\.\d+", await release_of(store))
    await store.close()
    assert await release_of(store) == await release_of(MemoryStore("c")) == ""
