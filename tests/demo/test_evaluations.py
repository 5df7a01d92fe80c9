"""The evaluator may be killed at any moment; every epoch is evaluated once all the same, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from examples.demo.evaluations import Evaluations


def test_an_epoch_that_ends_while_the_evaluator_comes_back_is_evaluated_once() -> None:
    evaluations = Evaluations(["w0"])
    assert evaluations.finished("w0", 1, 1.0) == 1
    evaluations.goes()  # before it answered
    assert evaluations.finished("w0", 2, 2.0) == 0
    assert evaluations.back() == 2
    assert [evaluations.answered(), evaluations.answered()] == [(1, 1.0), (2, 2.0)]


def test_an_epoch_is_due_when_its_last_worker_has_finished_it() -> None:
    evaluations = Evaluations(["w0", "w1"])
    assert evaluations.finished("w0", 1, 1.0) == 0
    assert evaluations.finished("w0", 2, 2.0) == 0
    assert evaluations.finished("w1", 2, 3.0) == 2  # from a checkpoint that holds the first
    assert [evaluations.answered(), evaluations.answered()] == [(1, 3.0), (2, 3.0)]


@given(st.lists(st.sampled_from(["w0", "w1", "rewind", "answer", "kill", "back"]), max_size=60))
def test_every_epoch_is_evaluated_once_whatever_is_killed(story: list[str]) -> None:
    workers = {"w0": 0, "w1": 0}  # the epoch each is at
    furthest = dict(workers)
    evaluations = Evaluations(workers)
    inbox = 0  # of an evaluator that lives
    alive = True
    ended: list[float] = []  # when each epoch was finished by the last worker
    answered: list[tuple[int, float]] = []

    def answer() -> None:
        nonlocal inbox
        inbox -= 1
        answered.append(evaluations.answered())

    for t, event in enumerate(story):
        if event in workers:
            workers[event] += 1
            furthest[event] = max(furthest[event], workers[event])
            if min(furthest.values()) > len(ended):
                ended.append(t)
            asks = evaluations.finished(event, workers[event], t)
            assert alive or asks == 0
            inbox += asks
        elif event == "rewind":  # to a checkpoint from before its last epoch
            workers["w0"] = max(0, workers["w0"] - 1)
        elif event == "answer" and inbox:
            answer()
        elif event == "kill":
            alive, inbox = False, 0
            evaluations.goes()
        elif event == "back" and not alive:
            alive, inbox = True, evaluations.back()
    if not alive:
        inbox = evaluations.back()
    while inbox:
        answer()
    assert answered == [(i + 1, t) for i, t in enumerate(ended)]
