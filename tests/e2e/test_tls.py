"""A cluster of real processes with TLS trains, survives a kill, renews certificates and refuses strangers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.errors import CoordinationError
from coordinator.core.url import parse
from elasticps.admin.audit import audit
from elasticps.cli.app import app
from elasticps.cli.output import ExitCode
from elasticps.cli.status import look
from elasticps.errors import ClusterUnreachable, ConfigError, ServerError
from elasticps.security.authority import Authority
from elasticps.security.identity import Identity, Role
from elasticps.system import background
from tests.conftest import NewCluster


async def write(url: str, key: str) -> None:
    store = await open_store(url)
    try:
        await store.get(key)  # everybody may
        await store.put(key, b"mine")
    finally:
        await store.close()


def test_a_cluster_with_tls_trains_renews_and_keeps_others_out(
    local_cluster: NewCluster, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    cluster = local_cluster(servers=3, tls=True, ranges=16)
    with ThreadPoolExecutor() as threads:
        assert len(set(threads.map(lambda _: cluster.url, range(4)))) == 1  # one certificate, and its own key
    keys, ones = np.arange(5000), np.ones((5000, 2), np.float32)
    with eps.connect(cluster.url, worker="w0") as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (keys, ones)}).result()
        files = parse(cluster.url).tls
        assert files is not None
        authority = Authority(Path(files.ca).parent)
        for name in ("worker/*/*", "server/s0", "server/s1", "server/s2"):  # renewed while it trains
            authority.issue(Identity.parse(f"spiffe://elasticps/local/{name}"))
        eventually(lambda: "certificates were renewed" in cluster.log("s0"))
        cluster.kill("s1")
        ps.push({table: (keys, ones)}).result()
        np.testing.assert_array_equal(table.pull(keys), 2 * ones)
    assert background.run(look(cluster.operator_url, 30.0))["epoch"] > 1
    assert not audit(cluster.operator_url).wrong
    with pytest.raises(ServerError, match="takes an operator"):
        audit(cluster.url)
    root_url = str(replace(parse(cluster.url), tls=authority.issue_root()))
    for url, code in (
        (root_url, ExitCode.OK),
        (cluster.operator_url, ExitCode.FAILED),
    ):  # again; not by others
        assert CliRunner().invoke(app, ["cluster", "protect", "--url", url]).exit_code == code
    server_url = str(
        replace(parse(cluster.url), tls=authority.issue(Identity.parse("spiffe://elasticps/local/server/s9")))
    )
    for url, keys_of_others in (
        (cluster.url, ("view", "config", "election", "servers/s0", "drains/s0", "roster")),
        (server_url, ("view", "config", "election", "workers/default/w0", "tables/default/t", "roster")),
    ):
        for key in keys_of_others:
            with pytest.raises(CoordinationError, match="permission denied"):
                background.run(write(url, key))
    of = {  # etcd learns of an application with the first certificate for one of its workers
        who: str(replace(parse(cluster.url), tls=authority.issue(Identity("local", Role.WORKER, "*", who))))
        for who in ("bank", "thief")
    }
    with eps.connect(of["bank"], worker="b", app="bank", timeout=30.0) as ps:
        gold = ps.table("gold", dim=2, optimizer=eps.Accumulate())
        ps.push({gold: (keys, ones)}).result()
        for key in ("tables/bank/gold", "workers/bank/b", "last-worker/bank/b", "rates/bank/gold"):
            with pytest.raises(CoordinationError, match="permission denied"):
                background.run(write(of["thief"], key))
        np.testing.assert_array_equal(gold.pull(keys), ones)
    (authority.folder / "etcd.url").unlink()  # as of an authority that is kept elsewhere
    new = replace(parse(cluster.url), tls=authority.issue(Identity("local", Role.WORKER, "*", "new")))
    with pytest.raises(ClusterUnreachable, match="cluster protect --app"):
        eps.connect(str(new), worker="n", app="new", timeout=30.0)
    protecting = ["cluster", "protect", "--url", root_url, "--app", "new"]
    assert CliRunner().invoke(app, protecting).stdout.endswith("applications: bank, default, new\n")
    eps.connect(str(new), worker="n", app="new", timeout=30.0).close()
    with pytest.raises(ClusterUnreachable):
        eps.connect(cluster.url.partition("?")[0], worker="w1", timeout=2.0)
    with pytest.raises(ConfigError, match="not spiffe://elasticps/local/worker/default/w1"):
        eps.connect(cluster.operator_url, worker="w1", timeout=30.0)
