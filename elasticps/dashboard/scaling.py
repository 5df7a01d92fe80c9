"""`elasticps scale` from the page, of a cluster that `elasticps up` has started on this machine."""

from __future__ import annotations

import threading

from elasticps.dashboard.actions import Scaler
from elasticps.errors import ConfigError
from elasticps.local import scaling, state
from elasticps.local.operator_client import OperatorClient
from elasticps.local.process import Process


def scaler_of(url: str) -> Scaler | None:
    """None if the cluster was started elsewhere."""
    if state.started_here(url) is None:
        return None

    def scale(servers: int) -> str:
        record = state.started_here(url)
        if record is None:
            raise ConfigError("the cluster has ended")
        folder = state.folder_of(record.name)
        with OperatorClient(record.url) as operator:
            names = [server.name for server in record.servers]
            change = scaling.change(names, operator.draining(), servers, operator.leaving())
        outcome = scaling.scale(record.url, folder, change, _reaped(scaling.spawn_recorded(folder)))
        return f"{', '.join(outcome.servers)} serve, after {outcome.seconds:.1f} s"

    return scale


def _reaped(spawn: scaling.Spawn) -> scaling.Spawn:
    """The same; what it starts is waited for, as this process goes on and they are its children."""

    def spawned(name: str, more: list[str]) -> Process:
        process = spawn(name, more)
        threading.Thread(target=process.popen.wait, name=f"waits for {name}", daemon=True).start()
        return process

    return spawned
