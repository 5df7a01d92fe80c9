"""`bench tables`: both sides train, and what it counts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.tables import TablesComparison


def test_collections_and_separate_tables_train_and_are_counted() -> None:
    options = "--tables 3 --batch 16 --dim 4 --servers 1 --seconds 0.1 --json"
    result = CliRunner().invoke(app, ["tables", *options.split()])
    assert result.exit_code == 0, result.output
    found = TablesComparison(**json.loads(result.stdout))
    assert (found.tables, found.batch, found.dim, found.servers) == (3, 16, 4, 1)
    assert min(found.separate_cpu_ms, found.collection_cpu_ms, found.separate_ms, found.collection_ms) > 0
    assert found.of_separate == pytest.approx(found.collection_cpu_ms / found.separate_cpu_ms, abs=0.001)
