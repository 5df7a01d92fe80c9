"""Refuses gRPC in a child that was forked from a process that uses gRPC.

gRPC's threads do not exist in such a child, but its descriptors do: a call there waits for ever, and takes wake-ups
that were the parent's, whose calls then wait, too, until leases run out. gRPC's own handling of forks does not cover
asyncio.
"""

from __future__ import annotations

import os

from coordinator.core.errors import ForkedProcess

REMEDY = (
    "Leave pulls and pushes to the parent, or fork before anything connects, or start the child by the method"
    ' "forkserver" or "spawn" and connect in it: DataLoader(…, multiprocessing_context="forkserver"),'
    ' multiprocessing.get_context("spawn")'
)

_user: int | None = None
"""The process that used gRPC first: this one, or one that this one was forked from."""


def use_grpc() -> None:
    """Notes that this process uses gRPC; called before its first channel is made. Raises ForkedProcess in a child of a
    process that did so before the fork."""
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise ForkedProcess(
            f"process {os.getpid()} was forked from process {_user}, which had connected to a cluster before; gRPC,"
            f" which speaks to etcd, does not work across a fork. {REMEDY}"
        )
