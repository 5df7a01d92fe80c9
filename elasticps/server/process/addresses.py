"""Ports and addresses of a server: where it listens, and the address that others connect to."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

from elasticps.errors import ConfigError

CONNECT_BACKLOG = 512

_WHY = {
    errno.EADDRINUSE: "another process listens there; take another {option}, or 0 for any free port",
    errno.EACCES: "ports below 1024 are not for every user; take a higher {option}",
    errno.EADDRNOTAVAIL: "this machine has no such address; --host names one of its own, or 0.0.0.0 for all of them",
}


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """A listening socket; connections wait in it until they are accepted. ConfigError if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=CONNECT_BACKLOG)
    except socket.gaierror:
        raise ConfigError(f"{host!r} is no address of this machine: no such name is known") from None
    except OSError as error:
        why = _WHY.get(error.errno or 0, error.strerror or str(error)).format(option=option)
        raise ConfigError(f"cannot listen on {joined(host, port)}: {why}") from None


def found_under(host: str, advertise: str, endpoints: Sequence[str]) -> str:
    """The host under which others reach a server that listens on `host`.

    A server that listens on every address takes the one from which it reaches etcd, unless that is loopback: processes
    that reach etcd reach us there. ConfigError if it cannot be found.
    """
    if advertise:
        if _is_any(advertise):
            raise ConfigError(f"--advertise {advertise} is no address that others can connect to; name one that is")
        return advertise
    if not _is_any(host):
        return host
    for found, _ in _ways(endpoints):
        if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    raise ConfigError(
        f"--host {host} listens on every address, and the way to etcd at {', '.join(endpoints)} does not tell which of "
        "them others can reach: give it as --advertise ADDRESS"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def hidden(host: str, endpoints: Sequence[str]) -> bool:
    """Whether only this machine can reach a server under `host`, although etcd is on another machine."""
    return is_loopback(host) and any(ours != theirs for ours, theirs in _ways(endpoints))


def joined(host: str, port: int) -> str:
    """As "host:port", brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_any(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return not host


def _ways(endpoints: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`_way` to each endpoint to which there is one."""
    for endpoint in endpoints:
        name, _, port = endpoint.rpartition(":")
        with suppress(OSError):
            yield _way(name.strip("[]"), int(port))


def _way(host: str, port: int) -> tuple[str, str]:
    """Our address on the way to `host`, and its own; a datagram socket's connect sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
