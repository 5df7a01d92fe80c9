"""Sphinx's settings. `make docs` builds the site into docs/_build/html; a broken link or reference fails it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import typer
from sphinx.application import Sphinx

import elasticps
from elasticps.cli.app import app as command_line

project, author, copyright = "elasticps", "the elasticps authors", "the elasticps authors"
version = release = elasticps.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"elasticps {release}"
smartquotes = False
html_show_sphinx = html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

suppress_warnings = ["misc.highlighting_failure"]

default_role = "literal"  # docstrings say `x`, as Markdown does
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["ray"]  # the site is built without it
python_use_unqualified_type_names = True

COMMANDS = "reference/commands"  # the page that is made here


def _option(parameter: object) -> str:
    all_names = (*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ()))
    names = ", ".join(f"`{name}`" for name in all_names)
    default, text = getattr(parameter, "default", None), getattr(parameter, "help", None) or ""
    shown = default not in (None, False, (), "") and not callable(default)
    if shown and getattr(parameter, "show_default", True):
        text += f" Default: `{getattr(default, 'value', default)}`."
    return f"| {names} | {' '.join(text.split()).replace('|', chr(92) + '|')} |"


def _command(path: str, command: object, depth: int) -> Iterator[str]:
    """A command's help as Markdown, and that of its own commands."""
    yield f"{'#' * depth} `{path}`\n"
    yield inspect.cleandoc(getattr(command, "help", None) or "").replace("\b", "") + "\n"
    own = [p for p in getattr(command, "params", ()) if getattr(p, "name", "") not in ("help", "config")]
    arguments = [p for p in own if getattr(p, "param_type_name", "") == "argument"]
    if arguments:
        yield "Arguments: " + ", ".join(f"`{str(getattr(p, 'name', '')).upper()}`" for p in arguments) + "\n"
    options = [_option(p) for p in own if p not in arguments]
    if options:
        yield "\n".join(["| option | |", "|---|---|", *options]) + "\n"
    for name, child in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", child, min(depth + 1, 4))


def _make_commands(app: Sphinx, name: str, source: list[str]) -> None:
    if name == COMMANDS:
        group = typer.main.get_command(command_line)
        made = (line for key, child in group.commands.items() for line in _command(f"elasticps {key}", child, 2))  # type: ignore[attr-defined]
        source[0] += "\n" + "\n".join(made)


def _show_as_typed(app: Sphinx, what: str, name: str, it: object, options: object, lines: list[str]) -> None:
    """Indented paragraphs of docstrings are examples and lists: as they stand there."""
    for at in range(len(lines) - 1, 0, -1):
        if lines[at].startswith("    ") and not lines[at - 1].strip():
            above = next((line for line in reversed(lines[:at]) if line.strip()), "")
            if not above.startswith("    "):
                lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _show_as_typed)
    app.connect("source-read", _make_commands)
