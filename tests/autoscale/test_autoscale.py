"""The autoscaler of the leading coordinator: a real cluster, and an API server that keeps one number, over HTTPS."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.autoscale import AutoscalePolicy
from elasticps.autoscale.kubernetes import KubernetesScale, Replicas
from elasticps.autoscale.loop import AutoscaleLoop
from elasticps.cli.autoscale import Mode, scaling_of
from elasticps.errors import ClusterUnreachable, ConfigError
from elasticps.security.authority import Authority
from elasticps.system import background
from tests.conftest import NewCluster

SCALE = "/apis/apps/v1/namespaces/elasticps/statefulsets/elasticps-server/scale"
TOKEN = "the-pods-own-token"
PATIENCE_S = 120.0


class FakeApi:
    """An API server with one StatefulSet. `requests` has the method, the type of the body and the body of each."""

    def __init__(self, folder: Path) -> None:
        self.replicas = 1
        self.version = 7
        self.requests: list[tuple[str, str, Any]] = []
        self.allowed = True
        authority = Authority.create(folder)
        files = authority.issue_etcd(["127.0.0.1"])
        (folder / "token").write_text(TOKEN + "\n")
        (folder / "namespace").write_text("elasticps")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                api.requests.append((self.command, self.headers.get("Content-Type", ""), body))
                status, answer = api.answer(self.path, self.headers.get("Authorization", ""), body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._server.server_address[1])
        }  # fmt: skip

    def answer(self, path: str, authorization: str, body: Any) -> tuple[int, dict[str, Any]]:
        if authorization != f"Bearer {TOKEN}" or not self.allowed:
            return 403, {"kind": "Status", "message": "statefulsets/scale is forbidden", "code": 403}
        if path.partition("?")[0] != SCALE:
            return 404, {"kind": "Status", "message": f"{path} is not found", "code": 404}
        if body is not None:
            seen = body.get("metadata", {}).get("resourceVersion")
            if seen is not None and seen != str(self.version):
                return 409, {"kind": "Status", "message": "the object has been modified", "code": 409}
            self.replicas, self.version = int(body["spec"]["replicas"]), self.version + 1
        metadata = {"name": "elasticps-server", "namespace": "elasticps", "resourceVersion": str(self.version)}
        return 200, {
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": {"replicas": self.replicas},
            "status": {"replicas": self.replicas},
        }  # fmt: skip

    @property
    def patches(self) -> list[int]:
        """The numbers that were asked for."""
        return [int(body["spec"]["replicas"]) for method, _, body in self.requests if method == "PATCH"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    found = FakeApi(tmp_path)
    yield found
    found.close()


def scale_of(api: FakeApi, folder: Path) -> KubernetesScale:
    return KubernetesScale("elasticps-server", folder, api.environment)


def test_a_pod_reads_and_changes_the_scale_of_its_servers_with_its_own_token(api: FakeApi, tmp_path: Path) -> None:
    scale = scale_of(api, tmp_path)
    seen = scale.read()
    assert seen == Replicas(1, "7")
    assert scale.write(4, seen)
    assert (api.replicas, scale.read().count) == (4, 4)
    assert api.requests[1][1] == "application/merge-patch+json"
    assert not scale.write(2, seen)  # somebody, it was us, has changed it since
    assert api.replicas == 4


def test_the_official_client_sees_and_does_the_same(api: FakeApi, tmp_path: Path) -> None:
    client = pytest.importorskip("kubernetes").client
    settings = client.Configuration()
    settings.host = f"https://127.0.0.1:{api.environment['KUBERNETES_SERVICE_PORT']}"
    settings.ssl_ca_cert = str(tmp_path / "ca.crt")
    settings.api_key = {"authorization": f"Bearer {TOKEN}"}
    scale = scale_of(api, tmp_path)
    with client.ApiClient(settings) as connection:
        apps = client.AppsV1Api(connection)
        name = ("elasticps-server", "elasticps")
        assert scale.write(5, scale.read())
        found = apps.read_namespaced_stateful_set_scale(*name)
        assert (found.spec.replicas, found.metadata.resource_version) == (5, "8")
        apps.patch_namespaced_stateful_set_scale(*name, {"spec": {"replicas": 3}})
    assert scale.read() == Replicas(3, "9")


def test_what_kubernetes_refuses_is_told_with_its_reason(api: FakeApi, tmp_path: Path) -> None:
    scale = scale_of(api, tmp_path)
    seen = scale.read()
    api.allowed = False
    with pytest.raises(ClusterUnreachable, match=r"read the scale of StatefulSet elasticps/.*: 403 .*forbid"):
        scale.read()
    with pytest.raises(ClusterUnreachable, match="change the scale"):
        scale.write(2, seen)
    api.allowed = True
    with pytest.raises(ClusterUnreachable, match="404"):
        KubernetesScale("other", tmp_path, api.environment).read()
    (tmp_path / "token").write_text("another")
    with pytest.raises(ClusterUnreachable, match="403"):  # it is read for each call
        scale.read()


def test_outside_of_a_pod_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KUBERNETES_SERVICE_HOST.*deploy/kubernetes/autoscaler"):
        KubernetesScale("elasticps-server", tmp_path, {})
    with pytest.raises(ConfigError, match="namespace"):
        KubernetesScale("x", tmp_path, {"KUBERNETES_SERVICE_HOST": "h", "KUBERNETES_SERVICE_PORT": "1"})


@pytest.mark.parametrize("servers", ["", "3", "0-2", "5-3", "a-b", "-1-3"])
def test_bounds_that_cannot_be_are_refused(servers: str) -> None:
    assert scaling_of(Mode.OFF, servers, "x") is None
    with pytest.raises(ConfigError):
        scaling_of(Mode.ON, servers, "elasticps-server")


def test_a_cluster_grows_and_shrinks_as_the_policy_says_and_no_value_is_lost(
    local_cluster: NewCluster, api: FakeApi, tmp_path: Path
) -> None:
    cluster = local_cluster(servers=1, replicas=1, ranges=16)
    keys = np.arange(100)

    async def run(least: int, most: int, until: Callable[[], bool], *, dry_run: bool = False) -> None:
        """Scales between these bounds until something has happened."""
        store = await open_store(cluster.url)
        policy = AutoscalePolicy(least, most, load_low=0.9, load_high=1.0, memory_low=0.9, memory_high=1.0)
        scale = scale_of(api, tmp_path)
        loop = AutoscaleLoop(store, None, policy, scale, dry_run=dry_run, look_s=0.02)
        task = asyncio.create_task(loop.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not until() and not task.done():  # noqa: ASYNC110  # of another thread
                    await asyncio.sleep(0.02)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await store.close()

    def looked(times: int) -> Callable[[], bool]:
        """Whether it has read the scale so often from now on."""
        before = len(api.requests)
        return lambda: len(api.requests) >= before + times

    with eps.connect(cluster.url, worker="w0") as ps:
        table = ps.table("sums", dim=1, optimizer=eps.Accumulate())
        ps.push({table: (keys, np.ones((100, 1), np.float32))}).result()
        background.run(run(3, 4, looked(3), dry_run=True))
        assert api.patches == []
        background.run(run(3, 4, lambda: api.replicas == 3))
        assert api.patches == [3]
        background.run(run(3, 4, looked(3)))  # two servers are still to come: it waits
        assert api.patches == [3]
        cluster.scale(3)  # as the StatefulSet does
        background.run(run(1, 2, lambda: api.replicas == 2))
        background.run(run(1, 1, looked(3)))  # one is to leave first, before another one is asked to
        assert api.patches == [3, 2]
        cluster.scale(2)
        background.run(run(1, 1, lambda: api.replicas == 1))
        cluster.scale(1)
        assert table.pull(keys).tolist() == [[1.0]] * 100
