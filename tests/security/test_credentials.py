"""Certificates: how they are made, refused, and read again when they were replaced."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from typer.testing import CliRunner

from coordinator.core.url import TlsFiles, parse
from elasticps.admin.service import secured
from elasticps.cli.app import app
from elasticps.errors import ConfigError
from elasticps.security.authority import Authority
from elasticps.security.credentials import LOOK_S, Credentials
from elasticps.security.identity import Role
from tests.security.conftest import issued


def test_files_are_the_owners_alone(authority: Authority) -> None:
    issued(authority, "server/s0")
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in authority.folder.iterdir()}
    assert found == dict.fromkeys(["ca.crt", "ca.key", "server-s0.crt", "server-s0.key"], "0o600")
    assert oct(authority.folder.stat().st_mode & 0o777) == "0o700"


def test_a_certificate_is_valid_only_for_the_role_of_its_holder(authority: Authority) -> None:
    server, worker = (
        x509.load_pem_x509_certificate(Path(issued(authority, who).cert).read_bytes())
        for who in ("server/s0", "worker/ads/w0")
    )
    for certificate, purposes in ((server, 2), (worker, 1)):
        assert len(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == purposes
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_second_authority_does_not_replace_the_first(authority: Authority) -> None:
    before = authority.ca.read_bytes()
    with pytest.raises(ConfigError, match="has an authority already"):
        Authority.create(authority.folder)
    assert authority.ca.read_bytes() == before
    with pytest.raises(ConfigError, match="no authority"):
        Authority(authority.folder.parent)


@pytest.mark.parametrize("written", [0, 1])
def test_an_authority_that_was_not_finished_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    left = [None] * written

    def dies(path: Path, content: bytes, mode: int) -> None:
        left.pop()  # IndexError: that was its last moment
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr("elasticps.system.temporary.replace_file", dies)
        with pytest.raises(IndexError):
            Authority.create(tmp_path / "ca")
    made = Authority.create(tmp_path / "ca")
    Credentials(issued(made, "server/s0"), "train").require(Role.SERVER, "s0")


def test_credentials_know_their_role_name_and_cluster(authority: Authority) -> None:
    found = Credentials(issued(authority, "server/s0"), "train")
    found.require(Role.SERVER, "s0")
    for role, name in ((Role.SERVER, "s1"), (Role.COORDINATOR, "s0")):
        with pytest.raises(ConfigError, match=f"not spiffe://elasticps/train/{role}/{name}"):
            found.require(role, name)
    with pytest.raises(ConfigError, match="is of cluster 'train', not 'other'"):
        Credentials(issued(authority, "server/s0"), "other")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("no ca", r"name its file with \?ca="),
        ("missing", "cannot read the cert file"),
        ("garbage", "cannot be used"),
        ("another's key", "cannot be used"),
        ("expired", "ended on"),
        ("no identity", "names no identity"),
        ("rsa", "neither an elliptic curve's nor Ed25519"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused(authority: Authority, damage: str, says: str) -> None:
    files = issued(authority, "server/s0", days=-1.0 if damage == "expired" else 2.0)
    if damage == "no ca":
        files = TlsFiles("", files.cert, files.key)
    elif damage == "missing":
        Path(files.cert).unlink()
    elif damage == "garbage":
        Path(files.cert).write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    elif damage == "another's key":
        shutil.copy(issued(authority, "server/s1").key, files.key)
    elif damage == "no identity":
        files = authority.issue_etcd(["localhost"])
    elif damage == "rsa":
        _sign_with_rsa(authority, files)
    with pytest.raises(ConfigError, match=says):
        Credentials(files, "train")


def _sign_with_rsa(authority: Authority, files: TlsFiles) -> None:
    key = rsa.generate_private_key(65537, 2048)
    old = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), 1)
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    signed = builder.add_extension(names, critical=False).sign(authority._key, old.signature_hash_algorithm)  # type: ignore[arg-type]
    pem = serialization.Encoding.PEM
    Path(files.cert).write_bytes(signed.public_bytes(pem))
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    Path(files.key).write_bytes(plain)


def test_files_that_were_replaced_are_read_again_and_bad_ones_are_not_taken(authority: Authority) -> None:
    now = 0.0
    files = issued(authority, "server/s0", days=1.0)
    found = Credentials(files, "train", clock=lambda: now)
    before, context = found.until_s, found.server_context()

    Path(files.cert).write_text("half a file")
    now += 2 * LOOK_S
    assert found.server_context() is context

    issued(authority, "server/s0", days=3.0)
    assert found.server_context() is context  # not looked at so soon
    now += 2 * LOOK_S
    assert found.server_context() is not context
    assert (found.generation, found.until_s > before) == (1, True)

    other = issued(authority, "server/s1")
    for theirs, mine in zip((other.cert, other.key), (files.cert, files.key), strict=True):
        os.replace(theirs, mine)
    now += 2 * LOOK_S
    found.refresh()
    assert (found.generation, found.identity.name) == (1, "s0")


def test_a_renewed_certificate_that_could_not_be_opened_is_read_later(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever held all descriptors of a process as its files were replaced had it end with its certificate."""

    def full(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    now = 0.0
    found = Credentials(issued(authority, "server/s0", days=1.0), "train", clock=lambda: now)
    before = found.until_s
    issued(authority, "server/s0", days=3.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", full)
        for _ in range(3):
            now += 2 * LOOK_S
            found.refresh()
    assert (found.generation, found.until_s) == (0, before)
    assert caplog.text.count("Too many open files") == 1
    now += 2 * LOOK_S
    found.refresh()
    assert (found.generation, found.until_s > before) == (1, True)


def test_grpc_is_given_certificates_only_when_they_were_replaced(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same again at each handshake it frees what other handshakes are using: a server died of two questions
    at once to its administration."""
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, newer, **_: (first, newer))
    now = 0.0
    credentials = Credentials(issued(authority, "server/s0"), "train", clock=lambda: now)
    first, newer = cast(tuple[object, Callable[[], object]], secured(credentials))
    assert first is not None
    assert newer() is None
    issued(authority, "server/s0", days=3.0)
    now += 2 * LOOK_S
    assert newer() is not None
    assert newer() is None


def test_the_command_makes_an_authority_once_and_certificates_at_every_call(tmp_path: Path) -> None:
    folder = str(tmp_path / "ca")
    who = ["train/server/s0", "train/worker/ads/*", "spiffe://elasticps/train/operator/me"]
    etcds = ["--etcd", "10.0.0.1", "--etcd", "etcd-0", "--etcd-root"]
    first = CliRunner().invoke(app, ["certificates", folder, *who, *etcds, "--json"])
    assert first.exit_code == 0, first.output
    made = json.loads(first.stdout)
    assert len(made) == 5
    for name, files in made.items():
        if name.startswith("etcd"):
            with pytest.raises(ConfigError, match="identity"):
                Credentials(TlsFiles(**files), "train")
        else:
            assert str(Credentials(TlsFiles(**files), "train").identity) == name
    ca = Path(folder, "ca.crt").read_bytes()
    again = CliRunner().invoke(app, ["certificates", folder, "train/server/s0"])
    assert again.exit_code == 0
    query = again.stdout.split()[1]
    assert parse(f"etcd://h/train{query}").tls == TlsFiles(**made["spiffe://elasticps/train/server/s0"])
    assert Path(folder, "ca.crt").read_bytes() == ca
    wrong = CliRunner().invoke(app, ["certificates", folder, "train/s0"])
    assert (wrong.exit_code, "no identity" in wrong.output) == (2, True)


@pytest.mark.parametrize(
    ("there", "requested", "file"),
    [
        (["prod/server/s0"], ["train/worker/a/b", "train/server/s0"], "server-s0.crt"),
        (["train/worker/a-b/c"], ["train/worker/a/b-c"], "worker-a-b-c.crt"),
        (["train/worker/*/w"], ["train/worker/any/w"], "worker-any-w.crt"),
        ([], ["prod/server/s0", "train/server/s0"], "server-s0.crt"),
    ],
)
def test_the_command_replaces_no_other_identitys_files(
    tmp_path: Path, there: list[str], requested: list[str], file: str
) -> None:
    for who in there:
        assert CliRunner().invoke(app, ["certificates", str(tmp_path), who]).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("*-*")}
    refused = CliRunner().invoke(app, ["certificates", str(tmp_path), *requested])
    assert refused.exit_code == 2
    for text in (str(tmp_path / file), f"spiffe://elasticps/{[*there, *requested][0]}", requested[-1], "move"):
        assert text in refused.output
    assert {path: path.read_bytes() for path in tmp_path.glob("*-*")} == before


def test_the_command_replaces_no_file_that_is_no_certificate(tmp_path: Path) -> None:
    file = tmp_path / "server-s0.crt"
    file.write_text("a shopping list")
    refused = CliRunner().invoke(app, ["certificates", str(tmp_path), "train/server/s0"])
    assert (refused.exit_code, file.read_text()) == (2, "a shopping list")
    assert f"{file} is no certificate" in refused.output
