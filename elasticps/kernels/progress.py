"""Progress of workers by range, in runs: what differs from what was sent of it before, and what was received."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from elasticps.kernels import compiled_once, njit

RUN = 4
"""Words of a run: worker, first range, last range, progress."""
_WORDS = types.Array(types.int64, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
_FLAGS_OUT = types.Array(types.boolean, 1, "C")
_SENT = types.Array(types.int64, 1, "C", readonly=True, aligned=False)  # in a frame
_SENT_RUNS = types.Array(types.int64, 2, "C", readonly=True, aligned=False)


@njit(
    nogil=True, cache=True, error_model="numpy",
    signature=(_WORDS, _WORDS, _WORDS, _TABLE, _WORDS, _WORDS, _WORDS, _TABLE, _TABLE, types.int64, _WORDS),
)  # fmt: skip
def write_state(
    seqs: NDArray[np.int64], sent_seqs: NDArray[np.int64], ranges: NDArray[np.int64], progress: NDArray[np.int64],
    rows: NDArray[np.int64], columns: NDArray[np.int64], workers: NDArray[np.int64], sent: NDArray[np.int64],
    ended: NDArray[np.int64], records: int, out: NDArray[np.int64],
) -> tuple[int, int]:  # fmt: skip
    """Writes a WINDOW's state, up to the records of steps: of which ranges seqs differ from `sent_seqs`, and these; as
    runs of ranges that follow each other, by worker, what differs between progress[rows[w], columns[ranges[i]]] and
    sent[w, i], behind the runs `ended` [k, RUN]; and how many records follow. Takes it into what was sent; returns how
    many ranges, and how many words. ranges: ascending; out: room for all, see `state_words`."""
    moved = 0
    for r in ranges:
        moved += seqs[r] != sent_seqs[r]
    i = 0
    for r in ranges:
        if seqs[r] != sent_seqs[r]:
            out[i], out[moved + i] = r, seqs[r]
            sent_seqs[r] = seqs[r]
            i += 1
    begin = 2 * moved + 1
    n = begin
    for i in range(ended.shape[0]):
        out[n : n + RUN] = ended[i]
        n += RUN
    for w in range(workers.shape[0]):
        open_run = False
        for i in range(ranges.shape[0]):
            value = progress[rows[w], columns[ranges[i]]]
            if value == sent[w, i]:
                open_run = False
                continue
            sent[w, i] = value
            if open_run and out[n - 2] == ranges[i] - 1 and out[n - 1] == value:
                out[n - 2] = ranges[i]
                continue
            out[n] = workers[w]
            out[n + 1] = out[n + 2] = ranges[i]
            out[n + 3] = value
            n += RUN
            open_run = True
    out[begin - 1] = (n - begin) // RUN
    out[n] = records
    return moved, n + 1


def state_words(ranges: int, workers: int, ended: int) -> int:
    """The most words that `write_state` writes."""
    return 2 * ranges + 2 + RUN * (workers * ranges + ended)


@njit(
    nogil=True, cache=True, error_model="numpy",
    signature=(_SENT_RUNS, types.int64, _WORDS, _WORDS, _FLAGS, _TABLE),
)  # fmt: skip
def take_runs(
    runs: NDArray[np.int64], start: int, workers: NDArray[np.int64], rows: NDArray[np.int64],
    counts: NDArray[np.bool_], out: NDArray[np.int64],
) -> int:  # fmt: skip
    """Writes runs [k, RUN] from `start` on into out [rows, ranges], where counts[range] says so; returns the index of
    the first one whose worker is not known, or k. workers: ascending; rows: of `out`, of each of these."""
    known, before = np.int64(-1), np.int64(0)
    for i in range(start, runs.shape[0]):
        worker = runs[i, 0]
        if known < 0 or worker != before:
            known, end = np.int64(0), np.int64(workers.shape[0])
            while known < end:
                middle = (known + end) // 2
                if workers[middle] < worker:
                    known = middle + 1
                else:
                    end = middle
            if known == workers.shape[0] or workers[known] != worker:
                return i
            before = worker
        for r in range(runs[i, 1], runs[i, 2] + 1):
            if counts[r]:
                out[rows[known], r] = runs[i, 3]
    count: int = runs.shape[0]
    return count


@njit(
    nogil=True, cache=True, error_model="numpy",
    signature=(
        _SENT, _SENT, _SENT, types.int64, types.int64, _WORDS, _WORDS, _WORDS, _WORDS, _FLAGS_OUT,
    ),
)  # fmt: skip
def take_positions(
    ranges: NDArray[np.int64], positions: NDArray[np.int64], followed: NDArray[np.int64], slot: int, time_us: int,
    owner: NDArray[np.int64], heard: NDArray[np.int64], have: NDArray[np.int64], times: NDArray[np.int64],
    exact: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Takes what a complete window says of its ranges [n]: their sequence numbers, and that of all ranges `followed` it
    shows the state. Of those that are its server's, by `owner`. The rest: see `Following`."""
    for i in range(ranges.shape[0]):
        if owner[ranges[i]] == slot:
            heard[ranges[i]] = positions[i]
    for r in followed:
        if owner[r] == slot and have[r] >= 0 and heard[r] >= 0:
            have[r] = heard[r]
            times[r] = time_us
            exact[r] = True


def warm() -> None:
    """Compiles, or loads from the cache, what servers do for readers."""
    with compiled_once(__file__):
        nothing, none = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
        ended, out = np.zeros((0, RUN), np.int64), np.zeros(state_words(1, 1, 0), np.int64)
        write_state(none, none.copy(), none, nothing, none, none, none, nothing.copy(), ended, 0, out)
