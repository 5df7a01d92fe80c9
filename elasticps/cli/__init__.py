"""The `elasticps` command. Every option is an argument of some function elsewhere: no decision is taken here."""

from __future__ import annotations


def main() -> None:
    """Runs the command line of this process; ends the process with an exit code of `ExitCode`."""
    try:
        from elasticps.cli.app import main as run  # takes a second, in which Ctrl-C is no failure to explain
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


__all__ = ["main"]
