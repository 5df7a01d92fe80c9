"""The step at hand: gradients that leave for the servers, a frame at a time, and the rates that they leave with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from elasticps.torch.expected import Exchange, Wanted
from elasticps.torch.group.client import GroupClient
from elasticps.torch.rates import Rates

if TYPE_CHECKING:
    from elasticps.client import Client, OpenStep, Step
    from elasticps.torch.group import GroupStep
    from elasticps.torch.rates import Target

ParamGroups = list[dict[str, Any]]


class Sending:
    """Gathers gradients into frames of about `frame_bytes`. With the first of them the step opens, and takes the rates
    of the groups; what fits one frame leaves as a whole, at the end. Called under the lock of the Optimizer."""

    def __init__(self, ps: Client | GroupClient, rates: Rates, frame_bytes: int) -> None:
        self._ps = ps
        self._rates = rates
        # Of a group nothing leaves before all ranks have all of their gradients: a rank may die until then.
        self._limit = sys.maxsize if isinstance(ps, GroupClient) else frame_bytes
        self._open: OpenStep | None = None
        self._sent_rates: list[float] = []  # of the groups, as the open step has them
        self._frame: dict[Any, Any] = {}  # by target
        self._frame_bytes = 0

    def __contains__(self, target: object) -> bool:
        """Whether a gradient is here still."""
        return target in self._frame

    def add(self, target: Target, gradient: Any, groups: ParamGroups) -> None:
        """Sends what is gathered, if it is enough with this."""
        self._frame[target] = gradient
        self._frame_bytes += sum(each.nbytes for each in gradient) if isinstance(gradient, tuple) else gradient.nbytes
        if self._frame_bytes >= self._limit:
            self._send(groups)

    def end(self, groups: ParamGroups) -> Step | GroupStep:
        """Sends the rest, which ends the step."""
        if self._open is None:
            return self._ps.push(self._frame, lr=self._rates_of(groups))
        if self._frame:
            self._send(groups)
        return self._open.commit()

    def exchange(self, wanted: Wanted, groups: ParamGroups) -> Exchange:
        """The same, and asks for what comes after the step."""
        ps: Any = self._ps
        if self._open is not None:
            return wanted.behind(ps, self._frame, self._open, {})
        return wanted.behind(ps, self._frame, None, self._rates_of(groups))

    def cut_short(self) -> Step | None:
        """Ends the step with what has left, if anything has."""
        return None if self._open is None else self._open.commit()

    def changed_rate(self, groups: ParamGroups) -> str:
        """The name of a group whose rate is another than that of the open step; empty if there is none."""
        if self._open is not None:
            for group, rate in zip(groups, self._sent_rates, strict=True):
                if float(group["lr"]) != rate:
                    return str(group["name"])
        return ""

    def clear(self) -> None:
        """The next step begins."""
        self._open = None
        self._frame, self._frame_bytes = {}, 0

    def _send(self, groups: ParamGroups) -> None:
        if self._open is None:
            rates = self._rates_of(groups)
            self._sent_rates = [float(group["lr"]) for group in groups]
            assert not isinstance(self._ps, GroupClient)  # its frame is never full
            self._open = self._ps.step(lr=rates)
        self._open.push(self._frame)
        self._frame, self._frame_bytes = {}, 0

    def _rates_of(self, groups: ParamGroups) -> dict[Any, float]:
        self._rates.take(groups)
        return self._rates.of_step(groups)
