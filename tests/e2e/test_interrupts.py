"""Ctrl-C, or whatever a signal handler raises, anywhere in a call: the step happened whole or not at all, and the next
calls find a client that goes on."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps import LocalCluster

CLIENT = "elasticps/client/"
POINTS = 40
KEYS = np.arange(64)


LOOKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}


@cache
def handler(code: CodeType, offset: int) -> int:
    """The address of the handler of an exception at this instruction, -1 for the caller."""
    entries: Any = vars(dis.Bytecode(code))["exception_entries"]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), -1)


class Stop(Exception):
    """An error raised by a signal handler; unlike `KeyboardInterrupt` an Exception."""


class Interrupt:
    """Raises at the `at`-th place in the client where Python looks for signals: the start of a function, the end of a
    call, a jump back. Counts these places.

    The exception comes with the instruction after; where that is under another handler, it is left out.
    """

    def __init__(self, at: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at = at
        self.passed = 0
        self._kind = kind
        self._last: dict[FrameType, int] = {}  # where each frame was

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if CLIENT not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            code, now = frame.f_code, frame.f_lasti
            before = self._last.get(frame, 0)
            self._last[frame] = now
            looks = dis.opname[code.co_code[before]] in LOOKS
            if looks and handler(code, before) == handler(code, now):
                self.passed += 1
                if self.passed == self.at:
                    sys.settrace(None)
                    raise self._kind
        return self._step


def every_point(action: Callable[[], object], kinds: tuple[type[BaseException], ...]) -> Iterator[bool]:
    """Runs an action again and again, interrupted at other points; yields whether it was."""
    action()  # the first time a worker joins
    with Interrupt(0) as undisturbed:
        action()
    for n in range(POINTS):
        with Interrupt(1 + n * undisturbed.passed // POINTS, kinds[n % len(kinds)]):
            try:
                action()
                hit = False
            except kinds:
                hit = True
        yield hit


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2, replicas=2, ranges=16) as cluster:
        yield cluster


def test_an_interrupted_push_happened_whole_or_not_at_all(cluster: LocalCluster) -> None:
    with eps.connect(cluster.url, worker="push", timeout=60) as ps:
        table = ps.table("push", dim=4, optimizer=eps.Accumulate())
        grads = np.ones((64, 4), np.float32)
        hits = 0
        for hit in every_point(lambda: ps.push({table: (KEYS, grads)}), (KeyboardInterrupt, Stop)):
            hits += hit
            grads[:] = 50  # what was sent is a copy
            assert np.array_equal(table.pull(KEYS), np.full((64, 4), ps.clock, np.float32))
            grads[:] = 1
        assert hits > POINTS // 2


def test_an_interrupted_push_with_a_pull_happened_whole_or_not_at_all(cluster: LocalCluster) -> None:
    """Also where the message that has both is cut."""
    with eps.connect(cluster.url, worker="both", timeout=60) as ps:
        table = ps.table("both", dim=4, optimizer=eps.Accumulate())
        tensor = ps.tensor("both-d", init=np.zeros(9, np.float32), optimizer=eps.Accumulate())
        grads, ones, hits = np.ones((64, 4), np.float32), np.ones(9, np.float32), 0
        keys: dict[Any, Any] = {table: KEYS, tensor: None}
        for hit in every_point(
            lambda: ps.push_pull({table: (KEYS, grads), tensor: ones}, keys), (KeyboardInterrupt, Stop)
        ):
            hits += hit
            grads[:] = 50
            found = ps.pull(keys)
            assert np.array_equal(found[table], np.full((64, 4), ps.clock, np.float32))
            assert np.unique(found[tensor]).tolist() == [ps.clock]
            grads[:] = 1
        assert hits > POINTS // 2


def test_an_interrupted_push_of_several_frames_is_copied_whole(cluster: LocalCluster) -> None:
    with eps.connect(cluster.url, worker="large", timeout=60) as ps:
        tensor = ps.tensor("large", init=np.zeros(1 << 19, np.float32), optimizer=eps.Accumulate())
        grad = np.ones(1 << 19, np.float32)
        for _ in every_point(lambda: ps.push({tensor: grad}), (KeyboardInterrupt,)):
            grad[:] = 50
            assert np.unique(tensor.pull()).tolist() == [ps.clock]
            grad[:] = 1


def test_an_interrupted_part_of_a_step_can_be_followed_by_others(cluster: LocalCluster) -> None:
    with eps.connect(cluster.url, worker="parts", timeout=60) as ps:
        table = ps.table("parts", dim=1, optimizer=eps.Accumulate())
        ones = np.ones((64, 1), np.float32)
        steps: list[eps.OpenStep] = []

        def push() -> None:
            steps.append(ps.step())
            steps[-1].push({table: (KEYS, ones)})
            steps[-1].commit()

        for _ in every_point(push, (KeyboardInterrupt,)):
            if steps[-1].state is not None:
                steps[-1].commit().result()
            before = table.pull(KEYS)
            assert len(np.unique(before)) == 1
            ps.push({table: (KEYS, ones)}).result()
            assert np.array_equal(table.pull(KEYS), before + 1)


def test_an_interrupted_wait_can_be_repeated(cluster: LocalCluster) -> None:
    with eps.connect(cluster.url, worker="wait", timeout=60) as ps:
        table = ps.table("wait", dim=4, optimizer=eps.Accumulate())
        ones = np.ones((64, 4), np.float32)
        for _ in every_point(lambda: ps.push({table: (KEYS, ones)}).result(), (KeyboardInterrupt, Stop)):
            assert np.array_equal(table.pull(KEYS), np.full((64, 4), ps.clock, np.float32))
            ps.flush()
            assert ps.committed == ps.clock


def test_an_interrupted_pull_leaves_its_array_alone(cluster: LocalCluster) -> None:
    with eps.connect(cluster.url, worker="pull", timeout=60) as ps:
        table = ps.table("pull", dim=4, optimizer=eps.Accumulate())
        ps.push({table: (KEYS, np.ones((64, 4), np.float32))}).result()
        out = np.zeros((64, 4), np.float32)
        for hit in every_point(lambda: table.pull(KEYS, out=out), (KeyboardInterrupt,)):
            assert hit or (out == 1).all()
            out[:] = 7
            assert (table.pull(KEYS) == 1).all()
            assert (out == 7).all()
