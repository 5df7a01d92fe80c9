"""Asks the gRPC services of a reader's process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from elasticps.admin.client import generation_of, open_channel
from elasticps.client.inputs import checked_keys
from elasticps.errors import ClusterUnreachable, Error, InputError, OtherShare, ServerError, UnknownTable
from elasticps.security.identity import Role
from elasticps.serving import lookup_pb2, lookup_pb2_grpc

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

_SHARE = re.compile(r"is in share (\d{1,4})/")  # of the text of OtherShare


class FoundRows(NamedTuple):
    """rows: by table, float32 [n, dim], a tensor in its shape; shown: see lookup.proto."""

    rows: dict[str, NDArray[np.float32]]
    shown: lookup_pb2.ShownState


class LookupClient:
    """Asks the reader at `address` for rows, over one channel: make one, and keep it. An asynchronous context
    manager, of one event loop. Raises UnknownTable, OtherShare, InputError, ClusterUnreachable when it does not
    answer, ServerError when it may not."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = address
        self._credentials = credentials
        self._generation = -1  # of the certificates that the channel was opened with
        self._channel: grpc.aio.Channel | None = None

    async def lookup(
        self, keys: Mapping[str, NDArray[np.int64] | None], timeout_s: float = 30.0, *, hold: bool = False
    ) -> FoundRows:
        """Rows of several tables; keys of None: all of a tensor. hold: all of one moment."""
        tables = [
            lookup_pb2.TableKeys(table=name, keys=() if some is None else checked_keys(name, some).tolist())
            for name, some in keys.items()
        ]
        stub = lookup_pb2_grpc.LookupStub(await self._opened())
        try:
            answer = await stub.Lookup(lookup_pb2.LookupRequest(tables=tables, hold=hold), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _failure(self.address, timeout_s, error) from error
        return FoundRows({one.table: _rows(one) for one in answer.tables}, answer.shown)

    async def _opened(self) -> grpc.aio.Channel:
        generation = generation_of(self._credentials)
        if self._channel is None or generation != self._generation:
            await self.close()
            self._channel, self._generation = open_channel(self.address, self._credentials, Role.READER), generation
        return self._channel

    async def close(self) -> None:
        """Closes the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def __aenter__(self) -> LookupClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def lookup(
    address: str, keys: Mapping[str, NDArray[np.int64] | None], timeout_s: float,
    credentials: Credentials | None = None, *, hold: bool = False,
) -> FoundRows:  # fmt: skip
    """`LookupClient.lookup` for a single question: it opens a channel and closes it."""
    async with LookupClient(address, credentials) as client:
        return await client.lookup(keys, timeout_s, hold=hold)


def _rows(one: lookup_pb2.TableRows) -> NDArray[np.float32]:
    found = np.frombuffer(one.rows, "<f4").astype(np.float32)
    return found.reshape(tuple(one.shape) if one.shape else (-1, one.dim))


async def ask_reader(
    address: str, method: str, request: Any, timeout_s: float, credentials: Credentials | None = None
) -> Any:
    """Calls a method of `ReaderAdmin` at `address`. Raises as `lookup`."""
    async with open_channel(address, credentials, Role.READER) as channel:
        try:
            return await getattr(lookup_pb2_grpc.ReaderAdminStub(channel), method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _failure(address, timeout_s, error) from error


def _failure(address: str, timeout_s: float, error: grpc.aio.AioRpcError) -> Error:
    """The error to raise for a failed call."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownTable(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        found = _SHARE.search(details)
        return OtherShare(details, int(found[1]) if found else 0)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InputError(details)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return ServerError(f"the reader at {address} refused: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ClusterUnreachable(f"the reader at {address} did not answer within {timeout_s:g} s")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InputError(f"a request to the reader at {address}, or the answer, is too large: {details}; ask in parts")
    hint = "; `grpc` in the first line that a reader prints is the address to ask" * (
        code is grpc.StatusCode.UNAVAILABLE
    )
    return ClusterUnreachable(f"the reader at {address} cannot be asked: {code.name.lower()}: {details}{hint}")
