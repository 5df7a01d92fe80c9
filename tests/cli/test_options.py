"""Values of options come from the argument, the environment or a file, in this order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elasticps.cli.app import app
from elasticps.cli.output import ExitCode
from elasticps.local import state

HERE, ELSEWHERE = "etcd://127.0.0.1:1/here", "etcd://127.0.0.1:2/elsewhere"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def plain(result: Result) -> str:
    return re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", result.output))


@pytest.fixture
def recorded(state_folder: Path) -> None:
    """A local cluster called "here" whose processes have all ended."""
    state.claim(state_folder / "here")
    entry = state.ProcessEntry("s0", "server", 2**22 + 1, "never")
    state.write(state_folder / "here", state.Record("here", HERE, (entry,)))


def written(folder: Path, text: str) -> str:
    file = folder / "elasticps.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_environment_names_the_cluster_of_every_command(
    monkeypatch: pytest.MonkeyPatch, state_folder: Path
) -> None:
    monkeypatch.setenv("ELASTICPS_URL", ELSEWHERE)
    for command in (["status", "--timeout", "0.1"], ["tables", "--timeout", "0.1"], ["audit", "--timeout", "0.1"]):
        result = run(*command)
        assert result.exit_code == ExitCode.UNREACHABLE, result.output
        assert "127.0.0.1:2" in plain(result)
    for command in (["kill", "s0"], ["down"], ["logs"], ["scale", "3"]):
        result = run(*command)
        assert result.exit_code == ExitCode.USAGE
        assert f"the cluster at {ELSEWHERE} was not started by" in plain(result)
    assert "No such option" in plain(run("coordinator", "--name", "c0", "--no-such-option"))
    assert "Missing option" not in plain(run("coordinator", "--name", "a b"))


def test_a_name_on_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch, recorded: None) -> None:
    monkeypatch.setenv("ELASTICPS_URL", ELSEWHERE)
    assert "s0 is not running any more" in plain(run("kill", "s0", "--name", "here"))
    assert "exclude each other" in plain(run("kill", "s0", "--name", "here", "--url", HERE))
    assert run("down", "--all").exit_code == ExitCode.OK
    assert state.records() == []


def test_a_local_cluster_is_found_by_its_url(recorded: None) -> None:
    assert "s0 is not running any more" in plain(run("kill", "s0", "--url", HERE))
    assert "no local cluster is called 'there'" in plain(run("kill", "s0", "--name", "there"))
    assert run("down", "--url", HERE).exit_code == ExitCode.OK
    assert state.records() == []


def test_a_damaged_record_is_named_and_holds_up_no_other_cluster(recorded: None, state_folder: Path) -> None:
    file = state_folder / "damaged" / "cluster.json"
    file.parent.mkdir()
    file.write_text("{")
    for command in (["kill", "s0"], ["kill", "s0", "--url", HERE], ["kill", "s0", "--name", "here"]):
        result = run(*command)
        assert "s0 is not running any more" in plain(result)
        assert (f"{file} cannot be read" in plain(result)) == (command == ["kill", "s0"])  # which it might have meant
    assert f"there is: here; the state file {file} cannot be read" in plain(run("kill", "s0", "--name", "there"))
    ended = run("down", "--all")
    assert ended.exit_code == ExitCode.FAILED
    assert "cluster here has ended" in plain(ended)
    assert f"{file} cannot be read" in plain(ended)
    assert file.exists()
    alone = run("status")
    assert alone.exit_code == ExitCode.USAGE
    assert f"{file} cannot be read" in plain(alone)
    assert "no local cluster is there" not in plain(alone)


def test_logs_survive_a_cluster_that_ends_meanwhile(
    recorded: None, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder lists files that are gone when they are opened."""
    (state_folder / "here" / "s0.log").write_text("it said this\n")
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([*glob(path, pattern), path / f"gone{pattern[1:]}"]))
    result = run("logs", "--name", "here")
    assert (result.exit_code, result.output) == (ExitCode.OK, "s0   | it said this\n"), result.exception


def test_a_file_gives_defaults_to_every_command(
    monkeypatch: pytest.MonkeyPatch, recorded: None, tmp_path: Path
) -> None:
    file = written(tmp_path, f'url = "{HERE}"\n[kill]\nsignal = "TERM"\n[up]\nservers = 65\n[server]\nname = "a b"\n')
    assert "is not running any more" in plain(run("kill", "s0", "--config", file))
    assert "is not running any more" in plain(run("--config", file, "kill", "s0"))
    assert "not 65" in plain(run("up", "--config", file))
    assert "not 66" in plain(run("up", "--config", file, "--servers", "66"))
    monkeypatch.setenv("ELASTICPS_URL", ELSEWHERE)
    assert "elsewhere was not started by" in plain(run("kill", "s0", "--config", file))
    monkeypatch.setenv("ELASTICPS_CONFIG", file)
    assert "not 65" in plain(run("up"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("servers = ", "Invalid value"),
        ("[sacle]\nservers = 3\n", "no command called 'sacle'"),
        ("colour = 3\n", "no command has an option --colour"),
        ("[up]\ncolour = 3\n", "up has no option --colour; it has coordinators"),
        ("[up]\nservers = 'three'\n", "'--servers'"),
        ("[up]\nservers = [3, 4]\n", "servers"),
        ("up = 3\n", "no command has an option --up"),
        ("[bench]\nsparse = 3\n", None),
    ],
)
def test_a_wrong_file_is_reported_without_a_traceback(text: str, says: str | None, tmp_path: Path) -> None:
    result = run("up", "--ranges", "100", "--config", written(tmp_path, text))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert (says or "power of two") in plain(result)
    assert "Traceback" not in result.output


def test_an_options_file_may_have_sections_for_subcommands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state_folder: Path
) -> None:
    text = (
        f'url = "{ELSEWHERE}"\nfull = true\n[tables]\ntimeout = 0.1\n[tables.list]\ntimeout = 0.2\n[checkpoint.list]\n'
    )
    monkeypatch.setenv("ELASTICPS_CONFIG", written(tmp_path, text))
    for command in (["tables"], ["tables", "list"]):
        result = run(*command)
        assert result.exit_code == ExitCode.UNREACHABLE, result.output
        assert "127.0.0.1:2" in plain(result)
    monkeypatch.setenv("ELASTICPS_CONFIG", written(tmp_path, "[tables.list]\nno = 1\n"))
    assert "tables list has no option --no" in plain(run("tables", "list"))
    monkeypatch.setenv("ELASTICPS_CONFIG", written(tmp_path, "[tables.fist]\n"))
    assert "tables has no option --fist" in plain(run("tables"))


def test_a_missing_options_file_is_reported() -> None:
    result = run("status", "--config", "/nowhere/x.toml")
    assert result.exit_code == ExitCode.USAGE
    assert "cannot read /nowhere/x.toml: No such file" in plain(result)


def test_the_version_and_a_script_for_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"elasticps \d+\.\d+\.\d+ with Python 3\.\d+\.\S+\n", run("--version").output)
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # else whoever started the tests
    assert "complete" in run("--show-completion").output


def test_names_of_clusters_and_processes_are_completed(monkeypatch: pytest.MonkeyPatch, recorded: None) -> None:
    def completed(line: str) -> list[str]:
        words = {"_ELASTICPS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}
        return CliRunner().invoke(app, prog_name="elasticps", env=words).output.split()

    assert completed("elasticps kill ") == ["s0"]
    assert completed("elasticps status --name ") == ["here"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["dashboard", "--url", HERE, "--insecure", "--host", "a" * 300], "can be no host"),
        (["dashboard", "--url", HERE, "--prometheus", "http://[x"], "is no URL of Prometheus"),
        (["server", "--url", "etcd://.../x", "--name", "s0"], "can be no host"),
        (["status", "--url", "etcd://.../x"], "can be no host"),
        (["checkpoint", "list", "s3://[x/y"], "is no URL of checkpoints"),
        (["checkpoint", "list", "x" * 5000], "File name too long"),
        (["certificates", "ca", "a/server/s0", "--days", "inf"], "certificates cannot be made in ca: "),
        (["certificates", "ca", "a/server/s0", "--days", "1e300"], "certificates cannot be made in ca: "),
        (["demo", "--seed", "-1"], "--seed"),
        (["sim", "--runs", str(10**30)], "--runs"),
        (["status", "--config", "deep.toml"], "deep.toml: "),
    ],
)
def test_impossible_options_are_reported_in_one_message(
    command: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.toml").write_text("url = " + "[" * 5000, encoding="utf-8")
    result = run(*command)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.FAILED)
    assert says in plain(result)
    assert isinstance(result.exception, SystemExit)


def test_a_name_that_is_not_utf_8_is_shown_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elasticps", "checkpoint", "list", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, text=True, env=strict, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "\\udcff has no checkpoint" in done.stdout
