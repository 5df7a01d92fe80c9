"""The list of kernels that an installation brings along, compiled when an image was built: `elasticps.warm` writes it
beside them.

Such kernels are used also where nothing can be written, as in a container with a read-only root, by any user. The list
says what they were compiled for, so that a process can tell why they do not fit instead of compiling in silence. Times
of files mean nothing: layers of images change them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numba
from numba.core.registry import cpu_target

_FILE = Path(__file__).parent / "__pycache__" / "kernels.json"
_MAX_BYTES = 1 << 20


class Prebuilt(NamedTuple):
    """What the kernels beside the code were compiled for, and from: stamps of their sources by the files' names."""

    machine: Mapping[str, str]
    stamps: Mapping[str, str]

    def mismatch(self, file: str, stamp: str) -> str:
        """Why this process cannot use those of a source file; "" if it can."""
        for what, here in machine().items():
            if (there := self.machine.get(what)) != here:
                return f"they are for {what} {there}, and this is {what} {here}"
        if file not in self.stamps:
            return f"none is of {file}"
        return "" if self.stamps[file] == stamp else f"{file}, or what it imports, has changed since"


def machine() -> dict[str, str]:
    """What a kernel depends on besides its sources, as numba sees it here."""
    triple, cpu, features = _codegen().magic_tuple()
    python = f"{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    return {"Python": python, "numba": numba.__version__, "system": triple, "CPU": cpu, "CPU features": features}


def _codegen() -> Any:
    context: Any = cpu_target.target_context
    return context.codegen()


def read() -> Prebuilt | None:
    """None where no kernels came along, or where their list cannot be read: then they are compiled."""
    try:
        with _FILE.open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        return Prebuilt(dict(found["machine"]), dict(found["stamps"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(stamps: Mapping[str, str]) -> None:
    """Writes the list, unless it is there. Where that is not possible, nothing can be kept beside the code either."""
    made = Prebuilt(machine(), dict(sorted(stamps.items())))
    if made == read():
        return
    part = _FILE.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(made._asdict(), indent=1) + "\n", encoding="utf-8")
        part.replace(_FILE)
    except OSError:
        part.unlink(missing_ok=True)
