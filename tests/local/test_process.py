from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticps import kernels
from elasticps.local.process import CompilingTold, Process, stop_all

READY = """
import os, sys, time
sys.stderr.write(sys.argv[1] + "\\n")
sys.stderr.flush()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
print('{"ready": true}', flush=True)
time.sleep(60)
"""


def test_who_waits_for_a_server_hears_once_that_it_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = SimpleNamespace(
        _cache=SimpleNamespace(cache_path="/there"), py_func=SimpleNamespace(__module__="elasticps.store.index")
    )
    with caplog.at_level(logging.WARNING, "elasticps.kernels"):
        kernels._Announcer().on_start(SimpleNamespace(data={"dispatcher": kernel}))
    (line,) = caplog.messages  # as a server writes it to its log

    go, told = tmp_path / "go", list[str]()

    def tell(text: str) -> None:
        told.append(text)
        go.touch()  # it is ready only after that was told

    process = Process.start("s0", "server", [sys.executable, "-c", READY, line, str(go)], tmp_path)
    try:
        process.wait_ready(time.monotonic() + 60, CompilingTold([tmp_path / "none.log", process.log], tell))
    finally:
        stop_all([process], grace_s=5)
    assert [text.partition(":")[0] for text in told] == ["compiling kernels for this machine"]
    assert process.ready == {"ready": True}
