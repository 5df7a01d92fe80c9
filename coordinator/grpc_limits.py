"""Two things in which gRPC is unlike other asyncio code: it does not survive a fork, and it raises CancelledError in
tasks that nobody has cancelled."""

from __future__ import annotations

import asyncio
import os

from coordinator.core.errors import ForkedProcess

REMEDY = (
    "Leave pulls and pushes to the parent, or fork before anything connects, or start the child by the method"
    ' "forkserver" or "spawn" and connect in it: DataLoader(…, multiprocessing_context="forkserver"),'
    ' multiprocessing.get_context("spawn")'
)

_user: int | None = None
"""The process that used gRPC first: this process, or one that it was forked from."""


def use_grpc() -> None:
    """Notes that this process uses gRPC; to be called before its first channel is made.

    Raises ForkedProcess in a process that was forked from one that uses gRPC. The threads of gRPC do not exist in such
    a child, but its descriptors do: a call there waits for ever, and takes wake-ups that were the parent's, whose calls
    then wait too, until leases run out. The handling of forks that gRPC has does not cover asyncio.
    """
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise ForkedProcess(
            f"process {os.getpid()} was forked from process {_user}, which had connected to a cluster before; gRPC,"
            f" which speaks to etcd, does not work across a fork. {REMEDY}"
        )


def task_cancelled() -> bool:
    """Whether the running task itself was cancelled. If not, the CancelledError that it has caught comes from gRPC,
    which raises it in every call on a channel that is closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
