from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticps import kernels
from elasticps.kernels import hashing
from elasticps.local.process import CompilationNotice, Process, stop_all

READY = """
import os, sys, time
sys.stderr.write(sys.argv[1] + "\\n")
sys.stderr.flush()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
print('{"ready": true}', flush=True)
time.sleep(60)
"""


def test_a_wait_for_a_compiling_server_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = SimpleNamespace(_cache=SimpleNamespace(cache_path="/there"), py_func=hashing.mix64.py_func)
    with caplog.at_level(logging.WARNING, "elasticps.kernels"):
        kernels._Announcer().on_start(SimpleNamespace(data={"dispatcher": kernel}))
    (line,) = caplog.messages  # as a server writes it to its log

    go, reported = tmp_path / "go", list[str]()

    def tell(text: str) -> None:
        reported.append(text)
        go.touch()  # it is ready only after that was told

    process = Process.start("s0", "server", [sys.executable, "-c", READY, line, str(go)], tmp_path)
    try:
        process.wait_ready(time.monotonic() + 60, CompilationNotice([tmp_path / "none.log", process.log], tell))
    finally:
        stop_all([process], kill_after_s=5)
    assert [text.partition(":")[0] for text in reported] == ["compiling kernels for this machine"]
    assert process.ready == {"ready": True}


def test_death_by_a_signal_without_a_name_is_described_as_others(tmp_path: Path) -> None:
    """Of the real-time signals Python names the first and the last."""
    for number, name in ((signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")):
        process = Process.start("s0", "server", ["sleep", "60"], tmp_path)
        process.popen.send_signal(number)
        process.popen.wait(40)
        assert process.how_it_ended() == f"was killed by {name}"


def test_an_etcd_on_a_full_disk_is_reported_without_its_stack(tmp_path: Path) -> None:
    def words(*lines: str) -> str:
        (tmp_path / "etcd.log").unlink(missing_ok=True)
        (tmp_path / "log").write_text("\n".join(lines) + "\n" + "main.main()\n\t/etcd/main.go:32 +0x45\n" * 150)
        process = Process.start("etcd", "etcd", ["sh", "-c", 'cat "$0" >&2', str(tmp_path / "log")], tmp_path)
        process.popen.wait(40)
        return process.last_words()

    running = '{"level":"info","msg":"ready to serve client requests"}'
    full = '{"level":"panic","msg":"failed to create WAL","error":"no space left on device","stacktrace":"…"}'
    assert words(running, full, "panic: failed to create WAL", "") == (
        f"failed to create WAL: no space left on device; make room where {tmp_path} is"
    )
    for others in ((full, running), (running, full[:60])):  # an earlier life's, and one that the disk cut off
        assert words(*others).startswith("its log ends with:")
