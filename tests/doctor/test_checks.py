"""What each fact about a machine is judged to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticps.cli.doctor import exit_code
from elasticps.cli.output import ExitCode
from elasticps.doctor.core.checks import CHECKS, Check, Verdict, fits, judge, worst
from elasticps.doctor.core.facts import Certificate, Clock, Facts, KernelCache, Package, Port, ServerMemory

NOW = 1_800_000_000.0
DAY, GIB, MIB = 86_400.0, 1 << 30, 1 << 20
GOOD = Facts(
    now_s=NOW, etcd="/usr/bin/etcd", etcd_release="3.5.21", free_ports=2,
    etcd_port=Port("etcd", "127.0.0.1:2379", None, "connection refused"), huge_pages="madvise",
    files=(1_024, 1 << 20), memory_total=64 * GIB, memory_limit=64 * GIB, memory_available=60 * GIB,
    shared_memory=(32 * GIB, 32 * GIB), cores=8, governor="performance", python=(3, 12), python_required=">=3.11",
    packages=(Package("numpy", ">=1.26", "2.4.6"), Package("numba", "<0.69,>=0.68", "0.68.1")),
    kernels=KernelCache(4, 4, "/code/__pycache__"),
)  # fmt: skip
OF_CLUSTER: dict[str, Any] = {
    "url": "etcd://10.0.0.1/ads", "etcd_port": None, "free_ports": None,
    "ports": (Port("etcd", "10.0.0.1:2379", 0.001), Port("data port of server s0", "10.0.0.2:7000", 0.002)),
    "clocks": (Clock("server s0", 0.1, 0.01), Clock("the leading coordinator", -0.9, 1.5)),
    "certificate": Certificate("w.crt", "", "spiffe://elasticps/ads/worker/default/w0", NOW - DAY, NOW + 30 * DAY),
    "cluster_servers": (ServerMemory("s0", 5 * GIB, 10 * GIB, 12 * GIB),),
}  # fmt: skip


def found(name: str, **changes: Any) -> list[Check]:
    return [check for check in judge(replace(GOOD, **changes)) if check.name == name]


def of_cluster(name: str, **changes: Any) -> list[Check]:
    return found(name, **(OF_CLUSTER | changes))


def test_a_good_machine_has_one_line_for_each_check_and_no_advice() -> None:
    checks = judge(GOOD)
    assert worst(checks) is Verdict.OK
    assert [check.name for check in checks] == [
        "python", "packages", "kernels", "etcd", "ports", "huge pages", "open files", "memory", "swap",
        "shared memory", "cores",
    ]  # fmt: skip
    assert not any(check.meaning or check.remedy for check in checks)


def test_a_good_cluster_has_its_checks_beside_them() -> None:
    checks = judge(replace(GOOD, **OF_CLUSTER))
    assert {check.name for check in checks if check.verdict is not Verdict.OK} == set()
    assert [check.name for check in checks][-3:] == ["certificate", "cluster", "clocks"]


def test_every_check_has_a_docstring_and_every_warning_says_what_to_do() -> None:
    assert all(check.__doc__ for check in CHECKS)
    bad = Facts(
        now_s=NOW, swap_total=GIB, **{name: value for name, value in OF_CLUSTER.items() if name != "free_ports"}
    )
    for check in judge(bad):
        assert (check.verdict is Verdict.OK) == (not check.meaning) == (not check.remedy), check


CASES: list[tuple[str, dict[str, Any], Verdict, str]] = [
    ("python", {"python": (3, 10)}, Verdict.WRONG, "asks for >=3.11"),
    ("packages", {"packages": (Package("numba", "<0.69,>=0.68", "0.69.0"),)}, Verdict.WRONG, "pip install 'numba<0.69"),
    ("packages", {"packages": (Package("uvloop", ">=0.21", ""),)}, Verdict.WRONG, "uvloop is missing"),
    ("packages", {"packages": ()}, Verdict.OK, "0 as asked for"),
    ("kernels", {"kernels": KernelCache(0, 4, "")}, Verdict.WRONG, "XDG_CACHE_HOME"),
    ("kernels", {"kernels": KernelCache(0, 4, "/x")}, Verdict.WARNING, "about 45 s of one core"),
    ("kernels", {"kernels": KernelCache(3, 4, "/x")}, Verdict.WARNING, "about 11 s of one core"),
    ("etcd", {"etcd": ""}, Verdict.WARNING, "elasticps[local]"),
    ("etcd", {"etcd_release": "3.5.1"}, Verdict.WARNING, "3.5.3 or later"),
    ("etcd", {"etcd_release": "3.5"}, Verdict.WARNING, "corrupt"),
    ("etcd", {"etcd_release": "3.3.27"}, Verdict.WRONG, "older than any"),
    ("etcd", {"etcd_release": "3.4.23"}, Verdict.OK, "3.4.23, /usr/bin/etcd"),
    ("etcd", {"etcd_release": ""}, Verdict.OK, "unknown release"),
    ("etcd", {"url": "etcd://h/c", "etcd": ""}, Verdict.OK, "3.5.21, of the URL"),
    ("ports", {"loopback": "it cannot reach 127.0.0.1"}, Verdict.WRONG, "ip link set lo up"),
    ("ports", {"free_ports": 0}, Verdict.WRONG, "end what listens there"),
    ("ports", {"etcd_port": Port("etcd", "127.0.0.1:2379", 0.001)}, Verdict.OK, "something answers at 127.0.0.1:2379"),
    ("huge pages", {"huge_pages": "always"}, Verdict.OK, "always"),
    ("huge pages", {"huge_pages": "never"}, Verdict.WARNING, "transparent_hugepage/enabled"),
    ("huge pages", {"huge_pages": ""}, Verdict.WARNING, "this kernel has none"),
    ("open files", {"files": (100, 100)}, Verdict.WRONG, "a server needs 144"),
    ("open files", {"files": (1_024, 1_024)}, Verdict.WARNING, "about 672 workers"),
    ("memory", {"memory_limit": 256 * MIB}, Verdict.WRONG, "a limit; the machine has 64.0 GiB"),
    ("memory", {"server_limit": 100 * MIB}, Verdict.WRONG, "a server needs 512.0 MiB"),
    ("memory", {"servers": 3}, Verdict.WRONG, "give each --memory-limit 21.3 GiB or less"),
    ("memory", {"servers": 3, "server_limit": 30 * GIB}, Verdict.WRONG, "--memory-limit 30.0 GiB: the kernel kills"),
    ("memory", {"servers": 3, "server_limit": 20 * GIB}, Verdict.OK, "64.0 GiB, 60.0 GiB free now"),
    ("memory", {"memory_available": 100 * MIB}, Verdict.WARNING, "others use nearly all of it"),
    ("swap", {"swap_total": 2 * GIB, "swap_used": MIB}, Verdict.WARNING, "swapoff -a"),
    ("shared memory", {"shared_memory": None}, Verdict.WARNING, "there is no /dev/shm"),
    ("shared memory", {"shared_memory": (64 * MIB, 64 * MIB)}, Verdict.WARNING, "--shm-size"),
    ("shared memory", {"shared_memory": (GIB, MIB)}, Verdict.WARNING, "1.0 MiB free"),
    ("cores", {"core_share": 0.5}, Verdict.WRONG, "8, limited to 0.5"),
    ("cores", {"core_share": 2.0, "servers": 2}, Verdict.WARNING, "2 servers and a worker share them"),
    ("cores", {"cores": 1}, Verdict.WARNING, "1 servers and a worker"),
    ("cores", {"governor": "powersave"}, Verdict.WARNING, "cpupower"),
    ("cores", {"governor": ""}, Verdict.OK, "8"),
]


@pytest.mark.parametrize(("name", "changes", "verdict", "text"), CASES)
def test_each_fact_of_a_machine_is_judged(name: str, changes: dict[str, Any], verdict: Verdict, text: str) -> None:
    (check,) = found(name, **changes)
    assert check.verdict is verdict
    assert text in " ".join(check[2:])


CERTIFICATE = OF_CLUSTER["certificate"]
CLUSTER_CASES: list[tuple[str, dict[str, Any], list[Verdict], str]] = [
    ("certificate", {"certificate": None}, [], ""),
    ("certificate", {"certificate": Certificate("w.crt", "w.crt: No such file")}, [Verdict.WRONG], "No such file"),
    ("certificate", {"certificate": CERTIFICATE._replace(ends_s=NOW - 3 * DAY)}, [Verdict.WRONG], "ended 3 days ago"),
    ("certificate", {"certificate": CERTIFICATE._replace(ends_s=NOW + 7_200)}, [Verdict.WARNING], "ends in 2 hours"),
    ("certificate", {"certificate": CERTIFICATE._replace(begins_s=NOW + 60)}, [Verdict.WRONG], "for another 60 s"),
    (
        "certificate", {"certificate": CERTIFICATE._replace(key_open_to_others=True)}, [Verdict.OK, Verdict.WARNING],
        "chmod 600",
    ),
    ("cluster", {"url": "", "url_error": ""}, [], ""),
    ("cluster", {"url_error": "etcd gave no answer"}, [Verdict.WRONG], "is etcd running there"),
    ("cluster", {"trouble": ("no coordinator leads", "etcd takes no writes")}, [Verdict.WRONG] * 2, "takes no writes"),
    ("servers", {"cluster_servers": (ServerMemory("s1", error="no answer"),)}, [Verdict.WRONG], "s1: no answer"),
    ("servers", {"cluster_servers": (ServerMemory("s1", 95, 100, 120),)}, [Verdict.WARNING], "ServerFull"),
    ("servers", {"cluster_servers": (ServerMemory("s1", 95, 0, 0),)}, [], ""),
    ("ports", {"ports": (Port("etcd", "h:1", None, "refused"),)}, [Verdict.WRONG], "etcd at h:1: refused"),
    ("clocks", {"clocks": ()}, [], ""),
    ("clocks", {"clocks": (Clock("server s0", -5.0, 0.1),)}, [Verdict.WARNING], "that of server s0 is 5.0 s slow"),
    ("clocks", {"clocks": (Clock("server s0", 60.0, 0.1),)}, [Verdict.WRONG], "60.0 s ahead"),
    ("clocks", {"clocks": (Clock("a", 0.0, 3.0), Clock("b", 2.0, 1.5))}, [Verdict.OK], "2 are within 3.5 s"),
    ("etcd", {"url_error": "no answer"}, [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "verdicts", "text"), CLUSTER_CASES)
def test_each_fact_of_a_cluster_is_judged(
    name: str, changes: dict[str, Any], verdicts: list[Verdict], text: str
) -> None:
    checks = of_cluster(name, **changes)
    assert [check.verdict for check in checks] == verdicts
    assert text in " ".join(" ".join(check[2:]) for check in checks)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ExitCode.OK),
        ({"huge_pages": "never"}, ExitCode.OK),
        ({"free_ports": 0}, ExitCode.FAILED),
        (OF_CLUSTER, ExitCode.OK),
        (OF_CLUSTER | {"url_error": "no answer", "python": (3, 10)}, ExitCode.UNREACHABLE),
        (OF_CLUSTER | {"cluster_servers": (ServerMemory("s1", error="no answer"),)}, ExitCode.DEGRADED),
        (OF_CLUSTER | {"certificate": Certificate("w.crt", "unreadable")}, ExitCode.FAILED),
    ],
)
def test_how_the_command_ends(changes: dict[str, Any], code: ExitCode) -> None:
    facts = replace(GOOD, **changes)
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
