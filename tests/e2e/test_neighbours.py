"""The example of nearest neighbours among exported rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "neighbours.py"


def test_the_example_finds_items_of_the_same_genre(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *genres, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":0 is like ")[0] for line in genres] == ["drama", "comedy", "thriller", "documentary"]
    for line in genres:
        genre, _, found = line.partition(":0 is like ")
        names = found.split(", ")
        assert len(names) == 5
        assert sum(name.startswith(f"{genre}:") for name in names) >= 4
    assert last.startswith("hnswlib ")


def test_neighbours_are_those_with_the_largest_cosine() -> None:
    neighbours = runpy.run_path(str(EXAMPLE))["neighbours"]
    vectors = np.array([[1, 0], [5, 5], [0, 3], [-1, 0], [0, 0]], np.float32)
    assert neighbours(vectors, np.array([2, 1], np.float32), 3).tolist() == [1, 0, 2]
