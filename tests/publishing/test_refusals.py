"""How long a target has refused rows, and when to say so, compared with a list of all that happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticps.publishing.core.refusals import REPEAT_S, Refusals

EVENTS = st.lists(st.tuples(st.floats(0, 8), st.sampled_from(["full", "away", "some", "all"])), max_size=60)


@given(EVENTS)
def test_refusals_are_counted_from_the_last_rows_taken_before_them(events: list[tuple[float, str]]) -> None:
    now_s, history, refusals = 0.0, [(0.0, "all")], Refusals(0.0)
    for passed_s, event in events:
        now_s += passed_s
        if event in ("full", "away"):
            refusals.note(now_s, event)
        else:
            refusals.taken(now_s, complete=event == "all")
        history.append((now_s, event))
        last = max(i for i, (_, one) in enumerate(history) if one == "all")
        refused = [i for i in range(last, len(history)) if history[i][1] in ("full", "away")]
        if event in ("some", "all"):
            assert (refusals.reason, refusals.seconds(now_s + 5)) == ("", 0.0)
            continue
        taken_s = max(at_s for at_s, one in history[: refused[0]] if one in ("some", "all"))
        assert refusals.reason == event
        assert refusals.seconds(now_s + 5) == now_s + 5 - taken_s


@given(EVENTS)
def test_the_same_reason_is_logged_now_and_then(events: list[tuple[float, str]]) -> None:
    now_s, logged, refusals = 0.0, list[tuple[float, str]](), Refusals(0.0)
    away = False
    for passed_s, event in events:
        now_s += passed_s
        if event in ("full", "away"):
            away = True
            due = not logged or logged[-1][1] != event or now_s - logged[-1][0] >= REPEAT_S
            assert refusals.note(now_s, event) is due
            if due:
                logged.append((now_s, event))
        else:
            assert refusals.taken(now_s, complete=event == "all") is (away and event == "all")
            if event == "all":
                away = False
                logged.clear()
