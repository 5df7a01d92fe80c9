"""The owner's side of a cluster's keeper, the process that ends everything when the owner dies: see `keeper`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from elasticps.local import keeper

_GRACE_S = 1.0  # for one that reads no more


class Keeping:
    """A keeper that runs, until `close`. born: what the record in the cluster's folder is known by."""

    def __init__(self, folder: Path, born: str) -> None:
        # By its path and without site-packages: it starts in a few milliseconds.
        self._command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(folder), born]
        self._lock = threading.Lock()
        self._known: list[tuple[int, str]] = []
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the keeper that runs now."""
        return self._process.pid

    def watch(self, pid: int, moment: str) -> None:
        """Has it end this process, too. A keeper that has died meanwhile is replaced: what it was to end runs on."""
        with self._lock:
            self._known.append((pid, moment))
            try:
                self._give([(pid, moment)])
            except OSError:
                self.close(_GRACE_S)
                self._process = self._start()
                self._give(self._known)

    def close(self, grace_s: float) -> None:
        """Ends it. Nothing that it was to end is left."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:  # a fork of this process still holds the other end
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # Not in our session, or Ctrl-C and a closing terminal would end it with us.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def _give(self, processes: Iterable[tuple[int, str]]) -> None:
        assert self._process.stdin is not None
        for pid, moment in processes:
            self._process.stdin.write(f"{pid} {moment}\n".encode())
