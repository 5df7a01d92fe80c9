"""Limits as control groups of either version and `ulimit` give them, and sizes as people write them."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from coordinator.core.sizing import fill_mark, rows_mark
from elasticps.errors import ConfigError
from elasticps.system.memory import find_limit, give_back, make_reader, parse_size

MIB = 1 << 20
LIMIT = 1 << 30


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def second_version(root: Path, group: str, limit: str, used: int = 0, file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    put(folder / "memory.max", f"{limit}\n")
    put(folder / "memory.current", f"{used}\n")
    put(folder / "memory.stat", f"anon 1\nfile {file}\nshmem {MIB}\n")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1500000000", 1_500_000_000), ("512MiB", 512 * MIB), ("4G", 4 << 30), ("1.5 gb", 3 << 29), ("64k", 65536)],
)
def test_sizes_are_parsed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1", "4X", "0", "1e9"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="4GiB"):
        parse_size(text)


def test_the_smallest_limit_around_the_process_counts(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "0::/pod/server\n")
    second_version(tmp_path, "pod/server", "max")
    second_version(tmp_path, "pod", str(300 * MIB), used=250 * MIB, file=101 * MIB)
    second_version(tmp_path, ".", str(400 * MIB))
    assert find_limit(tmp_path) == 300 * MIB
    assert make_reader(tmp_path)().available == 150 * MIB  # pages of files are dropped, shared memory is not


def test_the_limit_of_a_container_is_found(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    put(folder / "memory.limit_in_bytes", f"{200 * MIB}\n")
    put(folder / "memory.usage_in_bytes", f"{90 * MIB}\n")
    put(folder / "memory.stat", f"total_cache {41 * MIB}\ntotal_shmem {MIB}\n")
    assert find_limit(tmp_path) == 200 * MIB
    assert make_reader(tmp_path)().available == 150 * MIB


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "4:memory:/\n")
    put(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert find_limit(tmp_path) == psutil.virtual_memory().total
    used, available, _ = make_reader(tmp_path)()
    assert 0 < used < psutil.virtual_memory().total
    assert available > 0


def test_new_rows_stop_below_the_limit() -> None:
    assert rows_mark(LIMIT, 2, 2) == int(0.8 * LIMIT)  # nowhere to fill when one dies
    assert rows_mark(LIMIT, 5, 1) == int(0.8 * LIMIT)
    for servers in range(3, 12):  # all others take what one had, evenly: it fits below the upper mark
        mark = rows_mark(LIMIT, servers, 2)
        assert mark + mark / (servers - 1) <= fill_mark(LIMIT) + servers
        assert mark > LIMIT // 2


def test_small_limits_keep_a_minimum_free() -> None:
    """What a process needs besides rows does not grow with them."""
    assert fill_mark(512 << 20) == (512 - 80) << 20
    assert fill_mark(200 << 20) == 150 << 20
    assert rows_mark(200 << 20, 2, 2) == 150 << 20


def test_memory_freed_between_kept_blocks_is_returned() -> None:
    process = psutil.Process()
    some = [bytes(2000) for _ in range(50_000)]
    retained = some[::100]
    full = process.memory_info().rss
    some.clear()
    give_back()
    assert full - process.memory_info().rss > 50 << 20
    assert len(retained) == 500


def test_a_limit_of_the_process_counts_as_a_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "proc/self/cgroup", "4:memory:/\n")
    limits = {resource.RLIMIT_AS: 64 << 40, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    assert find_limit(tmp_path) == psutil.virtual_memory().total
    reading = make_reader(tmp_path)()
    assert 0 < (64 << 40) - reading.left < 1 << 40
    limits[resource.RLIMIT_DATA] = 1 << 30
    assert find_limit(tmp_path) == 1 << 30
    reading = make_reader(tmp_path)()
    assert reading.available <= reading.left < 1 << 30
