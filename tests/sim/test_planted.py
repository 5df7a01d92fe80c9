"""Stories find every bug that is planted: a check that nothing can fail checks nothing."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.sim.planted import ALONE, MODULES, PLANTED, STORIES, find
from tests.sim.planting import Patch


# A story that a bug has ended may leave things in the middle.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_story_finds(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = find(plant)
    assert found is not None, f"{plant.__name__} survived {STORIES} stories"
    assert found.options in str(found)
    assert "pytest-timeout" not in str(found), (
        "its time was over in the middle of a story, which took that for a broken promise"
    )


@pytest.mark.parametrize("plant", ALONE, ids=lambda plant: plant.__name__)
def test_a_test_of_one_part_finds(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = ALONE[plant]
    test = getattr(importlib.import_module(f"tests.{module}"), name)
    test()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_every_bug_has_its_story() -> None:
    written = {
        bug
        for module in MODULES
        for name, bug in inspect.getmembers(module, inspect.isfunction)
        if bug.__module__ == module.__name__ and not name.startswith("_")
    }
    assert written == {*PLANTED, *ALONE}
    assert all(seed < STORIES for *_, seed in PLANTED.values()), "one story in fifty of its kind finds it"
