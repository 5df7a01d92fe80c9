"""The laws of the coordination store. `etcd` and `memory` keep them; one test-suite checks both.

1. One revision counter: each mutation gets a revision above all before it. Reads are linearizable.
2. Keys are relative to one cluster: non-empty text, at most KEY_MAX characters, parts separated by "/".
   What others have written past this under keys that are none is neither listed nor watched.
3. `compare_and_set`, `compare_and_set_all` and `delete` are atomic over keys and guard. A lost race is a value (None,
   False). A write whose outcome is unknown is read back; only if that fails too, it raises
   `StoreUnavailable(indefinite=True)`.
4. A lease takes its keys with it when it runs out. A key written again belongs to the lease of the last write.
5. A watch yields every change after a revision, in order, once; or a `Reset` whose listing replaces all the watcher
   knew. It outlives outages of the store and ends only when the store object is closed.
6. Every call ends within the store's time-out: with an answer, or with `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from coordinator.core.errors import TooLarge

KEY_MAX = 512
VALUE_MAX = 1 << 20  # etcd refuses requests above 1.5 MiB unless configured otherwise
WRITES_MAX = 60  # keys that one call writes; etcd takes 128 operations at once, two for each key


@dataclass(frozen=True)
class Entry:
    """A key's present state. `revision` is of its last write, `create_revision` of the write that made it exist."""

    key: str
    value: bytes
    revision: int
    create_revision: int


@dataclass(frozen=True)
class Listing:
    """All keys below a prefix, ordered by key, as they were at `revision`."""

    entries: tuple[Entry, ...]
    revision: int


class Guard(NamedTuple):
    """A condition of a write, the fencing token of an office: `key` exists, and was created at `create_revision`."""

    key: str
    create_revision: int


@dataclass(frozen=True)
class Put:
    """A key was written."""

    entry: Entry

    @property
    def revision(self) -> int:
        """The revision of the write."""
        return self.entry.revision


@dataclass(frozen=True)
class Delete:
    """A key was deleted, by a call or because its lease ended."""

    key: str
    revision: int


@dataclass(frozen=True)
class Reset:
    """Changes since the last one are lost, such as after a compaction; `listing` is the state now."""

    listing: Listing

    @property
    def revision(self) -> int:
        """The revision that the listing shows."""
        return self.listing.revision


Change: TypeAlias = Put | Delete | Reset


class Store(Protocol):
    """A client of the coordination store, bound to one cluster. For one event loop.

    Every method may raise `StoreUnavailable`, ValueError for an unusable key, `TooLarge` for a value above
    VALUE_MAX bytes.
    """

    @property
    def cluster(self) -> str:
        """The cluster whose keys this store sees."""

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        """Returns the entry under `key`, None if absent. timeout_s: bounds this call; 0: the store's time-out."""

    async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
        """Returns all entries whose key begins with `prefix`, as of one revision; "" means the whole cluster.
        timeout_s: as for `get`, of each page."""

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        """Writes and returns the revision. For keys with one writer: after an outage it may have been written twice.

        Raises LeaseLost if `lease` no longer exists.
        """

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
        """Writes if the key's revision is `expect` (0: absent) and the guard holds. Returns the new revision, or None
        if not.

        timeout_s: as for `get`, for a value that must not be written late.

        None can also mean that this write did happen, during an outage, and somebody has replaced it since. Raises
        LeaseLost if `lease` no longer exists.
        """

    async def compare_and_set_all(
        self,
        writes: Mapping[str, tuple[bytes, int | None]],
        *,
        unchanged: Entry | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        """Writes all of these values, or none, if each key's revision is the one beside its value (0: absent; None:
        whatever it is, but not of the first key) and the guard holds. Returns the revision of all writes, or None, as
        `compare_and_set` does.

        unchanged: an entry that must have the same revision and the same value: another store may have come as far.
        timeout_s: as for `compare_and_set`.
        Raises ValueError for no key, for more than `WRITES_MAX`, or for more than VALUE_MAX bytes together.
        """

    async def delete(self, key: str, *, expect: int | None = None, guard: Guard | None = None) -> bool:
        """Deletes the key, if `expect` is None or its revision, and the guard holds. False if nothing was deleted.

        After an outage within the call, a key that is gone counts as deleted by us.
        """

    async def grant(self, ttl_s: float) -> int:
        """Returns a new lease, which lives `ttl_s` seconds (etcd rounds up to whole seconds, at least two) beyond each
        renewal."""

    async def keep_alive(self, lease: int) -> float:
        """Renews a lease once; returns the seconds left, counted from a moment after this call began. Raises LeaseLost
        if it has ended."""

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; does nothing if it has ended already."""

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """Yields the changes below `prefix` with revisions above `after`. Close the generator (`aclose`) to stop."""

    async def close(self) -> None:
        """Ends all watches and frees the connection. Leases are left to run out."""


def check_key(key: object) -> str:
    """Returns the key if it is usable. Raises ValueError otherwise."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_MAX or key[0] in "/." or not key.isprintable():
        raise ValueError(f"unusable key {key!r}: 1 to {KEY_MAX} printable characters, not beginning with '/' or '.'")
    return key


def check_writes(writes: Mapping[str, tuple[bytes, int | None]]) -> None:
    """Raises ValueError for writes that no call takes."""
    if not 0 < len(writes) <= WRITES_MAX:
        raise ValueError(f"{len(writes)} keys cannot be written at once: 1 to {WRITES_MAX} can")
    check_value(next(iter(writes)), b"".join([value for value, _ in writes.values()]))


def check_value(key: str, value: bytes) -> bytes:
    """Returns the value if it fits. Raises TooLarge otherwise."""
    if len(value) > VALUE_MAX:
        raise TooLarge(f"the value of {key!r} has {len(value)} bytes; the store takes {VALUE_MAX} at most")
    return value
