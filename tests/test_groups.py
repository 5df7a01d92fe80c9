"""Tests of a file run in one process: xdist reads the group behind the last @ of their ids."""

from __future__ import annotations

import os

import pytest


def test_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts what the tests of a file, or those of `e2e`, share."""
    _, _, group = request.node.nodeid.partition("@")
    assert group == ("test_groups.py" if "PYTEST_XDIST_WORKER" in os.environ else "")
