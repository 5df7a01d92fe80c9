"""Where checkpoints lie: a folder, a bucket of S3, Google or Azure, or this process's memory.

What `put` and `put_new` have written stays: buckets promise that, and in folders files and their entries are synced to
the disk. Nobody ever sees half a file. Calls block: for threads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore, ObjectStore, from_url

from elasticps.checkpoint.folder import Folder, Stored
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
_BUCKETS = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_SCHEMES = (*_BUCKETS, "file", "memory", "http", "https")
_memory: dict[str, MemoryStore] = {}  # by name: all that this process has


def new_memory(size: int) -> NDArray[np.uint8]:
    """Fresh memory, for callers that keep what they read."""
    return np.empty(size, np.uint8)


class NotThere(CheckpointError):
    """The file does not exist."""


def _checked(given: str, url: str) -> SplitResult:
    """Splits a URL. Raises CheckpointError for parts without meaning: two places must never be taken for one."""
    scheme = given.partition(":")[0].lower()
    if "://" not in given and scheme in _SCHEMES and ":" in given:
        slashes = "three slashes: file:///folder" if scheme == "file" else f"two slashes: {scheme}://…"
        raise CheckpointError(f"{given}: a URL of that kind has {slashes}; a folder of that name is ./{given}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise CheckpointError(f"{given} is no URL of checkpoints: {error}") from None
    if odd := [letter for letter in "?#" if letter in url]:
        raise CheckpointError(
            f"{given}: a place of checkpoints has no part behind {odd[0]!r}; if it belongs to a name, write "
            f"{quote(odd[0])} for it, or give a folder as a path without {parts.scheme}://"
        )
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise CheckpointError(f"{given}: a folder's URL has three slashes: file:///{parts.netloc}{parts.path}")
    if not (parts.path if parts.scheme == "file" else parts.netloc or (parts.scheme == "memory" and parts.path)):
        raise CheckpointError(f"{given} names no {'folder' if parts.scheme == 'file' else 'bucket'}")
    if parts.scheme in ("s3", "s3a", "gs", "az", "azure") and not {"@", ":"}.isdisjoint(parts.netloc):
        raise CheckpointError(
            f"{given}: behind {parts.scheme}:// comes a bucket's name; credentials and endpoints belong into the "
            "environment, as the provider's own tools take them"
        )
    return parts


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
        self._folder: Folder | None = None
        self._store: ObjectStore | None = None
        parts = _checked(url, self.url)
        if parts.scheme == "file":
            self._folder = Folder(Path(unquote(parts.path)))
        elif parts.scheme == "memory":
            self._store = _memory.setdefault(self.url, MemoryStore())
        else:
            # obstore drops the first folder of an az:// URL, and no folder of the other name for the same.
            known = f"abfs{self.url[len(parts.scheme) :]}" if parts.scheme in ("az", "azure") else self.url
            with self._explained("opened"):
                self._store = from_url(known, retry_config=_RETRIES, **options)
            prefix = getattr(self._store, "prefix", None)  # a server of plain HTTP has none
            if parts.scheme in _BUCKETS and (prefix or "") != unquote(parts.path).strip("/"):
                raise CheckpointError(
                    f"{url} would be taken for {parts.scheme}://{parts.netloc}/{prefix or ''}: write it as that"
                )

    @property
    def near(self) -> bool:
        """Whether a file is read as fast by one request as by many: a folder, or memory."""
        return self._folder is not None or self.url.startswith("memory:")

    def put(self, path: str, data: Data) -> None:
        """Makes or replaces a file: a concurrent reader gets the old one or the new one."""
        self._put(path, data, overwrite=True)

    def put_new(self, path: str, data: Data) -> bool:
        """Makes a file unless the name is taken; returns whether it did. Of several concurrent calls one does."""
        try:
            self._put(path, data, overwrite=False)
        except (AlreadyExistsError, FileExistsError):
            return False
        return True

    def _put(self, path: str, data: Data, *, overwrite: bool) -> None:
        parts = data if isinstance(data, tuple) else (memoryview(data),)
        with self._explained("written", path):
            if self._folder is not None:
                self._folder.write(path, parts, overwrite=overwrite)
            else:
                joined = b"".join(parts) if isinstance(data, tuple) else data
                obstore.put(self._objects, path, joined, mode="overwrite" if overwrite else "create")

    def get(self, path: str) -> bytes:
        """Reads a whole file. Raises NotThere."""
        with self._explained("read", path):
            if self._folder is None:
                return bytes(obstore.get(self._objects, path).bytes())
            with self._folder.open(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return file.read()

    def exists(self, path: str) -> bool:
        """Whether there is a file of that name."""
        try:
            with self._explained("looked for", path):
                if self._folder is None:
                    obstore.head(self._objects, path)
                else:
                    with self._folder.open(path):
                        pass
        except NotThere:
            return False
        return True

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Reads `length` bytes of a file from byte `start` on. Raises NotThere; CheckpointError if it ends before."""
        return bytes(self.get_ranges(path, [(start, length)])[0])

    def get_ranges(self, path: str, parts: Sequence[tuple[int, int]], take: Take = new_memory) -> list[memoryview]:
        """Several of (start, length), at once; those close to each other with one request. take: where what lies in a
        folder is read to; what comes over a network has memory of its own."""
        nonempty = [part for part in parts if part[1]]
        found: Iterator[memoryview] = iter(())
        if nonempty and self._folder is not None:
            with self._explained("read", path):
                found = iter(_read(self._folder, path, nonempty, take))
        elif nonempty:
            with self._explained("read", path):
                starts, lengths = [start for start, _ in nonempty], [length for _, length in nonempty]
                read = obstore.get_ranges(self._objects, path, starts=starts, lengths=lengths)
                found = map(memoryview, read)
        out = [next(found) if length else memoryview(b"") for _, length in parts]
        if any(len(data) != length for data, (_, length) in zip(out, parts, strict=True)):
            raise CheckpointError(f"{self.url}/{path} is shorter than it must be: it was cut off, or written by others")
        return out

    def listing(self, prefix: str = "") -> list[Stored]:
        """All files below a folder, which need not exist."""
        with self._explained("listed", prefix):
            if self._folder is not None:
                return self._folder.listing(prefix)
            return sorted(
                Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for chunk in obstore.list(self._objects, prefix or None) for meta in chunk
            )  # fmt: skip

    def files(self, prefix: str = "") -> list[tuple[str, int]]:
        """Path and bytes of all files below a folder, which need not exist."""
        return [(file.path, file.bytes) for file in self.listing(prefix)]

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        with self._explained("listed"):
            if self._folder is not None:
                return self._folder.folders()
            return sorted(obstore.list_with_delimiter(self._objects)["common_prefixes"])

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, in this order; those that are not there count as deleted."""
        with self._explained("deleted from"):
            if self._folder is None:
                with suppress(FileNotFoundError):
                    obstore.delete(self._objects, paths)
                return
            for path in paths:
                with suppress(FileNotFoundError):
                    self._folder.delete(path)

    def drop_empty(self, folder: str) -> bool:
        """Removes a folder at the top that has no files: only on disks there is such a thing. Whether it is gone; it
        stays if somebody is writing there."""
        return self._folder is not None and self._folder.drop_empty(folder)

    @property
    def _objects(self) -> ObjectStore:
        assert self._store is not None, "a folder has none"
        return self._store

    @contextmanager
    def _explained(self, done: str, path: str = "") -> Iterator[None]:
        """Turns errors into CheckpointError that says what failed where, and what to do."""
        where = f"{self.url}/{path}" if path else self.url
        try:
            yield
        except (AlreadyExistsError, FileExistsError):
            raise
        except (BaseError, OSError, ValueError) as error:
            text = _first(error)
            if any(name in text for name in _NO_BUCKET):
                raise CheckpointError(f"{where} cannot be {done}: there is no such bucket") from error
            if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR):
                text += "; a part of that path is no folder, or is a link, which is not followed"
            if isinstance(error, FileNotFoundError):
                raise NotThere(f"{where} cannot be {done}: it is not there") from error
            if isinstance(error, _DENIED) or any(name in text for name in _NOT_ALLOWED):
                text += "; look at the credentials in the environment, and at what they may do there"
            raise CheckpointError(f"{where} cannot be {done}: {text}") from error


def _read(folder: Folder, path: str, parts: Sequence[tuple[int, int]], take: Take) -> list[memoryview]:
    """(start, length) of a file; less where it ends before."""
    out = []
    with folder.open(path) as descriptor, open(descriptor, "rb", buffering=0, closefd=False) as file:
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
