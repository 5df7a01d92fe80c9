"""`elasticps certificates`: an authority, and certificates that it signs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.core.names import DEFAULT_APP, check_host
from coordinator.core.url import TlsFiles
from elasticps.cli.output import err, out, print_json
from elasticps.errors import ConfigError
from elasticps.security.authority import LEAF_DAYS, Authority
from elasticps.security.identity import ANY, OF_APPLICATIONS, Identity


def certificates(
    folder: Annotated[Path, typer.Argument(help="Where the authority is, or is to be.", show_default=False)],
    identities: Annotated[
        list[str] | None,
        typer.Argument(
            help="CLUSTER/server/NAME, CLUSTER/coordinator/NAME, CLUSTER/worker/APP/NAME, "
            "CLUSTER/reader/APP/NAME or CLUSTER/operator/NAME; "
            "'*' for any NAME or APP.",
            show_default=False,
        ),
    ] = None,
    etcd: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Also one for an etcd that is found there. May be given again."),
    ] = None,
    etcd_root: Annotated[
        bool, typer.Option("--etcd-root", help="Also one for `elasticps cluster protect`, and for nothing else.")
    ] = False,
    days: Annotated[float, typer.Option(min=0.001, help="How long certificates are good for.")] = LEAF_DAYS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Make certificates for the processes of a cluster, each with its key, and what to put behind its cluster's URL.

    The authority is made when there is none yet. Give each machine ca.crt and its own two files, keep ca.key to
    yourself. To renew a certificate, make it again and replace its files: processes read them again while they run.
    """
    try:
        requested = [
            Identity.parse(f"spiffe://elasticps/{text.removeprefix('spiffe://elasticps/')}")
            for text in identities or ()
        ]
        for host in etcd or ():
            if not check_host(host.removeprefix("*.")):  # a certificate may be for all names below one
                raise ValueError("--etcd takes a host, got none")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    new = not (folder / "ca.key").exists()
    try:
        authority = Authority.create(folder) if new else Authority(folder)
        authority.check(requested)
        made = {str(identity): authority.issue(identity, days=days) for identity in requested}
        if etcd:
            made["etcd"] = authority.issue_etcd(etcd, days=days)
        if etcd_root:
            made["etcd-root"] = authority.issue_root(days=days)
    except ConfigError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"certificates cannot be made in {folder}: {error}") from None
    if as_json:
        print_json({name: vars(files) for name, files in made.items()})
        return
    if new:
        err.print(f"a new authority: {authority.ca}", markup=False, soft_wrap=True)
    apps = sorted({one.app for one in requested if one.role in OF_APPLICATIONS} - {DEFAULT_APP, ANY})
    for app in apps:
        err.print(f"etcd has to know application {app}: `elasticps cluster protect --app {app}`", markup=False)
    for name, files in made.items():
        out.print(f"{name}  {_query(files)}", markup=False, soft_wrap=True)


def _query(files: TlsFiles) -> str:
    return f"?ca={files.ca}&cert={files.cert}&key={files.key}"
