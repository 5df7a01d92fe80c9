"""CPU contention: whether more threads want to run than there are cores.

Both ends of a connection ask before they poll without a sleep: with contention, polling takes the core from the peer.

The kernel's pressure file counts the time in which some thread, of whatever process, was ready and had no core. The
number of runnable threads in /proc/loadavg is that of one moment: who asks runs, and those who wait have mostly just
been put to sleep or woken. Without pressure files: the time that this process's own main thread waited.
"""

from __future__ import annotations

import contextlib
import os

LOOK_S = 0.02  # between looks, which cost 2-5 µs
CONTENDED = (
    0.2  # part of the time in which somebody waited for a core: a worker and a server that poll each other on two
)
# cores make 0.1 of it, a worker and three servers 0.3 and more
PRESSURE = "/proc/pressure/cpu"
OWN_WAITS = "/proc/self/schedstat"


class CpuContention:
    """Measures CPU contention. `contended` is cheap: it reads the kernel's file every LOOK_S at most."""

    def __init__(self, pressure: str = PRESSURE, own_waits: str = OWN_WAITS) -> None:
        self._fd = -1
        self._pressure = True
        self._looked_s = 0.0
        self._waited_s = 0.0
        self._part = 0.0  # a running average: one look catches a moment
        for path in (pressure, own_waits):
            self._close()
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._pressure = path == pressure
                self._waited_s = self._read()
                break
        else:
            self._close()

    def contended(self, now: float) -> bool:
        """Whether some thread waited for a core for much of the time lately."""
        since_s = now - self._looked_s
        if since_s > LOOK_S and self._fd >= 0:
            waited_s = self._read()
            if self._looked_s:
                part = min((waited_s - self._waited_s) / since_s, 1.0)
                self._part += (part - self._part) / 8 if since_s < 4 * LOOK_S else part - self._part
            self._looked_s, self._waited_s = now, waited_s
        return self._part > CONTENDED

    def _read(self) -> float:
        """Seconds waited since the kernel, or the process, began."""
        data = os.pread(self._fd, 128, 0)
        if self._pressure:
            return int(data[data.index(b"total=") + 6 :].split(None, 1)[0]) * 1e-6
        return int(data.split()[1]) * 1e-9

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()
