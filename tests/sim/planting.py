"""What planted bugs have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.fast.path import FastPath

Patch = Callable[[pytest.MonkeyPatch], None]


def leave_every_frame_to_python(patch: pytest.MonkeyPatch) -> None:
    """For bugs in what Python does: usual frames would not come there."""

    def follow(self: FastPath, *arguments: Any) -> None:
        share(self, *arguments)
        self.h[H_ENABLED] = 0

    share = FastPath.follow_replica
    patch.setattr(FastPath, "follow_replica", follow)
