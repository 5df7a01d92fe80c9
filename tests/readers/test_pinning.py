"""Readers that show a checkpoint: names of checkpoints, types of rows, and what a checkpoint lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.errors import CheckpointError, InputError, UnknownTable
from elasticps.readers.pinning import CheckpointName, before, parse_name

KEYS = np.arange(200)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s3://bucket/model/000042", CheckpointName("s3://bucket/model", 42)),
        ("s3://bucket/model/000042/", CheckpointName("s3://bucket/model", 42)),
        ("s3://bucket/model", CheckpointName("s3://bucket/model", None)),
        ("s3://bucket/42", CheckpointName("s3://bucket/42", None)),
        ("/data/000000", CheckpointName("/data/000000", None)),
        ("/data/1000042", CheckpointName("/data", 1000042)),
    ],
)
def test_a_checkpoint_is_named_by_its_folder(text: str, name: CheckpointName) -> None:
    assert parse_name(text) == name
    assert parse_name(str(name)) == name


def test_a_roll_back_without_a_number_needs_a_checkpoint(tmp_path: Path) -> None:
    assert before(CheckpointName("s3://bucket/model", 7), None) == CheckpointName("s3://bucket/model", 7)
    with pytest.raises(CheckpointError, match="no checkpoint to roll back to"):
        before(CheckpointName(str(tmp_path), None), None)


def test_pinned_readers_show_a_checkpoint_in_each_type(local_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = local_cluster(servers=2, replicas=1)
    place = f"file://{tmp_path}/checkpoints"
    rng = np.random.default_rng(1)
    with eps.connect(cluster.url, worker="w0") as ps:
        tables = {
            dtype: ps.table(dtype, dim=6, dtype=dtype, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=2))
            for dtype in ("float32", "float16", "bfloat16")
        }
        tower = ps.tensor("tower", init=rng.random((5, 9), np.float32), optimizer=eps.Adam(lr=0.1))

        def train() -> dict[str, Any]:
            grads = rng.random((100, 6), np.float32)
            ps.push(dict.fromkeys(tables.values(), (KEYS[:100], grads)) | {tower: np.ones((5, 9), np.float32)})
            ps.flush()
            return {name: table.pull(KEYS) for name, table in tables.items()} | {"tower": tower.pull()}

        first = train()
        tables["float32"].delete(KEYS[:10])
        first["float32"] = tables["float32"].pull(KEYS)
        checkpoint_cluster(cluster.operator_url, place)
        train()
        late = ps.table("late", dim=2, optimizer=eps.SGD(lr=0.1))
        ps.push({late: (KEYS, np.ones((200, 2), np.float32))}).result()

        everything: dict[str, Any] = dict.fromkeys(tables, KEYS) | {"tower": None}
        with eps.reader(cluster.url) as reader:
            as_of = reader.pin(place)
            assert as_of.held
            assert reader.pinned == f"{place}/000001"
            assert reader.as_of.steps == {ps.worker.id: 1}
            shown = reader.pull(everything)
            for name, rows in first.items():
                np.testing.assert_array_equal(shown[name], rows)
            with pytest.raises(UnknownTable, match="000001, which is shown, has no table 'late'"):
                reader.pull({"late": KEYS})
            with pytest.raises(InputError, match="pull keys of it"):
                reader.pull({"float32": None})
            reader.follow()
            assert reader.pinned == ""
            assert reader.pull({"late": KEYS})["late"].shape == (200, 2)
        for dtype, close in (("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 1e-2)):
            with eps.reader(cluster.url, ["float32", "tower"], dtype=dtype) as reader:
                reader.roll_back(place)
                shown = reader.pull({"float32": KEYS, "tower": None})
                for name, rows in shown.items():
                    np.testing.assert_allclose(rows, first[name], atol=close * np.abs(first[name]).max())
        with eps.reader(cluster.url, share=(2, 3)) as reader:
            reader.pin(place)
            assert reader._pinned is not None
            owners = eps.share_of(KEYS, 3)
            shown = reader.pull({"float32": KEYS[owners == 2], "tower": None})
            np.testing.assert_array_equal(shown["float32"], first["float32"][owners == 2])
            np.testing.assert_array_equal(shown["tower"], first["tower"])
            assert reader._pinned.tables["float32"].rows == (owners[10:100] == 2).sum()
            with pytest.raises(eps.OtherShare, match="in share"):
                reader.pull({"float32": KEYS})
        with eps.reader(cluster.url, ["late"]) as reader:
            with pytest.raises(UnknownTable, match="has no table 'late'"):
                reader.pin(place)
            assert reader.pinned == ""
