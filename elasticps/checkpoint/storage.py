"""Where checkpoints lie: a folder, a bucket of S3, Google or Azure, or this process's memory.

What `put` and `put_new` have said is there stays there: buckets promise that, and in folders files and their entries
are synced to the disk, which obstore leaves to the system. Nobody ever sees half a file. Calls block: for threads.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from elasticps.errors import CheckpointError

Data = bytes | bytearray | memoryview | tuple[memoryview, ...]
"""A file's bytes, or the parts of one."""
Take = Callable[[int], NDArray[np.uint8]]
"""Gives memory of so many bytes to read into."""
_RETRIES: Any = {
    "max_retries": 8,
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}
_DENIED = (PermissionDeniedError, UnauthenticatedError, PermissionError)
# In lists of what there is obstore has no kinds of errors, only what the storage has answered.
_NOT_ALLOWED = ("401 Unauthorized", "403 Forbidden", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_memory: dict[str, MemoryStore] = {}  # by name: all that this process has


def new_memory(size: int) -> NDArray[np.uint8]:
    """For those who keep what they read."""
    return np.empty(size, np.uint8)


class Stored(NamedTuple):
    """A file: its path, bytes, and when it was written, by the storage's clock, in seconds since 1970."""

    path: str
    bytes: int
    time: float


class NotThere(CheckpointError):
    """No such file."""


class Storage:
    """The files under one URL, by paths relative to it."""

    def __init__(self, url: str, **options: Any) -> None:
        """url: `file:///data/checkpoints` or a path, `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://name`.

        Regions, endpoints and credentials are taken from the environment, as each provider's own tools do (AWS_REGION,
        AWS_ENDPOINT_URL, …); options are obstore's, for those that come otherwise. Touches nothing yet.
        """
        if not url.strip():
            raise CheckpointError(
                "the place of checkpoints is empty: name a folder, or a URL such as s3://bucket/prefix"
            )
        self.url = url.rstrip("/") if "://" in url else Path(url).absolute().as_uri()
        self._folder: Path | None = None
        self._store: ObjectStore | None = None
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost"):
                raise CheckpointError(f"{url}: a folder's URL has three slashes: file:///{parts.netloc}{parts.path}")
            self._folder = Path(unquote(parts.path))
        elif parts.scheme == "memory":
            self._store = _memory.setdefault(self.url, MemoryStore())
        else:
            with self._told("opened"):
                self._store = from_url(self.url, retry_config=_RETRIES, **options)

    @property
    def near(self) -> bool:
        """Whether a file is read as fast by one request as by many: a folder, or memory."""
        return self._folder is not None or self.url.startswith("memory:")

    def put(self, path: str, data: Data) -> None:
        """Makes or replaces a file: whoever reads it meanwhile gets the one or the other."""
        self._put(path, data, overwrite=True)

    def put_new(self, path: str, data: Data) -> bool:
        """Makes a file unless there is one of that name; whether it did. Of several at once one does."""
        try:
            self._put(path, data, overwrite=False)
        except (AlreadyExistsError, FileExistsError):
            return False
        return True

    def _put(self, path: str, data: Data, *, overwrite: bool) -> None:
        store = self._for_writing()
        with self._told("written", path):
            if self._folder is None:
                joined = b"".join(data) if isinstance(data, tuple) else data
                obstore.put(store, path, joined, mode="overwrite" if overwrite else "create")
                return
            part = f"{path}.{uuid.uuid4().hex}.part"  # on the disk before it has its name
            try:
                there = iter(data) if isinstance(data, tuple) else data
                obstore.put(store, part, there, use_multipart=False)  # else it is copied under the GIL
                self._sync(self._folder / part)
                (os.replace if overwrite else os.link)(self._folder / part, self._folder / path)
                for folder in (self._folder / path).parents:
                    self._sync(folder)
                    if folder == self._folder.parent:
                        break
            finally:
                (self._folder / part).unlink(missing_ok=True)

    def get(self, path: str) -> bytes:
        """A whole file. Raises NotThere."""
        with self._told("read", path):
            return bytes(obstore.get(self._for_reading(path), path).bytes())

    def exists(self, path: str) -> bool:
        """Whether there is a file of that name."""
        try:
            with self._told("looked for", path):
                obstore.head(self._for_reading(path), path)
        except NotThere:
            return False
        return True

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes of a file from byte `start` on. Raises NotThere, CheckpointError if it ends before."""
        return bytes(self.get_ranges(path, [(start, length)])[0])

    def get_ranges(self, path: str, parts: Sequence[tuple[int, int]], take: Take = new_memory) -> list[memoryview]:
        """Several of (start, length), at once; those close to each other with one request. take: where what lies in a
        folder is read to; what comes over a network has memory of its own."""
        wanted = [part for part in parts if part[1]]
        found: Iterator[memoryview] = iter(())
        if wanted and self._folder is not None:
            with self._told("read", path):
                found = iter(_read(self._folder / path, wanted, take))
        elif wanted:
            with self._told("read", path):
                starts, lengths = [start for start, _ in wanted], [length for _, length in wanted]
                read = obstore.get_ranges(self._for_reading(path), path, starts=starts, lengths=lengths)
                found = map(memoryview, read)
        out = [next(found) if length else memoryview(b"") for _, length in parts]
        if any(len(data) != length for data, (_, length) in zip(out, parts, strict=True)):
            raise CheckpointError(f"{self.url}/{path} is shorter than it must be: it was cut off, or written by others")
        return out

    def listing(self, prefix: str = "") -> list[Stored]:
        """All files below a folder, which need not exist."""
        if self._folder is not None and not self._folder.exists():
            return []
        with self._told("listed", prefix):
            chunks = obstore.list(self._for_reading(), prefix or None)
            return sorted(
                Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for chunk in chunks for meta in chunk
            )  # fmt: skip

    def files(self, prefix: str = "") -> list[tuple[str, int]]:
        """Path and bytes of all files below a folder, which need not exist."""
        return [(file.path, file.bytes) for file in self.listing(prefix)]

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        if self._folder is not None and not self._folder.exists():
            return []
        with self._told("listed"):
            return sorted(obstore.list_with_delimiter(self._for_reading())["common_prefixes"])

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, in this order; those that are not there count as deleted."""
        with self._told("deleted from"):
            for some in [paths] if self._folder is None else [[path] for path in paths]:
                with suppress(FileNotFoundError):
                    obstore.delete(self._for_reading(), some)

    def drop_empty(self, folder: str) -> bool:
        """Removes a folder at the top that has no files: only on disks there is such a thing. Whether it is gone; it
        stays if somebody is writing there."""
        if self._folder is None or not (top := self._folder / folder).is_dir():
            return False
        with suppress(OSError):
            for at, _, _ in os.walk(top, topdown=False):
                os.rmdir(at)
        return not top.exists()

    # --- folders --------------------------------------------------------------------------------------------------

    def _for_writing(self) -> ObjectStore:
        if self._store is None:
            with self._told("made"):
                self._store = LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
        return self._store

    def _for_reading(self, path: str = "") -> ObjectStore:
        """A folder is not made by looking into it."""
        if self._folder is not None and not self._folder.exists():
            raise FileNotFoundError(path)
        return self._for_writing()

    @staticmethod
    def _sync(at: Path) -> None:
        """Has a file's bytes, or a folder's entries, on the disk, and out of memory: nobody reads them soon, and to
        take other pages for the next file may cost the system several times as much as to copy it there."""
        descriptor = os.open(at, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    @contextmanager
    def _told(self, done: str, path: str = "") -> Iterator[None]:
        """Errors say what could not be done where, and what to do."""
        where = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except (AlreadyExistsError, FileExistsError):
            raise
        except (BaseError, OSError, ValueError) as error:
            text = _first(error)
            if any(name in text for name in _NO_BUCKET):
                raise CheckpointError(f"{where} cannot be {done}: there is no such bucket") from error
            if isinstance(error, FileNotFoundError):
                raise NotThere(f"{where} cannot be {done}: it is not there") from error
            if isinstance(error, _DENIED) or any(name in text for name in _NOT_ALLOWED):
                text += "; look at the credentials in the environment, and at what they may do there"
            raise CheckpointError(f"{where} cannot be {done}: {text}") from error


def _read(path: Path, parts: Sequence[tuple[int, int]], take: Take) -> list[memoryview]:
    """(start, length) of a file; less where it ends before."""
    out = []
    with path.open("rb", buffering=0) as file:
        for start, length in parts:
            file.seek(start)
            data, got = take(length).data, 0
            while got < length and (n := file.readinto(data[got:])):
                got += n
            out.append(data[:got])
    return out


def _first(error: Exception) -> str:
    """What obstore says, without the structures behind it."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())
