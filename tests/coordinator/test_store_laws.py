"""The laws of the coordination store, on every store that claims to keep them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from coordinator import memory
from coordinator.core.errors import LeaseLost, StoreUnavailable
from coordinator.core.store import KEY_MAX, VALUE_MAX, WRITES_MAX, Delete, Entry, Guard, Put, Reset
from tests.coordinator.conftest import Clients
from tests.coordinator.support import take, until


async def test_a_written_value_can_be_read(clients: Clients) -> None:
    async with clients() as store:
        assert await store.get("a") is None
        first = await store.put("a", b"1")
        second = await store.put("a", b"")
        assert second > first
        assert await store.get("a") == Entry("a", b"", second, first)


async def test_a_listing_is_sorted_by_key_and_of_one_revision(clients: Clients) -> None:
    async with clients() as store:
        assert (await store.list("")).entries == ()
        for key in ("servers/b", "servers/a", "serverside", "view"):
            revision = await store.put(key, key.encode())
        listing = await store.list("servers/")
        assert [entry.key for entry in listing.entries] == ["servers/a", "servers/b"]
        assert listing.revision == revision
        assert [entry.key for entry in (await store.list("")).entries] == [
            "servers/a",
            "servers/b",
            "serverside",
            "view",
        ]


async def test_compare_and_set_succeeds_only_at_the_expected_revision(clients: Clients) -> None:
    async with clients() as store:
        first = await store.compare_and_set("a", b"1", expect=0)
        assert first is not None
        assert await store.compare_and_set("a", b"1", expect=0) is None
        second = await store.compare_and_set("a", b"2", expect=first)
        assert second is not None
        assert await store.compare_and_set("a", b"3", expect=first) is None
        assert await store.compare_and_set("b", b"3", expect=first) is None
        assert await store.get("a") == Entry("a", b"2", second, first)


async def test_many_keys_are_written_together_or_not_at_all(clients: Clients) -> None:
    async with clients() as store:
        config = await store.put("config", b"1")
        remaining = await store.get("config")
        made = await store.compare_and_set_all({"a": (b"1", 0), "b": (b"2", 0)}, unchanged=remaining)
        assert made is not None
        assert made > config
        assert (await store.list("")).entries[:2] == (Entry("a", b"1", made, made), Entry("b", b"2", made, made))
        assert await store.compare_and_set_all({"c": (b"3", 0), "b": (b"4", 0)}) is None
        assert remaining is not None
        assert await store.compare_and_set_all({"c": (b"3", 0)}, unchanged=replace(remaining, value=b"2")) is None
        await store.put("config", b"2")
        assert await store.compare_and_set_all({"a": (b"5", made)}, unchanged=remaining) is None
        again = await store.compare_and_set_all({"a": (b"6", made), "c": (b"7", 0)})
        assert again is not None
        assert [(e.key, e.value) for e in (await store.list("")).entries] == [
            ("a", b"6"), ("b", b"2"), ("c", b"7"), ("config", b"2"),
        ]  # fmt: skip
        too_many = {f"k{i}": (b"", 0) for i in range(WRITES_MAX + 1)}
        for several in (dict[str, tuple[bytes, int]](), too_many, {"k": (bytes(VALUE_MAX), 0), "l": (b"1", 0)}):
            with pytest.raises(ValueError, match=r"at once|bytes"):
                await store.compare_and_set_all(several)
        most = {f"k{i}": (b"", 0) for i in range(WRITES_MAX)}
        async with aclosing(store.watch("k", after=again)) as changes:
            revision = await store.compare_and_set_all(most)
            found = await take(changes, WRITES_MAX)
        assert {change.revision for change in found} == {revision}


async def test_only_one_of_many_writers_wins(clients: Clients) -> None:
    async with clients() as one, clients() as other:
        outcomes = await asyncio.gather(
            *(store.compare_and_set("a", b"same", expect=0) for store in (one, other) for _ in range(8))
        )
        assert sum(outcome is not None for outcome in outcomes) == 1


async def test_a_write_needs_its_guard_to_hold(clients: Clients) -> None:
    async with clients() as store:
        leadership = await store.put("election", b"me")
        guard = Guard("election", leadership)
        assert await store.compare_and_set("view", b"1", expect=0, guard=guard) is not None
        await store.put("election", b"me, renewed")
        written = await store.get("view")
        assert written is not None
        assert await store.compare_and_set("view", b"2", expect=written.revision, guard=guard) is not None
        await store.delete("election")
        await store.put("election", b"another")
        written = await store.get("view")
        assert written is not None
        assert await store.compare_and_set("view", b"3", expect=written.revision, guard=guard) is None
        assert await store.compare_and_set("new", b"3", expect=0, guard=Guard("nobody", leadership)) is None


async def test_deleted_keys_are_gone(clients: Clients) -> None:
    async with clients() as store:
        assert not await store.delete("a")
        revision = await store.put("a", b"1")
        assert not await store.delete("a", expect=revision - 1)
        assert await store.delete("a", expect=revision)
        assert await store.get("a") is None
        again = await store.put("a", b"2")
        assert await store.get("a") == Entry("a", b"2", again, again)
        assert await store.delete("a")


async def test_a_lease_takes_its_keys_with_it(clients: Clients) -> None:
    async with clients() as store:
        lease = await store.grant(60)
        assert 0 < await store.keep_alive(lease) <= 60
        await store.put("a", b"1", lease=lease)
        await store.compare_and_set("b", b"1", expect=0, lease=lease)
        await store.put("kept", b"1", lease=lease)
        await store.put("kept", b"2")
        await store.revoke(lease)
        assert [entry.key for entry in (await store.list("")).entries] == ["kept"]
        await store.revoke(lease)
        with pytest.raises(LeaseLost):
            await store.keep_alive(lease)
        with pytest.raises(LeaseLost):
            await store.put("a", b"1", lease=lease)
        with pytest.raises(LeaseLost):
            await store.compare_and_set("a", b"1", expect=0, lease=lease)


async def test_a_lease_that_is_not_renewed_runs_out(clients: Clients) -> None:
    async with clients() as store:
        lease = await store.grant(0.3)
        after = await store.put("a", b"1", lease=lease)
        async with aclosing(store.watch("a", after=after)) as changes:
            (gone,) = await take(changes, 1)
        assert gone == Delete("a", gone.revision)
        assert gone.revision > after
        with pytest.raises(LeaseLost):
            await store.keep_alive(lease)


async def test_a_watch_tells_every_change_once_in_order(clients: Clients) -> None:
    async with clients() as store, clients() as writer:
        before = await writer.put("servers/a", b"0")
        await writer.put("servers/a", b"1")
        await writer.put("other", b"x")
        async with aclosing(store.watch("servers/", after=before)) as changes:
            assert [change.entry.value for change in await take(changes, 1) if isinstance(change, Put)] == [b"1"]
            for i in range(2, 50):
                await writer.put("servers/a", str(i).encode())
            await writer.delete("servers/a")
            seen = await take(changes, 49)
        assert [change.entry.value for change in seen[:-1] if isinstance(change, Put)] == [
            str(i).encode() for i in range(2, 50)
        ]
        assert isinstance(seen[-1], Delete)
        revisions = [change.revision for change in seen]
        assert revisions == sorted(set(revisions))


async def test_of_many_watches_each_tells_its_own_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a key that nobody has changed for longer than the history reaches."""
    monkeypatch.setattr(memory, "WOKEN", 3)
    monkeypatch.setattr(memory, "HISTORY_MAX", 4)
    store = memory.MemoryStore()
    prefixes = ["a/", "a/1", "b/", "b/2", "", "rare"]
    seen: dict[str, list[str]] = {prefix: [] for prefix in prefixes}

    async def watch(prefix: str) -> None:
        async for change in store.watch(prefix, after=1):
            assert isinstance(change, Put), change
            seen[prefix].append(change.entry.key)

    tasks = [asyncio.create_task(watch(prefix)) for prefix in prefixes]
    await asyncio.sleep(0)
    keys = [f"{'ab'[i % 2]}/{i % 3}" for i in range(40)] + ["rare"]
    for key in keys:
        await store.put(key, b"x")
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == {prefix: [key for key in keys if key.startswith(prefix)] for prefix in prefixes}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_watch_from_zero_tells_everything(clients: Clients) -> None:
    async with clients() as store:
        await store.put("a", b"1")
        await store.put("a", b"2")
        async with aclosing(store.watch("", after=0)) as changes:
            state = b""
            while state != b"2":
                (change,) = await take(changes, 1)
                entries = change.listing.entries if isinstance(change, Reset) else ()
                for entry in (change.entry,) if isinstance(change, Put) else entries:
                    state = entry.value


async def test_closing_ends_watches_and_refuses_calls(clients: Clients) -> None:
    async with clients() as store:
        heard = asyncio.Event()

        async def follow() -> None:
            async for _ in store.watch("a", after=0):
                heard.set()

        watching = asyncio.create_task(follow())
        await store.put("a", b"1")
        await until(heard.is_set)
        await store.close()
        await asyncio.wait_for(watching, 10)
        with pytest.raises(StoreUnavailable):
            await store.get("a")


async def test_unusable_keys_and_values_are_refused(clients: Clients) -> None:
    async with clients() as store:
        for key in ("", "/a", ".a", "a\n", "x" * (KEY_MAX + 1)):
            with pytest.raises(ValueError, match="unusable key"):
                await store.put(key, b"")
        with pytest.raises(ValueError, match="bytes"):
            await store.put("a", bytes(VALUE_MAX + 1))
        for ttl_s in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                await store.grant(ttl_s)
        await store.put("a", bytes(VALUE_MAX))
