"""Output and exit codes of commands."""

from __future__ import annotations

import enum
import errno
import functools
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from coordinator.core import fields
from coordinator.core.errors import CoordinationError, StoreUnavailable, UnknownServer
from elasticps.errors import ClusterUnreachable, ConfigError, Error, Timeout, UnknownTable
from elasticps.system.sizes import size

__all__ = ["ExitCode", "err", "guarded", "make_folder", "out", "print_json", "sigterm_interrupts", "size"]

_P = ParamSpec("_P")

# What a program may read goes to standard output; what people read while they wait goes beside it.
# No markup: a table may be called emb[user], which is no style.
_PIPED_WIDTH = 120  # columns where there is no terminal that says how many it has
_WIDTH = None if sys.stdout and sys.stdout.isatty() else _PIPED_WIDTH
out = Console(soft_wrap=True, highlight=False, markup=False, width=_WIDTH)
err = Console(stderr=True, highlight=False, markup=False)


class ExitCode(enum.IntEnum):
    """How a command ended; the same for all of them."""

    OK = 0
    FAILED = 1
    USAGE = 2  # an option, a name or a URL is unusable
    UNREACHABLE = 3  # etcd, or what it names, did not answer in time
    DEGRADED = 4  # `status`: the cluster answers, but not all of it
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """Prints one line of JSON to standard output."""
    print(json.dumps(value, separators=(",", ":")), flush=True)


def make_folder(folder: Path) -> None:
    """Makes the folder of results that `--out` names, before anything starts whose results would be lost. ConfigError
    if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out {folder}: nothing can be written there: {error.strerror}") from None


# What the machine refuses, or a path that cannot be, and no fault of ours.
_SURROUNDINGS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
}  # fmt: skip


def guarded(command: Callable[_P, None]) -> Callable[_P, None]:
    """The same command, with what elasticps raises on purpose turned into one message and an exit code. Anything else
    is a bug of ours and keeps its traceback."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except (Error, CoordinationError) as error:
            err.print(Text.assemble(("error: ", "bold red"), _visible(str(error))), soft_wrap=True)
            raise typer.Exit(_code(error)) from None
        except OSError as error:
            if error.errno not in _SURROUNDINGS:
                raise
            what = f"{error.filename or 'what was to be written'}: {error.strerror}"
            err.print(Text.assemble(("error: ", "bold red"), _visible(what)), soft_wrap=True)
            raise typer.Exit(ExitCode.FAILED) from None

    return run


def _visible(text: str) -> str:
    """Several lines as they are; else what cannot be seen escaped, as names and reasons may be a peer's."""
    return "\n".join(fields.safe(line) for line in text.split("\n"))


def _code(error: Exception) -> ExitCode:
    if isinstance(error, (ConfigError, UnknownServer, UnknownTable)):
        return ExitCode.USAGE
    if isinstance(error, (ClusterUnreachable, StoreUnavailable, Timeout)):
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Lets SIGTERM and a closing terminal end a command as Ctrl-C does, so that it cleans up in the same way."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with signals_handled(interrupt, signal.SIGTERM):
        yield


@contextmanager
def signals_handled(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Handles signals, and SIGHUP, by `handler` meanwhile; then as before."""
    # SIGHUP that was ignored at the start, as by nohup, stays so: the command is to outlive its terminal. SIGTERM
    # counts all the same: `elasticps down` sends it.
    handled = [*numbers, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
