"""S3 storage: conditional writes, temporary and permanent errors, large files in parts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import pytest

from elasticps.checkpoint import catalog, maintenance, storage
from elasticps.checkpoint.storage import NotThere, Storage
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.fake_s3 import FakeS3
from tests.checkpoint.moto_s3 import MotoS3
from tests.checkpoint.writer import Change, row, write

S3 = TypeVar("S3", FakeS3, MotoS3)
TABLE = TableSpec("t", 3, spec.Adagrad(0.1))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    yield from _bucket(FakeS3(), monkeypatch)


@pytest.fixture(params=[FakeS3, MotoS3])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3 | MotoS3]:
    """Our own fake of S3 and moto's."""
    yield from _bucket(request.param(), monkeypatch)


def _bucket(fake: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for name, value in {"ENDPOINT_URL": fake.url, "ALLOW_HTTP": "true", "REGION": "here", "ACCESS_KEY_ID": "me",
                        "SECRET_ACCESS_KEY": "mine"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setitem(storage._RETRIES, "max_retries", 3)
    yield fake
    fake.close()


def test_a_checkpoint_in_a_bucket(either: FakeS3 | MotoS3) -> None:
    there = Storage("s3://models/run 1")
    change = Change({key: row(TABLE, key) for key in range(100)})
    first = write(there, 1, {"default/t": (7, TABLE)}, {"default/t": change})
    write(there, 2, {"default/t": (7, TABLE)}, {"default/t": Change({}, {5})}, since=1)
    assert not catalog.publish(there, replace(first, time=1.0))  # somebody else was first
    assert there.folders() == ["000001", "000002"]
    chain = catalog.chain(there)
    assert [maintenance.verify(there, manifest) for manifest in chain] == [[], []]
    assert maintenance.merge(there, chain).rows == 99
    catalog.delete(there, [1])
    assert {key.split("/")[1] for key in either.objects} == {"000002"}
    with pytest.raises(NotThere, match="it is not there"):
        there.get("000009/manifest.json")
    assert not there.exists("000009/manifest.json")
    with pytest.raises(CheckpointError):
        there.get_range("000002/manifest.json", 10, 1 << 20)


def test_large_files_go_in_parts_and_come_in_parts(either: FakeS3 | MotoS3) -> None:
    there = Storage("s3://models/run")
    data = bytes(range(256)) * (50 << 10)
    there.put("000001/large", data)
    assert either.objects["run/000001/large"] == data
    assert sum("partNumber" in path for _, path in either.requests) > 1
    found = there.get_ranges("000001/large", [(5, 3), (12_000_000, 5)])
    assert [bytes(part) for part in found] == [bytes([5, 6, 7]), data[12_000_000:12_000_005]]


@pytest.mark.parametrize("status", [500, 503])
def test_temporary_errors_are_retried(either: FakeS3 | MotoS3, status: int) -> None:
    left = {"PUT": 2, "GET": 2}

    def trouble(method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        left[method] = left.get(method, 0) - 1
        return (status, "SlowDown") if left[method] >= 0 else None

    either.trouble = trouble
    there = Storage("s3://models/run")
    assert there.put_new("000001/manifest.json", b"{}")
    assert there.get("000001/manifest.json") == b"{}"
    assert max(left.values()) < 0


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "AccessDenied", "look at the credentials"),
        (400, "ExpiredToken", "ExpiredToken.*look at the credentials"),
        (401, "Unauthorized", "look at the credentials"),
        (500, "InternalError", "Internal"),
    ],
)
def test_permanent_errors_are_reported_in_one_line(s3: FakeS3, status: int, code: str, reason: str) -> None:
    there = Storage("s3://models/run")
    there.put("000001/there", b"1")
    s3.trouble = lambda method, path, headers: (status, code)
    for call in (
        lambda: there.put("000001/x", b"1"),
        lambda: there.put_new("000001/x", b"1"),
        lambda: there.get("000001/there"),
        lambda: there.get_range("000001/there", 0, 1),
        there.files,
        there.folders,
        lambda: there.delete(["000001/there"]),
        lambda: catalog.chain(there),
    ):
        with pytest.raises(CheckpointError, match=reason) as caught:
            call()
        assert "s3://models/run" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "Debug" not in str(caught.value)
    s3.trouble = lambda method, path, headers: None
    assert there.files() == [("000001/there", 1)]


def test_credentials_that_expire_are_fetched_again(
    either: FakeS3 | MotoS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a container's platform gives them: each for a moment."""
    given: list[str] = []

    class Issuer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # its name
            assert self.headers["authorization"] == "let me in"
            given.append(f"KEY{len(given)}")
            moment = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
            document = {"AccessKeyId": given[-1], "SecretAccessKey": "s", "Token": "t", "Expiration": moment}
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # its name
            pass

    issuer = ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    thread = threading.Thread(target=issuer.serve_forever, args=(0.01,))
    thread.start()
    try:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{name}")
        (tmp_path / "token").write_text("let me in")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{issuer.server_port}/")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        used: list[str] = []

        def newest_only(method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
            header = {name.lower(): value for name, value in headers.items()}["authorization"]
            used.append(header.partition("Credential=")[2].partition("/")[0])
            return None if used[-1] == given[-1] else (400, "ExpiredToken")

        either.trouble = newest_only
        there = Storage("s3://models/run")
        there.put("000001/x", b"1")
        given.append("revoked")  # what was given before is not good any more
        deadline = time.monotonic() + 20
        while True:
            try:
                there.put("000001/x", b"2")
                break
            except CheckpointError:
                assert time.monotonic() < deadline, f"given {given}, used {used}"
        assert there.get("000001/x") == b"2"
        assert used[0] == "KEY0"
        assert used[-1] == given[-1] != "KEY0"
    finally:
        issuer.shutdown()
        thread.join()
        issuer.server_close()


def test_a_missing_bucket_is_reported(either: FakeS3 | MotoS3) -> None:
    there = Storage("s3://modles/run")
    for call in (lambda: there.put("x", b"1"), lambda: there.put_new("x", b"1"), there.files, there.folders):
        with pytest.raises(CheckpointError, match="no such bucket"):
            call()
    assert either.objects == {}
