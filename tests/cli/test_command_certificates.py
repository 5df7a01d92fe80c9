"""With which certificate a command comes to a local cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.core.url import parse
from elasticps.cli.local import target, worker_target
from elasticps.local import certificates, state
from elasticps.security.identity import Role


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    found = state.folder_of("here")
    found.mkdir(parents=True)
    return found


def record(folder: Path, url: str) -> None:
    state.write(folder, state.Record("here", url, (), ()))


def test_with_tls_a_command_that_acts_as_a_worker_has_a_workers_certificate(folder: Path) -> None:
    plain = "etcd://127.0.0.1:2379/here"
    certificates.begin(folder)
    record(folder, certificates.url_of(plain, folder, Role.OPERATOR))
    made = worker_target(None, "here")  # nobody has asked for one before
    before = {path: path.stat().st_mtime_ns for path in (folder / "tls").iterdir()}
    assert worker_target(None, "here") == worker_target(None, None) == made
    assert {path: path.stat().st_mtime_ns for path in (folder / "tls").iterdir()} == before  # not made anew
    files, operators = parse(made).tls, parse(target(None, "here")).tls
    assert files is not None
    assert operators is not None
    assert (Path(files.cert).name, Path(operators.cert).name) == ("worker-any-any.crt", "operator-any.crt")
    assert worker_target(plain, None) == plain  # who names a URL names the certificate


def test_without_tls_there_is_one_url(folder: Path) -> None:
    record(folder, "etcd://127.0.0.1:2379/here")
    assert worker_target(None, "here") == target(None, "here") == "etcd://127.0.0.1:2379/here"
