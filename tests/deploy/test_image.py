"""The image, built as its file says and run as the manifests do: by user 10001, with a root that cannot be written.

Needs root, `buildah` and `debootstrap`, which Debian and Ubuntu have, and a mirror of theirs and of PyPI: skipped where
these are not there. Instead of the Python image that the file names, which a registry has, it stands on this system's
own release with that release's Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from elasticps.local.etcd import free_ports
from tests.deploy.manifests import DEPLOY, ROOT, environment, expanded, workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap", "unshare"))),
        reason="only root builds images here, with buildah and debootstrap",
    ),
]

BASE = "localhost/python:built-here"
_RUN = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -o remount,bind,ro "$root"
cd /
exec chroot --userspec=10001:10001 "$root" env -i "$@"
"""


class Image:
    """One unpacked target of the image's file."""

    def __init__(self, buildah: Callable[..., str], name: str) -> None:
        self._buildah = buildah
        self._container = buildah("from", "--pull-never", name)
        self.root = Path(buildah("mount", self._container))
        self.config = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]

    def popen(self, *arguments: str, log: Path, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Runs the entry point in mounts of its own."""
        settings = [*self.config["Env"], *(f"{name}={value}" for name, value in (variables or {}).items())]
        command = ["sh", "-c", _RUN, "sh", str(self.root), *settings, *self.config["Entrypoint"], *arguments]
        with log.open("wb") as out:
            return subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", *command], stdout=out, stderr=subprocess.STDOUT
            )

    def run(self, *arguments: str, log: Path) -> str:
        """Runs a command in the image; its output. The command has to end with 0."""
        assert self.popen(*arguments, log=log).wait(300) == 0, log.read_text(encoding="utf-8")
        return log.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`buildah` with a storage of its own, which has the base image and goes away."""
    faulthandler.cancel_dump_traceback_later()  # which ends what takes as long; this test's own time-out holds
    folder = tmp_path_factory.mktemp("images")
    options = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def run(*arguments: str) -> str:
        done = subprocess.run(["buildah", *options, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    try:
        release = _release()
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3-venv,python-is-python3", release, folder / "base"],
            stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        container = run("from", "scratch")
        run("add", container, str(folder / "base"), "/")
        run("commit", "--rm", container, BASE)
        yield run
    finally:
        run("umount", "--all")
        run("rm", "--all")
        shutil.rmtree(folder, ignore_errors=True)


def _release() -> str:
    text = Path("/etc/os-release").read_text(encoding="utf-8")
    variables = dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)
    return variables["VERSION_CODENAME"]


def _wheels(folder: Path, requirements: str, python: str) -> None:
    """What the file has pip install, fetched here: only this side may know where packages come from."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:",
         "--python-version", python, "-r", str(DEPLOY / requirements), "-d", str(folder)], check=True,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["server", "chaos"])
def image(
    request: pytest.FixtureRequest, buildah: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Image:
    wheels = tmp_path_factory.mktemp("wheels")
    container = buildah("from", "--pull-never", BASE)
    python = buildah("run", "--isolation", "chroot", container, "python", "-c",
                     "import sys; print('%d.%d' % sys.version_info[:2])")  # fmt: skip
    buildah("rm", container)
    for requirements in ("requirements.txt", "requirements-chaos.txt")[: 2 if request.param == "chaos" else 1]:
        _wheels(wheels, requirements, python)
    name = f"localhost/elasticps-{request.param}:built-here"
    buildah(
        *("build", "--layers", "--isolation", "chroot", "--pull-never", "--network", "host"),
        *("--file", str(DEPLOY / "Dockerfile"), "--ignorefile", str(DEPLOY / "Dockerfile.dockerignore")),
        *("--target", request.param, "--tag", name, "--build-arg", f"PYTHON={BASE}"),
        *("--volume", f"{wheels}:/wheels:ro", "--env", "PIP_NO_INDEX=1", "--env", "PIP_FIND_LINKS=/wheels"),
        ".",
    )
    return Image(buildah, name)


def test_the_image_runs_servers_and_coordinators_from_a_root_that_cannot_be_written(
    image: Image, etcd_url: Callable[[], str], tmp_path: Path
) -> None:
    assert image.config["User"] == "10001:10001"
    assert "0.1.0" in image.run("--version", log=tmp_path / "version.log")
    if "chaos" in image.run("--help", log=tmp_path / "help.log"):
        assert "kill" in image.run("chaos", "plans", log=tmp_path / "plans.log")
    started: dict[str, subprocess.Popen[bytes]] = {}
    url = etcd_url()
    try:
        for component, name in (("coordinator", "c0"), ("server", "s0"), ("server", "s1"), ("server", "s2")):
            each = workload("overlays/dev", component)
            values = {"POD_NAME": name, "POD_IP": "127.0.0.1", "ZONE": "", "WEIGHT": "1.0"}
            values["ELASTICPS_URL"] = url
            arguments = [expanded(arg, environment(each, values)) for arg in each.args]
            ports = iter(free_ports(3))
            arguments = [
                f"{arg.partition('=')[0]}={next(ports)}" if arg.partition("=")[0].endswith("port") else arg
                for arg in arguments
            ]
            arguments = [arg.replace("0.0.0.0", "127.0.0.1") for arg in arguments]
            started[name] = image.popen(*arguments, log=tmp_path / f"{name}.log")
        keys = np.arange(1000)
        with eps.connect(url, worker="w0", timeout=300) as ps:
            table = ps.table("sums", dim=4, optimizer=eps.Accumulate())
            ps.push({table: (keys, np.ones((len(keys), 4), np.float32))})
            np.testing.assert_array_equal(table.pull(keys), np.ones((len(keys), 4), np.float32))
        for process in started.values():
            assert process.poll() is None
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            assert "\nUid:\t10001\t10001\t10001\t10001\n" in status
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(120)
    for name in started:
        assert "compiling" not in (tmp_path / f"{name}.log").read_text(encoding="utf-8")
