"""A SLURM of two machines on this one: munged, slurmctld and two slurmd, for as long as a command runs.

    unshare --net --mount-proc --pid --fork --kill-child -- python -m tests.launch.slurm_cluster FOLDER COMMAND…

Both machines have one address, which exists in the network namespace alone; /etc/hosts has their names in the mount
namespace alone. Ends with the exit code of the command.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "ip", "unshare", "mount")
DEADLINE_S = 60.0
DAEMON_S = 10.0  # for a daemon to end when it is asked to
_ADDRESS = "10.77.77.1"
_CONFIG = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge
SlurmctldPort=26817
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName=machine[1-2] NodeHostname={host} NodeAddr={address} Port=[27001-27002] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Says why there can be no SLURM here; "" if there can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    return "" if not absent and os.geteuid() == 0 else f"it needs root, and {', '.join(absent) or 'all tools'}"


def main() -> int:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    host = os.uname().nodename
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{_ADDRESS} machine1 machine2 {host}\n")
    for words in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", f"{_ADDRESS}/32", "dev", "lo"],
        ["mount", "--bind", str(hosts), "/etc/hosts"],
    ):
        subprocess.run(words, check=True)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, host=host, address=_ADDRESS))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    files = (f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed", "key"))
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "machine1"],
        ["slurmd", "-D", "-N", "machine2"],
    ]
    running = []
    try:
        for number, words in enumerate(daemons):
            with (folder / f"daemon{number}.log").open("wb") as log:
                running.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            if number == 0:
                _wait(lambda: (folder / "munge").exists())
        _wait(lambda: _idle() == 2)
        return subprocess.run(command, check=False).returncode
    finally:
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in running:
            try:
                daemon.wait(DAEMON_S)
            except subprocess.TimeoutExpired:  # slurmd waits for a controller that is gone
                daemon.kill()
                daemon.wait()


def _idle() -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
    return done.stdout.split().count("idle")


def _wait(there: object) -> None:
    until = time.monotonic() + DEADLINE_S
    assert callable(there)
    while not there():
        assert time.monotonic() < until, "it did not come up in time"
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
