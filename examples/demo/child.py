"""The child's end of the pipe to the demo's main process: JSON lines out on stdout, words in on stdin.

A child ends when its stdin does: it never outlives the main process, however that one ended.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time


class Pipe:
    """Talks to the main process."""

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
        """Waits for what the main process says next."""
        return self._words.get()
