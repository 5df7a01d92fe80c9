"""`elasticps scale` and `elasticps drain`: servers come and go while training goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from coordinator.core.dry_run import DryRun
from coordinator.core.reasons import standing_of
from coordinator.core.sizing import estimate, measure
from elasticps.cli.local import find, started_here, target
from elasticps.cli.options import Json, Name, Url
from elasticps.cli.output import err, out, print_json, size
from elasticps.errors import ConfigError
from elasticps.local import scaling, state
from elasticps.local.operator_client import OperatorClient, holds
from elasticps.local.operator_client import Progress as ChangeProgress


def drain(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="For example s1.")],
    url: Url = None,
    name: Name = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait; the drain goes on after that.")] = 600.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take it back; what has moved stays.")] = False,
    as_json: Json = False,
) -> None:
    """Move everything off a server while training goes on; then the server ends by itself.

    The exit code is 0 when the server holds nothing any more, 3 if it still does after --timeout.
    """
    with OperatorClient(target(url, name)) as operator:
        if cancel:
            taken_back = operator.cancel_drain(server)
            err.print(f"{server} stays" if taken_back else f"{server} was not asked to drain", markup=False)
            if as_json:
                print_json({"server": server, "cancelled": taken_back})
            return
        began = time.monotonic()
        draining = operator.request_drain(server)
        ranges = holds(operator.view, draining) or 0
        with _interruptible(server), _bar(f"draining {server}", ranges) as tell:
            view = operator.wait_drained(draining, timeout, tell)
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        print_json({"server": server, "ranges": ranges, "epoch": view.epoch, "seconds": seconds})
    else:
        out.print(f"{server} is out of view {view.epoch}, {ranges} ranges in {seconds:.1f} s: {view.reason}")


def scale(
    servers: Annotated[int, typer.Argument(metavar="N", min=1, help="How many servers are to serve.")],
    url: Url = None,
    name: Name = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would move, and do nothing.")] = False,
    weight: Annotated[float, typer.Option(min=0.01, help="Share of the ranges of each new server.")] = 1.0,
    zone: Annotated[str, typer.Option(help="What fails together with the new servers.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before servers are drained.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait; what was begun goes on after that.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Grow or shrink a local cluster while training goes on, and wait until nothing moves any more.

    New servers get the lowest free names; those with the highest numbers are drained. Of a cluster that runs elsewhere
    it only says what would move.
    """
    record = started_here(url) if url is not None and dry_run else find(url, name)
    with OperatorClient(target(url, name)) as operator:
        running = operator.registered() if record is None else record.servers
        names = [server.name for server in running]
        change = scaling.change(names, operator.draining(), servers, operator.leaving())
        statuses = operator.statuses()
        stored = {server: status["bytes"] for server, status in statuses.items()}
        try:
            planned = scaling.predict(operator, change, zone=zone, weight=weight, nbytes=stored)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ranges = operator.view.ranges
        memory = estimate(measure(statuses.values(), operator.view), servers)
    figures = _figures(planned, len(stored)) | {"memory": None if memory is None else asdict(memory)}
    if dry_run and as_json:
        print_json({"dry_run": True, "servers": servers, **asdict(change), **figures})
        return
    if not as_json or dry_run:
        (out if dry_run else err).print(_render(change, planned, figures, ranges))
    if dry_run or record is None:
        return
    if change.drain and not yes and sys.stdin.isatty():
        typer.confirm(f"drain {', '.join(change.drain)}?", abort=True, err=True)
    folder = state.folder_of(record.name)
    with _interruptible(), _bar(f"{servers} servers", planned.copies) as tell:
        outcome = scaling.scale(
            record.url, change, scaling.spawn_recorded(folder), partial(scaling.wait_ended, folder), zone=zone,
            weight=weight, timeout_s=timeout, tell=tell,
        )  # fmt: skip
    if as_json:
        print_json({"dry_run": False, "servers": outcome.servers, **asdict(change), **figures,
                    "epoch": outcome.epoch, "seconds": round(outcome.seconds, 3)})  # fmt: skip
    else:
        out.print(f"{', '.join(outcome.servers)} serve under view {outcome.epoch}, after {outcome.seconds:.1f} s")


def _figures(planned: DryRun, sources: int) -> dict[str, Any]:
    rate = scaling.USUAL_BYTES_PER_S * max(1, sources)
    moves = sorted(planned.moves.items(), key=lambda move: [scaling.by_number(one) for one in move[0]])
    return {
        "copies": planned.copies,
        "bytes": planned.nbytes,
        "seconds": round(planned.nbytes / rate, 1),
        "kinds": {kind: asdict(work) for kind, work in planned.kinds.items() if work.copies},
        "moves": [{"from": origin, "to": to, "copies": count} for (origin, to), count in moves],
        "waiting": planned.waiting,
    }


def _render(change: scaling.Change, planned: DryRun, figures: dict[str, Any], ranges: int) -> Group:
    parts = [
        f"{verb} {', '.join(some)}"
        for verb, some in (("start", change.start), ("drain", change.drain), ("keep", change.keep))
        if some
    ]
    fullness = _fullness(figures["memory"], len(change.start) + len(change.keep) + len(change.stay))
    if not parts and not planned.copies:
        return Group(Text("nothing is to be done"), *fullness)
    text = f"{'; '.join(parts) or 'no server comes or goes'}: "
    text += f"{planned.copies} copies of {ranges} ranges, about {size(planned.nbytes)}"
    text += f" in {max(0.1, figures['seconds']):,.1f} s, if workers are served meanwhile"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("from", "to", "ranges", "about"):
        table.add_column(column, justify="left" if column in ("from", "to") else "right")
    for move in figures["moves"]:
        share = planned.nbytes * move["copies"] / max(1, planned.copies)
        table.add_row(move["from"], move["to"], str(move["copies"]), size(share))
    lines: list[Text | Table] = [Text(text)]
    lines += [table] if figures["moves"] else []
    lines += [Text(f"waiting: {planned.waiting}", "yellow")] if planned.waiting else []
    return Group(*lines, *fullness)


def _fullness(memory: dict[str, int] | None, servers: int) -> list[Text]:
    if memory is None:
        return []
    text = (
        f"memory: each would use about {size(memory['each'])}, and takes new rows up to {size(memory['mark'])} of its "
        f"limit of {size(memory['limit'])}; "
    )
    if not memory["servers"]:
        return [Text(f"{text}no number of servers like these is enough: give them more memory", "red")]
    enough = servers >= memory["servers"]
    text += f"what is stored needs {memory['servers']} servers"
    return [Text(text if enough else f"{text}: too few", "" if enough else "red")]


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[ChangeProgress], None]]:
    """Shows a bar of the copies made, and beneath it the reason for waiting."""
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=28), TextColumn("{task.fields[left]} ranges left"),
        TimeElapsedColumn(), TextColumn("{task.fields[waiting]}", style="yellow", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=max(1, total), left=total, waiting="")

        def tell(state: ChangeProgress) -> None:
            done = max(0, total - state.left)
            progress.update(task, completed=done, left=state.left, waiting=standing_of(state.reason))

        yield tell


@contextmanager
def _interruptible(server: str = "") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        text = f"; to take it back: elasticps drain {server} --cancel" if server else ""
        err.print(f"not waited for any more; what was begun goes on{text}", markup=False)
        raise
