from __future__ import annotations

import pytest

from elasticps.client.session import PushFrame, Session


def frames(session: Session, servers: list[str], requests: list[int]) -> list[PushFrame]:
    step = session.begin()
    made = [PushFrame(step.clock, s, r, (b"",)) for s, r in zip(servers, requests, strict=True)]
    for frame in made:
        session.add(step, frame)
    session.close(step)
    return made


def test_steps_commit_in_clock_order_whatever_the_order_of_answers() -> None:
    session = Session(window=4)
    frames(session, ["a", "b"], [1, 2])
    frames(session, ["a", "b"], [3, 4])
    for request, committed in ((3, 0), (4, 0), (2, 0), (1, 2)):
        assert session.answered(request)
        assert session.committed == committed
    assert session.outstanding == 0
    assert session.clock == 2


def test_what_a_server_has_not_answered_is_sent_again_in_order() -> None:
    session = Session(window=4)
    frames(session, ["a", "b"], [1, 2])
    frames(session, ["b", "a"], [3, 4])
    session.answered(2)
    assert [f.request for f in session.unanswered("a")] == [1, 4]
    assert [f.request for f in session.unanswered("b")] == [3]
    assert session.waiting_for() == {"a": 1, "b": 2}


def test_an_open_step_is_not_done_even_when_all_of_it_is_answered() -> None:
    session = Session(window=1)
    step = session.begin()
    session.add(step, PushFrame(1, "a", 1, ()))
    session.answered(1)
    assert (step.done, session.full, session.committed) == (False, True, 0)
    session.close(step)
    assert (step.done, session.full, session.committed) == (True, False, 1)


def test_a_refused_frame_ends_the_step_with_the_first_error() -> None:
    session = Session(window=1)
    step = session.begin()
    for request in (1, 2):
        session.add(step, PushFrame(1, "a", request, ()))
    session.close(step)
    first = ValueError("first")
    session.answered(1, first)
    session.answered(2, ValueError("second"))
    assert step.done
    assert step.error is first
    assert session.failures == {1: first}


def test_answers_to_other_requests_are_not_ours() -> None:
    assert not Session(window=1).answered(99)


def test_failing_ends_everything_outstanding() -> None:
    session = Session(window=4, base=10)
    frames(session, ["a"], [1])
    open_step = session.begin()
    session.fail(RuntimeError("gone"))
    assert open_step.done
    assert isinstance(open_step.error, RuntimeError)
    assert session.outstanding == 0


def test_the_window_is_a_limit() -> None:
    session = Session(window=1)
    frames(session, ["a"], [1])
    with pytest.raises(AssertionError):
        session.begin()
