from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shared_cluster import app, connect, url
from tests.torch.fake_ps import FakeClient

__all__ = ["app", "connect", "url"]


@pytest.fixture
def ps() -> Any:
    return FakeClient()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)
