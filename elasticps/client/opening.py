"""How a process becomes a worker."""

from __future__ import annotations

import functools
import os
import re
import secrets

from coordinator.core.names import check_name
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.client.warm import warm
from elasticps.errors import ConfigError
from elasticps.model.spec import ASP, BSP, SSP, Consistency

_PART = re.compile(r"[^A-Za-z0-9._-]+")
_HOST_MAX = 32  # characters of a host's name in the name of a worker


@functools.cache
def own_name(host: str, pid: int) -> str:
    """A name that no other process has, the same for all clients of this one. Host and process id alone are not enough:
    in containers of one image they may be alike."""
    return f"worker-{_PART.sub('-', host)[:_HOST_MAX]}-{pid}-{secrets.token_hex(4)}"


def connect(
    url: str | None = None,
    *,
    worker: str = "",
    consistency: Consistency | None = None,
    window: int = 4,
    timeout: float = 30.0,
    app: str = "default",
    raise_on_loss: bool = False,
) -> Client:
    """Joins a cluster as a worker.

    `url` is etcd://host:port[,host:port…]/cluster (default: the environment's ELASTICPS_URL). `worker` names this
    process: started again under its name, it fences its older self and goes on where that was (default: a name that no
    other process has, so that a process that is started again is a new worker). `window` is how many steps may be
    outstanding before `push` waits. `timeout`, in seconds, bounds every wait that has no timeout of its own. `app`
    names one of several applications that share the servers: each has tables, rounds, bounds on staleness and shards of
    its own, and sees nothing of the others. `raise_on_loss`: the next operation raises `DataLost` when ranges were lost
    and came back from a checkpoint; else `ps.losses()` tells.

        with eps.connect(url, worker="w0", app="ads") as ps:             # the classic store: push and pull
            clicks = ps.table("clicks", dim=1, optimizer=eps.Accumulate())   # or eps.Custom, an update of your own
            ps.push({clicks: (ids, ones)}).result()
            clicks.pull(ids)                                               # the sum over all workers of "ads"

    Raises `ConfigError` for unusable arguments and `ClusterUnreachable`, saying what was tried, within the timeout.
    """
    url = url or os.environ.get("ELASTICPS_URL", "")
    if not url:
        raise ConfigError("no cluster given: pass a URL such as etcd://127.0.0.1:2379/demo or set ELASTICPS_URL")
    if not 1 <= window <= 1024:
        raise ConfigError(f"window must be between 1 and 1024 steps, got {window}")
    if not 0 < timeout < 86_400:
        raise ConfigError(f"timeout must be between 0 and 86400 seconds, got {timeout}")
    consistency = consistency or ASP()
    if not isinstance(consistency, ASP | SSP | BSP):
        raise ConfigError(f"consistency must be ASP(), SSP(staleness=k) or BSP(), got {consistency!r}")
    warm()
    try:
        name = check_name("worker", worker or own_name(os.uname().nodename, os.getpid()))
    except ValueError as error:
        raise ConfigError(f"worker=: {error}") from None
    return Client(Registry.open(url, timeout, Runtime()), name, consistency, window, timeout, app, raise_on_loss)
