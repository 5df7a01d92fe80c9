"""Writes files of rows in a thread, one after the other: encodes them, sums them, and waits for the storage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from elasticps.checkpoint.manifest import FileEntry
from elasticps.checkpoint.rows import RowFile

Done = Callable[[FileEntry | Exception], None]


class RowWriter(Protocol):
    """Writes the files of a server's checkpoints."""

    def put(self, url: str, folder: str, path: str, table: int, file: RowFile, done: Done) -> None:
        """Writes a file to a path below a folder of a storage. Then the loop calls `done` with its entry or the error;
        the file's memory may be used again from there on."""

    def close(self) -> None:
        """Drops files whose writing has not begun."""


class ThreadRowWriter:
    """Writes in a thread of its own, which starts with the first file."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._storage: Any = None
        self._url = ""

    def put(self, url: str, folder: str, path: str, table: int, file: RowFile, done: Done) -> None:
        """See `RowWriter`."""

        def tell(future: Future[FileEntry | Exception]) -> None:
            if not future.cancelled() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(done, future.result())

        self._threads.submit(self._write, url, folder, path, table, file).add_done_callback(tell)

    def _write(self, url: str, folder: str, path: str, table: int, file: RowFile) -> FileEntry | Exception:
        from elasticps.checkpoint.storage import Storage  # slow to import, and most servers never write

        try:
            if self._url != url:
                self._storage, self._url = Storage(url), url
            return write(self._storage, folder, path, table, file)
        except Exception as error:
            return error

    def close(self) -> None:
        """See `RowWriter`."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class InlineRowWriter:
    """Writes in the caller: for simulations, which have no threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, storage: Any) -> None:
        self._loop, self._storage = loop, storage

    def put(self, url: str, folder: str, path: str, table: int, file: RowFile, done: Done) -> None:
        """See `RowWriter`."""
        self._loop.call_soon(done, write(self._storage, folder, path, table, file))

    def close(self) -> None:
        """See `RowWriter`."""


def write(storage: Any, folder: str, path: str, table: int, file: RowFile) -> FileEntry:
    """Writes a file of rows; returns its entry for the manifest."""
    encoded = file.encode(partial(time.sleep, 0))  # a thread that serves may wait for the interpreter
    storage.put(f"{folder}/{path}", encoded.parts)
    return FileEntry.of(path, table, encoded)
