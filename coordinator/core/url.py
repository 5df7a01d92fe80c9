"""Cluster URLs: etcd://host:port[,host:port…]/cluster[?ca=FILE&cert=FILE&key=FILE]. Pure: opens no file."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from coordinator.core.names import check_address, check_host, check_name

EXAMPLE = "etcd://127.0.0.1:2379/demo"
DEFAULT_PORT = 2379


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: `ca` signs the servers ("" = the system's roots); `cert` and `key` identify the client, or
    are ""."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True)
class ClusterUrl:
    """The parts of a cluster's URL: etcd endpoints as "host:port", the cluster's name, TLS files (None = plain TCP)."""

    endpoints: tuple[str, ...]
    cluster: str
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        files = {} if self.tls is None else {k: v for k, v in vars(self.tls).items() if v}
        query = "?" + urlencode(files, quote_via=quote, safe="/") if files else ""
        return f"etcd://{','.join(self.endpoints)}/{self.cluster}{query}"


def parse(url: str) -> ClusterUrl:
    """Reads a cluster URL. Raises ValueError, which says what is wrong and shows a good one."""
    try:
        return _parse(url)
    except ValueError as error:
        raise ValueError(f"cannot use {url!r} as a cluster URL: {error} (a good one: {EXAMPLE})") from None


def _parse(url: str) -> ClusterUrl:
    parts = urlsplit(url)
    if parts.scheme != "etcd":
        raise ValueError("it must begin with etcd://")
    if "@" in parts.netloc:
        raise ValueError("user names and passwords are not supported; use client certificates (?ca=…&cert=…&key=…)")
    if parts.fragment:
        raise ValueError("it must not have a '#' part")
    if not parts.netloc:
        raise ValueError("it names no host")
    endpoints = tuple(_endpoint(host) for host in parts.netloc.split(","))
    if len(set(endpoints)) != len(endpoints):
        raise ValueError("it names an endpoint twice")
    name = parts.path.strip("/")
    if not name:
        raise ValueError("it names no cluster after the host")
    return ClusterUrl(endpoints, check_name("cluster", name), _tls(parts.query))


def _endpoint(host: str) -> str:
    has_port = ":" in host.rpartition("]")[2]
    address = check_address("etcd endpoint", host if has_port else f"{host}:{DEFAULT_PORT}")
    check_host(address.rpartition(":")[0].strip("[]"))
    return address


def _tls(query: str) -> TlsFiles | None:
    if not query:
        return None
    options = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    files = dict(options)
    if unknown := sorted(set(files) - {"ca", "cert", "key"}):
        raise ValueError(f"unknown option {', '.join(unknown)}; known are ca, cert and key")
    if len(files) != len(options) or not all(files.values()):
        raise ValueError("ca, cert and key are each given once and name a file")
    if ("cert" in files) != ("key" in files):
        raise ValueError("cert and key go together")
    return TlsFiles(**files)
