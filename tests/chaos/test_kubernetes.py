"""The calls that faults on pods make, on an API that only records them."""

from __future__ import annotations

import base64
import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from urllib3.exceptions import MaxRetryError

from chaos.live import kubernetes
from chaos.live.kubernetes import KubernetesStage, OfficialApi
from chaos.live.nemesis import Nemesis
from chaos.live.plan import ClusterPlan
from chaos.live.targets import Situation
from elasticps.errors import ConfigError, Error
from tests.chaos.scenes import action_of, view_of

PLAN = ClusterPlan(kind="kubernetes", url="etcd://elasticps-etcd:2379/demo")


def pod(name: str, uid: str = "", phase: str = "Running", ready: str = "True", restarts: int = 0) -> Any:
    ended = SimpleNamespace(reason="Error", exit_code=70)
    container = SimpleNamespace(restart_count=restarts, last_state=SimpleNamespace(terminated=ended))
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name, uid=uid or name, deletion_timestamp=None),
        spec=SimpleNamespace(node_name=f"node-of-{name}"),
        status=SimpleNamespace(
            phase=phase,
            conditions=[SimpleNamespace(type="Ready", status=ready)],
            container_statuses=[container] if restarts else None,
        ),
    )


class RecordingApi:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.found = {
            PLAN.server_labels: [pod(f"elasticps-server-{i}") for i in range(3)],
            PLAN.coordinator_labels: [pod("elasticps-coordinator-a"), pod("elasticps-coordinator-b")],
            PLAN.etcd_labels: [pod("elasticps-etcd-0")],
        }
        self.answer = ""
        self.unanswered = False
        self.count = 3
        self.cordoned_before: set[str] = set()
        self.refused: set[str] = set()  # nodes that it does not let be changed

    def pods(self, labels: str) -> list[Any]:
        return self.found[labels]

    def delete_pod(self, name: str, uid: str, grace_s: int | None) -> None:
        assert uid in {each.metadata.uid for pods in self.found.values() for each in pods}
        self.calls.append(("delete", name, grace_s))

    def execute(self, name: str, command: list[str]) -> str:
        self.calls.append(("exec", name, command))
        if self.unanswered:
            raise Error("Kubernetes did not answer")
        return self.answer

    def cordoned(self, node: str) -> bool:
        changes = [call[2] for call in self.calls if call[:2] == ("cordon", node)]
        return changes[-1] if changes else node in self.cordoned_before

    def cordon(self, node: str, on: bool) -> None:
        self.calls.append(("cordon", node, on))
        if node in self.refused:
            raise Error(f"Kubernetes refused patch_node {node}: 500 Internal Server Error")

    def replicas(self, stateful_set: str) -> int:
        return self.count

    def scale(self, stateful_set: str, replicas: int) -> None:
        self.calls.append(("scale", stateful_set, replicas))


@pytest.fixture
def api() -> RecordingApi:
    return RecordingApi()


@pytest.fixture
def stage(api: RecordingApi) -> Iterator[KubernetesStage]:
    stage = KubernetesStage(PLAN, api)
    yield stage
    stage.close()


def test_a_kill_deletes_the_pod_without_grace_and_a_new_one_of_the_name_counts(
    stage: KubernetesStage, api: RecordingApi
) -> None:
    stage.start_all()
    stage.kill("elasticps-server-1")
    assert api.calls == [("delete", "elasticps-server-1", 0)]
    assert not stage.running("elasticps-server-1")
    assert stage.names("server") == ["elasticps-server-0", "elasticps-server-2"]
    api.found[PLAN.server_labels][1] = pod("elasticps-server-1", uid="2", ready="False")
    assert stage.running("elasticps-server-1")
    assert not stage.ready("elasticps-server-1")
    api.found[PLAN.server_labels][1] = pod("elasticps-server-1", uid="2")
    assert stage.ready("elasticps-server-1")


def test_a_drain_deletes_the_pod_with_its_own_grace(stage: KubernetesStage, api: RecordingApi) -> None:
    stage.terminate("elasticps-server-0")
    assert api.calls == [("delete", "elasticps-server-0", None)]


def test_a_pause_is_a_signal_by_exec(stage: KubernetesStage, api: RecordingApi) -> None:
    stage.pause("elasticps-server-2")
    assert stage.names("server", paused=False) == ["elasticps-server-0", "elasticps-server-1"]
    stage.resume("elasticps-server-2")
    assert len(stage.names("server", paused=False)) == 3
    (stop, cont) = api.calls
    assert stop[:2] == ("exec", "elasticps-server-2")
    assert "kill -STOP" in stop[2][2]
    assert "kill -CONT" in cont[2][2]


def test_a_signal_that_does_not_arrive_is_an_error(stage: KubernetesStage, api: RecordingApi) -> None:
    api.answer = "no process of elasticps but number 1"
    with pytest.raises(Error, match="SIGSTOP did not reach elasticps-server-0: no process"):
        stage.pause("elasticps-server-0")


def test_growing_and_shrinking_scale_the_stateful_set(stage: KubernetesStage, api: RecordingApi) -> None:
    assert stage.grow() == "elasticps-server-3"
    assert stage.shrink("elasticps-server-0") == "elasticps-server-2"
    assert api.calls == [("scale", "elasticps-server", 4), ("scale", "elasticps-server", 2)]
    api.count = 1
    with pytest.raises(Error, match="none can be taken away"):
        stage.shrink("elasticps-server-0")


def test_a_cordon_ends_with_its_fault_or_with_the_run(api: RecordingApi) -> None:
    stage = KubernetesStage(PLAN, api)
    node = stage.cordon("elasticps-server-0")
    stage.uncordon(node)
    stage.cordon("elasticps-server-1")
    stage.close()
    assert api.calls == [
        ("cordon", f"node-of-elasticps-server-{i}", on) for i, on in ((0, True), (0, False), (1, True), (1, False))
    ]


def test_a_node_that_a_person_has_cordoned_stays_cordoned(api: RecordingApi) -> None:
    stage = KubernetesStage(PLAN, api)
    api.cordoned_before.add("node-of-elasticps-server-0")
    stage.uncordon(stage.cordon("elasticps-server-0"))
    stage.cordon("elasticps-server-0")
    stage.close()
    assert api.calls == []


def test_a_node_that_two_faults_cordon_takes_pods_again_after_both(stage: KubernetesStage, api: RecordingApi) -> None:
    node = stage.cordon("elasticps-server-0")
    assert stage.cordon("elasticps-server-0") == node
    stage.uncordon(node)
    assert ("cordon", node, False) not in api.calls
    stage.uncordon(node)
    assert api.calls[-1] == ("cordon", node, False)


def test_a_node_that_cannot_be_uncordoned_is_reported_and_all_others_are_uncordoned(api: RecordingApi) -> None:
    stage = KubernetesStage(PLAN, api)
    nodes = [stage.cordon(f"elasticps-server-{i}") for i in range(3)]
    stage.pause("elasticps-server-2")
    api.refused.add(nodes[0])
    api.calls.clear()
    (left,) = stage.close()
    assert [call for call in api.calls if call[0] == "cordon"] == [("cordon", node, False) for node in nodes]
    assert "kill -CONT" in api.calls[-1][2][2]
    assert left.startswith(f"node {nodes[0]} may take no new pods still, `kubectl uncordon {nodes[0]}` ends that: ")
    assert left.endswith("500 Internal Server Error")
    assert not stage.folder.exists()


def test_a_pod_that_may_still_be_frozen_is_reported(api: RecordingApi) -> None:
    stage = KubernetesStage(PLAN, api)
    stage.pause("elasticps-server-2")
    api.answer = "no such container"
    (left,) = stage.close()
    assert left.startswith("pod elasticps-server-2 may be frozen still")


def test_a_process_in_a_pod_that_ends_by_itself_is_seen(
    stage: KubernetesStage, api: RecordingApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LOOK_S", 0.0)
    servers = api.found[PLAN.server_labels]
    servers[0] = pod("elasticps-server-0", restarts=4)  # of before
    assert stage.poll() == []
    servers[0], servers[1] = pod("elasticps-server-0", restarts=5), pod("elasticps-server-1", restarts=1)
    assert stage.ended() == [
        (f"elasticps-server-{i}", f"server elasticps-server-{i} was started again by Kubernetes: Error, exit code 70")
        for i in (0, 1)
    ]
    assert stage.ended() == []


def test_no_pod_ends_by_itself_that_has_never_been_ready_or_is_frozen(
    stage: KubernetesStage, api: RecordingApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LOOK_S", 0.0)
    servers = api.found[PLAN.server_labels]
    assert stage.ended() == []
    stage.pause("elasticps-server-0")
    servers[0] = pod("elasticps-server-0", restarts=1)  # by its liveness probe
    stage.kill("elasticps-server-1")
    for restarts in (1, 2):  # etcd is away
        servers[1] = pod("elasticps-server-1", uid="2", ready="False", restarts=restarts)
        assert stage.ended() == []
    stage.resume("elasticps-server-0")
    servers[1] = pod("elasticps-server-1", uid="2", restarts=2)
    assert stage.ended() == []
    servers[1] = pod("elasticps-server-1", uid="2", restarts=3)
    assert [name for name, _ in stage.ended()] == ["elasticps-server-1"]


def test_pods_are_looked_at_now_and_then(stage: KubernetesStage, api: RecordingApi) -> None:
    assert stage.poll() == []
    api.found[PLAN.server_labels][0] = pod("elasticps-server-0", restarts=1)
    assert stage.poll() == []  # asked too soon
    stage._looked = 0.0
    assert len(stage.poll()) == 1


def test_a_run_without_servers_is_refused(stage: KubernetesStage, api: RecordingApi) -> None:
    api.found[PLAN.server_labels] = [pod("elasticps-server-0", phase="Pending")]
    with pytest.raises(Error, match="no server runs in namespace default"):
        stage.start_all()


def test_a_plan_runs_on_pods_as_on_processes(stage: KubernetesStage, api: RecordingApi) -> None:
    names = stage.names("server")
    view = view_of([[names[0], names[1]], [names[1], names[2]], [names[2], names[0]], [names[0], names[2]]])
    scene = Situation(view, {role: stage.names(role) for role in ("server", "coordinator", "etcd")}, leader="?")
    nemesis = Nemesis(stage, [action_of("kill", "head-of:hottest", back=0)], lambda: scene)
    nemesis.step(1.0)
    nemesis.step(1.1)
    assert [fault.state for fault in nemesis.faults] == ["running"]
    api.found[PLAN.server_labels][0] = pod(names[0], uid="2")
    nemesis.step(2.0)
    assert [fault.state for fault in nemesis.faults] == ["over"]
    assert api.calls == [("delete", names[0], 0)]


def test_without_the_official_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"pip install 'elasticps\[chaos,kubernetes\]'"):
        OfficialApi("default")


def test_an_api_server_that_cannot_be_reached_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("kubernetes")
    monkeypatch.setattr(client.config, "load_incluster_config", lambda: None)
    monkeypatch.setattr(kubernetes, "PATIENCE_S", 0.0)
    api = OfficialApi("there")

    def patch_node(name: str, body: object, **options: object) -> None:
        raise MaxRetryError(None, "/", ConnectionRefusedError(111, "refused"))  # type: ignore[arg-type]

    monkeypatch.setattr(api, "_core", SimpleNamespace(patch_node=patch_node))
    with pytest.raises(Error, match="Kubernetes was asked to change node n, and did not answer: "):
        api.cordon("n", False)


@pytest.mark.parametrize("status", [0, 429, 503])
def test_an_api_server_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Any error of its ended the run."""
    client = pytest.importorskip("kubernetes")
    monkeypatch.setattr(client.config, "load_incluster_config", lambda: None)
    api = OfficialApi("there")
    answers = iter(
        [client.client.ApiException(status, "busy"), MaxRetryError(None, "/"), client.client.ApiException(404, "gone")]  # type: ignore[arg-type]
    )

    def read_node(name: str, **options: object) -> None:
        raise next(answers)

    monkeypatch.setattr(api, "_core", SimpleNamespace(read_node=read_node))
    with pytest.raises(Error, match="Kubernetes refused to read node n: 404 gone"):
        api.cordoned("n")


@pytest.mark.parametrize("status", [404, 409])
def test_a_pod_that_is_gone_need_not_be_deleted(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """The first of two requests may have reached Kubernetes, though it was not answered."""
    client = pytest.importorskip("kubernetes")
    monkeypatch.setattr(client.config, "load_incluster_config", lambda: None)
    api = OfficialApi("there")
    answers = iter([client.client.ApiException(500, "unsure"), client.client.ApiException(status, "no such pod")])

    def delete_namespaced_pod(*_: object, **options: object) -> None:
        raise next(answers)

    monkeypatch.setattr(api, "_core", SimpleNamespace(delete_namespaced_pod=delete_namespaced_pod))
    api.delete_pod("p", "uid", 0)
    assert next(answers, None) is None


def test_every_method_that_is_called_exists_in_the_official_client(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("kubernetes")
    monkeypatch.setattr(client.config, "load_incluster_config", lambda: None)
    api = OfficialApi("there")
    calls: list[tuple[Any, ...]] = []

    class Core:
        def __getattr__(self, name: str) -> Any:
            assert hasattr(client.client.CoreV1Api, name) or hasattr(client.client.AppsV1Api, name)

            def call(*arguments: Any, **options: Any) -> Any:
                assert options.pop("_request_timeout") == (kubernetes.REACH_S, kubernetes.ANSWER_S)
                calls.append((name, arguments, options))
                return SimpleNamespace(items=[1], spec=SimpleNamespace(replicas=4, unschedulable=None))

            return call

    monkeypatch.setattr(api, "_core", Core())
    monkeypatch.setattr(api, "_apps", Core())
    assert api.pods("a=b") == [1]
    api.delete_pod("p", "uid", 0)
    api.delete_pod("p", "uid", None)
    assert not api.cordoned("n")
    api.cordon("n", True)
    assert api.replicas("set") == 4
    api.scale("set", 5)
    assert calls == [
        ("list_namespaced_pod", ("there",), {"label_selector": "a=b"}),
        ("delete_namespaced_pod", ("p", "there"), {"body": {"preconditions": {"uid": "uid"}, "gracePeriodSeconds": 0}}),
        ("delete_namespaced_pod", ("p", "there"), {"body": {"preconditions": {"uid": "uid"}}}),
        ("read_node", ("n",), {}),
        ("patch_node", ("n", {"spec": {"unschedulable": True}}), {}),
        ("read_namespaced_stateful_set_scale", ("set", "there"), {}),
        ("patch_namespaced_stateful_set_scale", ("set", "there", {"spec": {"replicas": 5}}), {}),
    ]


WAYS = {
    "pods": lambda api: api.pods("a=b"),
    "delete_pod": lambda api: api.delete_pod("p", "uid", 0),
    "execute": lambda api: api.execute("p", ["true"]),
    "cordon": lambda api: api.cordon("n", True),
    "scale": lambda api: api.scale("set", 5),
}


def served(monkeypatch: pytest.MonkeyPatch, port: int) -> OfficialApi:
    """The real client of an API server on that port, with little patience."""
    client = pytest.importorskip("kubernetes")
    monkeypatch.setattr(client.client.Configuration, "_default", None)
    settings = client.client.Configuration(host=f"http://127.0.0.1:{port}")
    monkeypatch.setattr(
        client.config, "load_incluster_config", lambda: client.client.Configuration.set_default(settings)
    )
    for name, seconds in (("REACH_S", 0.2), ("ANSWER_S", 0.2), ("PATIENCE_S", 0.5)):
        monkeypatch.setattr(kubernetes, name, seconds)
    return OfficialApi("there")


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_port_is_an_error_of_ours_for_every_call(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """An exec raised AttributeError, so that nothing was undone at the end."""
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        api = served(monkeypatch, taken.getsockname()[1])
        with pytest.raises(Error, match=r"^Kubernetes (refused to|was asked to) .*refused"):
            WAYS[way](api)


@pytest.mark.parametrize("way", WAYS)
def test_an_api_server_that_accepts_and_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = served(monkeypatch, silent.getsockname()[1])
        with pytest.raises(Error, match=r"^Kubernetes was asked to .*, and did not answer: "):
            WAYS[way](api)


@pytest.mark.parametrize(
    ("message", "ends", "outcome"),
    [
        (b"\x01no such process", True, "no such process"),
        (b"\x03" + b'{"status": "Success"}', True, ""),
        (b"\x03" + b'{"status": "Failure", "message": "no sh"}', True, "Failure: no sh"),  # as in a pod without a shell
        (b"\x01no such", False, "no end within 0\\.4 s"),
        (b"", None, "WebSocket"),  # the stream breaks
    ],
)
def test_the_output_of_a_command_counts_only_after_its_end(
    monkeypatch: pytest.MonkeyPatch, message: bytes, ends: bool | None, outcome: str
) -> None:
    """Half of what it wrote, or nothing, would mean that all went well. A stream that broke ended the run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_a_stream, args=(server, message, ends), daemon=True)
        thread.start()
        api = served(monkeypatch, server.getsockname()[1])
        monkeypatch.setattr(kubernetes, "PATIENCE_S", 0.0)
        if ends is not False:
            monkeypatch.setattr(kubernetes, "ANSWER_S", 60.0)
        if ends:
            assert api.execute("p", ["true"]) == outcome
        else:
            with pytest.raises(Error, match=f"was asked to execute in pod p, and did not answer: {outcome}"):
                api.execute("p", ["true"])
        thread.join()


def answer_a_stream(server: socket.socket, message: bytes, ends: bool | None) -> None:
    """Accepts one websocket, sends it a message, and its end or not, and waits until it is closed. ends: None breaks
    it off."""
    connection, _ = server.accept()
    with connection:
        lines = connection.recv(65536).decode().split("\r\n")
        (key,) = (line.partition(": ")[2] for line in lines if line.lower().startswith("sec-websocket-key"))
        digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        head = ("HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade",
                f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}",
                "Sec-WebSocket-Protocol: v4.channel.k8s.io", "", "")  # fmt: skip
        connection.sendall("\r\n".join(head).encode())
        if ends is None:
            return
        connection.sendall(bytes([0x82, len(message)]) + message + (b"\x88\x00" if ends else b""))
        while connection.recv(65536):
            pass


def test_a_pod_whose_pause_got_no_answer_is_resumed_at_the_end(api: RecordingApi) -> None:
    """It may have been stopped."""
    stage = KubernetesStage(PLAN, api)
    api.unanswered = True
    with pytest.raises(Error):
        stage.pause("elasticps-server-2")
    api.unanswered = False
    assert stage.close() == []
    assert "kill -CONT" in api.calls[-1][2][2]


def test_a_pod_that_no_signal_has_reached_counts_as_running(api: RecordingApi) -> None:
    """It was no more to be hit, and its restarts were nobody's."""
    stage = KubernetesStage(PLAN, api)
    api.answer = "no process"
    with pytest.raises(Error):
        stage.pause("elasticps-server-2")
    assert "elasticps-server-2" in stage.names("server", paused=False)
    assert stage.close() == []
