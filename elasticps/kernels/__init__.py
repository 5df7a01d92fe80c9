"""Caches compiled kernels between starts, and decides when to compile them again.

numba keeps a kernel for as long as the file that defines it stays the same. But what it inlines from other files, and
the constants that it takes from them, are compiled into it, too. Here a kernel is kept for as long as none of the files
changes that its file imports, directly or not.

Kernels lie beside the code; where that cannot be written, in the user's cache folder, or in a temporary one that only
this user can write. Those that an image brings along lie beside the code, too, and are used as they are, also by a user
who cannot write there (`prebuilt`). Every module with kernels imports `njit` from here, or imports one that does.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from typing import Any

from elasticps.errors import KernelsMissing

try:
    from numba import config
except ModuleNotFoundError as error:
    if error.name not in ("numba", "llvmlite"):
        raise
    raise KernelsMissing from None
from numba.core import event
from numba.core.caching import CacheImpl, NullCache, _CacheLocator

from elasticps.kernels import prebuilt
from elasticps.kernels.dispatch import njit

__all__ = ["announce", "compiled", "compiled_once", "list_compiled", "njit", "sources_of"]

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_OURS = ("elasticps", "coordinator", "replication")
_IMPORT = re.compile(r"^(?:import +([\w.]+)|from +([\w.]+) +import +(\([^)]*\)|[^\n]*))", re.M)
_CAN_BE_WRITTEN = 0o022  # by others than the user


@cache
def sources_of(path: Path) -> frozenset[Path]:
    """A file of ours, and those of ours that it imports when it is imported, directly or not."""
    found, todo = {path}, [path]
    while todo:
        for each in _imported(todo.pop()) - found:
            found.add(each)
            todo.append(each)
    return frozenset(found)


@cache
def _imported(path: Path) -> set[Path]:
    names = set()
    for module, package, some in _IMPORT.findall(path.read_text(encoding="utf-8")):
        names.add(module or package)
        names |= {f"{package}.{name}" for name in re.findall(r"\w+", some)}
    return {file for name in names if name.partition(".")[0] in _OURS for file in _files(name)}


def _files(module: str) -> Iterator[Path]:
    place = _ROOT.joinpath(*module.split("."))
    yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


@cache
def _stamp(path: Path) -> str:
    """Changes with every file that a kernel of this file may have compiled in."""
    digest = hashlib.sha256()
    for file in sorted(sources_of(path)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def compiled_once(file: str) -> Iterator[None]:
    """Around the first use of the kernels of a module, by its `__file__`: of several processes that start on a machine
    that has not compiled them yet one does it, and the others wait for it."""
    path = Path(file).resolve()
    _folder(path)  # a module that has no kernel of its own and compiles those of others is listed, too
    done = _mark(path)
    if done is None or done.exists():
        yield
        return
    with (done.parent / f"{path.stem}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield
        for old in done.parent.glob(f"{path.stem}-*.compiled"):
            old.unlink(missing_ok=True)
        done.touch()


def compiled(file: str) -> bool:
    """Whether another process could not spare this one the compiling of a module's kernels: it has been done, or there
    is nowhere to keep them."""
    done = _mark(Path(file).resolve())
    return done is None or done.exists()


def _mark(path: Path) -> Path | None:
    folder = None if _came_along(path) else _first_writable(path)
    return None if folder is None else folder / f"{path.stem}-{_stamp(path)[:16]}.compiled"


def list_compiled() -> None:
    """Notes beside the code for which sources, and which machine, this process has kernels there: all of them can be
    used as they are by each process that finds them."""
    prebuilt.write({_name(path): _stamp(path) for path, folder in _found.items() if folder == _beside(path)})


@cache
def _listed() -> prebuilt.Prebuilt | None:
    return prebuilt.read()


@cache
def _came_along(path: Path) -> bool:
    listed = _listed()
    return listed is not None and not listed.mismatch(_name(path), _stamp(path))


def _name(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix()


def _beside(path: Path) -> Path:
    return path.parent / "__pycache__"


_found: dict[Path, Path] = {}
"""Files with kernels that this process has imported, and the folders where these are kept."""


class Locator(_CacheLocator):
    """Where the kernels of one of our files are kept."""

    def __init__(self, py_func: Any, py_file: str, folder: Path) -> None:
        self._py_file = py_file  # numba's warnings name it
        self._line = py_func.__code__.co_firstlineno
        self._folder = folder

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Locator | None:
        """None for what is not ours, and where nothing can be written: numba looks for a place itself then."""
        path = Path(py_file).resolve()
        if not any(path.is_relative_to(_ROOT / package) for package in _OURS):
            return None
        folder = _folder(path)
        return None if folder is None else cls(py_func, py_file, folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return _stamp(Path(self._py_file).resolve())

    def get_disambiguator(self) -> str:
        return str(self._line)


def _folder(path: Path) -> Path | None:
    """The cache folder of a file's kernels; None where they cannot be cached."""
    folder = _beside(path) if _came_along(path) else _first_writable(path)
    if folder is not None:
        _found[path] = folder
    return folder


@cache
def _first_writable(path: Path) -> Path | None:
    for folder in _folders(path):
        with suppress(OSError):
            folder.mkdir(mode=0o777 if folder == _beside(path) else 0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    return None


def _folders(path: Path) -> Iterator[Path]:
    ours = _CacheLocator.get_suitable_cache_subpath(str(path))  # type: ignore[no-untyped-call]  # numba has no types
    chosen = vars(config)["CACHE_DIR"]
    if chosen:
        yield Path(chosen) / ours
    yield _beside(path)
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticps" / ours
    private = Path(tempfile.gettempdir()) / f"kernels-of-elasticps-{os.getuid()}"
    with suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        owner = private.lstat()
        if owner.st_uid == os.getuid() and not owner.st_mode & _CAN_BE_WRITTEN:  # what lies there is run
            yield private / ours


class _Announcer(event.Listener):
    """Logs once that kernels are being compiled: else a first start seems to hang."""

    def __init__(self) -> None:
        self._announced = False

    def on_start(self, event: Any) -> None:
        kernel = event.data["dispatcher"]
        if not isinstance(kernel._cache, NullCache) and kernel.py_func.__module__.startswith("elasticps."):
            self.announce(Path(inspect.getfile(kernel.py_func)).resolve(), Path(kernel._cache.cache_path))

    def announce(self, path: Path, folder: Path) -> None:
        """Logs that the kernels of a file are compiled, and the folder of their cache."""
        if self._announced:
            return
        self._announced = True
        listed = _listed()
        if listed is None or (folder == _beside(path) and not _came_along(path)):
            log.warning(
                "compiling kernels for this machine: a first start takes up to a minute longer, later ones find them "
                "in %s",
                folder,
            )
        else:
            why = listed.mismatch(_name(path), _stamp(path)) or "not all that are needed here are among them"
            log.warning(
                "compiling kernels for this machine, though some came along in %s: %s; a start takes up to a minute "
                "longer, unless it finds them in %s",
                _beside(path),
                why,
                folder,
            )

    def on_end(self, event: Any) -> None:
        """Nothing to say: other kernels may follow."""


_announcer = _Announcer()


def announce(file: str) -> None:
    """Logs, once, that kernels are compiled, such as those of a module, by its `__file__`."""
    path = Path(file).resolve()
    _announcer.announce(path, _first_writable(path) or _beside(path))


_locators: list[Any] = CacheImpl._locator_classes
_locators.insert(0, Locator)
event.register("numba:compile", _announcer)  # type: ignore[no-untyped-call]
