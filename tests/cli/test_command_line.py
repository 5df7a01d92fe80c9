"""The command as people type it: nothing here starts a cluster."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner, Result

from elasticps import cli
from elasticps.cli.app import app
from elasticps.cli.output import ExitCode, guarded, sigterm_interrupts
from elasticps.local import state

URL = ["--url", "etcd://127.0.0.1:1/x"]
SERVER = ["server", *URL]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


def test_version_and_help() -> None:
    assert re.fullmatch(r"elasticps \d+\.\d+\.\d+ with Python 3\.\d+\.\S+\n", run("version").output)
    for command in (
        "up",
        "down",
        "scale",
        "drain",
        "kill",
        "status",
        "audit",
        "demo",
        "bench",
        "server",
        "coordinator",
        "certificates",
        "version",
    ):
        assert run(command, "--help").exit_code == ExitCode.OK
        assert command in run("--help").output


def test_a_paragraph_of_a_help_text_flows_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = [" ".join(line.split()) for line in run("status", "--help").output.splitlines()]
    messages = "The exit code is 0 if all servers answer, 3 if etcd does not, 4 if the cluster has no view,"
    assert f"{messages} a server is silent, or ranges have no replica." in lines


def test_no_bracket_of_a_help_text_is_taken_for_markup() -> None:
    def commands(command: Any) -> Iterator[Any]:
        yield command
        for below in getattr(command, "commands", {}).values():
            yield from commands(below)

    for command in commands(typer.main.get_command(app)):
        for text in (command.help, *(getattr(param, "help", None) for param in command.params)):
            assert Text.from_markup(text or "").plain == (text or "").replace(r"\[", "[")
    assert "[default: as servers have them]" in plain(run("reader", "--help").output.replace("│", ""))


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("fly").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--replicas", "17"], "16"),
        (["up", "--detach", "--restart"], "leave one out"),
        (["scale", "3"], "no local cluster is there"),
        (["scale", "0"], "Invalid value"),
        (["drain", "s0"], "no local cluster is there"),
        (["drain", "s0", "--url", "etcd://127.0.0.1:1/x", "--name", "x"], "--url and --name exclude each other"),
        (["drain", "s0", "--url", "http://127.0.0.1:1/x"], "it must begin with etcd://"),
        (["kill", "s0"], "no local cluster is there"),
        (["audit"], "no local cluster is there"),
        (["reader", *URL, "--listen", "0.0.0.0:9101"], "whoever reaches 0.0.0.0 could read rows"),
        (["reader", *URL, "--max-age", "-5s"], "--max-age '-5s' is no time above 0: write for example 30s"),
        (["reader", *URL, "--share", "9/8"], "there is no 9/8"),
        (["reader", "--url", "reader://127.0.0.1"], "'127.0.0.1' is no host:port: say which port the relay"),
        (["reader", "--url", "reader://127.0.0.1:9100,[::1]"], "'[::1]' is no host:port"),
        (["reader", "--url", "reader://127.0.0.1:99999"], "'127.0.0.1:99999' is no address of a relay"),
        (["readers", "status", "9100"], "name a reader as HOST:PORT"),
        (["readers", "status", "reader://127.0.0.1:9100"], "name a reader as HOST:PORT"),
        (["audit", "--url", "etcd://127.0.0.1:1/x", "--name", "x"], "--url and --name exclude each other"),
        (["up", "--ranges", "100"], "power of two"),
        (["up", "--servers", "1000"], "1 to 64 servers"),
        (["up", "--servers", "3", "--metrics-port", "65533"], "not enough ports from 65533"),
        (["up", "--name", "../x"], "usable cluster name"),
        (["down"], "no local cluster is there; start one with: elasticps up"),
        (["down", "--name", "nobody"], "no local cluster is called 'nobody'"),
        (["down", "--all", "--name", "x"], "--all and --name exclude each other"),
        (["status"], "no local cluster is there"),
        (["status", "--url", "http://127.0.0.1:1/x"], "it must begin with etcd://"),
        (["status", "--url", "etcd://127.0.0.1:1/x", "--name", "x"], "--url and --name exclude each other"),
        (["coordinator", "--url", "etcd://127.0.0.1:1/x", "--name", "a b"], "usable coordinator name"),
        (["coordinator", "--url", "etcd://127.0.0.1:1/x", "--name", "c0", "--log-level", "loud"], "no log level"),
        ([*SERVER, "--name", "a b"], "usable server name"),
        ([*SERVER, "--name", ""], "usable server name"),
        ([*SERVER, "--name", "s0", "--zone", "a b"], "usable zone"),
        ([*SERVER, "--name", "s0", "--weight", "99"], "weight must be above 0"),
        ([*SERVER, "--name", "s0", "--advertise", "a b"], "server address"),
        (["coordinator", *URL, "--name", "c0", "--checkpoint-url", "foo://x"], "foo://x cannot be opened"),
        (["checkpoint", "list", ""], "the place of checkpoints is empty"),
        (["checkpoint", "list", "foo://x/y"], "foo://x/y cannot be opened"),
        (["checkpoint", "delete", "/proc/here", "--keep", f"last={'9' * 5000}"], "--keep takes last=N"),
        (["restore", *URL, "--ranges", "0-65536"], "--ranges takes numbers below 65536"),
        (["export", *URL, "--to", "/proc/here", "--rows", "t=²"], "--rows takes TABLE=N"),
        (["export", *URL, "--to", "/proc/here", "--rows", f"t={'9' * 5000}"], "--rows takes TABLE=N"),
        (["export", *URL, "--to", "/proc/here", "--format", "xyz"], "format must be one of"),
        (["certificates", "/proc/here", "--etcd", "not a host"], "'not a host' can be no host"),
        (["certificates", "/proc/here", "--etcd", ""], "--etcd takes a host"),
        (["dashboard", *URL, "--host", "no such"], "'no such' can be no host"),
        (["demo", "--out", "/proc/here"], "--out /proc/here: nothing can be written there"),
        (["chaos", "run", "etcd-outage", "--out", "/proc/here"], "--out /proc/here: nothing can be written there"),
    ],
)
def test_unusable_arguments_end_without_a_traceback(arguments: list[str], says: str, state_folder: Path) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert says in plain(result.output)
    assert "Traceback" not in result.output
    assert not list(state_folder.glob("*/"))


def test_a_missing_etcd_is_reported_within_the_timeout() -> None:
    command = [sys.executable, "-m", "elasticps", "status", "--url", "etcd://127.0.0.1:1/x", "--timeout", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == ExitCode.UNREACHABLE, done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["logs", "--name", "here"], ["version"], ["--version"]])
def test_a_full_disk_is_reported_without_a_traceback(arguments: list[str], state_folder: Path) -> None:
    state.claim(state_folder / "here")
    (state_folder / "here" / "s0.log").write_text("ts=2026-01-01T00:00:00Z event=ready\n")
    command = [sys.executable, "-m", "elasticps", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert "error: what was to be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != ExitCode.OK


def test_the_exit_code_is_right_with_closed_streams() -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-m", "elasticps"]
    done = subprocess.run([*command, "version"], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO, errno.EDQUOT])
def test_an_error_of_the_system_is_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(number, os.strerror(number), "model.safetensors")

    with pytest.raises(typer.Exit) as ended:
        guarded(write)()
    assert ended.value.exit_code == ExitCode.FAILED
    assert capsys.readouterr().err == f"error: model.safetensors: {os.strerror(number)}\n"


def test_ctrl_c_while_the_command_is_loaded_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "elasticps.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "elasticps.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.INTERRUPTED


def test_a_command_started_by_nohup_outlives_its_terminal() -> None:
    """As by nohup, which has it ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with sigterm_interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
