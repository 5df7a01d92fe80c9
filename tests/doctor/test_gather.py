"""Where facts about a machine come from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.core.url import TlsFiles
from elasticps.admin import fetch_status
from elasticps.cli.app import app
from elasticps.doctor.core.facts import ClusterFacts
from elasticps.doctor.gather import _dialled, core_share, gather, look_at
from elasticps.errors import ClusterUnreachable
from elasticps.security.authority import Authority
from elasticps.security.identity import Identity
from tests.conftest import NewCluster


def test_facts_about_this_machine_are_found() -> None:
    facts = gather(servers=2, server_limit=1 << 30)
    machine, installation = facts.machine, facts.installation
    assert machine.memory_total >= machine.memory_limit > 0
    assert machine.memory_available > 0
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.files[1] >= machine.files[0] > 0
    assert machine.free_ports == 2
    assert installation.etcd_release.startswith("3.")
    assert (facts.servers, facts.server_limit) == (2, 1 << 30)
    assert {"numpy", "numba", "uvloop"} <= {package.name for package in installation.packages}
    assert all(package.version and package.name for package in installation.packages)
    assert installation.kernels is not None
    assert installation.kernels.compiled == installation.kernels.modules == 4


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n2:memory:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "3:cpu:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_control_groups_limit_of_cores_is_found(tmp_path: Path, files: dict[str, str], share: float | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert core_share(tmp_path) == share


def test_a_certificate_is_looked_at_whether_or_not_it_can_be_used(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    one, other = (
        authority.issue(Identity.parse(f"spiffe://elasticps/ads/worker/default/{name}"), days=days)
        for name, days in (("w0", 30.0), ("w1", 0.001))
    )
    good = look_at(one, "ads")
    assert (good.error, good.identity) == ("", "spiffe://elasticps/ads/worker/default/w0")
    assert not good.key_open_to_others
    assert good.ends_s - look_at(other, "ads").ends_s > 29 * 86_400
    assert look_at(one, "news").error == f"{one.cert} is of cluster 'ads', not 'news'"
    assert "do not belong together" in look_at(TlsFiles(one.ca, one.cert, other.key), "ads").error
    assert "no process of a cluster" in look_at(TlsFiles(one.ca, one.ca, str(tmp_path / "ca.key")), "ads").error
    missing = look_at(TlsFiles(one.ca, str(tmp_path / "none.crt"), one.key), "ads")
    assert missing.error == f"{tmp_path / 'none.crt'}: No such file or directory"
    (tmp_path / "empty.crt").write_text("")
    assert "is no certificate" in look_at(TlsFiles(one.ca, str(tmp_path / "empty.crt"), one.key), "ads").error
    os.chmod(one.key, 0o644)
    assert look_at(one, "ads").key_open_to_others


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_reported_as_any_other_that_does_not_answer(address: str) -> None:
    answer_s, why = _dialled(address, 0.1)
    assert answer_s is None
    assert why


def run(*arguments: str, code: int) -> str:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"ELASTICPS_URL": None})
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_shows_what_is_wrong_and_what_to_do() -> None:
    assert "python: 3." in run(code=0)
    text = run("--servers", "1000", code=1)
    assert "wrong   memory: " in text
    assert "→ give each --memory-limit" in text
    found = json.loads(run("--json", "--servers", "1000", code=1))
    assert found["severity"] == "wrong"
    assert {"name", "severity", "found", "meaning", "remedy"} == found["checks"][0].keys()
    assert "must begin with etcd://" in run("http://127.0.0.1/x", code=2)
    assert "wrong   cluster: etcd gave no answer" in run("etcd://127.0.0.1:1/x", "--timeout", "0.5", code=3)


def looked_at(url: str) -> ClusterFacts:
    found = gather(url).cluster
    assert found is not None
    return found


def test_a_cluster_is_looked_at(
    local_cluster: NewCluster, eventually: Callable[[Callable[[], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = local_cluster(servers=2, ranges=16, tls=True)
    url = cluster.operator_url
    # A server hears of its leader's time with the leader's next beat.
    eventually(lambda: any(clock.whose == "the leading coordinator" for clock in looked_at(url).clocks))
    facts = looked_at(url)
    assert facts.etcd_release.startswith("3.")
    assert sorted(clock.whose for clock in facts.clocks) == ["server s0", "server s1", "the leading coordinator"]
    assert all(abs(clock.offset_s) < 60 for clock in facts.clocks)  # it is one clock; a busy machine may be late
    assert [port.answer_s is not None for port in facts.ports] == [True] * 5
    assert facts.certificate is not None
    assert "/operator/" in facts.certificate.identity
    assert [server.error for server in facts.servers] == ["", ""]
    found = json.loads(run(url, "--json", code=0))
    assert [check["name"] for check in found["checks"]][-3:] == ["certificate", "cluster", "clocks"]

    async def silent(address: str, *more: Any) -> dict[str, Any]:
        if address == cluster.server("s1").admin:
            raise ClusterUnreachable(f"the server at {address} did not answer")
        return await fetch_status(address, *more)

    monkeypatch.setattr("elasticps.doctor.gather.fetch_status", silent)
    assert "wrong   servers: s1: the server at" in run(url, code=4)
