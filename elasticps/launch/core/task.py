"""Which part of a cluster a task of a job has, by the scheduler's variables or by a list of machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.core.names import check_host, check_name
from elasticps.launch.core.nodelist import expand

PORT = 23790  # of etcd, where machines are listed by hand
_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that outgoing connections take
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Task:
    """One task of a job: a process that the scheduler starts, and starts again when it has died.

    name    of the cluster, the same for all tasks of one run of a job
    nodes   the machines of the job, names or addresses; the first one has etcd and a coordinator
    node    the number of this task's machine
    number  the number of this task, of `count` in all
    local   its number among the tasks of its machine; the first of them has the machine's servers
    port    etcd's; 0: any free one
    """

    name: str
    nodes: tuple[str, ...] = (LOOPBACK,)
    node: int = 0
    number: int = 0
    count: int = 1
    local: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        check_name("cluster", self.name)
        for node in self.nodes:
            check_host(node)
        if not 0 <= self.node < len(self.nodes):
            raise ValueError(f"there is no machine {self.node}: {len(self.nodes)} are listed, counted from 0")
        if not 0 <= self.number < self.count or self.local < 0:
            raise ValueError(f"there is no task {self.number} of {self.count}, counted from 0")
        if self.number == 0 and (self.node, self.local) != (0, 0):
            raise ValueError(
                f"task 0 runs on machine {self.node} and not on the first one, where others look for etcd: start "
                "tasks in the order of machines (srun --distribution=block)"
            )

    @property
    def first(self) -> bool:
        """Whether this task has etcd and a coordinator."""
        return self.number == 0

    @property
    def zone(self) -> str:
        """The zone of this machine's servers: what fails together."""
        return f"node-{self.node}"

    def servers(self, count: int) -> list[str]:
        """Returns the names of this task's servers, of `count` in all, dealt to the machines in turn."""
        return [f"s{i}" for i in range(count) if i % len(self.nodes) == self.node] if self.local == 0 else []


def of_nodes(name: str, nodes: str, node: int, port: int) -> Task:
    """Returns the one task of a machine, of a list of machines as SLURM writes them; one alone stays on loopback.
    ValueError if it cannot be."""
    found = expand(nodes)
    if len(set(found)) != len(found):
        raise ValueError(f"{nodes!r:.200} names a machine twice")
    if len(found) == 1:
        found = (LOOPBACK,)
    return Task(name, found, node, node, len(found), port=port)


def in_slurm(variables: Mapping[str, str]) -> bool:
    """Whether `srun` has started this process: a batch script alone has no step."""
    return "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables


def of_slurm(variables: Mapping[str, str], name: str = "", head: str = "") -> Task:
    """Returns the task that `srun` has started, by its variables. Raises ValueError if they make no sense.

    name: of the cluster, made of the job's, the step's and the restart's numbers if "". head: the first machine's
    address, where its name is not one that others can reach.
    """

    def number(key: str, *others: str) -> int:
        for each in (key, *others):
            if each in variables:
                if variables[each].isascii() and variables[each].isdecimal():
                    return int(variables[each])
                raise ValueError(f"SLURM's variable {each} is {variables[each]!r:.40}, and no number")
        raise ValueError(f"SLURM's variable {key} is missing")

    job, step = number("SLURM_JOB_ID", "SLURM_JOBID"), number("SLURM_STEP_ID")
    restart = number("SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in variables else 0
    nodes = expand(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""))
    count = number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if len(nodes) == 1:
        nodes = (LOOPBACK,)
    elif head:
        nodes = (head, *nodes[1:])
    return Task(
        name or f"slurm-{job}.{step}" + (f".{restart}" if restart else ""),
        nodes,
        number("SLURM_NODEID"),
        number("SLURM_PROCID"),
        count,
        number("SLURM_LOCALID"),
        # Another one for each run, so that none meets what an earlier one has left.
        _FIRST_PORT + (job * 31 + step * 7 + restart) % _PORTS if count > 1 else 0,
    )
