"""A forked child and the objects of its parent."""

from __future__ import annotations

import gc
import os

import elasticps.client  # noqa: F401  # it watches for forks


class _Left:
    """Garbage in a cycle: only the collector finds it."""

    def __init__(self, pipe: int) -> None:
        self.itself, self.pipe = self, pipe

    def __del__(self) -> None:
        os.write(self.pipe, b"finalised\n")


def test_a_forked_child_does_not_finalise_garbage_of_its_parent() -> None:
    """gRPC's objects do not bear it."""
    read, write = os.pipe()
    gc.disable()
    try:
        _Left(write)
        child = os.fork()
        if not child:
            gc.collect()
            os.write(write, b"done\n")
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        gc.enable()
    os.set_blocking(read, False)
    assert os.read(read, 100) == b"done\n"
    gc.collect()
    assert os.read(read, 100) == b"finalised\n"
    os.close(read)
    os.close(write)
