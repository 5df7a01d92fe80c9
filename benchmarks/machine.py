"""What this machine can do at all, measured beside elasticps, and what processes use of it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

_SIZES = struct.Struct("<QQ")


def memcpy_gb_per_s(size: int = 16 << 20, times: int = 20) -> float:
    """Median speed of copying `size` bytes within memory that is mapped already."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return size / float(np.median(seconds)) / 1e9


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that these processes have used so far, in user mode and in the kernel, from /proc."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} shows no resident memory")


def pss_bytes(pid: int) -> int:
    """Resident memory of a process, what it shares with others divided among them, from /proc."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} shows no resident memory")


def marked(mark: str) -> list[int]:
    """Pids of all processes that were started with `mark`, "NAME=VALUE", in their environment, and of their children:
    some overwrite what /proc shows of their environment."""
    parents, found = dict[int, int](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def marked_cpu_seconds(mark: str) -> float:
    """CPU time that the `marked` processes have used so far, and children of theirs that have ended."""
    total = 0
    for pid in marked(mark):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(each) for each in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


class SocketPair:
    """A plain request/response pair over loopback: `sendall`, `recv_into`, buffers used again, nothing else."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffers: dict[int, memoryview] = {}

    def exchange(self, request: int, response: int) -> float:
        """Sends `request` bytes, receives `response` bytes; seconds it took."""
        out, into = self._buffer(request), self._buffer(response)
        started = time.perf_counter()
        self._socket.sendall(_SIZES.pack(request, response))
        self._socket.sendall(out)
        _receive(self._socket, into)
        return time.perf_counter() - started

    def _buffer(self, size: int) -> memoryview:
        if size not in self._buffers:
            self._buffers[size] = memoryview(bytearray(b"\1" * size))
        return self._buffers[size]


@contextmanager
def socket_pair() -> Iterator[SocketPair]:
    """A `SocketPair` whose other end is a process of its own."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_serve, args=(child,), daemon=True)
    process.start()
    try:
        with socket.create_connection(("127.0.0.1", parent.recv())) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield SocketPair(sock)
    finally:
        process.terminate()
        process.join()
        parent.close()


def _serve(pipe: Pipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sizes, buffers = memoryview(bytearray(_SIZES.size)), dict[int, memoryview]()
    while _receive(peer, sizes):
        request, response = _SIZES.unpack(sizes)
        for size in (request, response):
            if size not in buffers:
                buffers[size] = memoryview(bytearray(b"\1" * size))
        _receive(peer, buffers[request])
        peer.sendall(buffers[response])


def _receive(sock: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        n = sock.recv_into(into[at:])
        if not n:
            return False
        at += n
    return True
