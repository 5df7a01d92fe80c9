"""The store's laws in memory, for the simulator and fast tests.

Leases run on the event loop's clock, so a loop with virtual time drives them. Watchers read one bounded history; one
that falls behind it gets a `Reset`, as after a compaction in etcd.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.core.errors import LeaseLost, StoreUnavailable
from coordinator.core.names import check_name
from coordinator.core.store import (
    Change,
    Delete,
    Entry,
    Guard,
    Listing,
    Put,
    Reset,
    check_key,
    check_value,
    check_writes,
)

HISTORY_MAX = 4096
WOKEN = 256  # so many watchers are all woken by each change; of more only those whose prefix it has


@dataclass
class _Lease:
    ttl_s: float
    timer: asyncio.TimerHandle
    keys: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Watcher:
    """seen: it has had all changes below its prefix up to this revision; changed: there may be more."""

    prefix: str
    seen: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Data:
    """The data that all clients of one memory store share."""

    revision: int = 1
    compacted: int = 0  # changes up to this revision are no longer in the history
    entries: dict[str, Entry] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)  # of all entries, sorted
    owner: dict[str, int] = field(default_factory=dict)  # key -> lease
    leases: dict[int, _Lease] = field(default_factory=dict)
    last_lease: int = 0
    history: list[Put | Delete] = field(default_factory=list)
    watchers: dict[_Watcher, None] = field(default_factory=dict)  # woken in the order in which they came
    watching: dict[str, dict[_Watcher, None]] = field(default_factory=dict)  # the same, by prefix


class MemoryStore:
    """A `Store` in this process's memory. `client()` makes further clients of the same data."""

    def __init__(self, cluster: str = "test", *, shared: _Data | None = None) -> None:
        self._cluster = check_name("cluster", cluster)
        self._data = _Data() if shared is None else shared
        self._closed = False
        self._watching: dict[_Watcher, None] = {}

    def client(self) -> MemoryStore:
        """Makes another client of the same data."""
        return MemoryStore(self._cluster, shared=self._data)

    def compact(self) -> None:
        """Forgets all history: watchers that have not seen it get a `Reset`."""
        self._data.compacted = self._data.revision
        self._data.history.clear()

    @property
    def cluster(self) -> str:
        """The cluster whose keys this store sees."""
        return self._cluster

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        """See `Store.get`."""
        self._check_open()
        return self._data.entries.get(check_key(key))

    async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
        """See `Store.list`."""
        self._check_open()
        return self._listing(prefix)

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        """See `Store.put`."""
        self._check_open()
        return self._write(check_key(key), check_value(key, value), lease)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expect: int,
        lease: int | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        """See `Store.compare_and_set`."""
        self._check_open()
        check_value(check_key(key), value)
        if self._revision(key) != expect:
            return None
        return self._write(key, value, lease) if self._holds(guard) else None

    async def compare_and_set_all(
        self,
        writes: Mapping[str, tuple[bytes, int | None]],
        *,
        unchanged: Entry | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        """See `Store.compare_and_set_all`."""
        self._check_open()
        check_writes(writes)
        expected = {check_key(key): expect for key, (_, expect) in writes.items()}
        if unchanged is not None and self._data.entries.get(unchanged.key) != unchanged:
            return None
        if any(expect not in (None, self._revision(key)) for key, expect in expected.items()):
            return None
        if not self._holds(guard):
            return None
        self._data.revision += 1
        self._announce([self._enter(key, value, None) for key, (value, _) in writes.items()])
        return self._data.revision

    async def delete(self, key: str, *, expect: int | None = None, guard: Guard | None = None) -> bool:
        """See `Store.delete`."""
        self._check_open()
        entry = self._data.entries.get(check_key(key))
        if entry is None or expect not in (None, entry.revision) or not self._holds(guard):
            return False
        self._remove([key])
        return True

    async def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        self._check_open()
        if not 0 < ttl_s < 1e9:
            raise ValueError(f"a lease lives a positive number of seconds, not {ttl_s!r}")
        self._data.last_lease += 1
        lease = self._data.last_lease
        self._data.leases[lease] = _Lease(ttl_s, self._timer(lease, ttl_s))
        return lease

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        self._check_open()
        held = self._lease(lease)
        held.timer.cancel()
        held.timer = self._timer(lease, held.ttl_s)
        return held.ttl_s

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        self._check_open()
        self._end_lease(lease)

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """See `Store.watch`."""
        data, watcher = self._data, _Watcher(prefix, after)
        self._watching[watcher] = data.watchers[watcher] = None
        data.watching.setdefault(prefix, {})[watcher] = None
        try:
            while not self._closed:
                watcher.changed.clear()
                changes = self._since(prefix, watcher.seen)
                watcher.seen = max(watcher.seen, data.revision)
                for change in changes:
                    yield change
                if not changes:
                    await watcher.changed.wait()
        finally:
            self._watching.pop(watcher)
            data.watchers.pop(watcher)
            alike = data.watching[prefix]
            alike.pop(watcher)
            if not alike:
                del data.watching[prefix]

    async def close(self) -> None:
        """See `Store.close`."""
        self._closed = True
        for watcher in list(self._watching):
            watcher.changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this memory store is closed")

    def _listing(self, prefix: str) -> Listing:
        keys, first = self._data.keys, bisect_left(self._data.keys, prefix)
        last = first
        while last < len(keys) and keys[last].startswith(prefix):
            last += 1
        entries = map(self._data.entries.__getitem__, keys[first:last])
        return Listing(tuple(entries), self._data.revision)

    def _since(self, prefix: str, seen: int) -> Sequence[Change]:
        if seen < self._data.compacted:
            return [Reset(self._listing(prefix))]
        first = bisect_right(self._data.history, seen, key=lambda change: change.revision)
        return [change for change in self._data.history[first:] if _key(change).startswith(prefix)]

    def _revision(self, key: str) -> int:
        entry = self._data.entries.get(key)
        return 0 if entry is None else entry.revision

    def _write(self, key: str, value: bytes, lease: int | None) -> int:
        if lease is not None:
            self._lease(lease)
        self._data.revision += 1
        self._announce([self._enter(key, value, lease)])
        return self._data.revision

    def _enter(self, key: str, value: bytes, lease: int | None) -> Put:
        """Makes an entry of the newest revision."""
        data = self._data
        held = None if lease is None else self._lease(lease)
        self._disown(key)
        if held is not None and lease is not None:
            held.keys.add(key)
            data.owner[key] = lease
        old = data.entries.get(key)
        entry = Entry(key, bytes(value), data.revision, data.revision if old is None else old.create_revision)
        if old is None:
            insort(data.keys, key)
        data.entries[key] = entry
        return Put(entry)

    def _remove(self, keys: Sequence[str]) -> None:
        self._data.revision += 1
        for key in keys:
            self._disown(key)
            del self._data.entries[key], self._data.keys[bisect_left(self._data.keys, key)]
        self._announce([Delete(key, self._data.revision) for key in keys])

    def _announce(self, changes: Sequence[Put | Delete]) -> None:
        data = self._data
        data.history.extend(changes)
        if len(data.history) > 2 * HISTORY_MAX:
            data.compacted = data.history[-HISTORY_MAX - 1].revision
            first = bisect_right(data.history, data.compacted, key=lambda change: change.revision)
            del data.history[:first]
            for watcher in data.watchers:
                if not watcher.changed.is_set():  # nothing below its prefix has changed
                    watcher.seen = max(watcher.seen, data.compacted)
        if len(data.watchers) <= WOKEN:
            woken = list(data.watchers)
        else:
            woken = [watcher for change in changes for watcher in self._watchers_of(_key(change))]
        for watcher in woken:
            watcher.changed.set()

    def _watchers_of(self, key: str) -> Iterator[_Watcher]:
        for end in range(len(key) + 1):
            yield from self._data.watching.get(key[:end], ())

    def _holds(self, guard: Guard | None) -> bool:
        held = None if guard is None else self._data.entries.get(check_key(guard.key))
        return guard is None or (held is not None and held.create_revision == guard.create_revision)

    def _lease(self, lease: int) -> _Lease:
        if lease not in self._data.leases:
            raise LeaseLost(f"lease {lease:x} has ended")
        return self._data.leases[lease]

    def _timer(self, lease: int, ttl_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s, self._end_lease, lease)

    def _disown(self, key: str) -> None:
        lease = self._data.owner.pop(key, None)
        if lease is not None:
            self._data.leases[lease].keys.discard(key)

    def _end_lease(self, lease: int) -> None:
        held = self._data.leases.get(lease)
        if held is None:
            return
        held.timer.cancel()
        if held.keys:
            self._remove(sorted(held.keys))
        del self._data.leases[lease]


def _key(change: Put | Delete) -> str:
    return change.entry.key if isinstance(change, Put) else change.key
