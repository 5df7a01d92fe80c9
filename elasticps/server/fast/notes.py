"""What compiled code notes for Python to keep: shards that steps train, and records of sparse steps."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from elasticps.server.fast import layout as at
from elasticps.server.fast.shared import SharedArrays
from replication.step_records import StepRecord, StepRecords, record_bytes

_NUMBERS = struct.Struct("<qqq")  # worker, clock, committed; behind them the bits


class Notes:
    """The notes of one server. ranges: P."""

    def __init__(self, shared: SharedArrays, ranges: int) -> None:
        self._fields = shared.fields
        self._shards = shared.make(at.H_NOTES, (at.NOTES, at.NOTE))
        self._records = shared.make(at.H_RECORDS, (at.RECORDS, 16 + record_bytes(ranges)), np.uint8)

    def __bool__(self) -> bool:
        return bool(self._fields[at.H_NOTE_COUNT] or self._fields[at.H_RECORD_COUNT])

    def tell(self, records: StepRecords, note_shard: Callable[[int, int, int, int], None]) -> None:
        """Passes all on: records to `records`; set, shard, worker and clock of each step that trains a shard to
        `note_shard`."""
        f = self._fields
        count, f[at.H_RECORD_COUNT] = f[at.H_RECORD_COUNT], 0
        for i in range(count):
            record = self._records[i].tobytes()  # which compiled code has checked
            worker, clock, committed = _NUMBERS.unpack_from(record)
            records.note(worker, StepRecord(clock, committed, record[_NUMBERS.size :]))
        count, f[at.H_NOTE_COUNT] = f[at.H_NOTE_COUNT], 0
        for number, shard, worker, clock in self._shards[:count].tolist():
            note_shard(number, shard, worker, clock)
