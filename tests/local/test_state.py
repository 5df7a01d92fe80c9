from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elasticps.errors import ConfigError
from elasticps.local import state, supervisor

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


def entry(process: subprocess.Popen[bytes], role: str = "server") -> state.ProcessEntry:
    return state.ProcessEntry("s0", role, process.pid, supervisor.started_at(process.pid) or "")


def test_a_record_survives_writing_and_reading(tmp_path: Path) -> None:
    record = state.Record("demo", "etcd://127.0.0.1:2379/demo", (state.this_process(),))
    state.write(tmp_path, record)
    assert state.read(tmp_path) == record
    assert record.owner == state.this_process()


def test_a_missing_record_is_none(tmp_path: Path) -> None:
    assert state.read(tmp_path) is None
    assert state.records(tmp_path / "none") == []


def damaged(**values: object) -> str:
    process = {"name": "s0", "role": "server", "pid": 7, "moment": "now"}
    return json.dumps({"format": 1, "name": "demo", "url": "", "processes": [process], **values})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[" * 100_000, "[]", "3", "\udcff", '{"format": 99}', '{"format": 1}', damaged(name="../x"),
        damaged(url=3), damaged(url="etcd://"), damaged(processes=3), damaged(processes=[3]),
        damaged(processes=[{"name": "s0"}]),
        damaged(processes=[{"name": "s0", "role": "server", "pid": "7", "moment": "now"}]),
        damaged(processes=[{"name": "s0", "role": "server", "pid": 1 << 80, "moment": "now"}]),
        damaged(server_options=3), damaged(environment=[1]),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_record_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"cluster\.json"):
        state.read(tmp_path)


def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        state.claim(tmp_path / name)
    (tmp_path / "a" / "cluster.json").write_text("{")
    found, unreadable = state.survey(tmp_path)
    assert [record.name for record in found] == ["b"]
    (why,) = unreadable
    assert f"{tmp_path / 'a' / 'cluster.json'} cannot be read" in why
    assert f"remove {tmp_path / 'a'}" in why
    assert state.started_here("etcd://127.0.0.1:1/c", tmp_path) is None


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="usable cluster name"):
        state.folder_of("../etc", tmp_path)


def test_records_lie_in_the_run_time_folder_if_there_is_one(tmp_path: Path) -> None:
    assert state.state_root({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "elasticps"
    fallback = Path.home() / ".local" / "state" / "elasticps"
    assert state.state_root({}) == fallback
    assert state.state_root({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == fallback


def test_a_claimed_folder_is_private_and_cannot_be_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "demo"
    state.claim(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="elasticps down --name demo"):
        state.claim(folder)


def test_files_of_a_dead_cluster_are_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    state.claim(folder)
    (folder / "s0.log").write_text("old")
    with subprocess.Popen(SLEEP) as process:
        state.write(folder, state.Record("demo", "", (entry(process),)))
        process.kill()
    state.claim(folder)
    assert not (folder / "s0.log").exists()


def test_a_folder_that_is_no_cluster_is_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        state.claim(folder)
    assert (folder / "thesis.tex").exists()


def test_end_stops_the_recorded_processes_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    state.claim(folder)
    with subprocess.Popen(SLEEP) as ours, subprocess.Popen(SLEEP) as stranger:
        other = replace(entry(stranger), name="s1", moment="a-moment-long-ago")
        record = state.Record("demo", "", (entry(ours), other))
        state.write(folder, record)
        state.end(folder, record)
        assert ours.wait(40) != 0
        assert stranger.poll() is None
        stranger.kill()
    assert not folder.exists()


def test_end_leaves_a_newer_cluster_of_the_same_name_alone(tmp_path: Path) -> None:
    """Also where neither has got so far that it has a URL."""
    folder = tmp_path / "demo"
    state.claim(folder)
    dead = state.read(folder)
    assert dead is not None
    dead = replace(dead, processes=(state.ProcessEntry("etcd", "etcd", 2**22 + 1, "a-moment-long-ago"),))
    state.write(folder, dead)
    state.claim(folder)
    with subprocess.Popen(SLEEP) as new:
        record = state.update(folder, lambda now: replace(now, processes=(entry(new),)))
        state.end(folder, dead)
        assert new.poll() is None
        new.kill()
    assert state.read(folder) == record


def test_a_cluster_with_an_owner_is_ended_by_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    state.claim(folder)
    with subprocess.Popen(SLEEP) as owner:
        record = state.Record("demo", "", (entry(owner, "owner"),))
        state.write(folder, record)
        state.end(folder, record)
        assert owner.wait(40) != 0
    assert not folder.exists()


def test_the_folder_of_local_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert state.state_root({}) == Path("/home/somebody/.local/state/elasticps")
    assert state.state_root({"XDG_STATE_HOME": "/var/s", "XDG_RUNTIME_DIR": "/nowhere"}) == Path("/var/s/elasticps")
    assert state.state_root({"XDG_STATE_HOME": "/var/s", "XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "elasticps"


def test_a_folder_that_cannot_be_written_is_reported_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*/file/elasticps: Not a directory; .*XDG_STATE_HOME"):
        state.claim(tmp_path / "file" / "elasticps" / "demo")


def test_the_variable_that_counts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of no effect"))
    (tmp_path / "elasticps").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*/elasticps: File exists; .* XDG_RUNTIME_DIR"):
        state.claim(state.folder_of("demo"))


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found, (says,) = state.survey(tmp_path / "file")
    assert found == []
    assert says.startswith(f"cannot look for local clusters in {tmp_path}/file: Not a directory; ")
