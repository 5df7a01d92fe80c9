"""The command's entry, and the list of what it can do."""

from __future__ import annotations

import io
import platform
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from elasticps import __version__
from elasticps.cli import audit, checkpoint, cluster, exchange, local, logs, processes, reader, scale, status, tables
from elasticps.cli.certificates import certificates
from elasticps.cli.dashboard import dashboard
from elasticps.cli.doctor import doctor
from elasticps.cli.launch import launch
from elasticps.cli.options import command
from elasticps.cli.output import guarded, out
from elasticps.cli.publish import publish
from elasticps.errors import ConfigError

app = typer.Typer(
    name="elasticps",
    help="An elastic, fault-tolerant parameter server, coordinated through etcd.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOCAL, LOOK, SHOW = "Clusters on this machine", "Any cluster", "See it work"
RUN, ABOUT = "Processes of a cluster", "About"
app.command(rich_help_panel=LOCAL)(command(local.up))
app.command(rich_help_panel=LOCAL)(command(local.down))
app.command(rich_help_panel=LOCAL, context_settings={"allow_interspersed_args": False})(command(launch))
app.command(rich_help_panel=LOCAL)(command(scale.scale))
app.command(rich_help_panel=LOCAL)(command(local.kill))
app.command(rich_help_panel=LOCAL)(command(logs.logs))
app.command(rich_help_panel=LOOK)(command(scale.drain))
app.command(rich_help_panel=LOOK)(command(status.status))
app.command(rich_help_panel=LOOK)(command(dashboard))
app.command(rich_help_panel=LOOK)(command(doctor))
app.add_typer(tables.app, name="tables", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(command(exchange.export))
app.command("import", rich_help_panel=LOOK)(command(exchange.import_))
app.command(rich_help_panel=LOOK)(command(audit.audit))
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(command(checkpoint.restore))
app.add_typer(reader.app, name="readers", rich_help_panel=LOOK)
app.add_typer(cluster.app, name="cluster", rich_help_panel=LOOK)
app.command(rich_help_panel=RUN)(command(processes.server))
app.command(rich_help_panel=RUN)(command(processes.coordinator))
app.command(rich_help_panel=RUN)(command(reader.reader))
app.command(rich_help_panel=RUN)(command(publish))
app.command(rich_help_panel=RUN)(command(certificates))


def add_extensions(to: typer.Typer) -> None:
    """Adds the commands of packages that elasticps itself does not import: `demo`, `bench`, `chaos`, `sim`. The command
    of a package that is not installed is hidden, and says how to get it."""
    for found in entry_points(group="elasticps.commands"):
        if not _installed(found.module):
            settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
            to.command(found.name, hidden=True, context_settings=settings)(guarded(_missing(found)))
            continue
        extension = found.load()
        if isinstance(extension, typer.Typer):
            for each in extension.registered_commands:
                if each.callback is not None:
                    each.callback = command(each.callback)
            to.add_typer(extension, name=found.name, rich_help_panel=SHOW)
        else:
            to.command(found.name, rich_help_panel=SHOW)(command(extension))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it belongs to
        return False


def _missing(extension: EntryPoint) -> Callable[[], None]:
    def explain() -> None:
        raise ConfigError(
            f"`elasticps {extension.name}` is not part of this installation, which lacks {extension.module}: run it in "
            "a checkout of the repository, where `make setup` installs everything"
        )

    return explain


add_extensions(app)


@app.command(rich_help_panel=ABOUT)
@guarded  # and no `command`: whatever is wrong with a file of options, the version can be asked for
def version() -> None:
    """Print the version."""
    out.print(f"elasticps {__version__} with Python {platform.python_version()}")


def _version(value: bool) -> None:
    if value:
        version()
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    config: Annotated[Path | None, typer.Option("--config", help="The same as --config of the command.")] = None,
) -> None:
    """An elastic, fault-tolerant parameter server, coordinated through etcd."""


def main() -> None:
    """Runs the command line of this process; ends the process with an exit code of `ExitCode`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    app()
