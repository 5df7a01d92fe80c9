"""Modules for other frameworks where these are missing: the error names the extra to install."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

MODULES = {"huggingface": "transformers", "lightning": "lightning", "torchrec": "torchrec"}


@pytest.mark.parametrize("name", MODULES)
def test_the_error_for_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    module = f"elasticps.{name}"

    def find(package: str, *more: Any) -> Any:
        return None if package == MODULES[name] else found(package, *more)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ImportError, match=rf"pip install 'elasticps\[{name}\]'"):
        importlib.import_module(module)
