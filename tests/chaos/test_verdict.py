"""Each check of a run against data that must fail it, and against data that must not."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from chaos.live.nemesis import FaultRecord
from chaos.live.verdict import FORGOTTEN, audit_words, epochs_back, given_up
from chaos.live.watch import Seen
from coordinator import sessions
from elasticps.admin.audit import AuditReport, Difference, WorkerClocks
from elasticps.client import dispatcher
from tests.chaos.scenes import action_of


def seen(*epochs: int) -> list[Seen]:
    """A view a second, of these epochs."""
    return [Seen(float(at), epoch, 0, 0, "because") for at, epoch in enumerate(epochs)]


def test_epochs_never_go_back() -> None:
    assert epochs_back(seen(3, 4, 7), []) == []
    (older,) = epochs_back(seen(3, 7, 4, 8), [])
    assert older == "at 2.0 s the view of epoch 7 was followed by another one of epoch 4: because"
    (same,) = epochs_back(seen(3, 7, 7, 8), [])
    assert same.startswith("at 2.0 s the view of epoch 7 was followed by another one of epoch 7")


def test_a_replaced_etcd_may_have_missed_the_last_view() -> None:
    renewed = FaultRecord(action_of("etcd-new", for_=1), "over", began=1.5, ended=2.5)
    assert epochs_back(seen(3, 7, 6, 7), [renewed]) == []
    assert len(epochs_back(seen(3, 7, 6, 7, 5), [renewed])) == 1


PAUSED = [FaultRecord(action_of("pause", "worker", for_=4), "over", "w1", "worker", 5.0, 9.0)]
FENCED = (
    "worker w1 ended with exit code 1: elasticps.errors.Closed: the cluster no longer knows worker 'w1'; it left, or"
)


def test_a_worker_may_end_when_it_was_away_for_longer_than_others_wait() -> None:
    assert given_up("w1", PAUSED, 10.0, FENCED) == "it had been away for 4.0 s, and counts as dead after about 3.2"
    assert not given_up("w0", PAUSED, 10.0, FENCED)
    assert not given_up("w1", PAUSED, 60.0, FENCED)
    assert not given_up("s1", PAUSED, 4.0, FENCED)


def test_a_worker_that_is_still_away_may_end_at_any_time() -> None:
    cut = [FaultRecord(action_of("cut", "worker", for_=60), "running", "w1", "worker", 5.0)]
    assert given_up("w1", cut, 40.0, FENCED)


@pytest.mark.parametrize(
    "why",
    [
        "was killed by SIGSEGV",
        "ended with exit code 1: IndexError: list index out of range",
        "ended with exit code 1: elasticps.errors.Closed: this worker was started again elsewhere: workers/w1 now "
        "belongs to incarnation 9; this is 4",
    ],
)
def test_a_worker_that_ends_for_another_reason_after_a_pause_breaks_a_promise(why: str) -> None:
    """Nobody else takes a name in a run: who is told so after a pause was told so wrongly, and that was a bug once."""
    assert not given_up("w1", PAUSED, 10.0, f"worker w1 {why}")


def test_the_words_for_forgotten_workers_occur_in_the_clients_errors() -> None:
    output = inspect.getsource(dispatcher) + inspect.getsource(sessions)
    assert all(words in output for words in FORGOTTEN)


CLEAN = AuditReport("c", 1, 8, 2, 16, 0, 0, (), (), {}, {}, 0.1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"differences": (Difference(3, "s1", "other rows"),)}, "range 3 at s1: other rows"),
        (
            {"workers": (WorkerClocks(7, "w1", 9, 8, 0, broken=True),)},
            "worker w1 was told of step 9, but only 8 is everywhere",
        ),
        ({"unjudged": {4: "s2 did not answer"}}, "1 ranges could not be audited: range 4: s2 did not answer"),
        ({"short": 2}, "2 ranges have fewer than 2 replicas"),
        ({"lost": {"s1": "s1 is gone"}}, "s1 was left out of the view while all was compared: s1 is gone"),
        (
            {"alone": 8, "compared": 8},
            "no replica was compared with another one, though there should be 2 of each range",
        ),
    ],
)
def test_every_finding_of_an_audit_is_a_broken_promise(found: dict[str, Any], words: str) -> None:
    assert audit_words(CLEAN) == []
    assert audit_words(replace(CLEAN, **found)) == [words]


def test_ten_differences_are_listed_and_the_rest_counted() -> None:
    different = tuple(Difference(r, "s1", "other rows") for r in range(12))
    words = audit_words(replace(CLEAN, differences=different))
    assert len(words) == 11
    assert words[-1] == "and 2 more replicas differ"
