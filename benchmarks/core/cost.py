"""How long adding up dense gradients should take: bytes by bandwidths, as a back of an envelope has it. Pure.

N processes have S bytes of gradients each, and want the sum, or new weights that come of it.

ring     all-reduce: each sends and receives 2 (N - 1) / N of S, in 2 (N - 1) turns, and adds up (N - 1) / N
servers  each pushes S to M servers and pulls S from them: N S each way, through M links; servers add up N S
group    ranks of one machine add up in memory, (N + 1) S there, and one of them pushes S and pulls S

On one machine everything shares its cores: all bytes pass the loopback, one after another. Over links of their own,
what counts is the link through which most passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Machine:
    """What was measured. memory_per_s, loopback_per_s: bytes that one pair of processes copies, or sends and receives,
    in a second; turn_s: a message of nothing and its answer; cores: those at hand."""

    memory_per_s: float
    loopback_per_s: float
    turn_s: float
    cores: int


class Work(NamedTuple):
    """Bytes that pass sockets, that are read and written in memory beside that, and turns of messages."""

    sent: float
    copied: float
    turns: int


def work(way: str, nbytes: float, processes: int) -> Work:
    """What one step of "ring", "servers" or "group" is."""
    if way == "ring":
        turns = 2 * (processes - 1)
        return Work(turns * nbytes, 1.5 * (processes - 1) * nbytes, turns)
    if way == "servers":  # gradients packed, added up and applied at the servers, weights copied to parameters
        return Work(2 * processes * nbytes, (3 * processes + 1) * nbytes, 3)
    in_memory = processes + (processes + 1) / 2 + processes  # given, added up, taken
    return Work(2 * nbytes, (in_memory + 4) * nbytes, 3 + 4)


def here_s(way: str, nbytes: float, processes: int, machine: Machine) -> float:
    """Seconds on one machine, whose cores are shared by processes and servers."""
    done = work(way, nbytes, processes)
    pairs = max(1.0, machine.cores / 2)  # one core sends while another one receives
    copying = machine.memory_per_s * max(1, min(machine.cores, processes))
    return done.sent / (machine.loopback_per_s * pairs) + done.copied / copying + done.turns * machine.turn_s


def links_s(way: str, nbytes: float, machines: int, each: int, servers: int, link_per_s: float) -> float:
    """Seconds over links of so many bytes per second, one for each of `machines` with `each` processes, and one for
    each of the servers: as long as the fullest link needs."""
    processes = machines * each
    if way == "ring":
        return 2 * (processes - 1) / processes * nbytes / link_per_s if machines > 1 else 0.0
    pushed = each if way == "servers" else 1  # times from each machine
    return 2 * nbytes * max(pushed, machines * pushed / servers) / link_per_s
