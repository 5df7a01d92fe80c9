"""Ranks of a group in threads of one process, with real sockets and real shared memory between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from elasticps.torch.group.client import GroupClient
from elasticps.torch.group.links import Links

Result = TypeVar("Result")
TIMEOUT_S = 60.0


@contextmanager
def linked(size: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[Links]]:
    """The links of `size` ranks."""
    pairs = [socket.socketpair() for _ in range(size - 1)]
    links = [Links(0, size, {rank: pair[0] for rank, pair in enumerate(pairs, start=1)}, timeout_s)]
    links += [Links(rank, size, {0: pair[1]}, timeout_s) for rank, pair in enumerate(pairs, start=1)]
    try:
        yield links
    finally:
        for each in links:
            each.close()


@contextmanager
def clients(ps: Any, size: int, **options: Any) -> Iterator[list[GroupClient]]:
    """The clients of `size` ranks; rank 0 has `ps`."""
    options = {"mean": False} | options
    with linked(size) as links:
        yield [GroupClient(each, None if each.rank else ps, **options) for each in links]


def together(does: Callable[[Any], Result], ranks: list[Any]) -> list[Result]:
    """Calls `does` for all ranks at once; their results, or the first error that one raises."""

    def ended(rank: Any) -> Result:
        try:
            return does(rank)
        except BaseException:
            rank.close()  # the others would wait for it
            raise

    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(ended, each) for each in ranks]
        done, _ = wait(running, TIMEOUT_S, FIRST_EXCEPTION)
        failed = next((each.exception() for each in done if each.exception() is not None), None)
        if failed is not None:
            raise failed
        return [each.result(0) for each in running]
