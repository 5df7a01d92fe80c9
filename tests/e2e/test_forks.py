"""Children of a process that has a client, as a torch DataLoader's workers are."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_children_are_born_well_beside_an_open_client(cluster: eps.LocalCluster) -> None:
    """grpc has handlers of forks that start threads in the child; they are off."""
    assert forked(cluster.url, 40) == (0, "")
    code, said = forked(cluster.url, 2, "import grpc", look=False)
    assert code == 0
    assert said.count("import elasticps first") == 1
    assert forked(cluster.url, 20, "import grpc", GRPC_ENABLE_FORK_SUPPORT="0") == (0, "")
