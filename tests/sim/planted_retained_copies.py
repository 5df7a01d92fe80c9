"""Bugs in what becomes of a copy whose server fell silent, for stories in which the other replica dies at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.cluster_tracker import ClusterTracker
from coordinator.core import planner
from coordinator.core.draft import Draft
from elasticps.server.roles import leaders
from replication.chain import Chains, CopyState, Role, place
from replication.view_change import ViewChange


def _as_if(patch: pytest.MonkeyPatch, role: Role, state: CopyState) -> None:
    """Replicas of a role take every joiner for one that is kept, or not."""
    change = ViewChange.change_roles

    def mutant(self: ViewChange, view: Chains, changed: Any) -> None:
        mine = place(view, self._core.me).role == role
        change(self, replace(view, copy_state=np.where(mine & (view.joining >= 0), state, view.copy_state)), changed)

    patch.setattr(ViewChange, "change_roles", mutant)


def acknowledge_before_the_one_left_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.FULL, CopyState.NONE)


def drop_the_copy_that_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.JOINING, CopyState.NONE)


def go_on_with_what_nobody_else_has(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.JOINING, CopyState.SUCCESSOR)
    returned = Draft.returned

    def mutant(self: Draft, *arguments: Any) -> dict[int, int]:
        self.copy_state = np.minimum(self.copy_state, CopyState.SUCCESSOR)
        return returned(self, *arguments)

    patch.setattr(Draft, "returned", mutant)
    patch.setattr(planner, "_unlawful", lambda *views: "")


def confirm_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leaders, "ALONE_S", 0.0)


def confirm_whom_nobody_has_heard(patch: pytest.MonkeyPatch) -> None:
    confirm = Draft.confirm

    def mutant(self: Draft, alone: Any, *arguments: Any) -> int:
        return confirm(self, dict.fromkeys(self.members, self.view.epoch), *arguments)

    patch.setattr(Draft, "confirm", mutant)


def forget_kept_copies_at_an_election(patch: pytest.MonkeyPatch) -> None:
    init = ClusterTracker.__init__

    def mutant(self: ClusterTracker, *arguments: Any) -> None:
        init(self, *arguments)
        if self.view is not None:
            self.view = replace(self.view, copy_state=np.zeros_like(self.view.copy_state))

    patch.setattr(ClusterTracker, "__init__", mutant)


def keep_no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "_keep", lambda self, out, before, promoted: 0)


def keep_no_copy_behind_one_that_takes_over(patch: pytest.MonkeyPatch) -> None:
    """That one was level, and may be dead."""
    keep = Draft._keep

    def mutant(self: Draft, out: Any, before: Any, promoted: Any) -> int:
        return keep(self, out & ~promoted[:, None], before, promoted)

    patch.setattr(Draft, "_keep", mutant)
