"""Small tables for notebooks (`_repr_html_`): everything that is shown is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_SHOWN = 200  # characters of a cell
_ROWS = 40  # of a table; the rest is counted


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return escape(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def described(title: str, values: Iterable[tuple[str, object]], *more: str) -> str:
    """A title, and below it names with their values; `more`: HTML that follows, as `table` makes it."""
    rows = "".join(f"<tr><th style='text-align:left'>{_cell(n)}</th><td>{_cell(v)}</td></tr>" for n, v in values)
    return f"<div><strong>{_cell(title)}</strong><table>{rows}</table>{''.join(more)}</div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with these heads; of many rows the first ones."""
    body, count = "", 0
    for count, row in enumerate(rows, 1):
        if count <= _ROWS:
            body += f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>"
    if count > _ROWS:
        body += f"<tr><td colspan='{len(heads)}'>and {count - _ROWS:,} more</td></tr>"
    return f"<table><tr>{''.join(f'<th>{_cell(head)}</th>' for head in heads)}</tr>{body}</table>"
