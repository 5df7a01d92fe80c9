"""A stand-in for `srun`: starts a command once for each task, each machine a network namespace with folders of its own.

    python -m tests.launch.fake_srun FOLDER MACHINES

It runs inside namespaces of its own, see `chaos.live.netns`. Reads orders from standard input, a line each, and answers
with a line of JSON:

    start TASK COMMAND…   as the task of that number, also again after its death
    kill TASK             kills all processes of a task, as a scheduler does when it kills a step
    signal TASK           sends SIGTERM to all processes of a task, as on preemption where a job is a control group
    wait TASK             waits until the task has ended; answers with its exit code

Output of tasks goes to FOLDER/TASK.out and .err. When its input ends, it kills what is left.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from chaos.live.netns import Namespaces

JOB = "4711"


def say(text: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Step:
    """A step of a job with one task on each machine."""

    def __init__(self, folder: Path, machines: int) -> None:
        self._folder = folder
        self._network = Namespaces()
        addresses = [self._network.join(f"machine{i}") for i in range(machines)]
        block = addresses[0].rpartition(".")[0]
        hosts = [address.rpartition(".")[2] for address in addresses]
        assert all(address.startswith(block) for address in addresses)
        self._nodes = f"{block}.[{hosts[0]}-{hosts[-1]}]"
        self._machines = machines
        self._tasks: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, task: int, command: list[str]) -> int:
        """Starts a task; returns its process id."""
        own = self._folder / f"machine{task}"
        own.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "SLURM_JOB_ID": JOB,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": self._nodes,
            "SLURM_STEP_NUM_TASKS": str(self._machines),
            "SLURM_PROCID": str(task),
            "SLURM_NODEID": str(task),
            "SLURM_LOCALID": "0",
            "TMPDIR": str(own),
            "XDG_RUNTIME_DIR": str(own),
        }
        with (self._folder / f"{task}.out").open("ab") as out, (self._folder / f"{task}.err").open("ab") as err:
            self._tasks[task] = subprocess.Popen(
                self._network.command(f"machine{task}", command), env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, start_new_session=True,
            )  # fmt: skip
        return self._tasks[task].pid

    def kill(self, task: int) -> int:
        """Kills all processes of a task, found by their environment; returns how many there were."""
        count = 0
        while found := self._processes(task):
            count += len(found)
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, 10)
            self._tasks[task].wait()
        return count

    def signal(self, task: int) -> int:
        """Sends SIGTERM to all processes of a task; returns how many there are."""
        found = self._processes(task)
        for process in found:
            with suppress(psutil.Error):  # it has ended meanwhile
                process.send_signal(signal.SIGTERM)
        return len(found)

    def wait(self, task: int) -> int:
        """Returns the exit code of a task."""
        return self._tasks[task].wait()

    def close(self) -> None:
        for task in self._tasks:
            self.kill(task)

    @staticmethod
    def _processes(task: int) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                variables = process.environ()
                if process.status() != psutil.STATUS_ZOMBIE and (
                    variables.get("SLURM_JOB_ID"), variables.get("SLURM_PROCID"), variables.get("XDG_RUNTIME_DIR", "")
                ) == (JOB, str(task), os.environ["FAKE_SRUN"] + f"/machine{task}"):  # fmt: skip
                    found.append(process)
        return found


def main() -> None:
    folder, machines = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["FAKE_SRUN"] = str(folder)
    step = Step(folder, machines)
    say("ready")
    try:
        for line in sys.stdin:
            order, task, *command = shlex.split(line)
            answer = step.start(int(task), command) if order == "start" else getattr(step, order)(int(task))
            say(json.dumps(answer))
    finally:
        step.close()


if __name__ == "__main__":
    main()
