"""Checks records of sparse steps in frames, and passes them on to Python, which keeps them."""

from __future__ import annotations

from elasticps.server.fast.layout import H_RANGES, H_RECORD_COUNT, H_RECORDS, RECORDS
from elasticps.server.fast.memory import load64, store64
from elasticps.store.native import copy, kernel
from replication.progress import MAX_CLOCK
from replication.step_records import MIX

SIGNED_MIX = MIX - (1 << 64)  # products of int64 have the same last 64 bits


@kernel
def home_of(h, worker):
    """The home range of a worker, as `replication.step_records.home_range`: there are at most 2^32 ranges."""
    return ((worker * SIGNED_MIX >> 32) & 0xFFFFFFFF) * h[H_RANGES] >> 32


@kernel
def record_size(h):
    """Bytes of a record at the end of a frame."""
    return 8 * (1 + ((h[H_RANGES] + 63) >> 6))


@kernel
def is_record(h, at, begin, clock):
    """Whether there is a valid record of step `clock` at an address that is not before `begin`, and room for it."""
    if at < begin or h[H_RECORD_COUNT] == RECORDS:
        return False
    committed, left = load64(at), h[H_RANGES] & 63
    if committed < 0 or committed >= clock or clock >= MAX_CLOCK:
        return False
    return left == 0 or load64(at + record_size(h) - 8) >> left == 0


@kernel
def note_record(h, at, worker, clock):
    """Passes a record on to Python."""
    size = record_size(h)
    to = h[H_RECORDS] + (16 + size) * h[H_RECORD_COUNT]
    store64(to, worker)
    store64(to + 8, clock)
    copy(to + 16, at, size)
    h[H_RECORD_COUNT] += 1
