"""What the system says of memory: the limit of this process, what it uses, and what is left where it runs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from elasticps.errors import ConfigError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_ROOT = Path("/")
_AVAILABLE = b"MemAvailable:"
PAGE = resource.getpagesize()
ENDLESS = 1 << 62
_OWN = ((resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data"))  # limits of a process, and what counts for them
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class Reading(NamedTuple):
    """Bytes that the process has in memory of its own, and bytes that its group or machine can still give; left: bytes
    until a limit of the process itself (`ulimit`)."""

    used: int
    available: int
    left: int = ENDLESS


class _Group(NamedTuple):
    """A control group with a limit: where its figures are, and what they are called."""

    folder: Path
    limit: int
    usage: str
    cache: str
    shared: str

    def available(self) -> int:
        """Bytes until the limit; what the kernel can drop at once does not count."""
        figures = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        dropped = int(figures.get(self.cache, 0)) - int(figures.get(self.shared, 0))
        return self.limit - int((self.folder / self.usage).read_text()) + dropped


def parse_size(text: str) -> int:
    """Bytes of "1500000000", "512MiB", "4G" and the like; units are powers of 1,024. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no size of memory: write for example 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def give_back() -> None:
    """Has the C library return what it keeps of freed memory, where it can: pages in the middle of its heaps, too.
    Takes about half a millisecond for each MiB that goes, 5 ms where none does."""
    if _trim is not None:
        _trim(0)


def find_limit(root: Path = _ROOT) -> int:
    """The smallest limit of the control groups around this process, of either version, or of the process itself
    (`ulimit -v`, `ulimit -d`), or else the machine's memory."""
    limits = [group.limit for group in _groups(root)] or [psutil.virtual_memory().total]
    return min((*limits, *own_limits().values()))


def own_limits() -> dict[str, int]:
    """The limits of this process, by the figure that counts for each."""
    found = {name: resource.getrlimit(which)[0] for which, name in _OWN}
    return {name: limit for name, limit in found.items() if limit != resource.RLIM_INFINITY}


def make_reader(root: Path = _ROOT) -> Callable[[], Reading]:
    """How to read these figures. Many servers of one machine each do so ten times a second: the files stay open."""
    groups, own = list(_groups(root)), own_limits()
    pages, machine = _OpenFile("/proc/self/statm"), _OpenFile("/proc/meminfo")

    def read() -> Reading:
        vms, rss, shared, _, _, data, _ = (PAGE * int(count) for count in pages.read().split())
        text = machine.read()
        available = int(text[text.index(_AVAILABLE) + len(_AVAILABLE) :].split(None, 1)[0]) << 10
        for group in groups:
            available = min(available, group.available())
        using = {"vms": vms, "data": data}
        left = min((limit - using[name] for name, limit in own.items()), default=ENDLESS)
        return Reading(rss - shared, min(available, left), left)

    return read


class _OpenFile:
    """A file of the kernel that is read again and again, from its beginning."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """The first bytes as they are now."""
        return os.pread(self._fd, 4096, 0)

    def __del__(self) -> None:
        os.close(self._fd)


def _groups(root: Path) -> Iterator[_Group]:
    """The groups around this process that have a limit below the machine's memory. In a container its own group may be
    mounted as the root of all."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    total = psutil.virtual_memory().total
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, more = root / "sys/fs/cgroup", "memory.max", ("memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            top, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            more = "memory.usage_in_bytes", "total_cache", "total_shmem"
        else:
            continue
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            try:
                found = (folder / limit).read_text().strip()
            except OSError:
                continue
            if found.isdigit() and int(found) < total:
                yield _Group(folder, int(found), *more)
