"""The files below a folder on a disk, by paths relative to it.

Below the folder no link is followed, neither by readers nor by what deletes: whoever may write there could point one
at files of somebody else. What is no regular file is not opened: a pipe would wait for ever. Each folder on the way to
a file is opened in the one above it, so that nobody can put a link in between.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from coordinator.core import fields
from elasticps.system import temporary

log = fields.logger(__name__)

_BESIDE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 5  # a folder that is made may go at once, with the last file of somebody who deletes
_VECTORS = 512  # parts that one call of the system writes


class Stored(NamedTuple):
    """A file: its path, bytes, and when it was written, by the storage's clock, in seconds since 1970."""

    path: str
    bytes: int
    time: float


class Folder:
    """The folder at `root`, which need not exist before something is written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, parts: Sequence[memoryview], *, overwrite: bool) -> None:
        """Makes a file of these parts, or replaces one; on the disk before it has its name. FileExistsError without
        `overwrite`, OSError."""
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                self._write(path, parts, overwrite)
                return
        self._write(path, parts, overwrite)

    def _write(self, path: str, parts: Sequence[memoryview], overwrite: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with self._parents(path, make=True) as (folders, name):
            part = temporary.new_path(Path(name).parent).name
            try:
                mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with _closing(os.open(part, mode, 0o666, dir_fd=folders[-1])) as file:
                    _write_all(file, parts)
                    _sync(file)
                (os.replace if overwrite else os.link)(part, name, src_dir_fd=folders[-1], dst_dir_fd=folders[-1])
                for folder in reversed(folders):
                    _sync(folder)
                with _closing(os.open(self.root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
                    _sync(above)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folders[-1])

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """The descriptor of a file that is read. FileNotFoundError; OSError for a link, and for what is no file."""
        with self._parents(path) as (folders, name):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folders[-1])
        with _closing(descriptor):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            yield descriptor

    def listing(self, prefix: str = "") -> list[Stored]:
        """All files below a folder, which need not exist."""
        found: list[Stored] = []
        with suppress(FileNotFoundError, NotADirectoryError), self._parents(f"{prefix}/x" if prefix else "x") as there:
            self._list(there[0][-1], f"{prefix}/" if prefix else "", found)
        return sorted(found)

    def _list(self, folder: int, before: str, found: list[Stored]) -> None:
        for entry in self._entries(folder, before):
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_dir(follow_symlinks=False):
                    with _closing(os.open(entry.name, _BESIDE, dir_fd=folder)) as below:
                        self._list(below, f"{before}{entry.name}/", found)
                elif entry.is_file(follow_symlinks=False):
                    there = entry.stat(follow_symlinks=False)
                    found.append(Stored(f"{before}{entry.name}", there.st_size, there.st_mtime))

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        with suppress(FileNotFoundError), self._parents("x") as (there, _):
            return sorted(e.name for e in self._entries(there[-1], "") if e.is_dir(follow_symlinks=False))
        return []

    def delete(self, path: str) -> None:
        """Deletes a file, and folders that have nothing else. FileNotFoundError."""
        with self._parents(path) as (folders, name):
            os.unlink(name, dir_fd=folders[-1])
            names = path.split("/")[:-1]
            with suppress(OSError):  # it has something else
                for above, below in zip(reversed(folders[:-1]), reversed(names), strict=True):
                    os.rmdir(below, dir_fd=above)

    def drop_empty(self, folder: str) -> bool:
        """Removes a folder at the top that has no files; whether it is gone. It stays if somebody is writing there."""
        with suppress(OSError), self._parents(f"{folder}/x") as ((root, top), _):
            self._drop_empty(top)
            os.rmdir(folder, dir_fd=root)
            return True
        return False

    def _drop_empty(self, folder: int) -> None:
        with os.scandir(folder) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in below:
            with _closing(os.open(name, _BESIDE, dir_fd=folder)) as inside:
                self._drop_empty(inside)
            os.rmdir(name, dir_fd=folder)

    def _entries(self, folder: int, before: str) -> list[os.DirEntry[str]]:
        """What lies in a folder, but links."""
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_symlink():
                log.warning("a link is not followed", path=self.root / before / entry.name)
        return [entry for entry in found if not entry.is_symlink()]

    @contextmanager
    def _parents(self, path: str, *, make: bool = False) -> Iterator[tuple[list[int], str]]:
        """Descriptors of the folders on the way to a file, the root's first, and the file's name."""
        *names, last = path.split("/")
        if any(name in ("", ".", "..") for name in (*names, last)):
            raise OSError(errno.EINVAL, "it is no path below a folder")
        folders = [os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folders[-1])
                folders.append(os.open(name, _BESIDE, dir_fd=folders[-1]))
            yield folders, last
        finally:
            for descriptor in folders:
                os.close(descriptor)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(file: int, parts: Sequence[memoryview]) -> None:
    """Writes without a copy, and without the interpreter's lock."""
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        written = os.writev(file, left[:_VECTORS])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def _sync(descriptor: int) -> None:
    """Has a file's bytes, or a folder's entries, on the disk, and out of memory: nobody reads them soon, and to take
    other pages for the next file may cost the system several times as much as to copy it there."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
