"""The demo's processes: the main process starts children, and each child answers over a pipe.

A child writes JSON lines to standard output and reads words from standard input. It ends when its standard input does:
it never outlives the main process, however that one ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from elasticps.errors import Error
from elasticps.local.process import signal_name

KILL_AFTER_S = 3.0


@dataclass(frozen=True)
class ChildEvent:
    """An event of child `source`. `kind` is "exit" when it ended, with its exit code in `values`."""

    source: str
    kind: str
    t: float  # time of day, seconds
    values: dict[str, Any]


class ChildFailed(Error):
    """A child of the demo ended before its work was done."""


class Children:
    """The child processes, and one queue of what all of them tell. Ends them on leaving the `with` block."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._killed: set[int] = set()  # ids of processes whose end is no news
        self._readers: list[threading.Thread] = []
        self._events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def start(self, name: str, job: dict[str, object], *, again: bool = False) -> None:
        """Starts `examples.demo.worker`; what it writes to stderr goes to `<name>.log`, `again`: to its end."""
        with (self._logs / f"{name}.log").open("ab" if again else "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "examples.demo.worker", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches the main process alone
            )
        self._running[name] = process
        reader = threading.Thread(target=self._read, args=(name, process), name=f"reader of {name}", daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if not line.endswith("\n"):
                    break  # it was killed in the middle of a line
                values = json.loads(line)
                self._events.put(ChildEvent(name, values.pop("event"), values.pop("t"), values))
        code = process.wait()
        if process.pid not in self._killed:
            self._events.put(ChildEvent(name, "exit", time.time(), {"code": code}))

    def kill(self, name: str) -> None:
        """kill -9; returns when the child is gone and everything that it told is in the queue. One that has ended by
        itself is gone already."""
        process = self._running.get(name)
        if process is None:
            return
        self._killed.add(process.pid)
        process.kill()
        self._close(name)
        for reader in self._readers:
            if reader.name == f"reader of {name}":
                reader.join()

    def say(self, name: str, word: str) -> None:
        """Sends a word to a child; one that has ended is heard of as an event."""
        stdin = self._running[name].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(word + "\n")
            stdin.flush()

    def next_event(self, timeout_s: float) -> ChildEvent | None:
        """The next event, None if there is none in time. Raises ChildFailed for a child that ended with an error."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event.kind == "exit":
            self._close(event.source)
            if event.values["code"] != 0:
                raise ChildFailed(self._story(event.source, event.values["code"]))
        return event

    def _story(self, name: str, code: int) -> str:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        log = self._logs / f"{name}.log"
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        return "\n".join([f"{name} {how}; the end of {log}:", *tail])

    def _close(self, name: str) -> None:
        process = self._running.pop(name)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def end(self) -> None:
        """Ends all children: asks, then insists."""
        waiting = list(self._running.values())
        for name in list(self._running):
            self._close(name)  # the end of its stdin ends a child
        deadline = time.monotonic() + KILL_AFTER_S
        for process in waiting:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join()


class Pipe:
    """The child's end: sends events to the main process, and receives its words."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print does not break the protocol
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._words.put(line.strip())
        os._exit(0)

    def tell(self, event: str, **values: object) -> None:
        """Sends an event with the time of day."""
        self._out.write(json.dumps({"event": event, "t": time.time(), **values}) + "\n")

    def next_word(self) -> str:
        """Waits for the main process's next word."""
        return self._words.get()
