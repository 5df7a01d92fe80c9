"""`elasticps reader`: a process that follows training and serves rows; and commands to such processes."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
import uvloop

from elasticps.cli.options import URL_VARIABLE, RequiredUrl, command, names, seconds, usable_host, usable_place
from elasticps.cli.output import out, print_json, size
from elasticps.cli.processes import LogFormat, LogLevel
from elasticps.errors import ConfigError
from elasticps.security import credentials_of
from elasticps.system import logs

app = typer.Typer(
    help="Commands to a running `elasticps reader`: what it shows, pin it to a checkpoint, roll it back, go on.",
    no_args_is_help=True,
)


def reader(
    url: RequiredUrl,
    tables: Annotated[
        str, typer.Option(help="Names, with commas in between; one that has a comma in double quotes. All if left out.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="How rows are kept: float32, float16, bfloat16 or int8.  \\[default: as servers have them]",
            show_default=False,
        ),
    ] = "",
    every: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=60,
            help="Seconds from one window of changes to the next; busy servers take up to 3 times that.",
        ),
    ] = 0.02,
    app: Annotated[str, typer.Option(help="The application that the tables belong to.")] = "default",
    share: Annotated[
        str, typer.Option(metavar="K/N", help="Of the keys of tables only this share, as 2/8: the second of eight.")
    ] = "",
    name: Annotated[
        str,
        typer.Option(
            help="By which servers log it, and `elasticps status` lists it.  \\[default: the certificate's, or host "
            "and process]"
        ),
    ] = "",
    host: Annotated[str, typer.Option(callback=usable_host, help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gRPC service; 0: any free one.")] = 0,
    metrics_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /metrics, /healthz and /readyz, at the host; 0: any free one."),
    ] = 0,
    listen: Annotated[
        str,
        typer.Option(
            help="Answer eps.remote_reader, and feed readers that follow this one, at HOST:PORT; port 0: any free one."
        ),
    ] = "",
    max_age: Annotated[str, typer.Option(help="It is not ready while its rows are older: 0.5s, 60s, 5m.")] = "60s",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without TLS: whoever reaches a port reads rows.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the first reading of all rows.")] = 600.0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "logfmt",
) -> None:
    """Hold a model's rows, follow its training, and serve them by gRPC until it is asked to end.

    With reader://HOST:PORT[,HOST:PORT…] as the URL it follows another reader that listens (--listen), and the next one
    when that is gone, silent or cut off. With TLS its certificate is of role reader, for the application. Ready
    (`/readyz`, gRPC's health service) once it has all rows, and while they are no older than --max-age.
    """
    from elasticps.model.key_share import KeyShare
    from elasticps.readers import reader as connect_reader  # imports take a second, which other commands do without
    from elasticps.readers.peers import reader_credentials, reader_name
    from elasticps.security.identity import Role
    from elasticps.serving.process import Ready, ServingOptions, check_host, serve_reader

    credentials = reader_credentials(url, app)
    name = reader_name(name, credentials)
    logs.configure(log_level, log_format=log_format, process=name)
    if credentials is not None:
        credentials.require(Role.READER, credentials.identity.name, app)
    chosen = KeyShare.parse(share)
    options = ServingOptions(host, grpc_port, metrics_port, seconds(max_age, "--max-age"), insecure, _place(listen))
    check_host(options, credentials)

    def tell(ready: Ready) -> None:
        print_json(
            {
                "ready": True,
                "name": name,
                "pid": os.getpid(),
                "grpc": ready.grpc,
                "metrics": ready.metrics_port,
                "pulls": ready.pulls,
                "share": str(chosen),
                "application": app,
                "tables": len(following.tables),
            }
        )

    with connect_reader(
        url,
        names(tables) or None,
        dtype=dtype or None,
        every=every,
        application=app,
        share=chosen,
        name=name,
        timeout=timeout,
    ) as following:
        uvloop.run(serve_reader(following, name, options, credentials, tell))


def _place(listen: str) -> tuple[str, int] | None:
    """Where to listen. Raises ConfigError."""
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen is HOST:PORT, got {listen!r}")
    return host.strip("[]"), int(port)


At = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the reader's gRPC service listens.")]
Checkpoint = Annotated[
    str, typer.Argument(metavar="URL[/NUMBER]", callback=usable_place, help="Such as s3://bucket/model/000042.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--url", envvar=URL_VARIABLE, help="The cluster's URL, where there is TLS: for its certificates."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that it may take.")]


@app.command()
@command
def status(at: At, url: ClusterOption = None, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Say what a reader has, how old it is, and what it shows."""
    found = _ask(at, "Status", {}, url, timeout)
    shown = _shown(found.shown)
    fields = {
        "name": found.name, "cluster": found.cluster, "application": found.application, "tables": list(found.tables),
        "rows": found.rows, "bytes": found.bytes, "pulls": found.pulls, "pulled": found.pulled,
        "age_p50_s": found.age_p50_s, "age_p99_s": found.age_p99_s, "share": found.share, **shown,
    }  # fmt: skip
    if as_json:
        print_json(fields)
        return
    out.print(f"{found.name} of {found.cluster}/{found.application}: {', '.join(found.tables) or 'no tables yet'}")
    of = f" of share {found.share}" if found.share not in ("", "1/1") else ""
    out.print(f"{found.rows:,} rows{of}, {size(found.bytes)}; {found.pulls:,} pulls of {found.pulled:,} rows")
    ages = f"windows p50 {found.age_p50_s:.4f} s, p99 {found.age_p99_s:.4f} s"
    out.print(f"shows {shown['pinned'] or 'training'}; {shown['age_s']:.3f} s old, {ages}")


@app.command()
@command
def pin(
    at: At, checkpoint: Checkpoint, url: ClusterOption = None, timeout: Timeout = 600.0, as_json: Json = False
) -> None:
    """Have a reader show a checkpoint, the newest at a URL or the one named, until it is told to follow."""
    _print_shown(_ask(at, "Pin", {"checkpoint": checkpoint}, url, timeout), as_json)


@app.command("roll-back")
@command
def roll_back(
    at: At, checkpoint: Checkpoint, url: ClusterOption = None, timeout: Timeout = 600.0, as_json: Json = False
) -> None:
    """Have a reader show the checkpoint named, or the one before what it shows, until it is told to follow."""
    _print_shown(_ask(at, "RollBack", {"checkpoint": checkpoint}, url, timeout), as_json)


@app.command()
@command
def follow(at: At, url: ClusterOption = None, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Have a reader show training again."""
    _print_shown(_ask(at, "Follow", {}, url, timeout), as_json)


def _ask(at: str, method: str, fields: dict[str, Any], url: str | None, timeout_s: float) -> Any:
    from elasticps.serving import lookup_pb2
    from elasticps.serving.client import ask_reader

    host, _, port = at.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(f"name a reader as HOST:PORT, as `grpc` of its first line says, got {at!r}")
    requests = {"Status": lookup_pb2.ReaderStatusRequest, "Follow": lookup_pb2.FollowRequest}
    request = requests.get(method, lookup_pb2.PinRequest)(**fields)
    credentials = credentials_of(url) if url else None
    return uvloop.run(ask_reader(at, method, request, timeout_s, credentials))


def _shown(shown: Any) -> dict[str, Any]:
    steps = {str(worker): step for worker, step in sorted(shown.steps.items())}
    return {"pinned": shown.pinned, "age_s": shown.age_s, "time_s": shown.time_s, "epoch": shown.epoch, "steps": steps}


def _print_shown(answer: Any, as_json: bool) -> None:
    shown = _shown(answer.shown)
    if as_json:
        print_json(shown)
    else:
        out.print(f"it shows {shown['pinned'] or 'training'}")
