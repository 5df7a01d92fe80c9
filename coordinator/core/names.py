"""The rules for names and addresses. Names become parts of store keys, and appear in logs and tables."""

from __future__ import annotations

import ipaddress
import re

NAME_MAX = 63
DEFAULT_APP = "default"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}")
_HOST = re.compile(rb"[A-Za-z0-9._-]*")  # a name, an address of IPv4, or "" for all addresses of this machine
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def check_name(what: str, name: object) -> str:
    """Returns `name` if it may name a `what` ("server", "cluster", …). Raises ValueError with the rule otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no usable {what} name: take 1 to {NAME_MAX} letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


def check_identity(text: object) -> str:
    """Returns `text` if it is a cluster's name, or a name and an id with "@" between; ValueError otherwise."""
    for part in text.split("@", 1) if isinstance(text, str) else [text]:
        check_name("cluster", part)
    return str(text)


def check_worker(name: object) -> None:
    """Raises ValueError unless `name` can be a worker's: a name, or an application and a name with "/" between."""
    for part in name.split("/", 1) if isinstance(name, str) else [name]:
        check_name("worker", part)


def worker_path(name: str) -> str:
    """Returns the end of a worker's keys, "application/name", for its name, which leaves the default application out.
    So all keys of one application's workers begin alike, and etcd can give rights to them."""
    return name if "/" in name else f"{DEFAULT_APP}/{name}"


def worker_name(path: str) -> str:
    """Returns the worker's name for the end of one of its keys, also if that lacks the default application, as in
    earlier versions."""
    return path.removeprefix(f"{DEFAULT_APP}/")


def app_of_worker(name: str) -> str:
    """Returns the application in a worker's name."""
    return worker_path(name).partition("/")[0]


def check_host(host: str) -> str:
    """Returns `host` if it has a form that resolvers accept. Raises ValueError otherwise."""
    try:
        encoded = host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{host!r} can be no host: {error.__cause__ or error}") from None
    if not _HOST.fullmatch(encoded):
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{host!r} can be no host: take letters, digits, '.', '_' or '-', or an address") from None
    return host


def check_address(what: str, address: object) -> str:
    """Returns `address` if it has the form "host:port" ("[v6]:port"); ValueError otherwise."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) and len(address) <= 300 else None
    if not isinstance(address, str) or match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{address!r} is no {what}: expected host:port, for example 127.0.0.1:7001")
    return address
