"""Metrics of real processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil
import pytest

import elasticps as eps
from elasticps.local.etcd import free_ports
from elasticps.metrics import serve_client
from tests.conftest import NewUrl
from tests.metrics.fleet import Fleet, get, scrape

STEPS = 64


def by_label(found: dict[tuple[tuple[str, str], ...], float], label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for labels, value in found.items()}


@pytest.fixture
def ports() -> list[int]:
    return free_ports(4)


@pytest.fixture
def url(fleet: Fleet, etcd_url: NewUrl, ports: list[int]) -> str:
    """A cluster of one coordinator (the first port) and two servers, whose zones differ."""
    found = etcd_url()
    options = ["--replicas", "2", "--min-servers", "2", "--ranges", "8", "--metrics-port", str(ports[0])]
    fleet.start("c0", ["coordinator", "--url", found, "--name", "c0", *options])
    fleet.wait_ready()
    for i in (0, 1):
        options = ["--zone", f"z{i}", "--advertise", "localhost", "--metrics-port", str(ports[1 + i])]
        fleet.start(f"s{i}", ["server", "--url", found, "--name", f"s{i}", *options])
    fleet.wait_ready()
    return found


def test_processes_show_their_work(
    fleet: Fleet, url: str, ports: list[int], eventually: Callable[[Callable[[], bool]], None]
) -> None:
    assert fleet.processes["s0"].ready["address"].startswith("localhost:")
    with eps.connect(url, worker="w0", consistency=eps.SSP(staleness=1)) as ps:
        close = serve_client(ps, ports[3])
        try:
            table = ps.table("t", dim=4, optimizer=eps.SGD(lr=1.0))
            keys = np.arange(100)
            for _ in range(STEPS):
                ps.push({table: (keys, np.ones((100, 4), np.float32))})
                table.pull(keys)
            ps.flush()
            worker = scrape(ports[3])
            gated = ps.table("gated", dim=4, optimizer=eps.SGD(lr=1.0), admission=eps.MinCount(2))
            for _ in range(2):
                ps.push({gated: (keys[:30], np.ones((30, 4), np.float32))})
            ps.push({gated: (keys[30:40], np.ones((10, 4), np.float32))})
            ps.flush()
        finally:
            close()
        servers = [scrape(port) for port in ports[1:3]]
    assert worker["elasticps_worker_steps_total"] == worker["elasticps_worker_committed_steps_total"] == {(): STEPS}
    assert worker["elasticps_worker_outstanding_steps"] == {(): 0}

    def total(name: str, label: str = "kind") -> dict[str, float]:
        each = [by_label(server[name], label) for server in servers]
        return {key: sum(found[key] for found in each) for key in each[0]}

    assert total("elasticps_server_rows_total")["push"] == STEPS * 100 + 70
    assert total("elasticps_server_rows_total")["pull"] == STEPS * 100
    assert total("elasticps_server_ranges", "role") == {"head": 8, "held": 16, "joining": 0}
    assert total("elasticps_server_received_bytes_total")["push"] >= STEPS * 100 * (8 + 16)
    assert total("elasticps_server_received_bytes_total")["forward"] >= STEPS * 100 * (8 + 16)
    assert {"push", "pull"} <= total("elasticps_server_refused_total").keys()
    (home,) = [server for server in servers if "elasticps_server_worker_clock" in server]
    assert by_label(home["elasticps_server_worker_clock"], "worker") == {"w0": STEPS + 3}
    for of in ("max", "min"):
        assert by_label(home[f"elasticps_server_worker_clock_{of}"], "app") == {"default": STEPS + 3}
    for i, server in enumerate(servers):
        assert server["elasticps_server_rows"] == {(): 130}
        assert server["elasticps_server_admitted_keys_total"] == {(): 30}
        assert server["elasticps_server_candidates"] == {(): 10}
        assert set(by_label(server["elasticps_server_evicted_rows_total"], "reason").values()) == {0}
        assert server["elasticps_server_log_operations"] == {(): 0}
        assert server["elasticps_server_lease_seconds"][()] > 0
        info = dict(next(iter(server["elasticps_server_info"])))
        assert (info["server"], info["zone"], info["incarnation"]) == (f"s{i}", f"z{i}", "1")
        waited = by_label(server["elasticps_server_request_seconds_count"], "kind")
        assert waited["push"] > 0
        assert waited["pull"] > 0
        assert server["elasticps_server_busy_seconds_total"][()] > 0
        assert server["process_resident_memory_bytes"][()] > 1e6

    eventually(lambda: by_label(scrape(ports[0])["elasticps_cluster_servers"], "state")["serving"] == 2)
    before = scrape(ports[0])
    assert before["elasticps_coordinator_leader"] == {(): 1}
    assert before["elasticps_coordinator_store_up"] == {(): 1}
    assert by_label(before["elasticps_cluster_ranges"], "replicas") == {"0": 0, "1": 0, "2": 8}
    assert before["elasticps_cluster_one_zone_ranges"] == {(): 0}
    fleet.processes["s1"].kill()
    eventually(lambda: by_label(scrape(ports[0])["elasticps_cluster_ranges"], "replicas")["1"] == 8)
    after = scrape(ports[0])
    assert after["elasticps_cluster_failovers_total"] == {(): before["elasticps_cluster_failovers_total"][()] + 1}
    assert after["elasticps_cluster_short_ranges"] == {(): 8}
    assert after["elasticps_cluster_waiting_ranges"] == {(): 0}
    fleet.processes["s0"].kill()
    eventually(lambda: scrape(ports[0])["elasticps_cluster_waiting_ranges"] == {(): 8})
    eventually(lambda: by_label(scrape(ports[0])["elasticps_cluster_servers"], "state")["silent"] == 1)


def test_a_process_answers_health_checks_and_ends_if_its_port_is_in_use(
    fleet: Fleet, url: str, ports: list[int]
) -> None:
    assert get(ports[0], "/healthz") == get(ports[1], "/healthz") == "ok\n"
    process = fleet.start("s9", ["server", "--url", url, "--name", "s9", "--metrics-port", str(ports[0])])
    assert process.popen.wait(120) == 2
    assert (
        f"the metrics port 127.0.0.1:{ports[0]} cannot be had: address already in use; take another --metrics-port"
        in process.log.read_text()
    )


def test_a_server_waits_for_its_cluster_and_can_be_ended_meanwhile(
    fleet: Fleet, etcd_url: NewUrl, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    url = etcd_url()
    patient = fleet.start("s0", ["server", "--url", url, "--name", "s0", "--wait", "600"])
    ended = fleet.start("s1", ["server", "--url", url, "--name", "s1", "--wait", "600"])
    hasty = fleet.start("s2", ["server", "--url", url, "--name", "s2"])
    assert hasty.popen.wait(120) == 2
    assert "does not exist" in hasty.log.read_text()
    eventually(lambda: bool(psutil.Process(ended.pid).net_connections()))  # to etcd: it handles signals by then
    ended.popen.terminate()
    assert ended.popen.wait(100) == 0
    del fleet.processes["s1"], fleet.processes["s2"]
    fleet.start("c0", ["coordinator", "--url", url, "--name", "c0"])
    fleet.wait_ready()
    assert patient.ready["name"] == "s0"
