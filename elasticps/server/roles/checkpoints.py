"""Writes a server's part of a checkpoint after a cut has passed, in slices of the loop's time.

Rows of a cut are retained from the moment when it passes (`elasticps.store.retained`). Writing starts when the driver
of the checkpoint asks how far it is, for only then have all ranges passed the cut. If the driver does not ask for
SILENT_S, the checkpoint is given up and the memory freed. Memory is bounded: at a budget pushes wait, as for room in
the log, and scanning waits for files to be written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import numpy as np

from coordinator.core import fields
from elasticps.admin.interface import Writing, WrittenFile
from elasticps.checkpoint.manifest import FileEntry, folder_of, folder_of_table
from elasticps.checkpoint.retention import mark_of
from elasticps.checkpoint.row_writer import RowWriter
from elasticps.server.core.operations import CutMark
from elasticps.server.core.scan import Finished, Lost, Scan
from elasticps.server.roles.context import Context
from elasticps.store.retained import Allowance
from replication.chain import Ranges

log = fields.logger(__name__)

ASIDE_BYTES = 256 << 20
FILES_AT_ONCE = 2  # full, and not written yet
PARTS_AT_ONCE = 16  # parts of one slice: most ranges have few rows
SLICE_BYTES = 512 << 10
BUSY_SLICE_BYTES = 256 << 10  # while workers are served: they wait for a slice, and each one wakes the server
WORKING_S = 0.05  # a worker served so recently waits for its next answer; one that computes for longer does not
BUSY_BYTES_PER_S = 24e6  # while workers are served: with four times as much, servers were taken for dead on two cores
SILENT_S = 10.0  # the driver of a checkpoint asks more often
GO_ON = 7 / 8  # pushes go on when so much of the budget is used


class CheckpointWriter:
    """Writes this server's part of a checkpoint; at most one at a time."""

    def __init__(self, context: Context, row_writer: RowWriter, aside_bytes: int, log_bytes: int) -> None:
        """aside_bytes, log_bytes: what retained rows, and the log, may take."""
        self._loop, self._executor, self._serving = context.loop, context.executor, context.serving  # shared parts
        self._path = context.path  # knows how much memory is left
        self._row_writer = row_writer  # writes files in a thread
        self._last_served = context.last_served  # slices are smaller while workers are served
        self._aside_bytes, self._log_bytes = aside_bytes, log_bytes  # budgets of memory
        self._scan: Scan | None = None  # of the present checkpoint; None if none is being written
        self._steps: Iterator[Finished | None] | None = None  # of the scan, once writing has begun
        self._files: list[FileEntry] = []  # written completely
        self._waiting = 0  # files that are full, and not written yet
        self._exhausted = False  # the scan has given all rows to files
        self._written: Writing | None = None  # how the checkpoint of `_cut` ended
        self._cut = 0  # number of the newest cut that passed
        self._waiters: list[asyncio.Future[None]] = []  # for the end of the checkpoint
        self._last_request_s = 0.0  # when the driver asked last
        self._full_s: float | None = None  # since when pushes wait
        self._allowance = Allowance(self._aside_bytes, lambda: None, lambda: None)  # counts retained rows
        self.written_bytes = 0  # of files, for metrics
        self._waited_s = 0.0  # how long pushes had to wait, but for the present wait
        self._executor.cut_passed = self._passed

    # --- progress --------------------------------------------------------------------------------------------------

    @property
    def aside_bytes(self) -> int:
        """Memory of retained rows."""
        return self._allowance.nbytes

    @property
    def waited_s(self) -> float:
        """How long pushes have waited because too many rows were retained."""
        return self._waited_s + (0.0 if self._full_s is None else self._loop.time() - self._full_s)

    def writing(self, cut: int) -> Writing | None:
        """How far this server has written its ranges of a cut; None if it knows nothing of the cut. Writing starts with
        the first call: the caller has seen all ranges pass the cut."""
        if cut != self._cut or not cut:
            return None
        self._last_request_s = self._loop.time()
        if self._written is not None:
            return self._written
        if self._scan is None:
            return None
        if self._steps is None:
            log.info("writing a checkpoint", cut=cut, ranges=len(self._scan.ranges), url=self._scan.mark.url)
            self._steps = self._scan.run()
            self._loop.call_soon(self._slice, self._scan)
        done = len(self._scan.ranges) * self._scan.scanned // (1 + self._scan.total)
        return Writing(min(done, len(self._scan.ranges) - 1), [_written_file(file) for file in self._files])

    async def wait(self, cut: int, wait_s: float) -> Writing | None:
        """As `writing`, when the checkpoint is done or after `wait_s`."""
        writing = self.writing(cut)
        if wait_s > 0 and writing is not None and self._scan is not None:
            over: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(over)
            timer = self._loop.call_later(wait_s, _wake, over)
            try:
                await over
            finally:
                timer.cancel()
                self._waiters = [other for other in self._waiters if other is not over]
        return self.writing(cut)

    # --- a cut passes -----------------------------------------------------------------------------------------------

    def _passed(self, ranges: Ranges, seqs: object, mark: CutMark, inside: Mapping[int, int] | None) -> None:
        if mark.number > self._cut:
            self._end(f"cut {mark.number} has passed")
        if (mark.writer, mark.incarnation) != (self._serving.me.name, self._serving.me.incarnation):
            return
        if mark.number > self._cut:
            self._cut, self._written, self._files, self._waiting, self._exhausted = mark.number, None, [], 0, False
            self._allowance = Allowance(self._aside_bytes, self._full, self._burst)
            self._scan, self._steps = Scan(self._executor.store, mark, self._allowance), None
            self._last_request_s = self._loop.time()
            self._loop.call_later(SILENT_S, self._watch, self._scan)
        if self._scan is not None and self._scan.mark == mark:
            if self._steps is not None:
                self._end("ranges have passed the cut after writing had begun")
            else:
                self._add(self._scan, ranges)

    def _add(self, scan: Scan, ranges: Ranges) -> None:
        """Has ranges written, unless there is no memory for copies of the keys that wait for rows there."""
        nbytes = scan.copied_bytes(ranges)
        if nbytes <= self._path.room:
            self._path.room -= nbytes
        elif nbytes and scan.copied + nbytes > self._aside_bytes:
            self._end(f"copies of keys that wait for rows take {nbytes:,} bytes more, for which there is no memory")
            return
        scan.add(ranges)

    def _watch(self, scan: Scan) -> None:
        if self._scan is scan:
            left_s = self._last_request_s + SILENT_S - self._loop.time()
            if left_s > 0:
                self._loop.call_later(left_s, self._watch, scan)
            else:
                self._end(f"nobody has asked for it for {SILENT_S:g} s")

    # --- slices -----------------------------------------------------------------------------------------------------

    def _slice(self, scan: Scan) -> None:
        if self._scan is not scan or self._steps is None or self._exhausted:
            return
        nbytes, busy = 0, self._last_served.within(WORKING_S)
        for _ in range(PARTS_AT_ONCE):
            before = scan.nbytes
            try:
                finished = next(self._steps)
            except StopIteration:
                self._exhausted = True
                self._finish()
                return
            except Lost as error:
                self._end(str(error))
                return
            if finished is not None:
                self._put(scan, finished)
            nbytes += scan.nbytes - before
            if nbytes >= (BUSY_SLICE_BYTES if busy else SLICE_BYTES) or self._waiting >= FILES_AT_ONCE:
                break
        self._let_go_on()
        if self._waiting < FILES_AT_ONCE:
            self._loop.call_later(nbytes / BUSY_BYTES_PER_S if busy else 0.0, self._slice, scan)

    def _put(self, scan: Scan, finished: Finished) -> None:
        table = self._executor.store.tables[finished.table]
        me = self._serving.me
        assert self._serving.view is not None, "a cut came by a chain"
        name = f"{mark_of(self._serving.view.cluster)}.{me.name}-{me.incarnation}.{finished.number:03d}.safetensors"
        path = f"{folder_of_table(table.spec, finished.table)}/{name}"

        def done(result: FileEntry | Exception) -> None:
            if self._scan is not scan:
                return
            if isinstance(result, Exception):
                self._end(str(result))
                return
            self._waiting -= 1
            scan.written(finished.file)
            self._files.append(result)
            self.written_bytes += result.bytes
            if self._waiting == FILES_AT_ONCE - 1:
                self._slice(scan)
            self._finish()

        self._waiting += 1
        self._row_writer.put(scan.mark.url, folder_of(scan.mark.number), path, finished.table, finished.file, done)

    def _finish(self) -> None:
        if self._exhausted and not self._waiting:
            self._end()

    def _end(self, failed: str = "") -> None:
        scan, self._scan, self._steps = self._scan, None, None
        if scan is None:
            return
        scan.stop()
        if failed:
            log.warning("gave up a checkpoint", cut=self._cut, reason=failed)
        else:
            log.info(
                "wrote a checkpoint", cut=self._cut, files=len(self._files), bytes=sum(f.bytes for f in self._files)
            )
        self._written = Writing(
            0 if failed else len(scan.ranges), [_written_file(file) for file in self._files], failed
        )
        for waiter in self._waiters:
            _wake(waiter)
        self._let_go_on()

    def close(self) -> None:
        """Gives up what is being written."""
        self._end("the server ends")
        self._row_writer.close()

    # --- memory -----------------------------------------------------------------------------------------------------

    def _burst(self) -> None:
        self._end(f"rows kept aside take more than {2 * self._aside_bytes:,} bytes")

    def _full(self) -> None:
        """Retained rows take their budget. A push is being applied: pushes are stopped in the next turn of the loop."""
        if self._full_s is None:
            self._full_s = self._loop.time()
            self._loop.call_soon(self._hold_back)

    def _hold_back(self) -> None:
        """Lets pushes wait, if this server heads all ranges of the scan: only a head can make pushes wait."""
        if self._scan is None:
            self._let_go_on()
            return
        gone = np.setdiff1d(np.array(self._scan.ranges, np.int64), self._serving.headed)
        if len(gone):
            self._end(f"rows kept aside take {self._aside_bytes:,} bytes, and range {gone[0]} is headed elsewhere")
        elif self._full_s is not None:
            self._executor.limit_log(0)

    def _let_go_on(self) -> None:
        if self._full_s is not None and self._allowance.used_bytes < GO_ON * self._aside_bytes:
            self._waited_s = self.waited_s
            self._full_s = None
            self._loop.call_soon(self._executor.limit_log, self._log_bytes)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _written_file(file: FileEntry) -> WrittenFile:
    return WrittenFile(file.path, file.bytes, file.header, file.rows, file.blake2b, file.table, file.ranges)
