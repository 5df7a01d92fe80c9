"""The process that others are forked from: see `local/zygote.py`, which starts it and asks it.

It has one thread, and takes requests over a socket, a line of JSON each: what to start, or whom to wait for. A process
that it has forked goes on as `python -m elasticps …` would.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAME_BYTES = 15  # of a process, as the kernel keeps it


def serve(sock: socket.socket) -> list[str] | None:
    """Starts whom it is asked for until nobody asks any more. Returns in each of those, too: with its arguments."""
    with sock, sock.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "wait" in asked:
                answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
            elif not (answer := os.fork()):
                break
            sock.sendall(b"%d\n" % answer)
        else:
            return None
    _become(asked)
    return list(asked["arguments"])


def _become(asked: Mapping[str, Any]) -> None:
    """What a new process has of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    for path, descriptor in ((asked["out"], 1), (asked["log"], 2)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    arguments = asked["arguments"]
    with suppress(OSError, ValueError, IndexError):  # for ps and top, which show the zygote's command line
        name = arguments[arguments.index("--name") + 1]
        Path("/proc/self/comm").write_bytes(f"elasticps {name}".encode()[:_NAME_BYTES])


def _prepare() -> None:
    """Imports and loads all that the others will need. Where kernels are missing it is they who compile them, and say
    so."""
    from elasticps.cli import app  # noqa: F401
    from elasticps.server.process import main as process

    if process.is_warm():
        process.warm()
    gc.collect()
    gc.freeze()  # or each of the others would copy whatever the collector looks at


def main() -> None:
    """Of the zygote, and then of whom it has forked."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    _prepare()
    arguments = serve(sock)
    if arguments is not None:
        from elasticps.cli import main as run

        sys.argv = ["elasticps", *arguments]
        run()


if __name__ == "__main__":
    main()
