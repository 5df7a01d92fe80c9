"""Children of a process that has a client, as a torch DataLoader's workers are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import elasticps as eps

FORKS = """
import os, signal, sys
{first}
import elasticps as eps
from elasticps.local import LocalCluster  # by way of what imports grpc
with eps.connect(sys.argv[1], worker="forks") as ps:
    for _ in range({forks}):
        child = os.fork()
        if not child:
            os._exit(0)
        if not {look}:
            os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == 0 or not {look}, "a child crashed"
"""


def forked(url: str, forks: int, first: str = "", *, look: bool = True, **environment: str) -> tuple[int, str]:
    """Forks beside an open client, in a process that begins with `first`; its exit code, and what it said."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    code = FORKS.format(first=first, forks=forks, look=look)
    done = subprocess.run(
        [sys.executable, "-c", code, url], env=clean | environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stderr


def test_forking_beside_an_open_client_is_safe(cluster: eps.LocalCluster) -> None:
    """grpc has handlers of forks that start threads in the child; they are off."""
    assert forked(cluster.url, 40) == (0, "")
    code, output = forked(cluster.url, 2, "import grpc", look=False)
    assert code == 0
    assert output.count("import elasticps first") == 1
    assert forked(cluster.url, 20, "import grpc", GRPC_ENABLE_FORK_SUPPORT="0") == (0, "")


CHILDREN = """
import multiprocessing, os, sys
import numpy as np
import elasticps as eps

KEYS, ONES = np.arange(50), np.ones((50, 2), np.float32)

def answer(call):
    try:
        return type(call()).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def train(url, answers):
    with eps.connect(url, worker="child") as ps:
        table = ps.table("forked", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (KEYS, ONES)}).result()
    answers.put("pushed")

if __name__ == "__main__":
    with eps.connect(sys.argv[1], worker="forks") as ps:
        table = ps.table("forked", dim=2, optimizer=eps.Accumulate())
        steps = 0
        for turn in range(3):
            child = os.fork()
            if not child:
                calls = [
                    lambda: eps.connect(sys.argv[1], worker="child"), ps.tables, ps.losses, ps.flush, ps.resume,
                    lambda: ps.push({table: (KEYS, ONES)}), lambda: table.pull(KEYS), lambda: len(table), ps.checkpoint,
                    lambda: ps.table("other", dim=2, optimizer=eps.Accumulate()), lambda: table.set_on_loss("wait"),
                ]
                print(*map(answer, calls), sep="\\n", flush=True)
                sys.exit(0)
            while not os.waitpid(child, os.WNOHANG)[0]:
                ps.push({table: (KEYS, ONES)}).result()
                steps += 1
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            answers = context.Queue()
            child = context.Process(target=train, args=(sys.argv[1], answers))
            child.start()
            print(method, answers.get(timeout=120), flush=True)
            child.join()
            steps += 1
        assert (table.pull(KEYS) == steps).all()
        ps.drop_table("forked")
"""


def test_a_forked_child_is_refused_at_once_and_its_parent_trains_on(cluster: eps.LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = subprocess.run([sys.executable, script, cluster.url], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    *refused, spawned, served = done.stdout.splitlines()
    assert (spawned, served) == ("spawn pushed", "forkserver pushed")
    assert len(refused) == 3 * 11
    for line in refused:
        assert line.startswith(("ConfigError: ", "Closed: ")), line
        assert "forkserver" in line
