"""What each fact about a machine is judged to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticps.cli.doctor import exit_code
from elasticps.cli.output import ExitCode
from elasticps.doctor.core.checks import CHECKS, Check, Severity, fits, judge, worst
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

NOW = 1_800_000_000.0
DAY, GIB, MIB = 86_400.0, 1 << 30, 1 << 20
INSTALLATION = Installation(
    (3, 12), ">=3.11", (Package("numpy", ">=1.26", "2.4.6"), Package("numba", "<0.69,>=0.68", "0.68.1")),
    KernelCache(4, 4, "/code/__pycache__"), "/usr/bin/etcd", "3.5.21",
)  # fmt: skip
MACHINE = Machine(
    etcd_port=Port("etcd", "127.0.0.1:2379", None, "connection refused"), free_ports=2, huge_pages="madvise",
    files=(1_024, 1 << 20), memory_total=64 * GIB, memory_limit=64 * GIB, memory_available=60 * GIB,
    shared_memory=(32 * GIB, 32 * GIB), cores=8, governor="performance",
)  # fmt: skip
GOOD = Facts(NOW, INSTALLATION, MACHINE)
OF_CLUSTER: dict[str, Any] = {
    "url": "etcd://10.0.0.1/ads", "etcd_release": "3.5.21",
    "ports": (Port("etcd", "10.0.0.1:2379", 0.001), Port("data port of server s0", "10.0.0.2:7000", 0.002)),
    "clocks": (Clock("server s0", 0.1, 0.01), Clock("the leading coordinator", -0.9, 1.5)),
    "certificate": Certificate("w.crt", "", "spiffe://elasticps/ads/worker/default/w0", NOW - DAY, NOW + 30 * DAY),
    "servers": (ServerUse("s0", 5 * GIB, 10 * GIB, 12 * GIB),),
}  # fmt: skip


CLUSTER = ClusterFacts(**OF_CLUSTER)
WITH_CLUSTER = replace(GOOD, machine=replace(MACHINE, etcd_port=None, free_ports=None), cluster=CLUSTER)


def changed(**changes: Any) -> Facts:
    """The good machine, with some facts changed, whichever part they belong to."""
    installed, own = ({n: v for n, v in changes.items() if hasattr(part, n)} for part in (INSTALLATION, MACHINE))
    rest = {name: value for name, value in changes.items() if name not in installed and name not in own}
    return replace(
        GOOD, installation=replace(INSTALLATION, **installed), machine=replace(MACHINE, **own), **rest
    )  # fmt: skip


def found(name: str, facts: Facts) -> list[Check]:
    return [check for check in judge(facts) if check.name == name]


def test_a_good_machine_has_one_line_for_each_check_and_no_advice() -> None:
    checks = judge(GOOD)
    assert worst(checks) is Severity.OK
    assert [check.name for check in checks] == [
        "python", "packages", "kernels", "etcd", "ports", "huge pages", "open files", "memory", "swap",
        "shared memory", "cores",
    ]  # fmt: skip
    assert not any(check.meaning or check.remedy for check in checks)


def test_a_good_cluster_has_its_checks_beside_them() -> None:
    checks = judge(WITH_CLUSTER)
    assert {check.name for check in checks if check.severity is not Severity.OK} == set()
    assert [check.name for check in checks][-3:] == ["certificate", "cluster", "clocks"]


def test_every_check_has_a_docstring_and_every_warning_says_what_to_do() -> None:
    assert all(check.__doc__ for check in CHECKS)
    bad = Facts(NOW, Installation(), Machine(swap_total=GIB), CLUSTER)
    for check in judge(bad):
        assert (check.severity is Severity.OK) == (not check.meaning) == (not check.remedy), check


CASES: list[tuple[str, dict[str, Any], Severity, str]] = [
    ("python", {"python": (3, 10)}, Severity.WRONG, "asks for >=3.11"),
    (
        "packages",
        {"packages": (Package("numba", "<0.69,>=0.68", "0.69.0"),)},
        Severity.WRONG,
        "install 'numba<0.69",
    ),
    ("packages", {"packages": (Package("uvloop", ">=0.21", ""),)}, Severity.WRONG, "uvloop is missing"),
    ("packages", {"packages": ()}, Severity.OK, "0 as asked for"),
    ("kernels", {"kernels": None}, Severity.WRONG, "python -c 'import numba'"),
    ("kernels", {"kernels": None, "packages": ()}, Severity.OK, "none, for operators"),
    ("kernels", {"kernels": KernelCache(0, 4, "")}, Severity.WRONG, "XDG_CACHE_HOME"),
    ("kernels", {"kernels": KernelCache(0, 4, "/x")}, Severity.WARNING, "about 45 s of one core"),
    ("kernels", {"kernels": KernelCache(3, 4, "/x")}, Severity.WARNING, "about 11 s of one core"),
    ("etcd", {"etcd": ""}, Severity.WARNING, "elasticps[local]"),
    ("etcd", {"etcd_release": "3.5.1"}, Severity.WARNING, "3.5.3 or later"),
    ("etcd", {"etcd_release": "3.5"}, Severity.WARNING, "corrupt"),
    ("etcd", {"etcd_release": "3.3.27"}, Severity.WRONG, "older than any"),
    ("etcd", {"etcd_release": "3.4.23"}, Severity.OK, "3.4.23, /usr/bin/etcd"),
    ("etcd", {"etcd_release": ""}, Severity.OK, "unknown release"),
    ("etcd", {"cluster": CLUSTER, "etcd": ""}, Severity.OK, "3.5.21, of the URL"),
    ("ports", {"loopback": "it cannot reach 127.0.0.1"}, Severity.WRONG, "ip link set lo up"),
    ("ports", {"free_ports": 0}, Severity.WRONG, "end what listens there"),
    ("ports", {"etcd_port": Port("etcd", "127.0.0.1:2379", 0.001)}, Severity.OK, "something answers at 127.0.0.1:2379"),
    ("huge pages", {"huge_pages": "always"}, Severity.OK, "always"),
    ("huge pages", {"huge_pages": "never"}, Severity.WARNING, "transparent_hugepage/enabled"),
    ("huge pages", {"huge_pages": ""}, Severity.WARNING, "this kernel has none"),
    ("open files", {"files": (100, 100)}, Severity.WRONG, "a server needs 144"),
    ("open files", {"files": (1_024, 1_024)}, Severity.WARNING, "about 672 workers"),
    ("memory", {"memory_limit": 256 * MIB}, Severity.WRONG, "a limit; the machine has 64.0 GiB"),
    ("memory", {"server_limit": 100 * MIB}, Severity.WRONG, "a server needs 512.0 MiB"),
    ("memory", {"servers": 3}, Severity.WRONG, "give each --memory-limit 21.3 GiB or less"),
    ("memory", {"servers": 3, "server_limit": 30 * GIB}, Severity.WRONG, "--memory-limit 30.0 GiB: the kernel kills"),
    ("memory", {"servers": 3, "server_limit": 20 * GIB}, Severity.OK, "64.0 GiB, 60.0 GiB free now"),
    ("memory", {"memory_available": 100 * MIB}, Severity.WARNING, "others use nearly all of it"),
    ("swap", {"swap_total": 2 * GIB, "swap_used": MIB}, Severity.WARNING, "swapoff -a"),
    ("shared memory", {"shared_memory": None}, Severity.WARNING, "there is no /dev/shm"),
    ("shared memory", {"shared_memory": (64 * MIB, 64 * MIB)}, Severity.WARNING, "--shm-size"),
    ("shared memory", {"shared_memory": (GIB, MIB)}, Severity.WARNING, "1.0 MiB free"),
    ("cores", {"core_share": 0.5}, Severity.WRONG, "8, limited to 0.5"),
    ("cores", {"core_share": 2.0, "servers": 2}, Severity.WARNING, "2 servers and a worker share them"),
    ("cores", {"cores": 1}, Severity.WARNING, "1 servers and a worker"),
    ("cores", {"governor": "powersave"}, Severity.WARNING, "cpupower"),
    ("cores", {"governor": ""}, Severity.OK, "8"),
]


@pytest.mark.parametrize(("name", "changes", "severity", "text"), CASES)
def test_each_fact_of_a_machine_is_judged(name: str, changes: dict[str, Any], severity: Severity, text: str) -> None:
    (check,) = found(name, changed(**changes))
    assert check.severity is severity
    assert text in " ".join(check[2:])


CERTIFICATE = OF_CLUSTER["certificate"]
CLUSTER_CASES: list[tuple[str, dict[str, Any], list[Severity], str]] = [
    ("certificate", {"certificate": None}, [], ""),
    ("certificate", {"certificate": Certificate("w.crt", "w.crt: No such file")}, [Severity.WRONG], "No such file"),
    ("certificate", {"certificate": CERTIFICATE._replace(ends_s=NOW - 3 * DAY)}, [Severity.WRONG], "ended 3 days ago"),
    ("certificate", {"certificate": CERTIFICATE._replace(ends_s=NOW + 7_200)}, [Severity.WARNING], "ends in 2 hours"),
    ("certificate", {"certificate": CERTIFICATE._replace(begins_s=NOW + 60)}, [Severity.WRONG], "for another 60 s"),
    (
        "certificate", {"certificate": CERTIFICATE._replace(key_open_to_others=True)}, [Severity.OK, Severity.WARNING],
        "chmod 600",
    ),
    ("cluster", {"error": "etcd gave no answer"}, [Severity.WRONG], "is etcd running there"),
    ("cluster", {"trouble": ("no coordinator leads", "etcd takes no writes")}, [Severity.WRONG] * 2, "takes no writes"),
    ("servers", {"servers": (ServerUse("s1", error="no answer"),)}, [Severity.WRONG], "s1: no answer"),
    ("servers", {"servers": (ServerUse("s1", 95, 100, 120),)}, [Severity.WARNING], "ServerFull"),
    ("servers", {"servers": (ServerUse("s1", 95, 0, 0),)}, [], ""),
    ("ports", {"ports": (Port("etcd", "h:1", None, "refused"),)}, [Severity.WRONG], "etcd at h:1: refused"),
    ("clocks", {"clocks": ()}, [], ""),
    ("clocks", {"clocks": (Clock("server s0", -5.0, 0.1),)}, [Severity.WARNING], "that of server s0 is 5.0 s slow"),
    ("clocks", {"clocks": (Clock("server s0", 60.0, 0.1),)}, [Severity.WRONG], "60.0 s ahead"),
    ("clocks", {"clocks": (Clock("a", 0.0, 3.0), Clock("b", 2.0, 1.5))}, [Severity.OK], "2 are within 3.5 s"),
    ("etcd", {"error": "no answer"}, [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "severities", "text"), CLUSTER_CASES)
def test_each_fact_of_a_cluster_is_judged(
    name: str, changes: dict[str, Any], severities: list[Severity], text: str
) -> None:
    checks = found(name, replace(WITH_CLUSTER, cluster=replace(CLUSTER, **changes)))
    assert [check.severity for check in checks] == severities
    assert text in " ".join(" ".join(check[2:]) for check in checks)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (GOOD, ExitCode.OK),
        (changed(huge_pages="never"), ExitCode.OK),
        (changed(free_ports=0), ExitCode.FAILED),
        (WITH_CLUSTER, ExitCode.OK),
        (changed(cluster=replace(CLUSTER, error="no answer"), python=(3, 10)), ExitCode.FAILED),
        (changed(cluster=replace(CLUSTER, error="no answer")), ExitCode.UNREACHABLE),
        (changed(cluster=replace(CLUSTER, servers=(ServerUse("s1", error="no answer"),))), ExitCode.DEGRADED),
        (changed(cluster=replace(CLUSTER, certificate=Certificate("w.crt", "unreadable"))), ExitCode.FAILED),
    ],
)
def test_how_the_command_ends(facts: Facts, code: ExitCode) -> None:
    assert exit_code(facts, judge(facts)) is code


@pytest.mark.parametrize(
    ("version", "required", "fitting"),
    [
        ("3.11", ">=3.11", True), ("3.10.2", ">=3.11", False), ("0.68.1", "<0.69,>=0.68", True),
        ("0.69.0rc1", "<0.69,>=0.68", False), ("1.0", "==1.0.0", True), ("1.0", "!=1", False), ("2", "", True),
        ("2.0", ">1.9, <=2", True), ("unknown", ">=1", True), ("1.4.2", "~=1.4", True),
    ],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version: str, required: str, fitting: bool) -> None:
    assert fits(version, required) is fitting
