"""Options that commands share, and where their values come from: argument > environment > `--config` > default."""

from __future__ import annotations

import csv
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from coordinator.core.names import check_host
from coordinator.core.url import EXAMPLE
from elasticps.cli.output import guarded
from elasticps.errors import CheckpointError, ConfigError
from elasticps.local import state

_P = ParamSpec("_P")
URL_VARIABLE = "ELASTICPS_URL"


# Options that say which cluster is meant. What was said more directly counts, so that `--name` beats $ELASTICPS_URL.
_WHICH = ("url", "name", "every")
_DIRECTNESS = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")


def _most_direct(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    def directness(name: str) -> int:
        source = ctx.get_parameter_source(name)
        return _DIRECTNESS.index(source.name) if source is not None and source.name in _DIRECTNESS else -1

    mine = param.name or ""
    if not value or ctx.resilient_parsing:
        return value
    for other in _WHICH:
        if other != mine and ctx.params.get(other):
            if directness(other) > directness(mine):
                return None
            if directness(other) < directness(mine):
                ctx.params[other] = None
    return value


def _names() -> list[str]:
    return [record.name for record in state.records()]


def usable_host(value: str) -> str:
    """Checks an option that is a host. BadParameter for a text that no resolver takes."""
    try:
        return check_host(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def usable_place(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """For options and arguments that say where checkpoints lie. BadParameter for what is no URL, and no path, and for
    nothing where it has to be said."""
    if ctx.resilient_parsing or not (value or param.required):
        return value
    from elasticps.checkpoint.storage import Storage  # takes half a second, which other commands do without

    try:
        Storage(value)  # touches nothing yet: here rather than when a coordinator makes its first checkpoint
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is no URL of checkpoints: {error}") from None
    return value


def number(text: str, most: int) -> int | None:
    """Of digits, if it is no larger than `most`. Not `isdigit` and `int`: the one takes ², which the other does not,
    nor more than 4,300 digits."""
    digits = text.lstrip("0") or text[:1]
    if not digits.isdecimal() or len(digits) > len(str(most)):
        return None
    found = int(digits)
    return found if found <= most else None


def names(text: str) -> list[str]:
    """Splits names at commas; a name with a comma in it stands in double quotes."""
    return [name for line in csv.reader([text], skipinitialspace=True) for each in line if (name := each.strip())]


Url = Annotated[
    str | None,
    typer.Option(envvar=URL_VARIABLE, callback=_most_direct, help="A cluster anywhere, as etcd://host:port/name."),
]
Name = Annotated[
    str | None,
    typer.Option(
        callback=_most_direct,
        autocompletion=_names,
        help="A local cluster; may be left out if there is one.",
    ),
]
Every = Annotated[bool, typer.Option("--all", callback=_most_direct, help="All local clusters of this user.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
RequiredUrl = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        show_default=False,
        help=f"The cluster, for example {EXAMPLE}.",
    ),
]


def command(function: Callable[_P, None]) -> Callable[_P, None]:
    """The function as a command: what it raises on purpose is one line, and `--config` is among its options."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        kwargs.pop("config", None)  # read already
        guarded(function)(*args, **kwargs)

    run.__doc__ = _flowing(function.__doc__)
    signature = inspect.signature(function, eval_str=True)
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), config])  # type: ignore[attr-defined]
    return run


def _flowing(text: str | None) -> str | None:
    """A docstring whose paragraphs are a line each: a help text breaks them where its terminal ends."""
    return text and "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _read(ctx: typer.Context, path: Path | None) -> None:
    """Makes what a file says the defaults of this command's options."""
    path = path or ctx.find_root().params.get("config")
    if path is None or ctx.resilient_parsing:
        return
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        ctx.default_map = _defaults(ctx, document)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="ELASTICPS_CONFIG",
        is_eager=True,  # before the options whose defaults it gives
        expose_value=False,
        callback=_read,
        help="A TOML file with values of options: those at its top for every command, a table for one: up.servers = 5.",
    ),
]


def _defaults(ctx: typer.Context, document: dict[str, Any]) -> dict[str, Any]:
    """Values at the top for the options that this command has, and those of its own table, by parameter."""
    path = [c.info_name or "" for c in _chain(ctx)]
    root = ctx.find_root().command
    general = {key: value for key, value in document.items() if not isinstance(value, dict)}
    commands = getattr(root, "commands", {})
    if strangers := sorted(document.keys() - general.keys() - commands.keys()):
        raise ValueError(f"there is no command called {strangers[0]!r}")
    known = set().union(*(_options(one) for one in _all(root)))
    if strangers := sorted(general.keys() - known):
        raise ValueError(f"no command has an option --{strangers[0]}")
    mine = _options(ctx.command)
    own: Any = document
    for name in path:
        own = own.get(name, {}) if isinstance(own, dict) else {}
    below = getattr(ctx.command, "commands", {})  # tables of their own
    own = {key: value for key, value in own.items() if not (isinstance(value, dict) and key in below)}
    if strangers := sorted(own.keys() - mine.keys()):
        raise ValueError(f"{' '.join(path)} has no option --{strangers[0]}; it has {', '.join(sorted(mine))}")
    return {mine[key]: value for key, value in {**general, **own}.items() if key in mine}


def _chain(ctx: typer.Context) -> Iterator[typer.Context]:
    """Returns the contexts from below the root to this one."""
    if ctx.parent is not None:
        yield from _chain(ctx.parent)  # type: ignore[arg-type]
        yield ctx


def _all(command: Any) -> Iterator[Any]:
    """Yields a command and all its subcommands."""
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from _all(one)


def _options(command: Any) -> dict[str, str]:
    """Names of a command's options as a file gives them, without dashes in front, and of their parameters."""
    return {
        text.lstrip("-"): param.name
        for param in command.params
        if param.param_type_name == "option"
        for text in param.opts
        if text.startswith("--") and param.name not in ("config", "help")
    }


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str, option: str) -> float:
    """Parses the value of an option such as "30s", "5m", "2h" or "1d". Raises ConfigError."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    try:
        found = float(number) * _UNITS_S[unit]
    except (ValueError, KeyError):
        found = 0.0
    if not 0 < found < 1e9:
        raise ConfigError(f"{option} {text!r} is no time above 0: write for example 30s, 5m or 2h")
    return found
