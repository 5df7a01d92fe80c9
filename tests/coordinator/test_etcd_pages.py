"""Long listings on real etcd: page by page, as of one revision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aetcd import rpc

from coordinator.core.url import ClusterUrl
from coordinator.etcd import PAGE_KEYS, EtcdStore
from tests.coordinator.support import Etcd, fresh_url


class PagedStore(EtcdStore):
    """A store that counts the keys of each answer to a range, and calls `between` after every page but the last."""

    def __init__(self, url: ClusterUrl, between: Callable[[], Awaitable[object]]) -> None:
        super().__init__(url)
        self.pages: list[int] = []
        self._between = between

    async def _call(
        self, method: Callable[[Any], Any], request: Any, *, writes: bool = False, timeout_s: float = 0.0
    ) -> tuple[Any, int]:
        response, attempts = await super()._call(method, request, writes=writes, timeout_s=timeout_s)
        if isinstance(request, rpc.RangeRequest) and request.range_end:
            self.pages.append(len(response.kvs))
            if response.more:
                await self._between()
        return response, attempts


async def fill(store: EtcdStore, count: int) -> list[str]:
    """Writes so many keys in few transactions; returns them in order."""
    (start, _), *_ = store.spans("")
    names = [f"last-worker/app/{i:05d}" for i in range(count)]
    for at in range(0, count, 100):  # etcd takes 128 operations in one transaction
        puts = [rpc.PutRequest(key=start + name.encode(), value=b"{}") for name in names[at : at + 100]]
        await store.call(
            lambda member: member.kv.Txn, rpc.TxnRequest(success=[rpc.RequestOp(request_put=p) for p in puts])
        )
    return names


async def test_many_keys_are_listed_page_by_page_as_of_one_revision(shared_etcd: Etcd) -> None:
    url = fresh_url(shared_etcd)
    writer = EtcdStore(url)

    async def change() -> None:
        await writer.delete(names[0])
        await writer.put(names[-1], b"changed")
        await writer.put("last-worker/app/later", b"{}")

    store = PagedStore(url, change)
    names = await fill(writer, 2 * PAGE_KEYS + 100)
    before = (await writer.list("last-worker/")).revision
    listing = await store.list("last-worker/")
    assert store.pages == [PAGE_KEYS, PAGE_KEYS, 100]
    assert [entry.key for entry in listing.entries] == names
    assert {entry.value for entry in listing.entries} == {b"{}"}
    assert listing.revision == before
    assert len((await store.list("last-worker/app/0000")).entries) == 9
    await store.close()
    await writer.close()


async def test_a_listing_begins_again_when_its_revision_is_compacted_away_between_two_pages(
    shared_etcd: Etcd,
) -> None:
    url = fresh_url(shared_etcd)
    writer = EtcdStore(url)
    compacted = 0

    async def compact() -> None:
        nonlocal compacted
        compacted += 1
        if compacted == 1:
            await writer.put(names[0], b"changed")
            await shared_etcd.compact()

    store = PagedStore(url, compact)
    names = await fill(writer, PAGE_KEYS + 100)
    listing = await store.list("")
    assert store.pages == [PAGE_KEYS, PAGE_KEYS, 100]
    assert [entry.key for entry in listing.entries] == names
    assert listing.entries[0].value == b"changed"
    assert listing.revision == listing.entries[0].revision
    await store.close()
    await writer.close()
