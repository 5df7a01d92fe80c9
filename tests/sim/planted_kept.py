"""Bugs in what becomes of a copy whose server fell silent, for stories in which the other replica dies at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.cluster_tracker import World
from coordinator.core import planner
from coordinator.core.draft import Draft
from elasticps.server.roles import leaders
from replication.chain import Chains, Kept, Role, place
from replication.replica import Replica


def _as_if(patch: pytest.MonkeyPatch, role: Role, kept: Kept) -> None:
    """Replicas of a role take every joiner for one that is kept, or not."""
    change = Replica._change_roles

    def mutant(self: Replica, view: Chains, changed: Any, out: Any) -> None:
        mine = place(view, self.me).role == role
        change(self, replace(view, kept=np.where(mine & (view.joining >= 0), kept, view.kept)), changed, out)

    patch.setattr(Replica, "_change_roles", mutant)


def acknowledge_before_the_one_left_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.FULL, Kept.NOT)


def drop_the_copy_that_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.JOINING, Kept.NOT)


def go_on_with_what_nobody_else_has(patch: pytest.MonkeyPatch) -> None:
    _as_if(patch, Role.JOINING, Kept.BEHIND)
    returned = Draft.returned

    def mutant(self: Draft, *arguments: Any) -> dict[int, int]:
        self.kept = np.minimum(self.kept, Kept.BEHIND)
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
    init = World.__init__

    def mutant(self: World, *arguments: Any) -> None:
        init(self, *arguments)
        if self.view is not None:
            self.view = replace(self.view, kept=np.zeros_like(self.view.kept))

    patch.setattr(World, "__init__", mutant)


def keep_no_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "_keep", lambda self, out, before, promoted: 0)


def keep_no_copy_behind_one_that_takes_over(patch: pytest.MonkeyPatch) -> None:
    """That one was level, and may be dead."""
    keep = Draft._keep

    def mutant(self: Draft, out: Any, before: Any, promoted: Any) -> int:
        return keep(self, out & ~promoted[:, None], before, promoted)

    patch.setattr(Draft, "_keep", mutant)
