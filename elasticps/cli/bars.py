"""Progress bars, and a restore with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from elasticps.cli.options import names
from elasticps.cli.output import err, print_json
from elasticps.system.progress import make_bar


def restore_with_bar(url: str, place: str, cut: int | None, tables: str, timeout_s: float, *, as_json: bool) -> None:
    """Brings the cluster at a URL back from a checkpoint."""
    from elasticps.checkpoint.restore import restore_cluster

    began = time.monotonic()
    with _progress(MofNCompleteColumn(), TextColumn("rows")) as progress:
        task = progress.add_task("restore", total=None)
        report = restore_cluster(
            url, place, cut=cut, tables=names(tables), timeout_s=timeout_s,
            progress=lambda rows, of: progress.update(task, completed=rows, total=of),
        )  # fmt: skip
    if as_json:
        print_json({"cut": report.cut, "rows": report.rows, "tables": report.tables, "workers": dict(report.workers)})
        return
    err.print(
        f"restored from checkpoint {report.cut}: {len(report.tables)} tables, {report.rows:,} rows, "
        f"in {time.monotonic() - began:.1f} s",
        markup=False,
    )


def _progress(*columns: ProgressColumn) -> Progress:
    return make_bar(err, *columns)


@contextmanager
def bar(title: str, total: int | None, *columns: ProgressColumn) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar; yields a function that is called with how much more is done."""
    with _progress(*columns) as progress:
        task = progress.add_task(title, total=total)
        yield lambda more: progress.advance(task, more)
