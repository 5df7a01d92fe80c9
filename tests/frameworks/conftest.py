"""Fixtures of tests with other frameworks."""

from __future__ import annotations

import pytest
import torch

from tests.shared_cluster import app, connect, url

__all__ = ["app", "connect", "same_numbers_every_time", "url"]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)
