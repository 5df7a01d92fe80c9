"""A bug in what becomes of tables that are dropped."""

from __future__ import annotations

import pytest

from elasticps.server.roles.pushes import PushHandler


def log_what_waited_behind_the_end_of_its_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushHandler, "_look_again", lambda self, push: None)
