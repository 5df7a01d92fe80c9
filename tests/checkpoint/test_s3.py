"""A bucket that is slow to please: somebody was first, errors that pass and that do not, parts of files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticps import spec
from elasticps.checkpoint import catalog, storage, upkeep
from elasticps.checkpoint.storage import NotThere, Storage
from elasticps.errors import CheckpointError
from elasticps.spec import TableSpec
from tests.checkpoint.fake_s3 import FakeS3
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    fake = FakeS3()
    for name, value in {"ENDPOINT_URL": fake.url, "ALLOW_HTTP": "true", "REGION": "here", "ACCESS_KEY_ID": "me",
                        "SECRET_ACCESS_KEY": "mine"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setitem(storage._RETRIES, "max_retries", 3)
    yield fake
    fake.close()


def test_a_checkpoint_in_a_bucket(s3: FakeS3) -> None:
    there = Storage("s3://models/run 1")
    change = Change({key: row(TABLE, key) for key in range(100)})
    first = write(there, 1, {"default/t": (7, TABLE)}, {"default/t": change})
    write(there, 2, {"default/t": (7, TABLE)}, {"default/t": Change({}, {5})}, since=1)
    assert not catalog.publish(there, first)  # somebody else was first
    assert there.folders() == ["000001", "000002"]
    chain = catalog.chain(there)
    assert [upkeep.verify(there, manifest) for manifest in chain] == [[], []]
    assert upkeep.merge(there, chain).rows == 99
    catalog.delete(there, [1])
    assert {key.split("/")[1] for key in s3.objects} == {"000002"}
    with pytest.raises(NotThere, match="it is not there"):
        there.get("000009/manifest.json")
    assert not there.exists("000009/manifest.json")
    with pytest.raises(CheckpointError):
        there.get_range("000002/manifest.json", 10, 1 << 20)


def test_large_files_go_in_parts_and_come_in_parts(s3: FakeS3) -> None:
    there = Storage("s3://models/run")
    data = bytes(range(256)) * (50 << 10)
    there.put("000001/large", data)
    assert s3.objects["run/000001/large"] == data
    assert sum("partNumber" in path for _, path in s3.requests) > 1
    found = there.get_ranges("000001/large", [(5, 3), (12_000_000, 5)])
    assert [bytes(part) for part in found] == [bytes([5, 6, 7]), data[12_000_000:12_000_005]]


@pytest.mark.parametrize("status", [500, 503])
def test_errors_that_pass_are_not_told(s3: FakeS3, status: int) -> None:
    left = {"PUT": 2, "GET": 2}

    def trouble(method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        left[method] = left.get(method, 0) - 1
        return (status, "SlowDown") if left[method] >= 0 else None

    s3.trouble = trouble
    there = Storage("s3://models/run")
    assert there.put_new("000001/manifest.json", b"{}")
    assert there.get("000001/manifest.json") == b"{}"
    assert max(left.values()) < 0


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "look at the credentials"),
        (400, "ExpiredToken", "ExpiredToken.*look at the credentials"),
        (401, "Unauthorized", "look at the credentials"),
        (500, "InternalError", "Internal"),
    ],
)
def test_errors_that_stay_are_told_in_one_line(s3: FakeS3, status: int, code: str, said: str) -> None:
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
        with pytest.raises(CheckpointError, match=said) as caught:
            call()
        assert "s3://models/run" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "Debug" not in str(caught.value)
    s3.trouble = lambda method, path, headers: None
    assert there.files() == [("000001/there", 1)]


def test_a_bucket_that_is_not_there_is_said(s3: FakeS3) -> None:
    there = Storage("s3://modles/run")
    for call in (lambda: there.put("x", b"1"), lambda: there.put_new("x", b"1"), there.files, there.folders):
        with pytest.raises(CheckpointError, match="no such bucket"):
            call()
    assert s3.objects == {}
