"""Workers that are killed, frozen and restarted under their names count each step once."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.sessions import WorkerSession
from elasticps.client.core import barrier
from elasticps.client.core.fan_out import Script
from tests.e2e.conftest import Connect
from tests.e2e.oracle import wait_for
from tests.e2e.worker_process import HALF, child, counts, keys_of, ones, two_parts

STEPS = 25


def push(ps: eps.Client, steps: int) -> None:
    for _ in range(steps):
        ps.push({}).result()


def test_without_a_predecessor_a_worker_starts_at_the_active_minimum(connect: Connect) -> None:
    first = connect("a")
    assert first.resume() == eps.Resume(0, 0, 0, 0, predecessor=False)
    push(first, 5)
    second = connect("b")
    assert second.resume() == eps.Resume(5, 5, 5, 0, predecessor=False)
    assert second.clock == 5
    push(second, 1)
    assert second.resume() == eps.Resume(5, 5, 5, 0, predecessor=False)  # of the start, also when asked later


def test_the_clock_of_a_name_never_goes_back(connect: Connect) -> None:
    for steps, requested in ((3, True), (2, False), (0, True), (4, True)):
        done = getattr(connect, "done", 0)
        ps = connect("a")
        if requested:
            resume = ps.resume()
            assert (resume.clock, resume.trained, resume.steps) == (done, done, done)
        push(ps, steps)
        assert ps.clock == ps.committed == done + steps
        connect.done = done + steps  # type: ignore[attr-defined]
        ps.close()


def test_a_restarted_worker_does_not_hold_back_the_others(connect: Connect) -> None:
    old, other = connect("a"), connect("b")
    other.resume()
    push(old, 3)
    old.close()
    push(other, 20)
    new = connect("a", consistency=eps.SSP(staleness=0))
    assert new.resume() == eps.Resume(clock=20, trained=3, begun=3, steps=3, predecessor=True)
    push(new, 2)
    new.close()
    other.close()
    again = connect("a")
    assert again.resume() == eps.Resume(clock=22, trained=22, begun=22, steps=5, predecessor=True)
    again.close()
    push(connect("c"), 1)  # nobody is active: it begins at 0
    assert connect("a").resume().steps == 5  # the one before pushed nothing


def test_a_worker_killed_half_way_through_a_step_goes_on(cluster: eps.LocalCluster, connect: Connect) -> None:
    app = connect("reader").app
    with child("stop_half_way", cluster.url, app, "w", STEPS) as first:
        half = first.hear_until("half")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    assert half["clock"] == STEPS + 1
    ps = connect("w")
    resume = ps.resume()
    assert resume.predecessor
    assert STEPS - 4 <= resume.trained <= STEPS  # no more than the window can be uncommitted
    assert (resume.steps, ps.clock) == (resume.trained, resume.clock)
    assert STEPS <= resume.begun <= resume.clock <= STEPS + 1
    for number in range(resume.steps, 2 * STEPS):
        two_parts(ps, number)
    ps.flush()
    table = counts(ps)
    for number in range(2 * STEPS):
        found = table.pull(keys_of(number))[:, 0]
        if resume.steps <= number < STEPS:  # trained again: what the first one did of it may count as well
            assert set(found.tolist()) <= {1.0, 2.0}
        elif number == STEPS:  # of which the first one had sent one half
            assert set(found[:HALF].tolist()) <= {1.0, 2.0}
            assert set(found[HALF:].tolist()) == {1.0}
        else:
            assert set(found.tolist()) == {1.0}, number


def test_an_older_incarnation_that_thaws_changes_nothing(cluster: eps.LocalCluster, connect: Connect) -> None:
    app = connect("reader").app
    with child("push_on", cluster.url, app, "w") as old:
        while old.hear().get("number", 0) < 10:
            pass
        old.process.send_signal(signal.SIGSTOP)
        new = connect("w")
        resume = new.resume()
        assert resume.steps >= 9
        begun = 1 + max(line["number"] for line in (*old.lines,))
        everything = np.concatenate([keys_of(number) for number in range(begun + 50)])
        table = counts(new)
        before = settled(new, table, everything)
        assert set(before[: resume.steps * len(keys_of(0))].tolist()) == {1.0}
        old.process.send_signal(signal.SIGCONT)
        assert any("closed" in line for line in old.rest())
        new.push({table: ones(keys_of(begun + 60))}).result()
        assert np.array_equal(table.pull(everything)[:, 0], before)


def settled(ps: eps.Client, table: eps.SparseTable, keys: np.ndarray) -> np.ndarray:
    """The rows, once nothing is on its way down the chains any more."""
    seen = [table.pull(keys)[:, 0]]

    def same() -> bool:
        ps.push({}).result()
        seen.append(table.pull(keys)[:, 0])
        return np.array_equal(seen[-1], seen[-2])

    wait_for(same, lambda: "values change for ever", 60)
    return seen[-1]


@pytest.mark.parametrize("consistency", ["ssp", "bsp"])
def test_a_dead_worker_stops_holding_others_back(cluster: eps.LocalCluster, connect: Connect, consistency: str) -> None:
    kind = eps.SSP(staleness=2) if consistency == "ssp" else eps.BSP()
    ps = connect("alive", consistency=kind, timeout=60)
    ps.resume()
    stop = threading.Event()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            while not stop.is_set():
                ps.push({})
                counts(ps).pull(np.array([1]))
        except BaseException as error:
            errors.append(error)

    with child("bounded", cluster.url, ps.app, "mortal", 7, consistency=consistency) as mortal:
        mortal.hear_until("base")
        thread = threading.Thread(target=train)
        thread.start()
        for _ in range(5):
            mortal.hear_until("clock")
        mortal.process.send_signal(signal.SIGKILL)
        died_at = ps.clock
        try:
            wait_for(lambda: ps.clock > died_at + 10 or bool(errors), lambda: f"held back at clock {ps.clock}", 60)
        finally:
            stop.set()
            thread.join(60)
    assert not errors


def test_a_restarted_worker_continues_after_the_last_round_it_was_in(connect: Connect) -> None:
    options = {"consistency": eps.BSP()}
    first, other = connect("a", **options), connect("b", **options)
    for ps in (first, other):
        counts(ps)
        ps.resume()
    threads = [threading.Thread(target=push, args=(ps, 3)) for ps in (first, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first.push({counts(first): ones(keys_of(0))})  # its round is never closed with it
    first.close()
    push(other, 2)
    again = connect("a", **options)
    resume = again.resume()
    assert (resume.clock, resume.trained, resume.steps, resume.begun) == (5, 3, 3, 4)
    assert not counts(again).pull(keys_of(0)).any()


def test_a_round_whose_only_worker_dies_as_it_is_decided_is_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connect("a", consistency=eps.BSP())
    first.push({counts(first): ones(keys_of(0))})
    settling = barrier.settling

    def die(*given: Any) -> Script[None]:
        yield from settling(*given)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(barrier, "settling", die)
        with pytest.raises(ZeroDivisionError):
            first.flush()
    first.close()
    second = connect("b", consistency=eps.BSP())
    assert set(counts(second).pull(keys_of(0))[:, 0].tolist()) == {1.0}
    assert second.clock == 1


def test_a_worker_overtaken_while_registering_is_told(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another of its name, not that the cluster cannot be reached."""
    take, overtaken, newer = WorkerSession._take, list[WorkerSession](), list[eps.Client]()

    async def later(self: WorkerSession) -> None:
        if not overtaken:
            overtaken.append(self)
            newer.append(await asyncio.to_thread(connect, "a"))
        await take(self)

    monkeypatch.setattr(WorkerSession, "_take", later)
    with pytest.raises(eps.Closed, match="started again"):
        connect("a")
    push(newer[0], 1)
