"""Periodic work of a server while the system refuses calls, and limits of the process."""

from __future__ import annotations

import asyncio
import errno
import resource

import pytest

from elasticps.errors import ConfigError
from elasticps.server.core.headroom import AMPLE_BYTES, AMPLE_LOOKS, Headroom, ServerMemory
from elasticps.server.process.lifecycle import keep_doing
from elasticps.system import descriptors
from elasticps.system.descriptors import ConnectionLimits, connections_for, raise_limit
from elasticps.system.memory import Reading
from tests.coordinator.support import until


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_work_that_the_system_refuses_is_logged_seldom_and_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    done: list[int] = []

    def work() -> None:
        done.append(len(done))
        if len(done) <= 5:
            raise error

    async def test() -> None:
        task = asyncio.create_task(keep_doing("a look", 0.001, work))
        await until(lambda: len(done) > 8)
        assert not task.done()
        task.cancel()

    asyncio.run(test())
    assert caplog.text.count("the system refuses something, tried again") == 1
    assert caplog.text.count('the system refuses nothing more what="a look" failures=5') == 1


def test_a_bug_is_not_taken_for_a_refusal_of_the_system() -> None:
    def work() -> None:
        raise KeyError

    async def test() -> None:
        with pytest.raises(KeyError):
            await asyncio.wait_for(keep_doing("a look", 0.001, work), 30)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        (144, ConnectionLimits(12, 2, 144)),
        (1024, ConnectionLimits(672, 112, 1024)),
        (20_000, ConnectionLimits(13126, 2187, 20_000)),
    ],
)
def test_connections_leave_descriptors_in_reserve(files: int, allowed: ConnectionLimits) -> None:
    assert connections_for(files) == allowed
    assert allowed.workers + 2 * allowed.unknown + descriptors.RESERVE <= files


def test_a_limit_that_leaves_nothing_to_connections_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"may have 143 files open \(`ulimit -n`\).* allow 144 or more"):
        connections_for(143)


def test_a_process_raises_its_limit_of_open_files() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        most = descriptors.MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, descriptors.MOST_FILES)
        assert raise_limit() == most
        assert raise_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_memory_that_counts_for_a_process_limit_is_used() -> None:
    """Addresses that hold nothing count for `ulimit -v`, so what is in memory says little of what is left."""
    headroom = Headroom("a", ServerMemory(1000, lambda: Reading(100, 10_000, left=300)))
    headroom.look(0)
    assert headroom.used == 700
    assert headroom.least.nbytes == headroom.mark - 700
    assert headroom.short == (0.9 * headroom.mark < 700)


def test_memory_is_read_at_every_look_unless_there_is_ample_room() -> None:
    used = 1 << 30
    headroom = Headroom("a", ServerMemory(64 << 30, lambda: Reading(used, 64 << 30)))
    assert not headroom.skips(), "nothing is known before the first look"
    headroom.look(0)
    assert [headroom.skips() for _ in range(AMPLE_LOOKS)] == [True] * (AMPLE_LOOKS - 1) + [False]
    used = headroom.mark - AMPLE_BYTES
    headroom.look(0)
    assert not headroom.skips(), "what is left may be taken before the next look"
