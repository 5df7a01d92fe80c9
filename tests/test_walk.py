"""Files and crossings on the way of a push, from its caller to the socket and back."""

from __future__ import annotations

import pytest

from tests.walk import PAGE, ROOT, measure

MOST_FILES = 20
MOST_CROSSINGS = {1: 32, 3: 50}


@pytest.mark.parametrize(("servers", "replicas"), [(1, 1), (3, 2)])
def test_a_push_stays_within_few_files(servers: int, replicas: int) -> None:
    walk = next(walk for name, walk in measure(servers, replicas) if name == "push").without("CpuContention.contended")
    figures = (
        f"{walk.calls} calls, {walk.files} files, {walk.crossings} crossings: see what `python -m tests.walk` writes"
    )
    assert walk.files <= MOST_FILES, figures
    assert walk.crossings <= MOST_CROSSINGS[servers], figures


def test_the_page_names_functions_that_exist() -> None:
    """It is written again after a change of the path: `python -m tests.walk`."""
    for line in PAGE.read_text().splitlines():
        if line.endswith(".py)"):
            function, _, file = line.strip(" →)").rpartition("   (")
            name = function.rpartition(".")[2]
            assert f"def {name}(" in (ROOT / file).read_text() or name.startswith("<"), f"{file} has no {name} any more"
