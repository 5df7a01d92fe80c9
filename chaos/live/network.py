"""How the processes of a chaos run reach each other, and what can be done to that; loopback, where nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticps.errors import Error


@dataclass(frozen=True)
class Shape:
    """What a process's packets suffer: ms later (plus or minus jitter), percent of them lost, at most mbit per second
    (0: no limit)."""

    ms: float = 0.0
    jitter: float = 0.0
    percent: float = 0.0
    mbit: float = 0.0


class ProcessNetwork(Protocol):
    """How processes reach each other, and how that is disturbed."""

    def join(self, name: str) -> str:
        """The address on which a process of this name is to listen. May be called again."""

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` as this process of the network."""

    def publish(self, name: str, host: str, port: int) -> str:
        """ "host:port" under which others are to find what listens there; the port is the same."""

    def started(self, name: str, pid: int) -> None:
        """A process of this name runs now."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """From now on nothing that the first of a pair sends gets to the second."""

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        """The end of that."""

    def shape(self, name: str, shape: Shape) -> None:
        """What this process's packets suffer from now on; `Shape()`: nothing."""

    def close(self) -> None:
        """Removes what was made."""


class Loopback:
    """Everything on 127.0.0.1: a network that nobody disturbs."""

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
