"""The `elasticps` command. Every option is an argument of some function elsewhere: no decision is taken here."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line of this process; ends the process with an exit code of `ExitCode`."""
    _open_closed_streams()
    try:
        from elasticps.cli.app import main as run  # takes a second, in which Ctrl-C is no failure to explain
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


def _open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that the caller has closed (`>&-`): Python has None for them, and
    the next file that is opened would have their number, and get what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for good


__all__ = ["main"]
