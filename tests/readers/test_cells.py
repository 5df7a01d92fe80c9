"""A range that is read again, beside one that is read from nothing: the same rows, and only what differs is sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import elasticps as eps
from elasticps.model.key_share import ALL_KEYS, KeyShare, share_of
from elasticps.readers.rows import ReaderTable, ReaderTables, codec_of
from elasticps.server.roles import range_parts
from elasticps.server.roles.range_parts import READ_BYTES, ReadTable, part_of
from elasticps.store import Store, Table, cells, journal
from elasticps.wire.frames import unpack_header
from elasticps.wire.range_parts import ALL_TABLES, RangePart, ReadCursor, ReadRange

RANGES, DIM = 4, 6


def there(buffers: Any) -> Any:
    """A frame as it arrives."""
    whole = b"".join(memoryview(one).cast("B") for one in buffers)
    return unpack_header(whole[:64]), np.frombuffer(whole[64:], np.uint8)


def readable(server: Table, reader: ReaderTable, share: KeyShare = ALL_KEYS) -> list[ReadTable]:
    return [ReadTable(7, server, share, max(reader.codec.code, 0), reader.codec.words)]


def tables_of(reader: ReaderTable) -> ReaderTables:
    """One table, as a reader has it."""
    tables = ReaderTables(RANGES, None)
    tables.by_id[7] = reader
    return tables


def read(server: Table, reader: ReaderTable, share: KeyShare = ALL_KEYS, *, rows: int = 8192) -> tuple[int, int]:
    """Reads all ranges; how many rows came, and bytes in both directions."""
    came, nbytes, tables = 0, 0, tables_of(reader)
    for r in range(RANGES):
        start = ReadCursor(0)
        while start < ALL_TABLES:
            header, body = there(tables.describe(ReadRange(1, 1, r, rows, start)).frame())
            nbytes += 64 + len(body)
            got = ReadRange.of(header, body, RANGES)
            header, body = there(part_of(readable(server, reader, share), got, 1, RANGES).frame())
            nbytes += 64 + len(body)
            assert len(body) < 4 * READ_BYTES
            part = RangePart.of(header, body, RANGES)
            came += sum(len(one.block.keys) for one in part.intervals)
            list(tables.replace(part, [7]))
            start = part.end
    return came, nbytes


def equal(server: Table, reader: ReaderTable, share: KeyShare) -> bool:
    """Whether the reader has the rows of its share, in its type bit for bit, and no others."""
    for r in range(RANGES):
        keys = np.sort(server.range_keys(r))
        keys = keys[share_of(keys, share.of) == share.number]
        if not np.array_equal(keys, np.sort(reader.list_range(r))):
            return False
        values = np.empty((len(keys), server.spec.dim), np.float32)
        server.gather(keys, values)
        stored = np.empty((len(keys), reader.codec.words), np.float32)
        reader.stored.gather(keys, stored)
        expected = reader.codec.encode(values) if reader.codec.code else values
        if not np.array_equal(expected.view(np.uint32), stored.view(np.uint32)):
            return False
    return True


def server_table(keys: NDArray[np.int64], rng: np.random.Generator, dtype: str = "float32") -> Table:
    spec = eps.TableSpec("t", DIM, eps.SGD(lr=0.1), dtype=dtype)
    table = Store(RANGES).create(spec, 7)
    table.put(keys, rng.random((len(keys), DIM), np.float32))
    return table


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30), st.sampled_from([None, "float16", "bfloat16", "int8"]),
    st.sampled_from(["float32", "bfloat16"]), st.sampled_from([ALL_KEYS, KeyShare(2, 3)]),
    st.sampled_from([0, 1, 30, 2000]), st.sampled_from([3, 8192]),
)  # fmt: skip
def test_what_is_read_again_is_what_there_is(
    seed: int, dtype: str | None, stored_as: str, share: KeyShare, rows: int, at_once: int
) -> None:
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(-(2**62), 2**62, rows))
    server = server_table(keys, rng, stored_as)
    reader = ReaderTable(server.spec, 7, RANGES, dtype, share)
    read(server, reader, share, rows=at_once)
    assert equal(server, reader, share)
    changed = rng.random(len(keys)) < rng.choice([0.0, 0.02, 0.7])
    server.put(keys[changed], rng.random((int(changed.sum()), DIM), np.float32))
    server.delete(keys[rng.random(len(keys)) < rng.choice([0.0, 0.02, 0.9])])
    more = np.unique(rng.integers(-(2**62), 2**62, int(rng.choice([0, 5, 3000]))))
    server.put(more, rng.random((len(more), DIM), np.float32))
    read(server, reader, share, rows=at_once)
    assert equal(server, reader, share)
    assert read(server, reader, share, rows=at_once)[0] == 0  # all is there
    values = np.empty((len(keys), DIM), np.float32)
    server.gather(keys, values)  # two rows change places
    if len(keys) > 1:
        server.put(keys[:2], values[1::-1])
        read(server, reader, share, rows=at_once)
        assert equal(server, reader, share)


def test_one_row_in_a_hundred_costs_a_small_part_of_all() -> None:
    rng = np.random.default_rng(1)
    spec, keys = eps.TableSpec("t", 64, eps.SGD(lr=0.1)), np.arange(20_000)
    server = Store(RANGES).create(spec, 7)
    server.put(keys, rng.random((len(keys), 64), np.float32))
    reader = ReaderTable(spec, 7, RANGES, None)
    assert codec_of(spec, None).words == 64
    rows, whole = read(server, reader)
    assert rows == len(keys)
    assert read(server, reader)[1] < 0.02 * whole  # nothing has changed
    some = rng.choice(keys, 200, replace=False)
    server.put(some, rng.random((200, 64), np.float32))
    rows, nbytes = read(server, reader)
    assert equal(server, reader, ALL_KEYS)
    assert rows < 4 * 200
    assert nbytes < 0.06 * whole


def test_a_share_gets_the_rows_of_its_keys() -> None:
    rng, share = np.random.default_rng(3), KeyShare(2, 3)
    server = server_table(np.arange(3000), rng)
    reader = ReaderTable(server.spec, 7, RANGES, None, share)
    read(server, reader, share)
    assert equal(server, reader, share)
    assert read(server, reader, share)[0] == 0


PROGRAM = """
import sys, elasticps as eps
with eps.reader(sys.argv[1], every=0.005) as reader:
    for line in sys.stdin:
        stats = reader.stats()
        rows = reader.pull({'rows': range(20000)})['rows'].tobytes().hex()
        print(stats.fills, stats.filled, stats.fill_bytes, rows, flush=True)
"""


def test_a_reader_that_was_away_too_long_reads_what_differs() -> None:
    """Stopped while a hundredth of the rows changes, and so much else that the journal is written over."""
    keys, rng = np.arange(20_000), np.random.default_rng(2)
    some = rng.choice(keys, 200, replace=False)
    with (
        eps.LocalCluster(servers=1, replicas=1) as cluster,
        eps.connect(cluster.url, worker="w0") as ps,
    ):
        table = ps.table("rows", dim=16, optimizer=eps.Adagrad(lr=0.1))
        ps.push({table: (keys, rng.random((len(keys), 16), np.float32))}).result()
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, cluster.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            commands, answers = process.stdin, process.stdout
            assert commands is not None
            assert answers is not None

            def ask() -> tuple[int, int, int, str]:
                commands.write("\n")
                commands.flush()
                fills, filled, nbytes, rows = answers.readline().split()
                return int(fills), int(filled), int(nbytes), rows

            first = ask()
            assert first[1] == len(keys)
            os.kill(process.pid, signal.SIGSTOP)
            noise = ps.table("noise", dim=16, optimizer=eps.SGD(lr=0.1))
            for step in range(150):  # until its credit is spent, and then more than the journal has room for
                step_of: dict[eps.SparseTable | eps.DenseTensor, object] = {
                    noise: (keys[:16384], np.ones((16384, 16), np.float32))
                }
                if step % 10 == 0:
                    step_of[table] = (some, rng.random((200, 16), np.float32))
                ps.push(step_of).result()
            ps.drop_table("noise")
            os.kill(process.pid, signal.SIGCONT)
            expected = table.pull(keys).tobytes().hex()
            until_s = time.monotonic() + 60
            while (after := ask())[3] != expected:
                assert time.monotonic() < until_s
            assert after[0] > first[0], "it was not away for long enough"
            assert after[1] - first[1] < 0.1 * len(keys)
            assert after[2] - first[2] < 0.15 * first[2]


@pytest.mark.parametrize("dim", [16, 4096])
def test_rows_that_are_compared_at_once_are_bounded_by_bytes(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows a range has: each list of cells, and what a server looks at for it, is of about 8 MB."""
    rng, keys, most = np.random.default_rng(5), np.arange(6000), 1 << 20
    monkeypatch.setattr(cells, "BYTES_AT_ONCE", most)
    server = Store(RANGES).create(eps.TableSpec("t", dim, eps.SGD(lr=0.1)), 7)
    server.put(keys, rng.random((len(keys), dim), np.float32))
    reader = ReaderTable(server.spec, 7, RANGES, None)
    read(server, reader)
    changed = np.arange(0, len(keys), 100)
    server.put(changed, rng.random((len(changed), dim), np.float32))
    looked_at = list[int]()

    def rows_of(header: NDArray[np.int64], named: NDArray[np.int64], *of: int) -> Any:
        looked_at.append(4 * dim * len(named))
        return journal.rows_of(header, named, *of)

    monkeypatch.setattr(cells, "rows_of", rows_of)
    monkeypatch.setattr(range_parts, "rows_of", rows_of)
    came, _ = read(server, reader)
    assert equal(server, reader, ALL_KEYS)
    assert max(looked_at) <= range_parts.COMPARED * most
    assert came < len(keys) / 2


@pytest.mark.parametrize("seed", range(10))
def test_damaged_requests_and_answers_are_refused_or_read_within_their_bounds(seed: int) -> None:
    from elasticps.wire.frames import FrameError

    rng = np.random.default_rng(seed)
    server = server_table(np.arange(400), rng)
    reader = ReaderTable(server.spec, 7, RANGES, None)
    read(server, reader)
    server.put(np.arange(5), rng.random((5, DIM), np.float32))
    request = tables_of(reader).describe(ReadRange(1, 1, 2, 8192, ReadCursor(0)))
    answer = part_of(readable(server, reader), request, 1, RANGES)
    assert answer.intervals[0].differing is not None
    for frame, parse in ((request.frame(), ReadRange.of), (answer.frame(), RangePart.of)):
        header, body = there(frame)
        for _ in range(200):
            damaged = body.copy()
            damaged[rng.integers(min(len(damaged), 40))] = rng.integers(256)
            damaged = damaged[: len(damaged) - 8 * int(rng.integers(0, 2))]
            changed = header._replace(
                items=int(rng.choice([header.items, rng.integers(1 << 32)])),
                table=int(rng.choice([header.table, rng.integers(1 << 20)])),
                body=len(damaged),
            )
            try:
                found: Any = parse(changed, damaged, RANGES)
            except FrameError:
                continue
            if isinstance(found, ReadRange):
                part_of(readable(server, reader), found, 1, RANGES)
