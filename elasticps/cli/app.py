"""The command's entry, and the list of what it can do."""

from __future__ import annotations

import platform

import typer

from elasticps import __version__
from elasticps.cli import local, processes, status
from elasticps.cli.output import guarded, out

app = typer.Typer(
    name="elasticps",
    help="An elastic, fault-tolerant parameter server, coordinated through etcd.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOCAL, RUN, ABOUT = "Clusters on this machine", "Processes of a cluster", "About"
app.command(rich_help_panel=LOCAL)(guarded(local.up))
app.command(rich_help_panel=LOCAL)(guarded(local.down))
app.command(rich_help_panel=LOCAL)(guarded(status.status))
app.command(rich_help_panel=RUN)(guarded(processes.server))
app.command(rich_help_panel=RUN)(guarded(processes.coordinator))


@app.command(rich_help_panel=ABOUT)
def version() -> None:
    """Print the version."""
    out.print(f"elasticps {__version__} with Python {platform.python_version()}")


def main() -> None:
    """Runs the command line of this process; ends the process with an exit code of `ExitCode`."""
    app()
