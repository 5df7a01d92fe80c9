"""An authority, and whom it has signed for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from coordinator.core.url import TlsFiles
from elasticps.security.authority import Authority
from elasticps.security.credentials import Credentials
from elasticps.security.identity import Identity

Holder: TypeAlias = Callable[[str], Credentials]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority")


@pytest.fixture
def holder(authority: Authority) -> Holder:
    """ "server/s0" -> its credentials in the cluster "train"."""
    return lambda who: Credentials(issued(authority, who), "train")


def issued(authority: Authority, who: str, days: float = 2.0) -> TlsFiles:
    return authority.issue(Identity.parse(f"spiffe://elasticps/train/{who}"), days=days)
