"""`elasticps doctor`: what is wrong with this machine or with the way to a cluster, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from elasticps.cli.local import target
from elasticps.cli.options import URL_VARIABLE, Json, Name
from elasticps.cli.output import ExitCode, out, print_json
from elasticps.doctor.core.checks import Check, Severity, judge, worst
from elasticps.doctor.core.facts import Facts
from elasticps.errors import ConfigError
from elasticps.system.memory import parse_size

_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.WRONG: "bold red"}
_OF_CLUSTER = ("cluster", "servers", "ports")  # what is wrong there need not be so here


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(
            envvar=URL_VARIABLE, help="A cluster to look at as well, as etcd://host:port/name.", show_default=False
        ),
    ] = None,
    name: Name = None,
    servers: Annotated[int, typer.Option(min=1, help="How many servers are to run on this machine.")] = 1,
    memory_limit: Annotated[
        str, typer.Option(help="What each of them is to use (its --memory-limit), such as 4GiB.", show_default=False)
    ] = "",
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each port.")] = 3.0,
) -> None:
    """Look at this machine, this installation and, if one is named, a cluster: what is wrong, and what to do.

    Nothing is changed. The exit code is 0 if nothing is wrong (there may be warnings), 1 if something here is, 3 if the
    cluster's etcd does not answer, 4 if the cluster answers in part.
    """
    from elasticps.doctor.gather import gather

    if name is not None:
        if url is not None:
            raise ConfigError("a URL and --name exclude each other")
        url = target(None, name)
    limit = parse_size(memory_limit) if memory_limit else 0
    facts = gather(url or "", servers=servers, server_limit=limit, timeout_s=timeout)
    checks = judge(facts)
    if as_json:
        print_json({"severity": worst(checks), "checks": [check._asdict() for check in checks]})
    else:
        for check in checks:
            _show(check)
    raise typer.Exit(exit_code(facts, checks))


def exit_code(facts: Facts, checks: Sequence[Check]) -> ExitCode:
    """How the command ends."""
    wrong = [check.name for check in checks if check.severity is Severity.WRONG]
    if facts.cluster is None or any(name not in _OF_CLUSTER for name in wrong):
        return ExitCode.FAILED if wrong else ExitCode.OK
    if facts.cluster.error:
        return ExitCode.UNREACHABLE
    return ExitCode.DEGRADED if wrong else ExitCode.OK


def _show(check: Check) -> None:
    severity = f"{check.severity:8}"
    out.print(Text.assemble((severity, _STYLES[check.severity]), f"{check.name}: {check.found}"))
    for text in filter(None, (check.meaning, check.remedy and f"→ {check.remedy}")):
        out.print(Text(f"{'':8}{text}"))
