"""Bugs in how views travel as differences. Each is something that a careful person could have written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from coordinator import membership
from coordinator.core import differences
from coordinator.core.differences import ViewDifference
from coordinator.core.view import DIGEST_BYTES, View


def apply_a_difference_to_whatever_view_there_is(patch: pytest.MonkeyPatch) -> None:
    """Its base is not compared, nor what comes of it."""
    apply = ViewDifference.apply
    check_no_digest(patch)
    patch.setattr(ViewDifference, "apply", lambda self, base: apply(replace(self, base=base.epoch), base))


def check_no_digest(patch: pytest.MonkeyPatch) -> None:
    """Epochs alone are compared: a store that was made anew gives them out again."""
    patch.setattr(View, "digest", bytes(DIGEST_BYTES))


def take_a_notice_for_a_view(patch: pytest.MonkeyPatch) -> None:
    """That there is a view, and nothing of what it says, is taken for: nothing else has changed."""
    apply = ViewDifference.apply

    def follow(self: ViewDifference, base: View) -> View | None:
        return apply(self, base) if self.base else replace(base, epoch=self.epoch, reason=self.reason)

    patch.setattr(ViewDifference, "apply", follow)


def ignore_a_gap_between_records(patch: pytest.MonkeyPatch) -> None:
    """Whoever reads differences from the store is content with what it has."""
    follow = differences.follow_view

    def go_on(view: View, records: Iterable[bytes]) -> View | None:
        return follow(view, records) or view

    for module in (differences, membership):
        patch.setattr(module, "follow_view", go_on)
