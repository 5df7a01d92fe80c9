"""Learning rates of an Optimizer's param groups: what workers set for all, and what each step takes along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elasticps.errors import ConfigError
from elasticps.torch.parameters import fixed, rate_of

if TYPE_CHECKING:
    from elasticps.client import DenseTensor, SparseTable
    from elasticps.client.rates import SetRate
    from elasticps.torch.group import GroupTable, GroupTensor

    Target = DenseTensor | SparseTable | GroupTensor | GroupTable

Groups = Sequence[dict[str, Any]]


class Rates:
    """Of tensors and tables, each with the index of its group. Only `lr` of a group may change: all else is fixed at
    the servers. `groups` are those of now, as torch makes them anew."""

    def __init__(self, targets: Sequence[tuple[Target, int]], groups: Groups) -> None:
        self._targets = targets
        self._fixed = [fixed(group) for group in groups]
        self._heard: list[SetRate | None] = [None] * len(targets)

    def take(self, groups: Groups) -> None:
        """Assigns to groups what was set for all workers since the last step; the newest, where there are several."""
        news = [
            (rate.revision, number)
            for number, (target, _) in enumerate(self._targets)
            if (rate := target.rate_set) is not None and rate is not self._heard[number]
        ]
        for _, number in sorted(news):
            target, index = self._targets[number]
            self._heard[number] = target.rate_set
            groups[index]["lr"] = rate_of(target.optimizer)

    def of_step(self, groups: Groups) -> dict[Any, float]:
        """By tensor or table, but those with a schedule of their own. ConfigError where torch has another for them."""
        rates: dict[Any, float] = {}
        for target, index in self._targets:
            group = groups[index]
            if not group["scheduled"]:
                rates[target] = float(group["lr"])
            elif "initial_lr" in group:
                raise ConfigError(f"group {group['name']!r} has its own schedule and a torch LR scheduler: drop one")
        return rates

    def check(self, groups: Groups) -> None:
        """ConfigError if something is changed that cannot be."""
        for group, constant in zip(groups, self._fixed, strict=True):
            for key, value in constant.items():
                if group[key] != value:
                    raise ConfigError(
                        f"{key} of group {group['name']!r} is {group[key]!r}, but at the servers it stays {value!r}: "
                        "only lr can be changed. OneCycleLR and CyclicLR take cycle_momentum=False"
                    )

    def check_loaded(self, groups: Groups) -> None:
        """The same of groups that were saved, which may lack what there was not yet."""
        self.check([constant | group for group, constant in zip(groups, self._fixed, strict=True)])

    def fix(self, groups: Groups) -> None:
        """Gives groups that were loaded what they lack."""
        for group, constant in zip(groups, self._fixed, strict=True):
            group.update(constant)
