"""Faults of etcd itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.live import etcd
from chaos.live.etcd import Etcd
from chaos.live.network import Loopback


class Frozen:
    """An etcd that answers the n-th request if `answers[n]`, and carries out the others later."""

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.requests: list[str] = []

    def __call__(self, host: str, port: int, tls: None, path: str, body: str) -> tuple[int, str]:
        self.requests.append(json.loads(body)["action"])
        return (200, "{}") if self.answers.pop(0) else (0, "")


@pytest.mark.parametrize(
    ("full", "answers", "requested", "done"),
    [
        (True, [True, True], ["GET", "ACTIVATE"], True),
        (True, [False], ["GET"], False),  # nothing that it would do when it goes on
        (True, [True, False], ["GET", "ACTIVATE"], True),  # it may be full: to be ended
        (False, [True], ["DEACTIVATE"], True),
        (False, [False], ["DEACTIVATE"], False),  # to be tried again
    ],
)
def test_an_alarm_that_may_have_been_raised_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool, answers: list[bool], requested: list[str], done: bool
) -> None:
    frozen = Frozen()
    frozen.answers = answers
    monkeypatch.setattr(etcd, "ask", frozen)
    assert Etcd(1, Loopback(), tmp_path).set_full(full) == done
    assert frozen.requests == requested
