"""Temporary files and folders: under new names, made exclusively, never through a link, removed by their maker.

A temporary name must not be predictable: whoever may write into the same folder could put a link there first, or the
name could be a folder of the user's own.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PREFIX = ".elasticps-"
_SUFFIX = ".part"
_ZEROS = bytes(1 << 20)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def new_path(folder: Path, mark: str = "") -> Path:
    """A new path in `folder` that nobody can guess. It is short: a target's long name plus more would not fit."""
    return folder / f"{_PREFIX}{mark}{uuid.uuid4().hex}{_SUFFIX}"


def paths_with(folder: Path, mark: str) -> list[Path]:
    """The temporary paths in `folder` that were made with this mark: by processes that run, or that died."""
    return sorted(folder.glob(f"{_PREFIX}{mark}{'[0-9a-f]' * 32}{_SUFFIX}"))


@contextmanager
def new_folder(folder: Path, mark: str = "", mode: int = 0o700) -> Iterator[Path]:
    """A new folder in `folder`, which is removed at the end, unless it has another name by then."""
    part = new_path(folder, mark)
    part.mkdir(mode)
    made = part.lstat()
    try:
        yield part
    finally:
        with suppress(OSError):  # what the caller raises counts
            if os.path.samestat(made, part.lstat()):
                shutil.rmtree(part)


def create(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Opens a new file for writing. Raises FileExistsError if the name is taken, even by a link."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "r+b")


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Makes a file, or puts another in its place, in one step: on the disk before it has its name. OSError names it."""
    part = new_path(path.parent)
    try:
        with naming(path), create(part, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def reserve(descriptor: int, nbytes: int) -> None:
    """Gives a file so many bytes on its disk, at least one. OSError where there is no room: a write through mapped
    memory that finds none ends the process by a signal."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        for at in range(0, nbytes, len(_ZEROS)):  # a file system that cannot reserve
            os.pwrite(descriptor, _ZEROS[: nbytes - at], at)


@contextmanager
def naming(path: object) -> Iterator[None]:
    """An OSError that comes out names this path, if it names none: a full disk says which one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
