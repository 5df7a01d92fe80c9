"""Opens readers: `reader`, and what is said where an application has not the tables that are to be followed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.errors import ClusterUnreachable, ConfigError, Timeout, UnknownTable
from elasticps.model.key_share import KeyShare
from elasticps.readers.peers import reader_name
from elasticps.readers.reader import Reader
from elasticps.readers.relay_registry import RelayRegistry
from elasticps.readers.values import ReaderSpec

log = logging.getLogger(__name__)

NAMED = 10  # tables or applications, in a text for people


def reader(
    url: str | None = None,
    tables: Sequence[str] | None = None,
    *,
    dtype: str | None = None,
    every: float = 0.02,
    application: str = "default",
    share: tuple[int, int] | None = None,
    name: str = "",
    timeout: float = 30.0,
    buffer_bytes: int = 256 << 20,
) -> Reader:
    """Connects a reader, and returns when it has read every range once.

    `url` is as for `connect`, with a certificate of role `reader` or `worker` where there is TLS; or that of an
    `elasticps reader --listen` that feeds others: reader://host:port, with TLS
    reader://host:port/cluster?ca=FILE&cert=FILE&key=FILE. Several as reader://host:port,host:port: the next one is
    followed when one is gone, silent or cut off from the servers.

    `tables`: names, None for all of the application. `share`: (2, 8) for the second eighth of all keys, `share_of` says
    which has a key; tensors are whole in each. `name`: by which servers log it; "": the certificate's, or host and
    process. All else as in `ReaderSpec`.

    Raises `ConfigError` for unusable arguments, `UnknownTable` for a table that there is not, `ClusterUnreachable` or
    `Timeout`, saying what was tried.
    """
    url = url or os.environ.get("ELASTICPS_URL", "")
    if not url:
        raise ConfigError("no cluster given: pass a URL such as etcd://127.0.0.1:2379/demo or set ELASTICPS_URL")
    if not 0 < timeout < 86_400:
        raise ConfigError(f"timeout must be between 0 and 86400 seconds, got {timeout}")
    if isinstance(tables, str):
        raise ConfigError(f"tables= is a list of names, or None for all tables, got {tables!r}")
    spec = ReaderSpec(
        None if tables is None else tuple(tables), dtype, every, application, buffer_bytes, KeyShare.checked(share)
    )
    if url.startswith("reader://"):
        relay: Any = RelayRegistry(url, spec, Runtime(), timeout)
        return open_reader(relay, spec, reader_name(name, relay.credentials), timeout)
    registry = Registry.open(url, timeout, Runtime())
    return open_reader(registry, spec, reader_name(name, registry.credentials), timeout)


def open_reader(registry: Registry, spec: ReaderSpec, name: str, timeout_s: float) -> Reader:
    """A reader that has read every range once."""
    made = None
    try:
        if spec.tables is not None:
            _check_tables(registry, spec, spec.tables, timeout_s)
        made = Reader(registry, spec, name, timeout_s)
        made.wait(timeout_s)
        if not made.tables:
            log.warning(
                "application %r has no tables yet, so there is nothing to read; %s. If that is its name, this reader "
                "shows its tables as soon as they are made", spec.application, _others(registry, timeout_s),
            )  # fmt: skip
        return made
    except BaseException:
        if made is not None:
            made.close()
        else:
            registry.close()
        raise


def _check_tables(registry: Registry, spec: ReaderSpec, names: Sequence[str], timeout_s: float) -> None:
    """Raises UnknownTable unless there are tables of these names, with those that there are."""
    known = registry.tables(spec.application, timeout_s)
    missing = [name for name in names if name not in known]
    if missing:
        there = f"it has {_some(known)}" if known else f"it has none; {_others(registry, timeout_s)}"
        raise UnknownTable(f"application {spec.application!r} has no table {missing[0]!r}; {there}")


def _others(registry: Registry, timeout_s: float) -> str:
    """Which applications have tables, for people."""
    try:
        apps = registry.applications(timeout_s)
    except (ClusterUnreachable, Timeout):  # with TLS, certificates are of one application
        return "of which applications there are tables cannot be seen from here"
    return f"there are tables of: {_some(apps)}" if apps else "no application has any"


def _some(names: Iterable[str]) -> str:
    there = sorted(names)
    return ", ".join(there[:NAMED]) + (f" and {len(there) - NAMED} more" if len(there) > NAMED else "")
