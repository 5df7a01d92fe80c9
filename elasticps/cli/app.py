"""The command's entry, and the list of what it can do."""

from __future__ import annotations

import platform
from importlib.metadata import entry_points

import typer

from elasticps import __version__
from elasticps.bench.cli import app as bench
from elasticps.cli import audit, local, processes, scale, status
from elasticps.cli.certificates import certificates
from elasticps.cli.demo import demo
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

LOCAL, LOOK, SHOW = "Clusters on this machine", "Any cluster", "See it work"
RUN, ABOUT = "Processes of a cluster", "About"
app.command(rich_help_panel=LOCAL)(guarded(local.up))
app.command(rich_help_panel=LOCAL)(guarded(local.down))
app.command(rich_help_panel=LOCAL)(guarded(scale.scale))
app.command(rich_help_panel=LOCAL)(guarded(local.kill))
app.command(rich_help_panel=LOOK)(guarded(scale.drain))
app.command(rich_help_panel=LOOK)(guarded(status.status))
app.command(rich_help_panel=LOOK)(guarded(audit.audit))
app.command(rich_help_panel=SHOW)(guarded(demo))
for command in bench.registered_commands:
    if command.callback is not None:
        command.callback = guarded(command.callback)
app.add_typer(bench, name="bench", rich_help_panel=SHOW)
app.command(rich_help_panel=RUN)(guarded(processes.server))
app.command(rich_help_panel=RUN)(guarded(processes.coordinator))
app.command(rich_help_panel=RUN)(guarded(certificates))
for extension in entry_points(group="elasticps.commands"):  # of packages that elasticps itself does not import
    app.command(extension.name, rich_help_panel=SHOW)(guarded(extension.load()))


@app.command(rich_help_panel=ABOUT)
def version() -> None:
    """Print the version."""
    out.print(f"elasticps {__version__} with Python {platform.python_version()}")


def main() -> None:
    """Runs the command line of this process; ends the process with an exit code of `ExitCode`."""
    app()
