"""Judges facts: each check says what was found, what that means, and what to do about it."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from elasticps.doctor.core.facts import Facts, Package
from elasticps.system.sizes import size

_DAY_S = 86_400.0
_GIB, _MIB = 1 << 30, 1 << 20
SERVER_LEAST_BYTES = 512 * _MIB  # an empty server has some 200 MiB, and a compiler takes 400
SHARED_LEAST_BYTES = 64 * _MIB  # Docker gives so little
FILES_LEAST, FILES_ENOUGH = 144, 4_096
CLOCK_WARN_S, CLOCK_WRONG_S = 1.0, 30.0
CERTIFICATE_SOON_S = 7 * _DAY_S
FULL_SHARE = 0.9  # of the mark above which a server takes no new rows
COMPILE_S = 45  # of one core


class Severity(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # it works, and is slower, or will not work for long
    WRONG = "wrong"  # it does not work


class Check(NamedTuple):
    """One check: what was looked at, the severity, what was found, what it means, and what to do; the last two are ""
    where all is well."""

    name: str
    severity: Severity
    found: str
    meaning: str = ""
    remedy: str = ""


def _ok(name: str, found: str) -> Check:
    return Check(name, Severity.OK, found)


def _warning(name: str, found: str, meaning: str, remedy: str) -> Check:
    return Check(name, Severity.WARNING, found, meaning, remedy)


def _wrong(name: str, found: str, meaning: str, remedy: str) -> Check:
    return Check(name, Severity.WRONG, found, meaning, remedy)


def judge(facts: Facts) -> list[Check]:
    """Runs all checks, in the order in which to read them."""
    return [check for each in CHECKS for check in each(facts)]


def worst(checks: list[Check]) -> Severity:
    """The worst severity."""
    found = {check.severity for check in checks}
    return next((one for one in (Severity.WRONG, Severity.WARNING) if one in found), Severity.OK)


# --- this installation ----------------------------------------------------------------------------------------------


def check_python(facts: Facts) -> Iterator[Check]:
    """Python and the packages that elasticps needs."""
    here = facts.installation
    version = ".".join(map(str, here.python))
    if fits(version, here.python_required):
        yield _ok("python", version)
    else:
        remedy = "make an environment with another Python, and install elasticps there"
        yield _wrong("python", version, f"elasticps asks for {here.python_required}", remedy)
    wrong = [package for package in here.packages if not package.version or not _package_fits(package)]
    for package in wrong:
        there = f"{package.name} {package.version or 'is missing'}"
        meaning = f"elasticps asks for {package.required or 'it'}, and was tested with nothing else"
        remedy = f"pip install '{package.name}{package.required}'"
        yield _wrong("packages", there, meaning, remedy)
    if not wrong:
        shown = ", ".join(f"{p.name} {p.version}" for p in here.packages if p.name in ("numpy", "numba", "grpcio"))
        yield _ok("packages", shown or f"{len(here.packages)} as asked for")


def _package_fits(package: Package) -> bool:
    return fits(package.version, package.required)


def fits(version: str, required: str) -> bool:
    """Whether a version is one of those that a text such as ">=0.68,<0.69" asks for. What cannot be read counts as
    fitting: pip has looked already."""
    here = _numbers(version)
    for part in filter(None, (each.strip() for each in required.split(","))):
        found = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*([\d.]+)", part)
        if found is None or not here:
            continue
        there = _numbers(found[2])
        size = max(len(here), len(there))
        one, other = here + (0,) * (size - len(here)), there + (0,) * (size - len(there))
        if not _COMPARED[found[1]](one, other):
            return False
    return True


_COMPARED: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_kernels(facts: Facts) -> Iterator[Check]:
    """The cache of compiled kernels."""
    here = facts.installation
    cache = here.kernels
    if cache is None and any(package.name == "numba" for package in here.packages):
        yield _wrong(
            "kernels", "numba is installed and cannot be imported", "no server and no worker starts",
            "look what python -c 'import numba' says: often NumPy is newer than it takes, or llvmlite is missing, and "
            "pip install 'elasticps[kernels]' mends that",
        )  # fmt: skip
    elif cache is None:
        yield _ok("kernels", "none, for operators; servers and workers need pip install 'elasticps[kernels]'")
    elif not cache.folder:
        yield _wrong(
            "kernels", "no folder can be written", "each process compiles its kernels again, for up to a minute",
            "let this user write beside the code, in ~/.cache or in the folder that XDG_CACHE_HOME names; in an image, "
            "run python -m elasticps.warm as it is built",
        )  # fmt: skip
    elif cache.compiled < cache.modules:
        missing = cache.modules - cache.compiled
        yield _warning(
            "kernels", f"{cache.compiled} of {cache.modules} modules are compiled, in {cache.folder}",
            f"the first start compiles the others, about {COMPILE_S * missing / cache.modules:.0f} s of one core",
            "python -m elasticps.warm",
        )  # fmt: skip
    else:
        yield _ok("kernels", f"compiled, in {cache.folder}")


# --- this machine ---------------------------------------------------------------------------------------------------


def check_etcd(facts: Facts) -> Iterator[Check]:
    """The binary that local clusters run, or the etcd of the URL."""
    here, cluster = facts.installation, facts.cluster
    if cluster is not None:
        if cluster.error:
            return  # which `check_cluster` says
        number, found = cluster.etcd_release, f"{cluster.etcd_release or 'unknown release'}, of the URL"
    elif not here.etcd:
        yield _warning(
            "etcd", "no etcd is on PATH", "clusters on this machine (`elasticps up`, LocalCluster) cannot start; to "
            "join a cluster elsewhere none is needed", "pip install 'elasticps[local]', or etcd of your distribution",
        )  # fmt: skip
        return
    else:
        number, found = here.etcd_release, f"{here.etcd_release or 'unknown release'}, {here.etcd}"
    release = _numbers(number)
    if release and release < (3, 4):
        yield _wrong("etcd", found, "it is older than any that was tried", "take etcd 3.4, or better 3.5.3 or later")
    elif release[:2] == (3, 5) and (*release, 0)[2] <= 2:
        meaning = "it may corrupt its data when it is killed under load; it will do for trying out"
        yield _warning("etcd", found, meaning, "for anything that matters take etcd 3.5.3 or later")
    else:
        yield _ok("etcd", found)


def check_ports(facts: Facts) -> Iterator[Check]:
    """Ports of this machine, or of the cluster."""
    machine = facts.machine
    if machine.loopback:
        yield _wrong("ports", machine.loopback, "a cluster on this machine cannot talk to itself", "ip link set lo up")
    elif machine.free_ports == 0:
        meaning = "a cluster on this machine finds no port to listen on"
        yield _wrong("ports", "none of 20000 to 32767 is free", meaning, "end what listens there")
    elif machine.etcd_port is not None and machine.etcd_port.answer_s is not None:
        yield _ok("ports", f"there are free ones; something answers at {machine.etcd_port.address}, etcd's usual one")
    elif machine.free_ports is not None:
        yield _ok("ports", "there are free ones")
    ports = () if facts.cluster is None else facts.cluster.ports
    silent = [port for port in ports if port.answer_s is None]
    for port in silent:
        yield _wrong(
            "ports", f"{port.what} at {port.address}: {port.error or 'no answer'}",
            "this machine cannot reach what it has to talk to",
            "is that process running, and may this machine reach the port (firewall, network policy, --advertise)?",
        )  # fmt: skip
    if ports and not silent:
        slowest = max(port.answer_s or 0.0 for port in ports)
        yield _ok("ports", f"{len(ports)} of the cluster answer, within {1e3 * slowest:.1f} ms")


def check_huge_pages(facts: Facts) -> Iterator[Check]:
    """Transparent huge pages."""
    machine = facts.machine
    if machine.huge_pages in ("always", "madvise"):
        yield _ok("huge pages", machine.huge_pages)
        return
    yield _warning(
        "huge pages", machine.huge_pages or "this kernel has none",
        "tables take pages of 4 KiB: pulls and pushes are up to several times slower, and a killed server's memory "
        "takes twenty times as long to be freed",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )  # fmt: skip


def check_files(facts: Facts) -> Iterator[Check]:
    """The limit of open files."""
    machine = facts.machine
    soft, hard = machine.files
    found = f"{hard:,} may be open" + (f", {soft:,} unless a process raises its limit" if soft < hard else "")
    if hard < FILES_LEAST:
        remedy = f"ulimit -Hn {FILES_ENOUGH} as root, LimitNOFILE= in systemd, --ulimit nofile= of a container"
        yield _wrong("open files", found, f"a server needs {FILES_LEAST} at least", remedy)
    elif hard < FILES_ENOUGH:
        meaning = f"a server takes about {max(hard - 128, 0) * 3 // 4:,} workers, and refuses others"
        yield _warning("open files", found, meaning, f"allow {FILES_ENOUGH:,} or more, where there are many workers")
    else:
        yield _ok("open files", found)


def check_memory(facts: Facts) -> Iterator[Check]:
    """What servers on this machine may use, beside what it has."""
    machine = facts.machine
    limited = machine.memory_limit < machine.memory_total
    found = f"{size(machine.memory_limit)}" + (f", a limit; the machine has {size(machine.memory_total)}" * limited)
    found += f", {size(machine.memory_available)} free now"
    each = facts.server_limit or machine.memory_limit
    if each < SERVER_LEAST_BYTES:
        remedy = "raise the limit of the control group or container, `ulimit -v`, or --memory-limit"
        yield _wrong("memory", found, f"a server needs {size(SERVER_LEAST_BYTES)}, for hardly any rows", remedy)
    elif facts.servers * each > machine.memory_limit:
        whose = f"--memory-limit {size(each)}" if facts.server_limit else "the whole of it, without --memory-limit"
        yield _wrong(
            "memory", found, f"{facts.servers} servers would each use {whose}: the kernel kills one when they have",
            f"give each --memory-limit {size(machine.memory_limit // facts.servers)} or less",
        )  # fmt: skip
    elif machine.memory_available < SERVER_LEAST_BYTES:
        remedy = "end what else runs here, or take another machine"
        yield _warning("memory", found, "others use nearly all of it: a server may be killed", remedy)
    else:
        yield _ok("memory", found)


def check_swap(facts: Facts) -> Iterator[Check]:
    """Swap space."""
    machine = facts.machine
    if not machine.swap_total:
        yield _ok("swap", "none")
        return
    yield _warning(
        "swap", f"{size(machine.swap_total)}, {size(machine.swap_used)} in use",
        "a server whose rows are on a disk is silent for seconds, and is left out of the cluster",
        "swapoff -a on machines of servers, or MemorySwapMax=0 of their unit",
    )  # fmt: skip


def check_shared_memory(facts: Facts) -> Iterator[Check]:
    """Where processes share memory."""
    machine = facts.machine
    if machine.shared_memory is None:
        yield _warning(
            "shared memory", "there is no /dev/shm", "DataLoader's workers of torch cannot hand batches over",
            "mount it: mount -t tmpfs shm /dev/shm",
        )  # fmt: skip
        return
    total, free = machine.shared_memory
    if min(total, free) <= SHARED_LEAST_BYTES:
        yield _warning(
            "shared memory", f"/dev/shm has {size(total)}, {size(free)} free",
            "DataLoader's workers of torch end by SIGBUS when their batches do not fit",
            "docker run --shm-size=2g; on Kubernetes an emptyDir with medium: Memory at /dev/shm",
        )  # fmt: skip
    else:
        yield _ok("shared memory", f"/dev/shm has {size(total)}, {size(free)} free")


def check_cores(facts: Facts) -> Iterator[Check]:
    """How many cores there are, and how fast they may run."""
    machine = facts.machine
    usable = machine.cores if machine.core_share is None else min(machine.cores, machine.core_share)
    found = f"{machine.cores}" + ("" if machine.core_share is None else f", limited to {machine.core_share:g}")
    found += f", governor {machine.governor}" if machine.governor else ""
    if usable < 1:
        meaning = "a server that is not let run for a moment is silent, and may be left out"
        yield _wrong("cores", found, meaning, "give the container at least one core, without a limit below it")
    elif usable < facts.servers + 1:
        meaning = f"{facts.servers} servers and a worker share them: they wait for each other"
        yield _warning("cores", found, meaning, "a core for each server, and one for a worker")
    elif machine.governor == "powersave":
        meaning = "cores may be slow to speed up: short requests take longer"
        yield _warning("cores", found, meaning, "cpupower frequency-set -g performance")
    else:
        yield _ok("cores", found)


# --- the cluster of a URL -------------------------------------------------------------------------------------------


def check_certificate(facts: Facts) -> Iterator[Check]:
    """The certificate that the URL names."""
    certificate = None if facts.cluster is None else facts.cluster.certificate
    if certificate is None:
        return
    make = "make it again with `elasticps certificates`, and replace its files: processes read them while they run"
    if certificate.error:
        yield _wrong("certificate", certificate.error, "no process of the cluster lets this one in", make)
        return
    found = f"{certificate.identity}, {certificate.path}"
    left_s = certificate.ends_s - facts.now_s
    if facts.now_s < certificate.begins_s:
        meaning = f"it is not valid for another {_time(certificate.begins_s - facts.now_s)}"
        yield _wrong("certificate", found, meaning, "is this machine's clock right? Else wait, or make it again")
    elif left_s <= 0:
        yield _wrong("certificate", found, f"it ended {_time(-left_s)} ago: no process lets this one in", make)
    elif left_s < CERTIFICATE_SOON_S:
        yield _warning("certificate", found, f"it ends in {_time(left_s)}", make)
    else:
        yield _ok("certificate", f"{found}, for another {_time(left_s)}")
    if certificate.key_open_to_others:
        meaning = "other users of this machine can read its key, and be this process"
        yield _warning("certificate", f"the key of {certificate.path}", meaning, "chmod 600 the key's file")


def check_cluster(facts: Facts) -> Iterator[Check]:
    """The cluster, as its etcd has it."""
    cluster = facts.cluster
    if cluster is None:
        return
    if cluster.error:
        remedy = "is etcd running there, and may this machine reach it? Of a cluster with TLS, does the URL name files?"
        yield _wrong("cluster", cluster.error, "nothing can be said of the cluster", remedy)
        return
    for text in cluster.trouble:
        remedy = "docs/guides/troubleshooting.md says what to do; `elasticps status` has more"
        yield _wrong("cluster", text, "the cluster, or a part of it, cannot go on as it is", remedy)
    if not cluster.trouble:
        yield _ok("cluster", f"{len(cluster.servers)} servers")
    for server in cluster.servers:
        if server.error:
            remedy = "`elasticps logs`, or those of its machine, say why it is silent"
            yield _wrong("servers", f"{server.name}: {server.error}", "it does not answer", remedy)
        elif server.mark and server.used > FULL_SHARE * server.mark:
            found = f"{server.name} uses {size(server.used)}, and takes new rows up to {size(server.mark)}"
            remedy = "`elasticps scale N --dry-run` says how many servers are enough"
            yield _warning("servers", found, "soon it refuses new rows (ServerFull)", remedy)


def check_clocks(facts: Facts) -> Iterator[Check]:
    """Clocks of the cluster's machines beside this one's."""
    clocks = () if facts.cluster is None else facts.cluster.clocks
    if not clocks:
        return
    wrong = False
    for clock in clocks:
        least_s = abs(clock.offset_s) - clock.error_s
        if least_s < CLOCK_WARN_S:
            continue
        wrong = True
        found = f"that of {clock.whose} is {abs(clock.offset_s):.1f} s {'ahead' if clock.offset_s > 0 else 'slow'}"
        meaning = "times in logs do not fit; rows of growing tables may be forgotten too soon or too late"
        remedy = "run chrony or systemd-timesyncd on both machines"
        if least_s < CLOCK_WRONG_S:
            yield _warning("clocks", found, meaning, remedy)
        else:
            yield _wrong("clocks", found, f"{meaning}, and certificates count as expired or not yet valid", remedy)
    if not wrong:
        most_s = max(abs(clock.offset_s) + clock.error_s for clock in clocks)
        yield _ok("clocks", f"{len(clocks)} are within {most_s:.1f} s of this machine's")


CHECKS: tuple[Callable[[Facts], Iterator[Check]], ...] = (
    check_python, check_kernels, check_etcd, check_ports, check_huge_pages, check_files, check_memory, check_swap,
    check_shared_memory, check_cores, check_certificate, check_cluster, check_clocks,
)  # fmt: skip


def _time(seconds: float) -> str:
    for unit, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
