"""`elasticps dashboard`: a page in the browser that shows a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from elasticps.cli.local import target
from elasticps.cli.options import Name, Url, usable_host, usable_place
from elasticps.cli.output import err, out, sigterm_interrupts
from elasticps.dashboard import PORT, check_installed

if TYPE_CHECKING:
    from elasticps.dashboard.serve import Dashboard


def dashboard(
    url: Url = None,
    name: Name = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = PORT,
    host: Annotated[str, typer.Option(callback=usable_host, help="Address to listen on.")] = "127.0.0.1",
    checkpoints: Annotated[
        str,
        typer.Option(
            metavar="URL", callback=usable_place, help="Where checkpoints are kept, to list them.", show_default=False
        ),
    ] = "",
    prometheus: Annotated[
        str,
        typer.Option(metavar="URL", help="What scrapes the cluster: charts begin an hour back.", show_default=False),
    ] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that browsers know this host by, such as that of a proxy. May be given again."),
    ] = None,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Let servers be drained, and started, from the page, by who has the token it prints.",
        ),
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines: whoever reaches the port can read the page.")
    ] = False,
) -> None:
    """Serve a page that shows a cluster live: ring, traffic, what happened, workers, tables, checkpoints.

    It keeps the last hour in memory, and goes on through outages of the cluster. Ctrl-C ends it.
    """
    check_installed()
    from elasticps.dashboard.serve import Dashboard, check_host, make_token

    check_host(host, insecure)
    where = target(url, name)
    token = make_token(where) if allow_actions else ""
    page = Dashboard(
        where, host=host, port=port, checkpoints=checkpoints, prometheus=prometheus, allow_host=allow_host or (),
        token=token,
    )  # fmt: skip
    if token:
        err.print(f"token for actions: {token}", markup=False)
    with sigterm_interrupts():
        uvloop.run(_serve(page))


async def _serve(page: Dashboard) -> None:
    try:
        await page.begin()
        out.print(page.address, markup=False)
        out.file.flush()
        await page.wait()
    finally:
        await page.end()
