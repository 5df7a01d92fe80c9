"""Asks the gRPC services of a reader's process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from elasticps.admin.client import open_channel
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


async def lookup(
    address: str, keys: Mapping[str, NDArray[np.int64] | None], timeout_s: float,
    credentials: Credentials | None = None, *, hold: bool = False,
) -> FoundRows:  # fmt: skip
    """Rows of several tables from the reader at `address`; keys of None: all of a tensor. Raises UnknownTable,
    OtherShare, InputError, ClusterUnreachable when it does not answer, ServerError when it may not."""
    tables = [
        lookup_pb2.TableKeys(table=name, keys=() if some is None else some.tolist()) for name, some in keys.items()
    ]
    async with open_channel(address, credentials, Role.READER) as channel:
        try:
            answer = await lookup_pb2_grpc.LookupStub(channel).Lookup(
                lookup_pb2.LookupRequest(tables=tables, hold=hold), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _failure(address, timeout_s, error) from error
    return FoundRows({one.table: _rows(one) for one in answer.tables}, answer.shown)


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
    return ClusterUnreachable(f"the reader at {address} cannot be asked: {code.name.lower()}: {details}")
