"""A network of our own: each process in a network namespace, joined by veth pairs and a bridge.

The whole run moves into a fresh network and mount namespace first (`enter`, by `unshare`): bridge, addresses and the
namespaces of the processes exist only in there, so nothing of the machine's own network is touched, no address can be
in use by anybody else, and the kernel removes all of it when the last process in it has ended, however that came.
Without root a user namespace is tried as well.

A one-way cut is a neighbour entry: in the sender's namespace the receiver's address gets a hardware address that nobody
has, so packets leave and are never received. That needs no module of the kernel beyond veth and bridge, works on
connections that are open, and the sender's system notices nothing. Delay and loss are `tc netem`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from chaos.live.network import Shape
from elasticps.errors import ConfigError, Error

_INSIDE = "ELASTICPS_CHAOS_NETNS"
_BLOCK = "10.77"  # of the run's own namespace, which has no other network
_BRIDGE = "chaos0"
_NOBODY = "02:de:ad:00:00:00"  # a local hardware address that no interface has
_RUN = Path("/run/netns")
_PROXY_HINT = "use the user-space proxy instead: in the plan, cluster: {kind: local, proxy: true}, or --proxy"


def enter() -> None:
    """Executes this command line again inside namespaces of its own; returns only in there. Raises ConfigError if that
    is not possible."""
    if os.environ.get(_INSIDE):
        return
    if why := refused():
        raise ConfigError(f"network namespaces cannot be made here: {why}; {_PROXY_HINT}")
    command = [*_unshare(), "--", sys.executable, "-m", "chaos.live.cli", *sys.argv[1:]]
    os.environ[_INSIDE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)


@cache
def refused() -> str:
    """Says why network namespaces cannot be made here; "" if they can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} (util-linux, iproute2) {'is' if len(missing) == 1 else 'are'} not on PATH"
    script = (
        f"mkdir -p {_RUN} && mount -t tmpfs none {_RUN} && ip netns add probe && ip link add {_BRIDGE} type bridge "
        "&& ip link add probe0 type veth peer name eth0 netns probe"
    )
    done = subprocess.run([*_unshare(), "--", "sh", "-c", script], capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["it failed"])[-1] if done.returncode else ""


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--propagation", "private"]


class Namespaces:
    """The network of namespaces; to be made after `enter`."""

    def __init__(self) -> None:
        if not os.environ.get(_INSIDE):
            raise Error("a network of namespaces is made only inside a namespace of its own: call enter() first")
        self._numbers: dict[str, int] = {}
        _RUN.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "none", str(_RUN))
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{_BLOCK}.0.1/16", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")

    @staticmethod
    @cache
    def can_shape() -> bool:
        """Whether this kernel has netem."""
        done = subprocess.run(
            ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], capture_output=True, check=False
        )
        if done.returncode == 0:
            _run("tc", "qdisc", "del", "dev", "lo", "root")
        return done.returncode == 0

    def join(self, name: str) -> str:
        if name not in self._numbers:
            number = self._numbers[name] = len(self._numbers) + 2
            outer = f"v{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outer, "master", _BRIDGE, "up")
            _run("ip", "-n", name, "addr", "add", f"{self._address(name)}/16", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", interface, "up")
        return self._address(name)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={_RUN / name}", "--", *command] if name in self._numbers else list(command)

    def publish(self, name: str, host: str, port: int) -> str:
        return f"{host}:{port}"

    def started(self, name: str, pid: int) -> None:
        """Does nothing: the process is in its namespace already."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._neighbours(pairs, "replace {} lladdr " + _NOBODY + " dev eth0 nud permanent")

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._neighbours(pairs, "del {} dev eth0")

    def shape(self, name: str, shape: Shape) -> None:
        where = (["tc", "-n", name], "eth0"), (["tc"], f"v{self._numbers[name]}")  # what it sends, what it receives
        for tc, device in where:
            if shape == Shape():
                subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            else:
                _run(*tc, "qdisc", "replace", "dev", device, "root", *_discipline(shape))

    def close(self) -> None:
        """Does nothing: the kernel removes the namespaces with their last process."""

    def _address(self, name: str) -> str:
        number = self._numbers[name]
        return f"{_BLOCK}.{number >> 8}.{number & 255}"

    def _neighbours(self, pairs: Sequence[tuple[str, str]], change: str) -> None:
        """Changes neighbour entries in all namespaces, as nearly at the same time as possible."""
        running = []
        for sender in sorted({sender for sender, _ in pairs}):
            lines = "".join(f"neigh {change.format(self._address(to))}\n" for who, to in pairs if who == sender)
            command = ["ip", "-n", sender, "-force", "-batch", "-"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert process.stdin is not None
            process.stdin.write(lines)
            process.stdin.close()
            running.append((process, command))
        for process, command in running:
            assert process.stderr is not None
            with process.stderr:
                text = process.stderr.read()
            if process.wait():
                raise Error(f"{' '.join(command)} failed: {text.strip()}")


def _discipline(shape: Shape) -> list[str]:
    if Namespaces.can_shape():
        words = ["netem", "limit", "100000"]
        if shape.ms:
            words += ["delay", f"{shape.ms:g}ms", *([f"{shape.jitter:g}ms"] if shape.jitter else [])]
        if shape.percent:
            words += ["loss", f"{shape.percent:g}%"]
        return words + (["rate", f"{shape.mbit:g}mbit"] if shape.mbit else [])
    if shape.ms or shape.percent:
        raise Error(f"this kernel has no netem, so packets cannot be delayed or lost; {_PROXY_HINT}")
    return ["tbf", "rate", f"{shape.mbit:g}mbit", "burst", "256kb", "latency", "400ms"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Error(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
