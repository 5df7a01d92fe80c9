"""`elasticps logs`: shows what the processes of a local cluster have logged."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from coordinator.core import fields
from elasticps.cli.local import find, processes
from elasticps.cli.options import Name, Url
from elasticps.errors import ConfigError
from elasticps.local import state

_LOOK_EVERY_S = 0.2
_READ_BYTES = 8 << 20  # of the end of each log
_WHEN = re.compile(r'"?ts"?[=:]"?(\d{4}-\d\d-\d\dT[\d:.]+)')  # ours, and etcd's


def logs(
    process: Annotated[
        str | None,
        typer.Argument(help="For example s1; also c0 or etcd. Without it: all of them.", autocompletion=processes),
    ] = None,
    url: Url = None,
    name: Name = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many, from the newest.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
) -> None:
    """Show the newest log lines of a local cluster's processes, in the order of time."""
    folder = state.folder_of(find(url, name).name)
    known: dict[str, _Log] = {}

    def new() -> list[tuple[str, str]]:
        """Lines since the last call by the time in them, of each process in its order."""
        with suppress(FileNotFoundError):  # the folder goes just now
            for path in sorted(folder.glob("*.log")):  # servers may have been started meanwhile
                if process in (None, path.stem):
                    known.setdefault(path.stem, _Log(path))
        width = max(map(len, known), default=0)
        found = [
            (when, line if process is not None else f"{who:{width}} | {line}")
            for who, log in known.items()
            for when, line in log.new()
        ]
        return sorted(found, key=itemgetter(0))

    found = new()
    if not known:
        names = ", ".join(sorted(path.stem for path in folder.glob("*.log")))
        raise ConfigError(f"no process called {process!r} has a log; there are {names}")
    _show(found[len(found) - min(lines, len(found)) :])
    with suppress(KeyboardInterrupt):
        while follow and folder.exists():
            time.sleep(_LOOK_EVERY_S)
            _show(new())


def _show(found: list[tuple[str, str]]) -> None:
    for _, line in found:
        print(line)
    sys.stdout.flush()


class _Log:
    """A log file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at: int | None = None  # nothing was read yet
        self._when = ""

    def new(self) -> Iterator[tuple[str, str]]:
        """Whole lines that came since the last call: when, and what. Lines of no time are of the one before."""
        try:
            with self._path.open("rb") as file:
                if self._at is None:
                    self._at = max(0, os.fstat(file.fileno()).st_size - _READ_BYTES)
                file.seek(self._at)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:  # the cluster has ended
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            found = _WHEN.search(line)
            self._when = found[1] if found else self._when
            yield self._when, fields.safe(line)
