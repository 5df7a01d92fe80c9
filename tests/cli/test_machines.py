"""Commands and the options file on docs/guides/machines.md can be parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from elasticps.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs/guides/machines.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"(?:^|`|/bin/)elasticps ((?:server|coordinator|status|tables|audit|drain|scale) ?[^`\n]*)", PAGE, re.M
)


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_on_the_page_can_be_parsed(line: str, tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert block is not None
    file = tmp_path / "elasticps.toml"
    file.write_text(block[1], encoding="utf-8")
    name, *words = shlex.split(line.replace("/etc/elasticps.toml", str(file)).replace("%i", "1"))
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, words, parent=typer.main.get_command(app).make_context("elasticps", [name]))
    if "--config" in words:
        assert context.params["url"].endswith("/ads")
    if name == "coordinator":
        assert (context.params["metrics_port"], context.params["min_servers"]) == (7300, 3)
    if name == "server":
        assert (context.params["host"], context.params["insecure"]) == ("0.0.0.0", True)  # else it would not start
        assert (context.params["drain_timeout"], context.params["wait"]) == (600, 240)


def test_there_are_commands_on_the_page() -> None:
    assert {line.split()[0] for line in COMMANDS} >= {"server", "coordinator", "status", "drain", "scale"}


@pytest.mark.parametrize(
    ("name", "certificate"), [("server", "server-any"), ("coordinator", "coordinator-any"), ("status", "operator-me")]
)
def test_with_tls_each_role_has_its_own_certificate(name: str, certificate: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/tls.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", page, re.S)
    assert block is not None
    file = tmp_path / "elasticps.toml"
    file.write_text(block[1], encoding="utf-8")
    command = typer.main.get_command(app)
    context = command.commands[name].make_context(  # type: ignore[attr-defined]
        name,
        ["--config", str(file)] + ["--name", "x"] * (name != "status"),
        parent=command.make_context("elasticps", [name]),
    )
    assert f"/{certificate}.crt" in context.params["url"]
    assert not context.params.get("insecure")
