"""The image's file, and its entry points run as the manifests call them: real processes, only addresses are others."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tomli

from elasticps.admin import fetch_health
from elasticps.local.etcd import EtcdPlan, etcd_binary, free_ports
from elasticps.local.process import Process, stop_all
from elasticps.security.authority import Authority
from elasticps.security.identity import identity_among
from elasticps.system import background
from tests.deploy.manifests import DEPLOY, ROOT, Workload, environment, expanded, named, of_kind, workload
from tests.deploy.test_network import EVERYWHERE, Connection
from tests.metrics.fleet import Fleet, get, scrape

DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- the image


def instructions(stage: str) -> list[str]:
    """The instructions of one stage, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    (found,) = (each for each in stages if each.splitlines()[0].endswith(f" AS {stage}"))
    return [line for line in found.splitlines()[1:] if line]


def variables(stage: str) -> dict[str, str]:
    """The variables that ENV sets in a stage."""
    words = [word for line in instructions(stage) if line.startswith("ENV ") for word in shlex.split(line[4:])]
    return {name: value.replace("${CPU}", "x86-64-v3") for name, _, value in (word.partition("=") for word in words)}


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = {
        stage: [p for line in instructions(stage) if line.startswith("COPY ") for p in line.split()[1:-1]]
        for stage in ("build", "build-chaos")
    }
    assert {"pyproject.toml", "elasticps", "coordinator", "replication"} <= set(copied["build"])
    assert "chaos" not in copied["build"]
    assert "chaos" in copied["build-chaos"]
    for path in (*copied["build"], *copied["build-chaos"]):
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored


def test_base_images_and_packages_are_pinned_by_hash() -> None:
    assert re.search(r"^ARG PYTHON=\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)) == {"${PYTHON}", "build", "base"}
    installs = re.findall(r"pip(?: --python \S+)? install ([^\n&]*)", DOCKERFILE)
    assert len(installs) == 3
    wheels = "--require-hashes --only-binary :all:"  # a source distribution would run code of its own
    assert all(wheels in each or "--no-index" in each for each in installs)


def test_the_image_runs_elasticps_as_an_unprivileged_user() -> None:
    base = instructions("base")
    assert 'ENTRYPOINT ["elasticps"]' in base
    assert "USER 10001:10001" in base
    assert DOCKERFILE.rstrip().splitlines()[-2].endswith("AS server")  # what is built unless another is asked for
    assert "torch" not in DOCKERFILE
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any("torch" in requirement for requirement in project["dependencies"])
    assert workload("base", "server").spec["securityContext"]["runAsUser"] == 10001


def test_the_kernels_are_compiled_for_the_processors_that_use_them() -> None:
    def numba(stage: str) -> dict[str, str]:
        return {name: value for name, value in variables(stage).items() if name.startswith("NUMBA_")}

    assert numba("build") == numba("base")
    assert set(numba("base")) == {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"}


def warming() -> list[str]:
    """The arguments with which the image's interpreter compiles kernels."""
    (found,) = re.findall(r"/opt/elasticps/bin/python ([^&|]*-m elasticps\.warm)", "\n".join(instructions("build")))
    return shlex.split(found)


def installed(folder: Path) -> Path:
    """Our packages, without any kernel."""
    for package in ("replication", "coordinator", "elasticps"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def settings(stage: str, packages: Path) -> dict[str, str]:
    ours = {**variables(stage), "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    return {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")} | ours | {"PATH": os.environ["PATH"]}


def test_kernels_are_compiled_from_the_installed_package(tmp_path: Path) -> None:
    """The folder in which the image is built has a copy of the sources, which Python would look into first."""
    packages = installed(tmp_path / "site")
    (tmp_path / "src" / "elasticps").mkdir(parents=True)
    (tmp_path / "src" / "elasticps" / "__init__.py").write_text("raise SystemExit('the copy of the sources')")
    before = warming()[: warming().index("-m")]
    command = [sys.executable, *before, "-c", "import elasticps; print(elasticps.__file__)"]
    done = subprocess.run(
        command, cwd=tmp_path / "src", env=settings("build", packages), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"{packages / 'elasticps' / '__init__.py'}\n", "")


@pytest.mark.slow
@pytest.mark.timeout(650)  # compiles every kernel: a minute alone, ten beside other tests
def test_kernels_of_the_image_serve_where_nothing_can_be_written(tmp_path: Path) -> None:
    packages, sources = installed(tmp_path / "site"), installed(tmp_path / "src")
    subprocess.run([sys.executable, *warming()], cwd=sources, env=settings("build", packages), check=True)
    for file in packages.rglob("*.py"):  # as layers of an image do
        seconds = int(file.stat().st_mtime) - 5
        os.utime(file, (seconds, seconds))

    def files() -> dict[str, float]:
        return {str(p): p.stat().st_mtime for p in packages.rglob("*") if p.is_file()}

    before = files()
    assert sum(name.endswith(".nbc") for name in before) > 50
    assert not list(sources.rglob("*.nb*"))
    read_only = (  # numba finds out by a temporary file whether it may write; tests may run as root, who always may
        "import os, tempfile, numba.core.compiler as c\n"
        "def no(*a, **k): raise OSError(30, 'Read-only file system')\n"
        "tempfile.TemporaryFile = os.replace = c.compile_extra = no\n"
        "from elasticps.server.process.main import is_warm\n"
        "assert is_warm()\n"
        "from elasticps.warm import warm; warm()\n"
    )
    elsewhere = settings("base", packages) | {"HOME": str(tmp_path / "none")}
    subprocess.run([sys.executable, "-c", read_only], cwd=tmp_path, env=elsewhere, check=True)
    assert files() == before


# ------------------------------------------------------------------------------------------------------- entry points


class Pods:
    """Starts the workloads of an overlay as processes of this machine. Only addresses and folders are others."""

    def __init__(self, build: str, folder: Path, mounts: dict[str, str] | None = None) -> None:
        self.build = build
        self.mounts = mounts or {}  # folders of the container -> where they are here
        self.fleet = Fleet(folder)
        self.etcd: list[Process] = []
        self.ports: dict[str, dict[str, int]] = {}
        self.url = named(build, "ConfigMap", "elasticps")["data"]["url"]

    def start_etcd(self) -> None:
        each = workload(self.build, "etcd")
        assert each.container["command"] == ["/usr/local/bin/etcd"]
        members = [f"{each.name}-{i}" for i in range(each.manifest["spec"]["replicas"])]
        ports = {name: dict(zip(each.ports, free_ports(3), strict=True)) for name in members}
        self.ports.update(ports)
        for name in members:
            arguments = [expanded(arg, environment(each, {"POD_NAME": name})) for arg in each.args]
            local = [self._mounted(self._local(arg, ports, ports[name], each)) for arg in arguments]
            folder = self.fleet.folder
            command = [str(etcd_binary()), *local, f"--data-dir={folder / name}"]
            settings = EtcdPlan.environment() | environment(each, {"POD_NAME": name})
            self.etcd.append(Process.start(name, "etcd", command, folder, settings))
        deadline = time.monotonic() + 60
        for process in self.etcd:
            metrics = ports[process.name]["metrics"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = each.container[probe]["httpGet"]["path"]
                process.wait_until(lambda at=metrics, path=path: _healthy(at, path), deadline)  # type: ignore[misc]
        self.url = self._mounted(self.url)
        first = f"127.0.0.1:{ports[members[0]]['client']}"
        self.url = self.url.replace("elasticps-etcd-client:2379", first)
        for name in members:
            self.url = self.url.replace(f"{name}.elasticps-etcd:2379", f"127.0.0.1:{ports[name]['client']}")

    def _mounted(self, text: str) -> str:
        for there, here in self.mounts.items():
            text = text.replace(there, here)
        return text

    @staticmethod
    def _local(argument: str, every: dict[str, dict[str, int]], own: dict[str, int], each: Workload) -> str:
        for kind, port in each.ports.items():
            argument = argument.replace(f"0.0.0.0:{port}", f"127.0.0.1:{own[kind]}")
            for name, ports in every.items():
                argument = argument.replace(f"{name}.elasticps-etcd:{port}", f"127.0.0.1:{ports[kind]}")
        return argument

    def start(self, component: str, number: int) -> Process:
        each = workload(self.build, component)
        name = f"{each.name}-{number}"
        url = self.url.replace("COMPONENT", component)
        values = {"POD_NAME": name, "POD_IP": "127.0.0.1", "ELASTICPS_URL": url, "ZONE": "", "WEIGHT": "1.0"}
        ports = self.ports[name] = dict(zip(each.ports, free_ports(len(each.ports)), strict=True))
        arguments = []
        for arg in each.args:
            for kind, port in each.ports.items():
                arg = re.sub(rf"port={port}$", f"port={ports[kind]}", arg)
            arguments.append(expanded(arg, environment(each, values)).replace("0.0.0.0", "127.0.0.1"))
        return self.fleet.start(name, arguments)

    def connections(self, worker: int = 0) -> set[Connection]:
        """Which process is connected to which port of which other one now; `worker` is the number of a worker's."""
        listening = {port: (name, kind) for name, ports in self.ports.items() for kind, port in ports.items()}
        everybody = {process.name: process.popen.pid for process in (*self.etcd, *self.fleet.processes.values())}
        found = set()
        for name, number in (everybody | ({"elasticps-worker-0": worker} if worker else {})).items():
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(number).net_connections("tcp"):
                    if each.status != psutil.CONN_ESTABLISHED or each.laddr.port in listening:
                        continue
                    target, kind = listening.get(each.raddr.port, (name, ""))
                    if target != name:  # what stays inside a pod meets no policy
                        found.add((component_of(name), component_of(target), kind))
        return found

    def stop(self) -> None:
        self.fleet.stop()
        stop_all(self.etcd, kill_after_s=5)


def component_of(name: str) -> str:
    return name.removeprefix("elasticps-").rpartition("-")[0]


def _healthy(port: int, path: str) -> bool:
    try:
        return bool(json.loads(get(port, path))["health"] == "true")
    except OSError:
        return False


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    found = Pods("overlays/dev", tmp_path)
    try:
        yield found
    finally:
        found.stop()


def test_the_containers_make_a_cluster_that_trains(pods: Pods) -> None:
    pods.start_etcd()
    server, *_ = [pods.start("server", number) for number in range(3)]
    pods.start("coordinator", 0)
    pods.fleet.wait_ready()
    for number in range(3):
        admin = pods.ports[f"elasticps-server-{number}"]["admin"]
        assert background.run(fetch_health(f"127.0.0.1:{admin}", 10)) == "SERVING"
        probe = workload(pods.build, "server").container["readinessProbe"]["httpGet"]["path"]
        assert get(pods.ports[f"elasticps-server-{number}"]["metrics"], probe) == "ok\n"
    path = workload(pods.build, "coordinator").container["readinessProbe"]["httpGet"]["path"]
    assert get(pods.ports["elasticps-coordinator-0"]["metrics"], path) == "ok\n"

    job = workload("workers", "worker")
    command, script = job.container["command"]
    assert command == "python"
    source = named("workers", "ConfigMap", "elasticps-train")["data"][Path(script).name]
    (port,) = free_ports(1)
    mine = environment(job, {"ELASTICPS_URL": pods.url, "INDEX": "3"})
    settings = mine | {"METRICS_PORT": str(port), "SAMPLES": "20000"}
    text = source.replace("0.0.0.0", "127.0.0.1")
    seen = set[Connection]()
    with subprocess.Popen([sys.executable, "-c", text], env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
                          stderr=subprocess.PIPE, text=True) as training:  # fmt: skip
        while training.poll() is None:
            seen |= pods.connections(training.pid)
            time.sleep(0.02)
        assert training.stderr is not None
        printed = training.stderr.read()
    assert training.returncode == 0, printed
    assert "done after 40 steps" in printed
    assert seen <= EVERYWHERE, "network policies do not let this through"
    assert seen >= {(each, "etcd", "client") for each in ("coordinator", "server", "worker")}
    assert seen >= {(each, "server", "data") for each in ("coordinator", "server", "worker")}
    assert mine["WORKER"] == "w3"

    server.popen.terminate()  # what the kubelet does first
    assert server.popen.wait(90) == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {"cluster", "process", "incarnation", "epoch", "event", "level", "ts"} <= lines[-1].keys()
    assert any((line["event"], line.get("reason")) == ("stopping", "drained") for line in lines)
    found = scrape(pods.ports["elasticps-coordinator-0"]["metrics"])
    assert found["elasticps_cluster_short_ranges"] == {(): 0}
    assert found["elasticps_cluster_failovers_total"] == {(): 0}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Folders with the files that cert-manager would put into each secret, for 127.0.0.1."""
    authority = Authority.create(tmp_path / "authority")
    issued = {"etcd": authority.issue_etcd(["127.0.0.1"])}
    for manifest in of_kind("overlays/production", "Certificate"):
        if uris := manifest["spec"].get("uris"):
            identity = identity_among(uris)
            issued[identity.role] = authority.issue(identity)
    for name, files in issued.items():
        (tmp_path / "tls" / name).mkdir(parents=True)
        for source, target in ((files.ca, "ca.crt"), (files.cert, "tls.crt"), (files.key, "tls.key")):
            shutil.copy(source, tmp_path / "tls" / name / target)
    return tmp_path / "tls"


def test_a_cluster_with_tls_survives_the_loss_of_an_etcd_member(
    tmp_path: Path, certificates: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    mounts = dict.fromkeys(("/etc/etcd/server", "/etc/etcd/peer"), str(certificates / "etcd"))
    mounts["/etc/elasticps/identity"] = str(certificates / "COMPONENT")
    found = Pods("overlays/production", tmp_path, mounts)
    try:
        found.start_etcd()
        found.start("coordinator", 0)
        found.fleet.wait_ready()
        port = found.ports["elasticps-coordinator-0"]["metrics"]
        eventually(lambda: scrape(port)["elasticps_coordinator_leader"] == {(): 1})
        found.etcd[0].kill()
        found.start("coordinator", 1)  # is ready only with an answer of etcd
        for number in range(3):
            found.start("server", number)
        found.fleet.wait_ready()
        eventually(lambda: scrape(port).get("elasticps_cluster_short_ranges") == {(): 0})
    finally:
        found.stop()
