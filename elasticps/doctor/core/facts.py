"""Facts about a machine and a cluster, as they were found; None, or "", where they could not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Package(NamedTuple):
    """A package that elasticps needs: what it asks for, such as ">=0.68,<0.69", and the version there is, "" for
    none."""

    name: str
    required: str
    version: str


class Port(NamedTuple):
    """A port that was tried. free: nobody listens there; answers: whether a connection was made, in seconds."""

    what: str
    address: str
    answer_s: float | None
    error: str = ""


class Clock(NamedTuple):
    """How far a clock is before this machine's, in seconds, and how well that is known: half the time of the answer, or
    more where it says whole seconds."""

    whose: str
    offset_s: float
    error_s: float


class Certificate(NamedTuple):
    """A certificate: its file, why it cannot be used, whose it is, and when it begins and ends, in Unix time."""

    path: str
    error: str = ""
    identity: str = ""
    begins_s: float = 0.0
    ends_s: float = 0.0
    key_open_to_others: bool = False


class KernelCache(NamedTuple):
    """The cache of compiled kernels: how many of its modules are compiled, of how many, and the folder that is written
    to, "" for none."""

    compiled: int
    modules: int
    folder: str


class ServerUse(NamedTuple):
    """A server of the cluster: bytes that it uses, above which it takes no new rows, and may use; 0: no limit. error:
    why it did not answer."""

    name: str
    used: int = 0
    mark: int = 0
    limit: int = 0
    error: str = ""


@dataclass(frozen=True)
class Installation:
    """What is installed: Python, packages, compiled kernels, and an etcd for local clusters."""

    python: tuple[int, int] = (0, 0)
    python_required: str = ""  # such as ">=3.11"
    packages: Sequence[Package] = ()
    kernels: KernelCache | None = None  # without numba there are none
    etcd: str = ""  # the binary that a local cluster would run
    etcd_release: str = ""  # of the binary


@dataclass(frozen=True)
class Machine:
    """What this machine has, and lets a process use. Sizes are bytes."""

    loopback: str = ""  # why this machine cannot reach itself
    etcd_port: Port | None = None  # 2379, etcd's usual one
    free_ports: int | None = None  # of the few that were looked for
    huge_pages: str = ""  # the mode of transparent huge pages
    files: tuple[int, int] = (0, 0)  # open files: the limit, and up to where it may be raised
    memory_total: int = 0  # of the machine
    memory_limit: int = 0  # of the control group or the process, else the machine's
    memory_available: int = 0  # now
    swap_total: int = 0
    swap_used: int = 0
    shared_memory: tuple[int, int] | None = None  # /dev/shm: its size, and what is free
    cores: int = 0  # that this process may use
    core_share: float | None = None  # a control group's limit, in cores
    governor: str = ""  # of the first core


@dataclass(frozen=True)
class ClusterFacts:
    """What was found of the cluster at a URL. error: why its etcd cannot be asked; then little else is known."""

    url: str
    error: str = ""
    etcd_release: str = ""
    ports: Sequence[Port] = ()
    clocks: Sequence[Clock] = ()
    certificate: Certificate | None = None
    servers: Sequence[ServerUse] = ()
    trouble: Sequence[str] = ()  # what its etcd, or its view, says of itself


@dataclass(frozen=True)
class Facts:
    """All of it. now_s: Unix time by this machine's clock; servers, server_limit: how many servers are to run here, and
    the bytes of each one's --memory-limit, 0 for none."""

    now_s: float
    installation: Installation
    machine: Machine
    cluster: ClusterFacts | None = None
    servers: int = 1
    server_limit: int = 0
