"""Options of `elasticps coordinator` that let it scale the servers of its cluster."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from coordinator.core.autoscale import AutoscalePolicy
from coordinator.core.names import check_name
from coordinator.core.store import Store
from elasticps.errors import ConfigError

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

Scaling = Callable[[Store, "Credentials | None"], Coroutine[Any, Any, None]]
"""What the leader runs: with its store and its credentials, until its term ends."""


class Mode(enum.StrEnum):
    """What `--autoscale` may do."""

    OFF = "off"
    DRY_RUN = "dry-run"
    ON = "on"


def scaling_of(mode: Mode, servers: str, target: str) -> Scaling | None:
    """Returns what scales as these options say, None for none. ConfigError for options that cannot be, and where no
    Kubernetes is."""
    if mode is Mode.OFF:
        return None
    bounds = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", servers)
    if bounds is None:
        raise ConfigError(
            f"--autoscale needs --autoscale-servers, how many there may be, such as 3-12, not {servers!r}"
        )
    try:
        policy = AutoscalePolicy(int(bounds[1]), int(bounds[2]))
        check_name("StatefulSet", target)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    from elasticps.autoscale.kubernetes import KubernetesScale  # only who scales waits for gRPC and TLS
    from elasticps.autoscale.loop import AutoscaleLoop

    scale = KubernetesScale(target)

    async def run(store: Store, credentials: Credentials | None) -> None:
        await AutoscaleLoop(store, credentials, policy, scale, dry_run=mode is Mode.DRY_RUN).run()

    return run
