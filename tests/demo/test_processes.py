from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from examples.demo.processes import ChildEvent, ChildFailed, Children


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    """Whose "workers" are any Python code, given as job["code"]."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; exec(json.loads(sys.argv[3])[\'code\'])" "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    return Children(tmp_path)


def wait(children: Children, kind: str) -> ChildEvent:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        event = children.next_event(timeout_s=0.5)
        if event is not None and event.kind == kind:
            return event
    raise AssertionError(f"no {kind!r} came")


PIPE = "from examples.demo.processes import Pipe; pipe = Pipe()\n"


def test_children_send_and_receive_messages(children: Children) -> None:
    with children:
        children.start("a", {"code": PIPE + "pipe.tell('heard', word=pipe.next_word()); print('noise')"})
        children.say("a", "hello")
        event = wait(children, "heard")
        assert (event.source, event.values) == ("a", {"word": "hello"})
        assert wait(children, "exit").values == {"code": 0}
        assert children.next_event(timeout_s=0.01) is None


def test_a_child_that_fails_is_reported_with_the_end_of_its_log(children: Children) -> None:
    with children:
        children.start("a", {"code": "1 / 0"})
        with pytest.raises(ChildFailed, match=r"(?s)a ended with exit code 1.*ZeroDivisionError"):
            wait(children, "exit")


def test_a_child_that_is_killed_is_reported(children: Children) -> None:
    with children:
        children.start("a", {"code": "import os; os.kill(os.getpid(), 9)"})
        with pytest.raises(ChildFailed, match="a was killed by SIGKILL"):
            wait(children, "exit")


def test_a_child_that_we_kill_is_no_failure_and_may_start_again(children: Children) -> None:
    with children:
        children.start("a", {"code": PIPE + "pipe.tell('up'); import time; time.sleep(60)"})
        wait(children, "up")
        children.kill("a")
        assert children.next_event(timeout_s=0.01) is None
        children.start("a", {"code": PIPE + "pipe.tell('back', word=pipe.next_word())"}, again=True)
        children.say("a", "go")
        assert wait(children, "back").values == {"word": "go"}
        assert wait(children, "exit").values == {"code": 0}


def test_a_child_that_has_ended_by_itself_is_gone_already(children: Children) -> None:
    with children:
        children.start("a", {"code": "pass"})
        wait(children, "exit")
        children.kill("a")
        assert children.next_event(timeout_s=0.01) is None


def test_leaving_ends_children_that_would_go_on(children: Children) -> None:
    started = time.monotonic()
    with children:
        children.start("a", {"code": PIPE + "pipe.tell('up'); import time; time.sleep(60)"})
        wait(children, "up")
    assert time.monotonic() - started < 50


def test_leaving_kills_children_that_do_not_listen(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.processes.KILL_AFTER_S", 0.2)
    with children:
        children.start("a", {"code": 'print(\'{"event": "up", "t": 0}\', flush=True); import time; time.sleep(60)'})
        wait(children, "up")
