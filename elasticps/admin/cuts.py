"""Calls the `CutInterface` of a remote server by gRPC, and encodes its messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from elasticps.admin import admin_pb2, admin_pb2_grpc
from elasticps.admin.client import failure, generation_of, open_channel
from elasticps.admin.interface import CutState, CutTaken, CutWritten, WorkerHeld, Writing, WrittenFile
from replication.step_records import StepRecord

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials


class CutClient:
    """Calls the server whose admin service is at `address`, on one connection until `close`: workers wait meanwhile,
    and dialling costs time. Each call raises ClusterUnreachable when that does not answer within `timeout_s`,
    ServerError if it refuses."""

    def __init__(self, address: str, timeout_s: float, credentials: Credentials | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._generation = 0  # of the certificates that it was opened with

    async def close(self) -> None:
        """Ends the connection."""
        if self._channel is not None:
            await self._channel.close(None)

    async def hold(self, cut: int, hold_s: float) -> bool:
        """Makes all its workers hold; False if that time is over, or a newer cut is being taken."""
        return bool((await self._ask("Hold", admin_pb2.HoldRequest(cut=cut, hold_ms=int(hold_s * 1000)))).held)

    async def held(self, cut: int) -> Mapping[int, WorkerHeld]:
        """The workers that hold, and what they report."""
        answer = await self._ask("Held", admin_pb2.HeldRequest(cut=cut))
        reports = zip(answer.clocks, answer.epochs, answer.digests, strict=True)
        return dict(zip(answer.workers, map(WorkerHeld._make, reports), strict=True))

    async def release(self, cut: int) -> None:
        """Lets workers go on."""
        await self._ask("Release", admin_pb2.ReleaseRequest(cut=cut))

    async def take(self, cut: int, since: int, url: str) -> bool:
        """Logs the cut in the ranges that the server heads; False: ask again."""
        return bool((await self._ask("Cut", admin_pb2.CutRequest(cut=cut, since=since, url=url))).complete)

    async def state(self, cut: int) -> CutState:
        """Reports the state at the cut."""
        return read_state(await self._ask("CutState", admin_pb2.CutStateRequest(cut=cut)))

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        """Starts to write the cut if that has not begun; reports how far it is, when it is done or after `wait_s`."""
        request = admin_pb2.CutWrittenRequest(cut=cut, wait_ms=int(1000 * wait_s))
        return read_written(await self._ask("CutWritten", request))

    async def _ask(self, method: str, request: Any) -> Any:
        generation = generation_of(self._credentials)
        if self._channel is None or generation != self._generation:
            await self.close()
            self._channel, self._generation = open_channel(self._address, self._credentials), generation
        try:
            stub = admin_pb2_grpc.AdminStub(self._channel)
            return await getattr(stub, method)(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(self._address, self._timeout_s, error) from error


def write_state(state: CutState) -> admin_pb2.CutStateResponse:
    """Encodes a state as its message."""
    taken = [
        admin_pb2.CutTaken(
            ranges=one.ranges, workers=one.clocks.keys(), progress=one.clocks.values(), closed=one.closed,
            kept=[
                admin_pb2.KeptShare(app=app, round=clock, worker=worker) for app, clock, worker in one.waiting_shares
            ],
        )
        for one in state.taken
    ]  # fmt: skip
    homes = {r: json.dumps(home, separators=(",", ":")) for r, home in state.homes.items()}
    return admin_pb2.CutStateResponse(
        incarnation=state.incarnation, epoch=state.epoch, newest=state.newest, taken=taken, homes=homes,
        records=sparse_steps(state.records),
    )  # fmt: skip


def read_state(answer: admin_pb2.CutStateResponse) -> CutState:
    """The inverse of `write_state`."""
    taken = [
        CutTaken(
            tuple(one.ranges), dict(zip(one.workers, one.progress, strict=True)), dict(one.closed),
            tuple((share.app, share.round, share.worker) for share in one.kept),
        )
        for one in answer.taken
    ]  # fmt: skip
    homes = {r: json.loads(home) for r, home in answer.homes.items()}
    return CutState(answer.incarnation, answer.epoch, answer.newest, taken, homes, read_sparse_steps(answer.records))


def sparse_steps(records: Iterable[tuple[int, StepRecord]]) -> list[admin_pb2.SparseStep]:
    """Encodes records of workers' steps as messages."""
    return [
        admin_pb2.SparseStep(worker=worker, clock=record.clock, committed=record.committed, bits=record.bits)
        for worker, record in records
    ]


def read_sparse_steps(answers: Iterable[admin_pb2.SparseStep]) -> list[tuple[int, StepRecord]]:
    """The inverse of `sparse_steps`."""
    return [(one.worker, StepRecord(one.clock, one.committed, one.bits)) for one in answers]


def write_written(written: CutWritten) -> admin_pb2.CutWrittenResponse:
    """Encodes as its message how far a cut is written."""
    writing = written.writing or Writing(0, ())
    return admin_pb2.CutWrittenResponse(
        incarnation=written.incarnation, ranges=written.ranges, writes=written.writing is not None,
        ranges_done=writing.ranges_done, failed=writing.failed,
        files=[admin_pb2.WrittenFile(**file._asdict()) for file in writing.files],
    )  # fmt: skip


def read_written(answer: admin_pb2.CutWrittenResponse) -> CutWritten:
    """The inverse of `write_written`."""
    files = [
        WrittenFile(file.path, file.bytes, file.header, file.rows, file.blake2b, file.table, tuple(file.ranges))
        for file in answer.files
    ]
    writing = Writing(answer.ranges_done, files, answer.failed) if answer.writes else None
    return CutWritten(answer.incarnation, answer.ranges, writing)
