"""The store's laws on etcd.

Of aetcd this uses the generated messages and stubs, over channels of its own: with TLS, one for each endpoint, and a
deadline on every call. A call that fails on one endpoint goes to the next until the time-out; a watch does the same for
as long as it takes, and resumes after the last revision that it has yielded.

Everything of a cluster is below `elasticps/<cluster>/`: its keys below `keys/`, and below `by/` a mark of the last
compare-and-set of each key. The mark is written in the same transaction, and tells whether a write without an answer
was this client's, even when two clients write the same bytes.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import tenacity
from aetcd import rpc
from grpc.aio import EOF, AioRpcError  # type: ignore[attr-defined]  # grpc-stubs lacks EOF

from coordinator.core import fields
from coordinator.core.errors import CoordinationError, LeaseLost, StoreUnavailable
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
from coordinator.core.url import ClusterUrl
from coordinator.etcd_channel import (
    Member,
    RevisionGone,
    explain,
    open_member,
    raise_definite,
    signature,
    tls_credentials,
)
from coordinator.grpc_limits import use_grpc

log = fields.logger(__name__)

ATTEMPT_S = 2.0  # the longest that one endpoint may take to answer before the next is asked
PAGE_KEYS = 1000  # of one answer: thousands of workers' records must not fill a message, nor keep etcd from others
LOOK_S = 1.0  # between looks at whether certificates were replaced
_RETRY_MAX_S = 0.5
_ODD_SHOWN = 64  # unusable keys that are logged; and how many bytes of each
_CHANCE = secrets.SystemRandom()

# A member that is cut off from the others must end a watch rather than keep it silent.
_REQUIRE_LEADER = (("hasleader", "true"),)


class _TryNext(Exception):
    """This endpoint gave no answer; another may."""


@dataclass
class _Trouble:
    """The failures of one call so far: the newest of each endpoint."""

    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        each = "; ".join(f"{address}: {why}" for address, why in self.failures.items())
        return f"etcd gave no answer for {time.monotonic() - self.began:.1f} s ({each or 'not asked yet'})"


class EtcdStore:
    """A `Store` on etcd, for the cluster that `url` names.

    `timeout_s` bounds each call, over all its attempts. Opens no connection until the first call. Raises ValueError if
    a TLS file cannot be read, ForkedProcess in a child of a process that uses gRPC.
    """

    def __init__(self, url: ClusterUrl, *, timeout_s: float = 5.0) -> None:
        if not 0 < timeout_s <= 86_400:
            raise ValueError(f"a time-out is a positive number of seconds, at most a day, not {timeout_s!r}")
        use_grpc()
        self._url = url
        self._timeout_s = timeout_s
        self._keys = f"elasticps/{url.cluster}/keys/"
        self._marks = f"elasticps/{url.cluster}/by/"
        self._credentials = None if url.tls is None else tls_credentials(url.tls)
        self._files = signature(url.tls)
        self._looked = time.monotonic()
        self._members: dict[str, Member] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # channels with certificates that were replaced
        self._at = 0  # the endpoint in use
        self._odd: set[bytes] = set()  # unusable keys that were logged
        self._closed = asyncio.Event()

    @property
    def cluster(self) -> str:
        """The cluster whose keys this store sees."""
        return self._url.cluster

    @property
    def secure(self) -> bool:
        """Whether etcd identifies clients by certificates."""
        return self._url.tls is not None

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        """See `Store.get`."""
        request = rpc.RangeRequest(key=self._key(key))
        response, _ = await self._call(lambda m: m.kv.Range, request, timeout_s=timeout_s)
        return self._entry(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str, *, timeout_s: float = 0.0) -> Listing:
        """See `Store.list`."""
        start = (self._keys + prefix).encode()
        while True:
            with suppress(RevisionGone):  # compacted away between two pages: begin again at the newest revision
                return await self._list(start, _end(start), timeout_s)

    async def _list(self, start: bytes, end: bytes, timeout_s: float) -> Listing:
        """Reads page after page, all as of the revision of the first."""
        entries: list[Entry] = []
        revision = 0  # the newest
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision)
            response, _ = await self._call(lambda m: m.kv.Range, request, timeout_s=timeout_s)
            revision = revision or response.header.revision
            entries += filter(None, map(self._entry, response.kvs))
            if not response.more:
                return Listing(tuple(entries), revision)
            start = response.kvs[-1].key + b"\0"  # the next key that there can be

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        """See `Store.put`."""
        request = rpc.PutRequest(key=self._key(key), value=check_value(key, value), lease=lease or 0)
        response, _ = await self._call(lambda m: m.kv.Put, request, writes=True)
        return int(response.header.revision)

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
        held = [] if guard is None else [_compare(self._key(guard.key), "CREATE", guard.create_revision)]
        return await self._swap({key: (check_value(key, value), expect)}, held, lease or 0, timeout_s)

    async def compare_and_set_all(
        self,
        writes: Mapping[str, tuple[bytes, int | None]],
        *,
        unchanged: Entry | None = None,
        guard: Guard | None = None,
        timeout_s: float = 0.0,
    ) -> int | None:
        """See `Store.compare_and_set_all`."""
        check_writes(writes)
        held = [] if guard is None else [_compare(self._key(guard.key), "CREATE", guard.create_revision)]
        if unchanged is not None:
            name, compare = self._key(unchanged.key), rpc.Compare
            held.append(_compare(name, "MOD", unchanged.revision))
            held.append(compare(key=name, target=compare.VALUE, result=compare.EQUAL, value=unchanged.value))
        return await self._swap(writes, held, 0, timeout_s)

    async def _swap(
        self, writes: Mapping[str, tuple[bytes, int | None]], held: Sequence[Any], lease: int, timeout_s: float
    ) -> int | None:
        """Writes all, each with a mark, if every key has its revision and what is `held` holds."""
        nonce, first = secrets.token_bytes(12), next(iter(writes))
        puts = [
            rpc.PutRequest(key=name, value=value, lease=lease)
            for key, (written, _) in writes.items()
            for name, value in ((self._key(key), written), (self._mark(key), nonce))
        ]
        expected = {key: expect for key, (_, expect) in writes.items() if expect is not None}
        request = rpc.TxnRequest(
            compare=[*(_compare(self._key(key), "MOD", expect) for key, expect in expected.items()), *held],
            success=[rpc.RequestOp(request_put=put) for put in puts],
            # All were written or none, so that the first one tells.
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=k)) for k in (self._key(first), self._mark(first))
            ],
        )
        # Trying again after an unknown outcome is safe: if the first try did it, this one compares false, and the
        # mark that comes back shows whose write it was.
        response, _ = await self._call(lambda m: m.kv.Txn, request, writes=True, timeout_s=timeout_s)
        if response.succeeded:
            return int(response.header.revision)
        found, marked = (part.response_range.kvs for part in response.responses)
        if found and marked and marked[0].value == nonce and marked[0].mod_revision == found[0].mod_revision:
            return int(found[0].mod_revision)
        return None

    async def delete(self, key: str, *, expect: int | None = None, guard: Guard | None = None) -> bool:
        """See `Store.delete`."""
        name = self._key(key)
        compare = [] if expect is None else [_compare(name, "MOD", expect)]
        if guard is not None:
            compare.append(_compare(self._key(guard.key), "CREATE", guard.create_revision))
        request = rpc.TxnRequest(
            compare=compare,
            success=[
                rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=k)) for k in (name, self._mark(key))
            ],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name))],
        )
        response, attempts = await self._call(lambda m: m.kv.Txn, request, writes=True)
        first = response.responses[0]
        if response.succeeded and first.response_delete_range.deleted:
            return True
        gone = bool(response.succeeded) or not first.response_range.kvs
        return gone and attempts > 1

    async def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        if not 0 < ttl_s < 1e9:
            raise ValueError(f"a lease lives a positive number of seconds, not {ttl_s!r}")
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        response, _ = await self._call(lambda m: m.lease.LeaseGrant, request, writes=True)
        return int(response.ID)

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)
        response, _ = await self._call(lambda m: m.keep_alive, request)
        if response.TTL <= 0:
            raise LeaseLost(f"etcd no longer knows lease {lease:x}")
        return float(response.TTL)

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        try:
            await self._call(lambda m: m.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease), writes=True)
        except LeaseLost:
            return

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        """See `Store.watch`."""
        seen, out = after, _Trouble()
        known: Any = None  # an entry that is, or was, in the store that is watched
        while not self._closed.is_set():
            at = self._at
            member = self._member(at)
            try:
                async with aclosing(self._responses(member, prefix, seen)) as responses:
                    async for response in responses:
                        if out.failures:
                            log.warning("a watch goes on", prefix=prefix, endpoint=member.address, before=out)
                            out = _Trouble()
                        if reset := await self._gap(response, prefix, seen, known):
                            seen, known = reset.revision, None
                            yield reset
                            break
                        if response.created and known is None:
                            known = await self._config()
                        for event in response.events:
                            seen = event.kv.mod_revision
                            known = event.kv if event.type == event.PUT else known
                            if change := self._change(event):
                                yield change
            except (AioRpcError, _TryNext, StoreUnavailable) as error:
                if not out.failures:
                    log.warning("a watch is broken", prefix=prefix, endpoint=member.address, error=explain(error))
                    out.began = time.monotonic()
                out.failures[member.address] = explain(error)
                out.attempts += 1
                self._rotate(at)
                await self._pause(min(_RETRY_MAX_S, 0.02 * 2 ** min(out.attempts, 6)))

    async def ping(self, timeout_s: float) -> None:
        """Makes sure that etcd answers. Raises StoreUnavailable after `timeout_s` seconds."""
        await self._call(lambda m: m.kv.Range, rpc.RangeRequest(key=self._key("config")), timeout_s=timeout_s)

    async def close(self) -> None:
        """See `Store.close`."""
        self._closed.set()
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(member.channel.close(None) for member in members), *self._leaving)

    async def release(self) -> str:
        """Returns the release of the etcd that answers, such as "3.5.9"; "" if it does not say."""
        try:
            response, _ = await self._call(lambda m: rpc.MaintenanceStub(m.channel).Status, rpc.StatusRequest())
        except CoordinationError:
            return ""
        return str(response.version)

    async def _gap(self, response: Any, prefix: str, seen: int, known: Any) -> Reset | None:
        """Returns the state now if changes after `seen` were compacted away, or if etcd has lost what this watch has
        seen, as one that was replaced has, even if it has come as far."""
        other = response.created and not await self._had(known)
        if not (response.compact_revision or other or (response.created and response.header.revision < seen)):
            return None
        listing = await self.list(prefix)
        # A member that lags behind shows an older revision too; the listing shows the newest.
        return Reset(listing) if response.compact_revision or other or listing.revision < seen else None

    async def _config(self) -> Any:
        response, _ = await self._call(lambda m: m.kv.Range, rpc.RangeRequest(key=self._key("config")))
        return response.kvs[0] if response.kvs else None

    async def _had(self, known: Any) -> bool:
        """Whether etcd had this entry at its revision; False if it cannot tell any more."""
        if known is None:
            return True
        request = rpc.RangeRequest(key=known.key, revision=known.mod_revision)
        try:
            response, _ = await self._call(lambda m: m.kv.Range, request)
        except RevisionGone:
            return False
        return bool(response.kvs) and response.kvs[0] == known

    async def _responses(self, member: Member, prefix: str, seen: int) -> AsyncGenerator[Any, None]:
        """Yields the answers of one watch on one endpoint. Raises when the stream breaks, ends with the store."""
        start = (self._keys + prefix).encode()
        create = rpc.WatchCreateRequest(key=start, range_end=_end(start), start_revision=seen + 1)
        call = member.watch.Watch(metadata=_REQUIRE_LEADER)
        closed = asyncio.ensure_future(self._closed.wait())
        read: asyncio.Future[Any] = asyncio.ensure_future(_opened(call, create))
        try:
            while True:
                # Reads are tasks of their own: closing the channel cancels them, which must not look to the watcher
                # as if it had been cancelled itself.
                await asyncio.wait((read, closed), return_when=asyncio.FIRST_COMPLETED)
                if closed.done() or read.cancelled():
                    return
                response = read.result()
                if response is EOF:
                    raise _TryNext("etcd closed the stream")
                yield response
                if response.canceled:
                    raise _TryNext(response.cancel_reason or "etcd ended the watch")
                read = asyncio.ensure_future(call.read())
        finally:
            call.cancel()
            read.cancel()
            closed.cancel()
            await asyncio.gather(read, closed, return_exceptions=True)

    async def call(self, method: Callable[[Member], Any], request: Any) -> Any:
        """Makes a call that `Store` has no method for; see `_call`."""
        response, _ = await self._call(method, request, writes=True)
        return response

    def spans(self, prefix: str) -> Sequence[tuple[bytes, bytes]]:
        """Returns where etcd has the keys that begin with `prefix`, and their marks: from, and up to."""
        starts = [(part + prefix).encode() for part in (self._keys, self._marks)]
        return [(start, _end(start)) for start in starts]

    async def _call(
        self, method: Callable[[Member], Any], request: Any, *, writes: bool = False, timeout_s: float = 0.0
    ) -> tuple[Any, int]:
        """Asks each endpoint in turn until the time-out (0: the store's); returns the answer and how many attempts were
        made."""
        timeout_s = timeout_s or self._timeout_s
        trouble = _Trouble()
        end = trouble.began + timeout_s
        attempt_s = min(ATTEMPT_S, timeout_s / (len(self._url.endpoints) + 1))
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TryNext),
            stop=tenacity.stop_before_delay(timeout_s),
            wait=_jitter,
            reraise=True,
        )

        async def attempt() -> Any:
            trouble.attempts += 1
            at = self._at
            member = self._member(at)
            left = max(0.01, min(attempt_s, end - time.monotonic()))
            try:
                return await method(member)(request, timeout=left)
            except (AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError, asyncio.CancelledError) as error:
                raise_definite(error)
                trouble.failures[member.address] = explain(error)
                self._rotate(at)
                raise _TryNext from error

        try:
            return await retrying(attempt), trouble.attempts
        except _TryNext as error:
            raise StoreUnavailable(str(trouble), indefinite=writes) from error.__cause__
        except StoreUnavailable as error:  # closed, before or during the call
            raise type(error)(str(error), indefinite=writes and bool(trouble.failures)) from None

    def _member(self, at: int) -> Member:
        if self._closed.is_set():
            raise StoreUnavailable(f"this store of cluster {self.cluster} is closed")
        use_grpc()
        self._follow_files()
        address = self._url.endpoints[at]
        if address not in self._members:
            self._members[address] = open_member(address, self._credentials)
        return self._members[address]

    def _follow_files(self) -> None:
        """Connects again when certificates were replaced. Calls under way end on the old channels; watches resume."""
        tls, now = self._url.tls, time.monotonic()
        if tls is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        files = signature(tls)
        if files == self._files:
            return
        try:
            self._credentials = tls_credentials(tls)
        except ValueError as error:
            log.warning("etcd's certificates are not read again: %s", error)
            return
        self._files = files
        members, self._members = list(self._members.values()), {}
        for member in members:
            member.stop_renewing()
            task = asyncio.ensure_future(member.channel.close(ATTEMPT_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _rotate(self, failed: int) -> None:
        """Turns to the next endpoint, unless another call has done so already."""
        if self._at == failed:
            self._at = (failed + 1) % len(self._url.endpoints)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def _key(self, key: str) -> bytes:
        return (self._keys + check_key(key)).encode()

    def _mark(self, key: str) -> bytes:
        return (self._marks + key).encode()

    def _entry(self, kv: Any) -> Entry | None:
        """Returns the entry; None for an unusable key: etcd takes any bytes from a client that may write there."""
        raw = kv.key[len(self._keys) :]
        try:
            return Entry(check_key(raw.decode()), kv.value, kv.mod_revision, kv.create_revision)
        except ValueError as error:
            shown = raw[:_ODD_SHOWN]
            if shown not in self._odd and len(self._odd) < _ODD_SHOWN:  # a client that writes many must not fill logs
                self._odd.add(shown)
                log.warning("an entry is left out", key=shown, why=error)
            return None

    def _change(self, event: Any) -> Change | None:
        entry = self._entry(event.kv)
        if entry is None:
            return None
        return Put(entry) if event.type == event.PUT else Delete(entry.key, entry.revision)


async def _opened(call: Any, create: Any) -> Any:
    """Sends a watch's request and returns the first answer."""
    try:
        async with asyncio.timeout(ATTEMPT_S):
            await call.write(rpc.WatchRequest(create_request=create))
            return await call.read()
    except TimeoutError:
        raise _TryNext(f"no answer in {ATTEMPT_S:g} s") from None
    except asyncio.InvalidStateError:  # the stream broke before the request was on its way
        raise _TryNext("the stream broke") from None


def _jitter(state: tenacity.RetryCallState) -> float:
    """Draws a pause up to a bound that doubles; not from the module `random`, whose seed belongs to the program."""
    return _CHANCE.uniform(0.0, min(_RETRY_MAX_S, 0.02 * 2 ** min(state.attempt_number, 6)))


def _compare(key: bytes, target: str, revision: int) -> Any:
    field_name = {"MOD": "mod_revision", "CREATE": "create_revision"}[target]
    compare = rpc.Compare
    return compare(key=key, target=getattr(compare, target), result=compare.EQUAL, **{field_name: revision})


def _end(start: bytes) -> bytes:
    """Returns the first key after all that begin with `start`, whose last byte is ASCII."""
    return start[:-1] + bytes([start[-1] + 1])
