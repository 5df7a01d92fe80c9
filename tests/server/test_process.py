"""Server processes as people start and end them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.core.view import PROTOCOL, ClusterConfig
from elasticps.errors import ConfigError
from elasticps.local.process import Process
from elasticps.local.zygote import OURS
from elasticps.server.process.main import load_plugin
from elasticps.system.coordination import read_store
from tests.conftest import NewCluster, NewUrl
from tests.zygotes import Shared

Eventually = Callable[[Callable[[], bool]], None]


_OLD = ClusterConfig(protocol=PROTOCOL - 1, id="old")


def start(folder: Path, name: str, url: str, *arguments: str) -> Process:
    """Starts `elasticps server` with these arguments, forked from a zygote: to import everything takes ten times as
    long."""
    zygote = Shared(folder / "zygote.log", os.environ) if Shared.possible() else None
    return Process.start(name, "server", [*OURS, "server", "--url", url, *arguments], folder, None, zygote)


@contextmanager
def server(folder: Path, url: str, name: str, *arguments: str) -> Iterator[Process]:
    """A server that is killed at the end, if it still runs."""
    process = start(folder, name, url, "--name", name, *arguments)
    try:
        yield process
    finally:
        process.kill()


def refusal(folder: Path, url: str, *arguments: str) -> str:
    """The one line that a server says that does not start."""
    refused = start(folder, "refused", url, *arguments)
    code, errors = refused.popen.wait(120), refused.log.read_text()
    assert code == 2, errors
    assert "Traceback" not in errors
    return errors.strip().splitlines()[-1]


def test_the_name_of_a_living_server_is_refused(
    local_cluster: NewCluster, eventually: Eventually, tmp_path: Path
) -> None:
    cluster = local_cluster(servers=2, ranges=32)
    text = refusal(tmp_path, cluster.url, "--name", "s0")
    assert f"a server called 's0' is alive at {cluster.server('s0').address}" in text
    assert cluster.server("s0").running
    assert cluster.server("s0").incarnation == 1

    port = cluster.server("s0").address.rpartition(":")[2]
    text = refusal(tmp_path, cluster.url, "--name", "x", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: another process" in text
    text = refusal(tmp_path, cluster.url, "--name", "x", "--admin-port", port)
    assert f"the admin port 127.0.0.1:{port} cannot be had: another process listens there" in text
    assert "GRPC_VERBOSITY" not in text
    text = refusal(tmp_path, cluster.url, "--name", "x", "--memory-limit", "20MiB")
    assert "--memory-limit 20,971,520 bytes: an empty server uses " in text

    with server(tmp_path, cluster.url, "s0", "--take-over") as taker:
        eventually(lambda: not cluster.server("s0").running)
        assert taker.running
    (tmp_path / "s0.log").unlink()
    with server(tmp_path, cluster.url, "s0") as heir:  # at once: whoever was there has died
        heir.wait_ready(time.monotonic() + 100)
        assert heir.ready["incarnation"] == 3
        heir.popen.send_signal(signal.SIGINT)
        assert heir.popen.wait(100) == 0
        assert "waiting until the lease" not in heir.log.read_text()


def test_a_server_of_another_protocol_is_refused(etcd_url: NewUrl, tmp_path: Path) -> None:
    url = etcd_url()
    asyncio.run(read_store(url, 60.0, lambda store: store.put("config", _OLD.to_json())))
    text = refusal(tmp_path, url, "--name", "s0")
    assert f"speaks version {_OLD.protocol} of the protocol, and this elasticps version {PROTOCOL}" in text


def test_a_frozen_server_gives_up_its_name_to_a_newer_one(
    local_cluster: NewCluster, eventually: Eventually, tmp_path: Path
) -> None:
    cluster = local_cluster(servers=2, ranges=32)
    cluster.pause("s1")
    with server(tmp_path, cluster.url, "s1") as heir:
        heir.wait_ready(time.monotonic() + 100)
        assert heir.ready["incarnation"] == 2
        cluster.resume("s1")
        eventually(lambda: not cluster.server("s1").running)
        assert heir.running
        heir.popen.send_signal(signal.SIGINT)
        assert heir.popen.wait(100) == 0


def test_the_last_server_ends_at_once(local_cluster: NewCluster, eventually: Eventually) -> None:
    cluster = local_cluster(servers=2, ranges=32)
    eventually(lambda: all("event=adopted" in cluster.log(name) for name in ("s0", "s1")))  # else they just end
    for one in cluster.servers:
        os.kill(one.pid, signal.SIGTERM)
    # Long before the drain's time-out of 60 s, after which they would end too.
    eventually(lambda: not any(one.running for one in cluster.servers))
    assert any("no server stays that could take what it holds" in cluster.log(name) for name in ("s0", "s1"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError"),
    ],
)
def test_a_plugin_that_fails_is_reported_in_one_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_plugin.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="plug-in 'my_plugin' cannot be imported") as caught:
        load_plugin("my_plugin")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../my_plugin.py", "my_plugin.py", "folder/my_plugin"])
def test_a_plugin_given_as_a_path_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is a path; name it as `import` would, 'my_plugin'"):
        load_plugin(name)


def test_a_plugin_is_found_where_the_server_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugin_here.py").write_text("found = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as an installed command has it
    load_plugin("my_plugin_here")
    assert sys.modules.pop("my_plugin_here").found
    assert sys.path[-1] == str(tmp_path)  # what is installed comes first


@pytest.mark.parametrize("name", ["no_such_plugin", "no_such_plugin.inner", ".relative"])
def test_a_missing_plugin_is_reported_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        load_plugin(name)
    assert "\n" not in str(caught.value)
