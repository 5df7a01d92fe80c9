"""How the processes of a chaos run reach each other, and how that is disturbed; loopback, which cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticps.errors import Error


@dataclass(frozen=True)
class Shape:
    """How a process's packets are disturbed: ms later (plus or minus jitter), percent of them lost, at most mbit per
    second (0: no limit)."""

    ms: float = 0.0
    jitter: float = 0.0
    percent: float = 0.0
    mbit: float = 0.0


class ProcessNetwork(Protocol):
    """How processes reach each other, and how that is disturbed."""

    def join(self, name: str) -> str:
        """Returns the address on which the process of this name is to listen. May be called again."""

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Returns the command that runs `command` as this process of the network."""

    def publish(self, name: str, host: str, port: int) -> str:
        """Returns the "host:port" under which others reach a port of this process; the port is the same."""

    def started(self, name: str, pid: int) -> None:
        """Notes that the process of this name has been started."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Loses everything that the first of each pair sends to the second, until `mend`."""

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Ends the cuts of these pairs."""

    def shape(self, name: str, shape: Shape) -> None:
        """Disturbs this process's packets from now on; `Shape()` ends that."""

    def close(self) -> None:
        """Removes the network."""


class Loopback:
    """The network of 127.0.0.1, which cannot be disturbed."""

    def join(self, name: str) -> str:
        return "127.0.0.1"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def publish(self, name: str, host: str, port: int) -> str:
        return f"{host}:{port}"

    def started(self, name: str, pid: int) -> None:
        """Nothing to do."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        raise Error("processes on loopback cannot be cut off from each other")

    mend = cut

    def shape(self, name: str, shape: Shape) -> None:
        raise Error("loopback cannot be slowed down")

    def close(self) -> None:
        """Nothing to do."""
