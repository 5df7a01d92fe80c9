"""The zygote's side of `local/zygote.py`: forks processes on request.

It has one thread, and reads requests from a socket, a line of JSON each: a process to start, or one to wait for. A
forked process goes on as `python -m elasticps …` would.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAME_BYTES = 15  # of a process, as the kernel keeps it


def serve(sock: socket.socket) -> list[str] | None:
    """Answers requests until the socket closes, then returns None. In each forked process returns its arguments."""
    with sock, sock.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if "wait" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            elif not (answer := os.fork()):
                break
            sock.sendall(b"%d\n" % answer)
        else:
            return None
    _become(request)
    return list(request["arguments"])


def _become(request: Mapping[str, Any]) -> None:
    """Gives a forked process its session, environment, working folder, output files and name."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):  # it was removed: then in the zygote's
        os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for path, descriptor in ((request["out"], 1), (request["log"], 2)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    arguments = request["arguments"]
    with suppress(OSError, ValueError, IndexError):  # for ps and top, which show the zygote's command line
        name = arguments[arguments.index("--name") + 1]
        Path("/proc/self/comm").write_bytes(f"elasticps {name}".encode()[:_NAME_BYTES])


def _prepare() -> None:
    """Imports and loads all that forked processes need, but for missing kernels: those they compile, and say so."""
    from elasticps.cli import app  # noqa: F401
    from elasticps.server.process import main as process

    if process.is_warm():
        process.warm()
    gc.collect()
    gc.freeze()  # or each forked process would copy every page that the collector touches


def main() -> None:
    """Entry point of the zygote and its children."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # of a scheduler, to every process of a job
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner
    sock = socket.socket(fileno=int(sys.argv[1]))
    _prepare()
    arguments = serve(sock)
    if arguments is not None:
        from elasticps.cli import main as run

        sys.argv = ["elasticps", *arguments]
        run()


if __name__ == "__main__":
    main()
