"""A bug in what workers make of a server's word, for stories in which the store has the last one."""

from __future__ import annotations

import pytest

from coordinator.core.view import View
from elasticps.client.core.new_views import ViewHint, ViewHints


def believe_a_server_that_the_store_does_not_bear_out(patch: pytest.MonkeyPatch) -> None:
    judge = ViewHints.judge

    def believe(hints: ViewHints, now: float, epoch: int, stored: View | None) -> tuple[View | None, ViewHint | None]:
        newest, untrue = judge(hints, now, epoch, stored)
        return (newest if untrue is None else untrue.view), untrue

    patch.setattr(ViewHints, "judge", believe)
