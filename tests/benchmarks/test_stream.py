"""The stream of `elasticps bench stream`, and what its tables come to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.core.stream import DIM, Stream, area_under_curve, hidden


def test_a_stream_replaces_part_of_its_ids_in_an_hour_and_follows_from_its_seed() -> None:
    stream = Stream(ids=50, churn=0.2, batch=200, steps=10)
    first, again = ([samples.ids.tolist() for samples in stream.samples(5)] for _ in range(2))
    assert first == again
    assert stream.pushes == sum(map(len, first))
    assert stream.distinct(5) == len(set().union(*first))
    assert max(first[0]) < 50
    assert {key for ids in first[-3:] for key in ids} & set(range(90, 100))  # of the last hour
    assert len(set(first[-1]) & set(range(50))) < 40


def test_gradients_are_summed_by_id() -> None:
    (samples,) = Stream(ids=20, churn=0.0, batch=30, steps=1).samples(1)
    vectors = hidden(samples.ids)
    scores = samples.score(vectors)
    expected = np.zeros((len(samples.ids), DIM))
    for score, label, features, fields in zip(scores, samples.labels, samples.features, samples.where, strict=True):
        assert score == pytest.approx(sum(vectors[i] for i in fields) @ features, abs=1e-4)
        for i in fields:
            expected[i] += (1 / (1 + np.exp(-score)) - label) * features
    np.testing.assert_allclose(samples.gradients(scores), expected, atol=1e-4)


def test_the_hidden_vectors_are_about_normal_and_tell_clicks_from_others() -> None:
    vectors = hidden(np.arange(20_000))
    assert abs(vectors.mean()) < 0.02
    assert vectors.std() == pytest.approx(1, abs=0.02)
    (samples,) = Stream(ids=1000, churn=0.0, batch=5000, steps=1).samples(1)
    assert area_under_curve(samples.score(hidden(samples.ids)), samples.labels) > 0.75
    assert area_under_curve(np.array([1, 1, 2], np.float32), np.array([False, True, True])) == 0.75
    assert np.isnan(area_under_curve(np.ones(1, np.float32), np.array([True])))


@pytest.mark.slow
def test_the_command_holds_the_bounded_table_to_its_rows(tmp_path: Path) -> None:
    picture = tmp_path / "stream.png"
    options = f"stream --ids 4000 --hours 6 --hour-s 3 --steps 12 --batch 256 --servers 1 --picture {picture} --json"
    done = CliRunner().invoke(app, options.split())
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    every, bounded = report["lines"]
    assert (every["table"], bounded["table"]) == ("unbounded", "bounded")
    assert every["rows"] > 3 * bounded["capacity"]
    assert bounded["evicted"]["capacity"] > 0
    assert bounded["rows"] < every["rows"] / 2
    assert len(report["points"]) == 24
    assert picture.read_bytes().startswith(b"\x89PNG")
