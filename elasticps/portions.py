"""Sequences cut into portions that a limit allows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def portions(items: Sequence[T], most: int, most_bytes: int, size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Cuts items, in their order, into portions of at most `most` items and `most_bytes` bytes; an item that is larger
    is a portion of its own."""
    start = nbytes = 0
    for i, item in enumerate(items):
        its = size(item)
        if i > start and (i - start == most or nbytes + its > most_bytes):
            yield items[start:i]
            start, nbytes = i, 0
        nbytes += its
    if start < len(items):
        yield items[start:]
