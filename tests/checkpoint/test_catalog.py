"""Manifests are read strictly, and what is needed is never deleted."""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.checkpoint import catalog
from elasticps.checkpoint import manifest as manifests
from elasticps.checkpoint.manifest import FileEntry, Manifest, WorkerEntry
from elasticps.checkpoint.retention import Keep, builds_on, chain_of, deletion, superfluous
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import write

FILES = (FileEntry("t/s0-1.000.safetensors", 3, 200, 100, 5, "ab", (0, 3)),)
MANIFEST = Manifest(
    "c@1", 5, 2, 4, 1234.5, {"default/t": (3, TableSpec("t", 4, spec.Adam(0.1)))}, FILES,
    {"a": WorkerEntry(4, "default", 17, 3, 3, 1)}, {9: 12, (1 << 31) + 9: 2}, {11: (1, 2, 3, 4)}, {"default": 17},
    ({"app": "default", "decided": 17},), ({"app": "default", "name": "train"},),
)  # fmt: skip


def test_a_manifest_survives_encoding_and_decoding() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert MANIFEST.newest_id == 11


@given(st.data())
def test_any_altered_byte_of_a_manifest_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(MANIFEST.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    to = data.draw(st.integers(0, 255).filter(lambda byte: byte != encoded[at]))
    blank = encoded[at] in b" \n" and to in b" \n\t\r"
    encoded[at] = to
    if not blank:
        with pytest.raises(CheckpointError):
            Manifest.decode(bytes(encoded))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (b"", "no manifest of a checkpoint, or was cut off"),
        (MANIFEST.encode()[:-10], "no manifest of a checkpoint, or was cut off"),
        (b'{"version": 1}', "no manifest of a checkpoint"),
        (b"[1]", "no manifest of a checkpoint"),
        (MANIFEST.encode().replace(b'"version": 2', b'"version": 4'), "written by a newer elasticps"),
        (MANIFEST.encode().replace(b'"cut": 5', b'"cut": 6'), "was altered"),
    ],
)
def test_a_document_that_is_no_manifest_is_refused_with_the_reason(changed: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"s3://b/000005/manifest.json .*{reason}"):
        Manifest.decode(changed, "s3://b/000005/manifest.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cut": 1},
        {"ranges": 3},
        {"files": (FileEntry("../x", 3, 2, 1, 0, "", ()),)},
        {"files": (FileEntry("x", 4, 2, 1, 0, "", ()),)},
        {"left_out": {1: (1,)}},
        {"tables": {"default/u": MANIFEST.tables["default/t"]}},
        {"tables": {"default/../t": MANIFEST.tables["default/t"]}},
        {"tables": {"/t": MANIFEST.tables["default/t"]}},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    fields = MANIFEST.__dict__ | wrong
    with pytest.raises(CheckpointError):
        Manifest.decode(Manifest(**fields).encode())


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("time",), 10**400),
        (("time",), float("nan")),
        (("cluster",), 7),
        (("workers", "a", "id"), "4"),
        (("workers", "a", "id"), -1),
        (("workers", "a", "clock"), None),
        (("workers", "a", "clock"), 1.5),
        (("workers", "a", "clock"), -1),
        (("workers", "a", "app"), []),
        (("workers", "a", "steps"), "1"),
        (("former", "9"), "12"),
        (("former", "9"), -12),
        (("left_out", "11", 2), "3"),
        (("left_out", "11", 2), None),
        (("closed", "default"), "17"),
        (("groups", 0), 3),
        (("shards", 0), []),
        (("files", 0, "blake2b"), 3),
        (("files", 0, "ranges", 1), 1.5),
        (("files", 0, "header"), 1 << 40),
        (("settings",), {"rates/default/t": 1}),
        (("tables", "default/t", "spec", "optimizer", "eps"), 10**400),
    ],
    ids=range(22),
)
def test_impossible_values_are_refused_even_with_a_right_checksum(path: tuple[Any, ...], wrong: object) -> None:
    """Though its sum is right: not in the middle of a restore."""
    fields = dataclasses.replace(MANIFEST, files=(dataclasses.replace(FILES[0], bytes=1 << 41),))
    document = json.loads(fields.encode())
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = wrong
    version, _ = document.pop("version"), document.pop("blake2b")
    data = json.dumps({"version": version, "blake2b": manifests._sum(document), **document}).encode()
    with pytest.raises(CheckpointError):
        Manifest.decode(data)


def some(cut: int, since: int, time: float = 0.0, cluster: str = "c@1") -> Manifest:
    return Manifest(cluster, cut, since, 4, time, {}, ())


HISTORY = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=12)


def history(steps: list[tuple[int, int]]) -> dict[int, Manifest]:
    """Each adds to one of those before it, or is full; some hours apart."""
    made: dict[int, Manifest] = {}
    time = 1e6
    for cut, (back, hours) in enumerate(steps, 1):
        time += 3600 * hours / 8
        made[cut] = some(cut, max(cut - back, 0) if back else 0, time)
    return made


@given(HISTORY, st.builds(Keep, st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)))
def test_thinning_out_leaves_whole_chains_and_the_requested_checkpoints(
    steps: list[tuple[int, int]], keep: Keep
) -> None:
    manifests = history(steps)
    going = superfluous(manifests, keep)
    left = {cut: manifest for cut, manifest in manifests.items() if cut not in going}
    for cut in left:
        assert chain_of(left, cut) == chain_of(manifests, cut)
    newest = sorted(manifests)[-keep.last :]
    expected = set(newest)
    for count, width in ((keep.hourly, 3600), (keep.daily, 86400)):
        periods = sorted({int(m.time // width) for m in manifests.values()})[-count:] if count else []
        expected |= {max(c for c, m in manifests.items() if int(m.time // width) == period) for period in periods}
    assert expected <= left.keys()
    assert left.keys() == builds_on(manifests, expected)
    assert superfluous(left, keep) == []
    assert deletion(manifests, going) == sorted(going, reverse=True)


@given(HISTORY, st.sets(st.integers(1, 12)))
def test_no_checkpoint_that_another_builds_on_is_deleted(steps: list[tuple[int, int]], cuts: set[int]) -> None:
    manifests = history(steps)
    left = manifests.keys() - cuts
    possible = cuts <= manifests.keys() and all(manifests[cut].since not in cuts for cut in left)
    if possible:
        gone: set[int] = set()
        for cut in deletion(manifests, cuts):  # at no moment one is there that lacks something
            gone.add(cut)
            assert all(manifests[other].since not in gone for other in manifests.keys() - gone)
        assert gone == cuts
    else:
        with pytest.raises(CheckpointError, match=r"not there|builds on"):
            deletion(manifests, cuts)


def test_chains_of_several_clusters_are_refused() -> None:
    with pytest.raises(CheckpointError, match="which is one of cluster d@2"):
        chain_of({1: some(1, 0, cluster="d@2"), 2: some(2, 1)}, 2)


def test_a_catalog_lists_whole_damaged_and_unfinished_checkpoints(tmp_path: Any) -> None:
    storage = Storage(str(tmp_path))
    tables = {"default/t": (3, TableSpec("t", 4, spec.Adam(0.1)))}
    first = write(storage, 1, tables, {})
    second = write(storage, 2, tables, {}, since=1)
    assert catalog.publish(storage, second)  # asked again, as the first answer was lost
    assert not catalog.publish(storage, dataclasses.replace(second, time=1.0))
    assert catalog.read(storage, 2) == second
    storage.put("000003/t-3/s0-1.000.safetensors", b"given up")
    storage.put("000004/manifest.json", b"{")
    storage.put("000005/t-3/s0-1.000.safetensors", b"being written")
    storage.put("notes/readme", b"somebody's")
    there = catalog.look(storage)
    assert there.manifests == {1: first, 2: second}
    assert list(there.unreadable) == [4]
    assert there.unpublished == (3, 5)
    with pytest.raises(CheckpointError, match=r"000004/manifest\.json"):
        catalog.chain(storage)
    with pytest.raises(CheckpointError, match="has no checkpoint 9; there are 1, 2, 3, 4, 5"):
        catalog.chain(storage, 9)
    assert catalog.clean(storage) == []  # somebody may be writing
    assert catalog.clean(storage, cluster="c@1", below=4) == []  # not ours, as it seems
    assert catalog.clean(storage, still_s=0) == [3, 5]
    with pytest.raises(CheckpointError, match="checkpoint 2 builds on 1"):
        catalog.delete(storage, [1])
    catalog.delete(storage, [1, 2])
    assert storage.folders() == ["000004", "notes"]
    storage.put("000007/manifest.json", first.encode())
    with pytest.raises(CheckpointError, match="is the manifest of checkpoint 1"):
        catalog.read(storage, 7)


def test_thinning_out_deletes_the_other_checkpoints() -> None:
    storage = Storage(f"memory://{uuid.uuid4()}")
    tables = {"default/t": (3, TableSpec("t", 4, spec.Adam(0.1)))}
    for cut, since in ((1, 0), (2, 1), (3, 0), (4, 3)):
        write(storage, cut, tables, {}, since=since, time=1000.0 * cut)
    assert catalog.thin_out(storage, Keep(1)) == [2, 1]
    assert sorted(catalog.look(storage).manifests) == [3, 4]
    with pytest.raises(CheckpointError):
        catalog.newest(Storage(f"memory://{uuid.uuid4()}"))


def test_a_checkpoint_that_was_copied_to_another_number_displaces_none(tmp_path: Any) -> None:
    """`read` refuses it: as the only one that is kept it would leave nothing to restore."""
    storage = Storage(tmp_path.as_uri())
    for cut in (1, 2):
        write(storage, cut, {}, {}, time=float(cut))
    for path, _ in storage.files("000001"):
        storage.put(path.replace("000001", "000003"), storage.get(path))
    there = catalog.look(storage)
    assert sorted(there.manifests) == [1, 2]
    assert "it was moved there" in there.unreadable[3]
    assert catalog.thin_out(storage, Keep(last=1)) == [1]
    assert catalog.chain(storage, 2)[-1].cut == 2
