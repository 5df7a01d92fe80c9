"""`elasticps cluster`: `protect` its etcd; `adopt` it when etcd's data were lost; `reset` it when it is dead."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated

import typer

from coordinator.adoption import Witness, adopt, look_at_dead, plan_adoption, reset
from coordinator.connect import open_store
from coordinator.core.view import Roster
from elasticps.admin import fetch_cluster, fetch_tables
from elasticps.cli.local import target
from elasticps.cli.options import Name, Url, command
from elasticps.cli.output import err, out
from elasticps.errors import ConfigError
from elasticps.security import credentials_of
from elasticps.security.credentials import Credentials
from elasticps.security.rights import protect
from elasticps.system import background

app = typer.Typer(
    help="Protect a cluster's etcd; mend a cluster whose etcd has lost its data, or that is dead.", no_args_is_help=True
)

Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd, and for each server.")]


@app.command("adopt")
@command
def adopt_command(
    server: Annotated[str, typer.Option(help="The admin address of a server that lives, host:port.")],
    url: Url = None,
    name: Name = None,
    without: Annotated[list[str] | None, typer.Option(help="A server that is gone for good; may be repeated.")] = None,
    app: Annotated[str, typer.Option(help="Whose tables are of which no server knows it.")] = "default",
    timeout: Timeout = 5.0,
) -> None:
    """Let a new, empty etcd take over a cluster whose servers still live: nothing that they hold is lost.

    Every server must answer, or be given up by --without. Servers, and workers that live, register by themselves then.
    """
    unclear = background.run(_adopt(target(url, name), server, tuple(without or ()), app, timeout))
    for table in unclear:
        err.print(f"several tables are called {table}: left to their workers, which put them back", style="yellow")
    out.print("adopted: servers and workers register by themselves now; see `elasticps status`")


async def _adopt(url: str, first: str, without: tuple[str, ...], app: str, timeout_s: float) -> tuple[str, ...]:
    credentials = credentials_of(url)
    witnesses = [await _ask(first, timeout_s, credentials)]
    contacted = {_who(witnesses[0])}
    while True:  # whoever answers may know of others
        view = max((witness.view for witness in witnesses), key=lambda view: view.epoch)
        others = [s for s in view.servers if s.name not in without and (s.name, s.incarnation) not in contacted]
        if not others:
            break
        contacted |= {(server.name, server.incarnation) for server in others}
        asking = (_ask(server.admin, timeout_s, credentials) for server in others)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        witnesses += (answer for answer in answers if isinstance(answer, Witness))
    adoption = plan_adoption(witnesses, without, app)
    store = await open_store(url, timeout_s=timeout_s)
    try:
        await adopt(store, adoption)
    finally:
        await store.close()
    return adoption.unclear


def _who(witness: Witness) -> tuple[str, int]:
    return witness.name, witness.incarnation


async def _ask(address: str, timeout_s: float, credentials: Credentials | None) -> Witness:
    known, tables = await asyncio.gather(
        fetch_cluster(address, timeout_s, credentials), fetch_tables(address, timeout_s, credentials)
    )
    if known.view is None:
        raise ConfigError(f"the server at {address} has never had a view")
    roster = known.roster or Roster(1, (), known.view.cluster)  # none is written before there is a worker
    specs = {int(table["id"]): str(table["spec"]) for table in tables}
    apps = {int(table["id"]): str(table["app"]) for table in tables}
    return Witness(known.name, known.incarnation, known.view, roster, known.newest, specs, apps)


@app.command("reset")
@command
def reset_command(
    url: Url = None,
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else only what would be given up is said.")] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Begin a dead cluster anew under its own name. What its servers held is given up for good."""
    lines = background.run(_reset(target(url, name), yes, timeout))
    for line in lines:
        out.print(line, markup=False)
    if not yes:
        out.print("nothing was done: say --yes to do it")


async def _reset(url: str, yes: bool, timeout_s: float) -> list[str]:
    store = await open_store(url, timeout_s=timeout_s)
    try:
        dead = await look_at_dead(store)
        verb = "given up" if yes else "would be given up"
        lines = [f"{verb}: {len(dead.tables)} tables ({', '.join(dead.tables) or 'none'})"]
        lines.append(f"{verb}: {dead.ranges} ranges, last held by {', '.join(dead.servers) or 'nobody'}")
        if yes:
            config = await reset(store, secrets.token_hex(6))
            lines.append(f"cluster {config.identity(store.cluster)} begins: start servers, and workers, again")
        return lines
    finally:
        await store.close()


@app.command("protect")
@command
def protect_command(
    url: Url = None,
    name: Name = None,
    app: Annotated[
        list[str] | None,
        typer.Option(help="An application whose workers are to come; may be repeated. Known ones need not be named."),
    ] = None,
    timeout: Timeout = 5.0,
) -> None:
    """Have etcd ask who may write what: servers their own keys, workers those of their application, coordinators and
    operators all.

    For an etcd with TLS and --client-cert-auth. The URL has the certificate of `elasticps certificates --etcd-root`.
    Before the cluster begins or while it runs, and again for each new application and for a new etcd.
    """
    known = background.run(protect(target(url, name), timeout, app or ()))
    out.print("protected: etcd asks for a certificate of this cluster, and what its holder may write")
    out.print(f"applications: {', '.join(known)}", markup=False)
