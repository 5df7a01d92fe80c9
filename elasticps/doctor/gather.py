"""Gathers the facts that `core.checks` judges: looks at files of the kernel, sockets, and a cluster's etcd and servers.

Nothing is changed, and whatever cannot be found out is left open: a check says what it does not know.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509

from coordinator.connect import release_of
from coordinator.core.cluster_state import ClusterState
from coordinator.core.errors import CoordinationError
from coordinator.core.store import Store
from coordinator.core.url import DEFAULT_PORT, TlsFiles, parse
from coordinator.core.view import ServerInfo
from coordinator.trouble import find_trouble
from elasticps.admin import fetch_status
from elasticps.doctor.core.facts import (
    Certificate,
    Clock,
    ClusterFacts,
    Facts,
    Installation,
    KernelCache,
    Machine,
    Package,
    Port,
    ServerUse,
)
from elasticps.errors import ConfigError, Error
from elasticps.local.etcd import etcd_binary, free_ports, release
from elasticps.security import credentials_of
from elasticps.security.identity import NotAuthorised, identity_among
from elasticps.system import background
from elasticps.system.coordination import read_state, read_store
from elasticps.system.memory import find_limit, make_reader

_ROOT = Path("/")
_KERNELS = (  # modules whose kernels servers and workers wait for
    "elasticps.client.warm", "elasticps.server.fast.receive", "elasticps.server.fast.sockets",
    "elasticps.store.registry",
)  # fmt: skip
_LEADER_ERROR_S = 1.5  # a leader says whole seconds, and not all the time
_AT_ONCE = 64  # at once


def gather(url: str = "", *, servers: int = 1, server_limit: int = 0, timeout_s: float = 3.0) -> Facts:
    """Facts about this machine and, of a URL, about that cluster. servers, server_limit: how many servers are to run
    here, and the bytes of each one's --memory-limit. ConfigError for an unusable URL."""
    cluster = _of_cluster(url, timeout_s) if url else None
    machine = _machine() if url else _local_ports(_machine())
    return Facts(time.time(), _installation(), machine, cluster, servers, server_limit)


# --- this machine and installation ----------------------------------------------------------------------------------


def _machine() -> Machine:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    soft, hard = (1 << 30 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    available = memory.available
    with suppress(OSError, ValueError):
        available = make_reader()().available
    return Machine(
        huge_pages=_chosen(_text("sys/kernel/mm/transparent_hugepage/enabled")),
        files=(soft, hard),
        memory_total=memory.total,
        memory_limit=find_limit(),
        memory_available=available,
        swap_total=swap.total,
        swap_used=swap.used,
        shared_memory=_shared_memory(),
        cores=len(os.sched_getaffinity(0)),
        core_share=core_share(),
        governor=_text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    )


def _text(path: str, root: Path = _ROOT) -> str:
    try:
        return (root / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _shared_memory() -> tuple[int, int] | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def core_share(root: Path = _ROOT) -> float | None:
    """The smallest limit of the control groups around this process, in cores; None without one."""
    shares = list(_shares(root))
    return min(shares) if shares else None


def _shares(root: Path) -> Iterator[float]:
    for line in _text("proc/self/cgroup", root).splitlines():
        _, controllers, path = line.split(":", 2)
        named = controllers.split(",")
        if controllers and "cpu" not in named:
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            if controllers:
                words = [_text("cpu.cfs_quota_us", folder), _text("cpu.cfs_period_us", folder)]
            else:
                words = _text("cpu.max", folder).split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                yield int(words[0]) / int(words[1])


def _packages() -> dict[str, Any]:
    """What elasticps asks for, and what there is."""
    try:
        required = metadata.metadata("elasticps")["Requires-Python"] or ""
        lines = metadata.requires("elasticps") or []
    except metadata.PackageNotFoundError:  # run from sources that are not installed
        return {}
    packages = []
    for requirement in lines:
        line, _, marker = requirement.partition(";")
        if marker and 'extra == "kernels"' not in marker:
            continue
        name = line = line.strip()
        for at, letter in enumerate(name):
            if not (letter.isalnum() or letter in "-_."):
                name = name[:at]
                break
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if marker:
                continue
            version = ""
        packages.append(Package(name, line[len(name) :].strip(" ()"), version))
    return {"python_required": required, "packages": tuple(packages)}


def _kernels() -> KernelCache | None:
    try:
        from elasticps import kernels  # imports numba
    except ImportError:
        return None
    files = [spec.origin for name in _KERNELS if (spec := find_spec(name)) is not None and spec.origin]
    locator = kernels.Locator.from_function(_kernels, files[0]) if files else None
    folder = "" if locator is None else locator.get_cache_path()
    return KernelCache(sum(map(kernels.compiled, files)), len(files), folder)


def _installation() -> Installation:
    python, binary = (sys.version_info.major, sys.version_info.minor), ""
    with suppress(ConfigError):  # there is none
        binary = str(etcd_binary())
    etcd_release = release(Path(binary)) if binary else ""
    return Installation(python, kernels=_kernels(), etcd=binary, etcd_release=etcd_release, **_packages())


def _local_ports(machine: Machine) -> Machine:
    address = f"127.0.0.1:{DEFAULT_PORT}"
    port = Port("etcd", address, *_dialled(address, 1.0))
    try:
        return replace(machine, etcd_port=port, free_ports=len(free_ports(2)))
    except ConfigError as error:
        if "loopback" in str(error):
            return replace(machine, loopback="this machine cannot reach 127.0.0.1")
        return replace(machine, etcd_port=port, free_ports=0)


def _dialled(address: str, timeout_s: float) -> tuple[float | None, str]:
    """Seconds until a TCP connection was made, or None and why not."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError, OverflowError) as error:  # of a port that is none, too
        return None, (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
    return time.monotonic() - began, ""


def _tried(addresses: Sequence[tuple[str, str]], timeout_s: float) -> list[Port]:
    """Tries ports, (what, address), many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda each: _dialled(each[1], timeout_s), addresses)
        return [Port(what, address, *one) for (what, address), one in zip(addresses, found, strict=True)]


# --- a cluster ------------------------------------------------------------------------------------------------------


def _of_cluster(url: str, timeout_s: float) -> ClusterFacts:
    try:
        cluster = parse(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    certificate = look_at(cluster.tls, cluster.cluster) if cluster.tls is not None and cluster.tls.cert else None
    ports = _tried([("etcd", address) for address in cluster.endpoints], timeout_s)
    try:
        state, trouble, etcd_release = background.run(read_store(url, timeout_s, _read), timeout_s + 1)
    except (CoordinationError, Error, TimeoutError) as error:
        return ClusterFacts(url, str(error), ports=ports, certificate=certificate)
    known = {one.name: one for one in (*(state.view.servers if state.view else ()), *state.registered)}
    servers = list(known.values())
    addresses = [(f"data port of server {server.name}", server.address) for server in servers]
    addresses += [(f"admin port of server {server.name}", server.admin) for server in servers if server.admin]
    ports += _tried(addresses, timeout_s)
    try:
        reports, clocks = background.run(_question(url, servers, timeout_s))
    except Error as error:  # its certificate, which a check of its own speaks of
        reports, clocks = [ServerUse(server.name, error=str(error)) for server in servers], []
    return ClusterFacts(url, "", etcd_release, ports, clocks, certificate, reports, trouble)


async def _read(store: Store) -> tuple[ClusterState, list[str], str]:
    state, trouble, etcd_release = await asyncio.gather(read_state(store), find_trouble(store), release_of(store))
    if state.config is None and not trouble:
        trouble = [f"there is no cluster {state.cluster!r} in this etcd: `elasticps up` or a coordinator makes one"]
    return state, trouble, etcd_release


async def _question(url: str, servers: Sequence[ServerInfo], timeout_s: float) -> tuple[list[ServerUse], list[Clock]]:
    """What servers say of their memory, and of their clocks and the leader's."""
    credentials, limit = credentials_of(url), asyncio.Semaphore(_AT_ONCE)
    clocks: list[Clock] = []
    leader: list[Clock] = []

    async def ask(server: ServerInfo) -> ServerUse:
        if not server.admin:
            return ServerUse(server.name, error="it has no admin port")
        async with limit:
            began = time.time()
            try:
                answer = await fetch_status(server.admin, timeout_s, credentials)
            except Error as error:
                return ServerUse(server.name, error=str(error))
            took_s = time.time() - began
        between = began + took_s / 2
        if answer["clock"]:
            clocks.append(Clock(f"server {server.name}", answer["clock"] - between, took_s / 2))
        if answer["leader_clock"]:
            offset_s = answer["leader_clock"] + 0.5 - between
            leader.append(Clock("the leading coordinator", offset_s, took_s / 2 + _LEADER_ERROR_S))
        return ServerUse(server.name, answer["memory_used"], answer["memory_mark"], answer["memory_limit"])

    reports = await asyncio.gather(*map(ask, servers))
    return list(reports), [*clocks, *leader[:1]]


def look_at(files: TlsFiles, cluster: str) -> Certificate:
    """What the certificate of a URL is, whether or not it can still be used."""
    path = files.cert
    try:
        for file in filter(None, (files.ca, files.cert, files.key)):
            Path(file).read_bytes()
        certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(files.cert, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identity = identity_among(names.get_values_for_type(x509.UniformResourceIdentifier))
    except (x509.ExtensionNotFound, NotAuthorised):
        return Certificate(path, f"{path} names no process of a cluster")
    except ssl.SSLError as error:
        return Certificate(
            path, f"{path} and {files.key} do not belong together, or {files.ca} is none: {error.reason}"
        )
    except OSError as error:
        return Certificate(path, f"{error.filename or path}: {error.strerror}")
    except ValueError as error:
        return Certificate(path, f"{path} is no certificate: {error}")
    if identity.cluster != cluster:
        return Certificate(path, f"{path} is of cluster {identity.cluster!r}, not {cluster!r}")
    return Certificate(
        path,
        identity=str(identity),
        begins_s=certificate.not_valid_before_utc.timestamp(),
        ends_s=certificate.not_valid_after_utc.timestamp(),
        key_open_to_others=bool(os.stat(files.key).st_mode & 0o044),
    )
