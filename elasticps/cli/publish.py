"""`elasticps publish`: write a model's rows into Redis or a folder, and keep them new."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from elasticps.cli.options import RequiredUrl, names
from elasticps.cli.output import out, print_json, sigterm_interrupts
from elasticps.cli.processes import LogFormat, LogLevel
from elasticps.system import logs
from elasticps.system.sizes import size


def publish(
    url: RequiredUrl,
    to: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="redis://host:port/database, rediss://… with TLS, or file:///folder.",
            show_default=False,
        ),
    ],
    tables: Annotated[
        str, typer.Option(help="Names, with commas in between; one that has a comma in double quotes. All if left out.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Of rows: float32, float16 or bfloat16.")] = "float32",
    prefix: Annotated[str, typer.Option(help="What keys in Redis begin with.")] = "elasticps:",
    every: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=3600,
            help="Seconds from one batch of changes to the next, at least.  \\[default: 1 for a folder, as fast as it "
            "takes them for Redis]",
            show_default=False,
        ),
    ] = None,
    app: Annotated[str, typer.Option(help="The application that the tables belong to.")] = "default",
    share: Annotated[
        str, typer.Option(metavar="K/N", help="Of the keys of tables only this share, as 2/8, to a place of its own.")
    ] = "",
    name: Annotated[
        str,
        typer.Option(help="By which servers log it, and `elasticps status` lists it.  \\[default: host and process]"),
    ] = "",
    report: Annotated[float, typer.Option(min=0.1, help="Seconds from one line about its lag to the next.")] = 10.0,
    once: Annotated[bool, typer.Option(help="End when all rows are there, and do not follow.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds for the first reading of all rows; with --once also for a target that takes none.",
        ),
    ] = 30.0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "logfmt",
) -> None:
    """Write the rows of a model into Redis or a folder, and every change of them while it is trained.

    Rows that are deleted, evicted or dropped go there, too. What an earlier run has left, and is no more, goes with the
    first listing. When the target is away it is tried again, and gets all rows when it is back; with --once it is
    tried for --timeout seconds, then the exit code is 3.
    """
    from elasticps.model.key_share import KeyShare
    from elasticps.publishing import publish  # imports take half a second, which other commands do without

    logs.configure(log_level, log_format=log_format, process="publish")
    chosen = names(tables) or None
    with sigterm_interrupts():
        running = publish(
            url, to=to, tables=chosen, dtype=dtype, prefix=prefix, every=every, application=app,
            share=KeyShare.parse(share), name=name, timeout=timeout,
        )  # fmt: skip
        with running:
            running.wait(float("inf"), timeout if once else float("inf"))
            while True:
                stats = running.stats()
                if as_json:
                    print_json({"to": running.where, **vars(stats)})
                else:
                    out.print(
                        f"{running.where}: {stats.lag_s:.3f} s old; {stats.rows:,} rows and {stats.deletions:,} "
                        f"deletions written, {stats.listings} × all rows, {size(stats.pending_bytes)} pending"
                    )
                if once:
                    return
                deadline_s = time.monotonic() + report
                while (left_s := deadline_s - time.monotonic()) > 0:
                    running.check()
                    time.sleep(min(left_s, 0.25))
